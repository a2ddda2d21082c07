//! What came back: one reply read piece by piece, and the verdict on it. No clock, no network.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::sse::{Oversize, Splitter};

/// The longest answer kept for a chat's history: an endless reply must not fill the memory.
pub(super) const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Why a request failed, as the client saw it. The label of each is its key in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorKind {
    /// No connection could be made.
    Connect,
    /// The connection broke before the reply's head, or was reset within its body.
    Reset,
    /// The reply's status was not 2xx.
    Status(u16),
    /// The stream carried an `error` event, whatever came after it.
    ErrorEvent,
    /// The reply ended before its end: no `[DONE]`, no finish reason, or a body shorter than announced.
    Truncated,
    /// The engine broke the answer off: `finish_reason` was `abort`.
    Abort,
    /// The whole request took longer than allowed.
    Timeout,
    /// The body is not what was asked for: not JSON, not a completion, not a stream, or endless.
    BodyMismatch,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("connect"),
            Self::Reset => f.write_str("reset"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::ErrorEvent => f.write_str("error-event"),
            Self::Truncated => f.write_str("truncated"),
            Self::Abort => f.write_str("abort"),
            Self::Timeout => f.write_str("timeout"),
            Self::BodyMismatch => f.write_str("body mismatch"),
        }
    }
}

/// A failure and what the other side said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Its kind.
    pub kind: ErrorKind,
    /// The first words of the reply or of the error's cause.
    pub detail: String,
}

impl Failure {
    /// A failure with as much of `detail` as a table can show, on one line.
    pub fn new(kind: ErrorKind, detail: impl AsRef<str>) -> Self {
        const DETAIL_CHARS_MAX: usize = 200;
        let printable = |letter: char| if letter.is_control() { ' ' } else { letter };
        Self { kind, detail: detail.as_ref().chars().take(DETAIL_CHARS_MAX).map(printable).collect() }
    }
}

/// Tokens, as the engine counted them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    #[serde(default)]
    pub completion_tokens: u64,
    /// More about the prompt; some engines leave it out.
    #[serde(default)]
    pub prompt_tokens_details: Option<PromptDetails>,
}

/// What `usage` says about the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct PromptDetails {
    /// Tokens of the prompt that came from the prefix cache.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
}

impl Usage {
    /// Cached tokens, if the engine counts them.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens)
    }
}

/// What a reply holds, as far as it was read.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// The text of the first choice.
    pub text: String,
    /// When the first content arrived.
    pub first_content: Option<Instant>,
    /// The time from each content event to the next.
    pub gaps: Vec<Duration>,
    /// Events with content.
    pub content_events: u64,
    /// The last `usage` seen.
    pub usage: Option<Usage>,
    finish: Finish,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Finish {
    #[default]
    Missing,
    Normal,
    Abort,
}

/// Reads one streamed reply.
#[derive(Debug, Default)]
pub(super) struct StreamReader {
    splitter: Splitter,
    events: Events,
}

#[derive(Debug, Default)]
struct Events {
    answer: Answer,
    last_content: Option<Instant>,
    failure: Option<Failure>,
    done: bool,
}

impl StreamReader {
    /// Reads the chunk that arrived at `now`. Events of one chunk arrived together.
    pub(super) fn push(&mut self, chunk: &[u8], now: Instant) {
        let Self { splitter, events } = self;
        if let Err(Oversize) = splitter.push(chunk, |data| events.read(data, now)) {
            events.fail(ErrorKind::BodyMismatch, "an event too large to be one");
        }
    }

    /// Whether reading on is pointless: the reply is no stream of completion events, or has no end.
    pub(super) fn is_hopeless(&self) -> bool {
        self.events.failure.as_ref().is_some_and(|failure| failure.kind == ErrorKind::BodyMismatch)
    }

    /// The answer so far, and whether the stream was a whole one. An error event stays an error whatever
    /// follows it; a `[DONE]` without a finish reason is not an end.
    pub(super) fn finish(self) -> (Answer, Result<(), Failure>) {
        let Events { answer, failure, done, .. } = self.events;
        let verdict = match (failure, answer.finish, done) {
            (Some(failure), ..) => Err(failure),
            (None, Finish::Abort, _) => Err(Failure::new(ErrorKind::Abort, "finish_reason abort")),
            (None, _, false) => Err(Failure::new(ErrorKind::Truncated, "no [DONE]")),
            (None, Finish::Missing, true) => {
                Err(Failure::new(ErrorKind::Truncated, "[DONE] without finish_reason"))
            }
            (None, Finish::Normal, true) => Ok(()),
        };
        (answer, verdict)
    }
}

