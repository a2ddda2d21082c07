//! What a single event says: byte searches first, JSON only for the few events that matter.

use std::borrow::Cow;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memchr2;
use memchr::memmem::{self, Finder};
use serde::Deserialize;
use serde_json::Value;

use super::scan::Dialect;

/// What of an event matters to the relay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// `data: [DONE]`.
    pub(super) done: bool,
    /// An error of the engine's.
    pub(super) error: bool,
    /// That error has a 4xx code.
    pub(super) error_is_clients: bool,
    /// A finish reason other than an abort, or the last event of the Responses API.
    pub(super) finish: bool,
    /// `finish_reason: "abort"`: the engine gave up on the request.
    pub(super) abort: bool,
    /// It carries token counts.
    pub(super) usage: bool,
}

impl Marks {
    /// Whether the event is an ordinary one.
    pub(super) const fn is_plain(&self) -> bool {
        !(self.done || self.error || self.finish || self.abort || self.usage)
    }
}

struct Needles {
    delta: Finder<'static>,
    done: Finder<'static>,
    error: Finder<'static>,
    finish: Finder<'static>,
    usage: Finder<'static>,
    last_response: Finder<'static>,
}

static NEEDLES: LazyLock<Needles> = LazyLock::new(|| Needles {
    delta: Finder::new(".delta\""),
    done: Finder::new("[DONE]"),
    error: Finder::new("\"error\""),
    finish: Finder::new("\"finish_reason\""),
    usage: Finder::new("\"usage\""),
    last_response: Finder::new("response."),
});

/// Which of the words that matter occur anywhere in a run of events. Most occur in few of them, and one search
/// through all costs less than one in each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words {
    done: bool,
    error: bool,
    finish: bool,
    usage: bool,
    last_response: bool,
}

impl Words {
    /// Those in `run`.
    pub(super) fn of(run: &[u8], dialect: Dialect) -> Self {
        let needles = &*NEEDLES;
        let occurs = |needle: &Finder<'_>| needle.find(run).is_some();
        Self {
            done: occurs(&needles.done),
            error: occurs(&needles.error),
            finish: occurs(&needles.finish),
            usage: occurs(&needles.usage),
            last_response: dialect == Dialect::Responses && occurs(&needles.last_response),
        }
    }
}

/// Reads the marks of one whole event, which is of a run with these words.
pub(super) fn marks(event: &[u8], words: Words) -> Marks {
    let needles = &*NEEDLES;
    let mut marks = Marks {
        usage: words.usage && needles.usage.find_iter(event).any(|at| has_value(&event[at + 7..])),
        ..Marks::default()
    };
    let suspect = (words.finish && needles.finish.find_iter(event).any(|at| has_value(&event[at + 15..])))
        || (words.error && needles.error.find_iter(event).any(|at| !says_null(&event[at + 7..])))
        || (words.done && needles.done.find(event).is_some())
        || (words.last_response && ends_response(needles, event));
    if suspect {
        read_closely(event, &mut marks);
    }
    marks
}

/// Whether an event consists of comment lines (`: keep-alive`) and blank lines only.
pub(crate) fn is_comment(event: &[u8]) -> bool {
    let mut rest = event;
    // Mostly the first byte tells: few events are comments.
    while let Some(first) = rest.first() {
        rest = match first {
            b'\n' | b'\r' => &rest[1..],
            b':' => memchr2(b'\n', b'\r', rest).map_or(&[], |end| &rest[end..]),
            _ => return false,
        };
    }
    true
}

/// Whether an event carries a piece of the answer: a non-empty text in one of the fields that engines put
/// it in, or a tool call.
pub(super) fn has_content(event: &[u8]) -> bool {
    const TEXTS: [&[u8]; 6] = [
        b"\"content\"",
        b"\"text\"",
        b"\"reasoning_content\"",
        b"\"reasoning\"",
        b"\"delta\"",
        b"\"arguments\"",
    ];
    TEXTS.iter().any(|key| {
        memmem::find_iter(event, key).any(|at| {
            let value = value_after(&event[at + key.len()..]);
            value.first() == Some(&b'"') && value.get(1).is_some_and(|byte| *byte != b'"')
        })
    }) || memmem::find(event, b"\"tool_calls\"").is_some_and(|at| {
        let value = value_after(&event[at + 12..]);
        value.first() == Some(&b'[') && value.get(1).is_some_and(|byte| *byte != b']')
    })
}

