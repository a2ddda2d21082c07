//! Follows a reply that comes in one piece: token counts stand at its end, a response's id at its start.

use std::borrow::Cow;

use bytes::Bytes;
use memchr::memmem;

use super::event::response_id;
use super::usage::Usage;

/// How much of a reply's end is looked at, in bytes: `usage` is among the last fields, before at most a few
/// short ones.
const TAIL_BYTES_MAX: usize = 8 << 10;

/// The reader of one reply.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    /// The last parts of the reply, together at least [`TAIL_BYTES_MAX`] where there is as much.
    parts: Vec<Bytes>,
    response_id: Option<Bytes>,
    begun: bool,
}

impl Tail {
    /// Takes the next part of the reply, which passes as it is.
    pub(crate) fn push(&mut self, part: &Bytes) {
        if !self.begun {
            self.begun = true;
            self.response_id = response_id(part).map(|id| part.slice_ref(id));
        }
        self.parts.push(part.clone());
        let mut length: usize = self.parts.iter().map(Bytes::len).sum();
        while self.parts.len() > 1 && length - self.parts[0].len() >= TAIL_BYTES_MAX {
            length -= self.parts.remove(0).len();
        }
    }

    /// The engine's word on tokens, if it said any.
    pub(crate) fn usage(&self) -> Option<Usage> {
        Usage::find_last(&self.end())
    }

    /// Whether the engine gave up on the request (`"finish_reason": "abort"`): what it has is no answer. That name
    /// within a text has its quotes escaped.
    pub(crate) fn is_aborted(&self) -> bool {
        let end = self.end();
        memmem::find_iter(&end, b"\"abort\"").any(|at| {
            let before = end[..at].trim_ascii_end().strip_suffix(b":");
            before.is_some_and(|before| before.trim_ascii_end().ends_with(b"\"finish_reason\""))
        })
    }

    /// What has come last, at most [`TAIL_BYTES_MAX`] of it.
    fn end(&self) -> Cow<'_, [u8]> {
        let last = |bytes: &[u8]| bytes.len().saturating_sub(TAIL_BYTES_MAX);
        match &self.parts[..] {
            [] => Cow::default(),
            [only] => Cow::Borrowed(&only[last(only)..]),
            parts => {
                let mut whole = parts.concat();
                whole.drain(..last(&whole));
                Cow::Owned(whole)
            }
        }
    }

    /// The first `"id"` of the reply.
    pub(crate) fn response_id(&self) -> Option<&str> {
        self.response_id.as_deref().and_then(|id| std::str::from_utf8(id).ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_found_at_the_end_of_a_long_reply_however_it_is_cut() {
        let reply = format!(
            r#"{{"id":"resp_7","text":"{}","usage":{{"prompt_tokens":5,"completion_tokens":6}}}}"#,
            "x".repeat(40_000)
        );
        for step in [1_000, 7_777, 100_000] {
            let mut tail = Tail::default();
            reply.as_bytes().chunks(step).for_each(|part| tail.push(&Bytes::copy_from_slice(part)));
            assert_eq!(tail.usage().map(|usage| (usage.prompt_tokens, usage.output_tokens)), Some((5, 6)));
            assert_eq!(tail.response_id(), Some("resp_7"));
            assert!(tail.parts.iter().map(Bytes::len).sum::<usize>() < TAIL_BYTES_MAX + step + 1);
        }
    }

    #[test]
    fn an_abort_is_told_from_its_name_in_a_text_however_it_is_cut() {
        let aborted = |reply: &str, step| {
            let mut tail = Tail::default();
            reply.as_bytes().chunks(step).for_each(|part| tail.push(&Bytes::copy_from_slice(part)));
            tail.is_aborted()
        };
        for step in [1, 7, 1_000] {
            let of = |reason: &str| {
                let two = format!(
                    r#"{{"text":"a","finish_reason":"stop"}},{{"text":"b","finish_reason" : {reason}}}"#
                );
                format!(r#"{{"choices":[{two}],"usage":{{"prompt_tokens":5}}}}"#)
            };
            assert!(aborted(&of(r#""abort""#), step));
            assert!(!aborted(&of("null"), step));
            let said =
                r#"{"choices":[{"text":"\"finish_reason\":\"abort\"","finish_reason":"stop","x":"abort"}]}"#;
            assert!(!aborted(said, step));
        }
        assert!(!aborted("", 1));
    }
}