impl Events {
    fn read(&mut self, data: &[u8], now: Instant) {
        if data == b"[DONE]" {
            self.done = true;
            return;
        }
        let event: Event<'_> = match serde_json::from_slice(data) {
            Ok(event) => event,
            Err(error) => return self.fail(ErrorKind::BodyMismatch, error.to_string()),
        };
        if let Some(error) = event.error {
            return self.fail(ErrorKind::ErrorEvent, error.get());
        }
        let Some(choice) = self.answer.take(event) else { return };
        if choice.has_content() {
            if let Some(last) = self.last_content.replace(now) {
                self.answer.gaps.push(now.duration_since(last));
            }
            self.answer.first_content.get_or_insert(now);
            self.answer.content_events += 1;
            self.answer.text.push_str(choice.text());
            if self.answer.text.len() > ANSWER_BYTES_MAX {
                self.fail(ErrorKind::BodyMismatch, "an answer without end");
            }
        }
    }

    /// The first failure is the one that counts.
    fn fail(&mut self, kind: ErrorKind, detail: impl AsRef<str>) {
        self.failure.get_or_insert_with(|| Failure::new(kind, detail));
    }
}

/// Reads a reply that came in one piece.
pub(super) fn read_whole(body: &[u8]) -> (Answer, Result<(), Failure>) {
    let mut answer = Answer::default();
    let event: Event<'_> = match serde_json::from_slice(body) {
        Ok(event) => event,
        Err(error) => return (answer, Err(Failure::new(ErrorKind::BodyMismatch, error.to_string()))),
    };
    if let Some(error) = event.error {
        return (answer, Err(Failure::new(ErrorKind::ErrorEvent, error.get())));
    }
    let verdict = match answer.take(event) {
        None => Err(Failure::new(ErrorKind::BodyMismatch, "no choice in the reply")),
        Some(choice) => {
            answer.content_events = u64::from(choice.has_content());
            answer.text.push_str(choice.text());
            match answer.finish {
                Finish::Normal => Ok(()),
                Finish::Abort => Err(Failure::new(ErrorKind::Abort, "finish_reason abort")),
                Finish::Missing => Err(Failure::new(ErrorKind::Truncated, "no finish_reason")),
            }
        }
    };
    (answer, verdict)
}

impl Answer {
    /// Notes an event's usage and finish reason; returns its first choice.
    fn take<'a>(&mut self, event: Event<'a>) -> Option<Choice<'a>> {
        self.usage = event.usage.or(self.usage);
        let choice = event.choices.0?;
        if let Some(reason) = &choice.finish_reason {
            self.finish = if reason.0 == "abort" { Finish::Abort } else { Finish::Normal };
        }
        Some(choice)
    }
}

/// A chunk of a stream, or a whole reply: the fields that matter here.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    choices: First<Choice<'a>>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default, alias = "message")]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    finish_reason: Option<Text<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Text<'a>>,
    #[serde(default)]
    tool_calls: First<IgnoredAny>,
}

/// A string borrowed from the event unless it has escapes. (`Option<Cow>` itself would always allocate.)
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl Choice<'_> {
    fn text(&self) -> &str {
        let content = self.delta.as_ref().and_then(|delta| delta.content.as_ref());
        content.or(self.text.as_ref()).map_or("", |text| &text.0)
    }

    /// Whether the model produced something: text, reasoning or a call. The role alone is nothing.
    fn has_content(&self) -> bool {
        let says = |text: &Option<Text<'_>>| text.as_ref().is_some_and(|text| !text.0.is_empty());
        let in_delta = self.delta.as_ref().is_some_and(|delta| {
            says(&delta.content)
                || says(&delta.reasoning)
                || says(&delta.reasoning_content)
                || delta.tool_calls.0.is_some()
        });
        in_delta || says(&self.text)
    }
}

/// The first item of a list, without a list: one choice is all that is ever asked for.
struct First<T>(Option<T>);

impl<T> Default for First<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for First<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstVisitor<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for FirstVisitor<T> {
            type Value = First<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list or null")
            }
            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(First(None))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let first = seq.next_element()?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(First(first))
            }
        }
        deserializer.deserialize_any(FirstVisitor(std::marker::PhantomData))
    }
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