/// Whether an event of the Responses API carries a piece of the answer: its type ends in `.delta`.
pub(super) fn is_delta(event: &[u8]) -> bool {
    NEEDLES.delta.find(event).is_some()
}

/// The id that the Responses API gives a response: the first `"id"` that has a text.
pub(crate) fn response_id(body: &[u8]) -> Option<&[u8]> {
    const ID_BYTES_MAX: usize = 256;
    memmem::find_iter(body, b"\"id\"").find_map(|at| {
        let value = value_after(&body[at + 4..]).strip_prefix(b"\"")?;
        let end = memchr::memchr(b'"', value)?;
        ((1..=ID_BYTES_MAX).contains(&end) && !value[..end].contains(&b'\\')).then(|| &value[..end])
    })
}

/// The same event without its ending: the abort's text is kept, `"abort"` reads `null`.
pub(super) fn without_abort(event: &[u8]) -> Bytes {
    const ABORT: &[u8] = b"\"abort\"";
    let mut out = BytesMut::with_capacity(event.len());
    let mut copied = 0;
    for at in NEEDLES.finish.find_iter(event) {
        let value = value_after(&event[at + 15..]);
        if value.starts_with(ABORT) {
            let begin = event.len() - value.len();
            out.extend_from_slice(&event[copied..begin]);
            out.extend_from_slice(b"null");
            copied = begin + ABORT.len();
        }
    }
    out.extend_from_slice(&event[copied..]);
    out.freeze()
}

fn ends_response(needles: &Needles, event: &[u8]) -> bool {
    needles.last_response.find_iter(event).any(|at| {
        let word = &event[at + 9..];
        [&b"completed"[..], b"incomplete", b"failed"].iter().any(|end| word.starts_with(end))
    })
}

fn value_after(rest: &[u8]) -> &[u8] {
    let rest = rest.trim_ascii_start();
    rest.strip_prefix(b":").map_or(&[], <[u8]>::trim_ascii_start)
}

fn has_value(rest: &[u8]) -> bool {
    let value = value_after(rest);
    !value.is_empty() && !value.starts_with(b"null")
}

fn says_null(rest: &[u8]) -> bool {
    value_after(rest).starts_with(b"null")
}

#[derive(Deserialize)]
struct ThinEvent<'a> {
    #[serde(default)]
    error: Option<Value>,
    #[serde(default, borrow)]
    object: Option<Cow<'a, str>>,
    #[serde(default, borrow, rename = "type")]
    kind: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    choices: Option<Vec<ThinChoice<'a>>>,
    #[serde(default)]
    code: Option<Value>,
}

#[derive(Deserialize)]
struct ThinChoice<'a> {
    #[serde(default, borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

fn read_closely(event: &[u8], marks: &mut Marks) {
    let data = data_of(event);
    if data.trim_ascii() == b"[DONE]" {
        marks.done = true;
        return;
    }
    let Ok(thin) = serde_json::from_slice::<ThinEvent<'_>>(&data) else { return };
    let kind = thin.kind.as_deref().unwrap_or_default();
    marks.error = thin.error.is_some()
        || thin.object.as_deref() == Some("error")
        || matches!(kind, "error" | "response.failed");
    let code = thin.error.as_ref().and_then(|error| error.get("code")).or(thin.code.as_ref());
    marks.error_is_clients =
        marks.error && code.and_then(Value::as_u64).is_some_and(|code| (400..500).contains(&code));
    marks.finish = matches!(kind, "response.completed" | "response.incomplete");
    for choice in thin.choices.iter().flatten() {
        match choice.finish_reason.as_deref() {
            Some("abort") => marks.abort = true,
            Some(_) => marks.finish = true,
            None => {}
        }
    }
}

/// The event's data: its `data:` lines, joined by LF as the format says.
pub(crate) fn data_of(event: &[u8]) -> Cow<'_, [u8]> {
    let mut data: Option<Cow<'_, [u8]>> = None;
    for line in event.split(|byte| matches!(byte, b'\n' | b'\r')) {
        let Some(value) = line.strip_prefix(b"data:") else { continue };
        match &mut data {
            None => data = Some(Cow::Borrowed(value)),
            Some(joined) => {
                let joined = joined.to_mut();
                joined.push(b'\n');
                joined.extend_from_slice(value);
            }
        }
    }
    data.unwrap_or_default()
}
