//! Making the rest of an answer, which is a stream of its own, look like what it continues.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Deserialize;

use super::Said;
use super::said::{Choice, Counts, Identity};
use crate::edit::{Change, edited_by};
use crate::stream::{Usage, data_of, event_end, is_comment};

/// What the events of the rest must say to be those of the stream that broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stitch {
    identity: Identity,
    /// Whether the client knows whose words these are, or has some already.
    role: bool,
    /// Tokens that came before.
    before: u32,
    /// Tokens of the client's own prompt, if the first engine has told; else they are what the prompt of the rest has
    /// beyond those that came before.
    prompt_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Choices<'a> {
    #[serde(default, borrow)]
    choices: Option<Vec<Choice<'a>>>,
}

/// What is to be done about whose words these are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Nothing: the event does not say, or the client does not know.
    Stays,
    /// The event says nothing else.
    IsAll,
    /// It goes, and the rest stays.
    Goes,
}

impl Stitch {
    /// For what follows `said`.
    pub(crate) fn to(said: &Said) -> Self {
        Self {
            identity: said.identity(),
            role: said.role() || !said.text().is_empty(),
            before: if said.text().is_empty() { 0 } else { said.tokens() },
            prompt_tokens: said.prompt_tokens(),
        }
    }

    /// Whole events of the rest, as the client gets them.
    pub(crate) fn joined(&self, events: &Bytes) -> Bytes {
        let mut out = BytesMut::with_capacity(events.len() + 64);
        let mut at = 0;
        while let Ok(end) = event_end(events, at) {
            self.put(&mut out, &events[at..end]);
            at = end;
        }
        self.put(&mut out, &events[at..]);
        out.freeze()
    }

    /// Tokens of the whole answer, by what an engine says of the rest.
    pub(crate) fn usage(&self, rest: Usage) -> Usage {
        let counts = Counts { prompt_tokens: rest.prompt_tokens, completion_tokens: rest.output_tokens };
        let Counts { prompt_tokens, completion_tokens } = self.counts(counts);
        let cached_tokens = rest.cached_tokens.map(|cached| cached.min(prompt_tokens));
        Usage { prompt_tokens, output_tokens: completion_tokens, cached_tokens }
    }

    fn counts(&self, rest: Counts) -> Counts {
        Counts {
            prompt_tokens: self
                .prompt_tokens
                .unwrap_or_else(|| rest.prompt_tokens.saturating_sub(self.before)),
            completion_tokens: rest.completion_tokens.saturating_add(self.before),
        }
    }

    fn put(&self, out: &mut BytesMut, event: &[u8]) {
        if event.is_empty() || is_comment(event) {
            out.put_slice(event);
            return;
        }
        let data = data_of(event);
        let data = data.trim_ascii();
        let role = self.role_in(data);
        if role == Role::IsAll {
            return;
        }
        match edited_by(data, |key, value| self.change(key, value, role), &[]) {
            None => out.put_slice(event),
            Some(edited) => {
                out.put_slice(b"data: ");
                // Between lines of an event's data there can only be space between what JSON consists of.
                out.extend(edited.iter().map(|byte| if *byte == b'\n' { b' ' } else { *byte }));
                out.put_slice(b"\n\n");
            }
        }
    }

    fn change<'a>(&'a self, key: &[u8], value: &[u8], role: Role) -> Change<'a> {
        let set = |value: &'a Option<String>| match value {
            Some(value) => Change::Set(value.as_bytes().into()),
            None => Change::Keep,
        };
        match key {
            b"id" => set(&self.identity.id),
            b"created" => set(&self.identity.created),
            b"model" => set(&self.identity.model),
            b"usage" => self.usage_in(value).map_or(Change::Keep, Change::Set),
            b"choices" if role == Role::Goes => without_role(value).map_or(Change::Keep, Change::Set),
            _ => Change::Keep,
        }
    }

    fn role_in(&self, data: &[u8]) -> Role {
        if !self.role {
            return Role::Stays;
        }
        let Ok(Choices { choices: Some(choices) }) = serde_json::from_slice(data) else { return Role::Stays };
        let [Choice { delta: Some(delta), finish_reason, .. }] = &choices[..] else { return Role::Stays };
        let speechless = delta.content.as_deref().is_none_or(str::is_empty) && delta.is_text();
        match (&delta.role, speechless && finish_reason.is_none()) {
            (None, _) => Role::Stays,
            (Some(_), true) => Role::IsAll,
            (Some(_), false) => Role::Goes,
        }
    }

    /// A report of tokens, about the whole answer.
    fn usage_in(&self, value: &[u8]) -> Option<Cow<'static, [u8]>> {
        let rest: Counts = serde_json::from_slice(value).ok()?;
        let Counts { prompt_tokens, completion_tokens } = self.counts(rest);
        let set = |tokens: u32| Change::Set(tokens.to_string().into_bytes().into());
        let change = |key: &[u8], value: &[u8]| match key {
            b"prompt_tokens" => set(prompt_tokens),
            b"completion_tokens" => set(completion_tokens),
            b"total_tokens" => set(prompt_tokens.saturating_add(completion_tokens)),
            b"prompt_tokens_details" => cached_in(value, prompt_tokens).map_or(Change::Keep, Change::Set),
            _ => Change::Keep,
        };
        edited_by(value, change, &[]).map(|edited| edited.to_vec().into())
    }
}

/// Of the client's prompt no more than all can have been cached.
fn cached_in(value: &[u8], prompt_tokens: u32) -> Option<Cow<'static, [u8]>> {
    let change = |key: &[u8], value: &[u8]| match (key, serde_json::from_slice::<u32>(value)) {
        (b"cached_tokens", Ok(cached)) if cached > prompt_tokens => {
            Change::Set(prompt_tokens.to_string().into_bytes().into())
        }
        _ => Change::Keep,
    };
    edited_by(value, change, &[]).map(|edited| edited.to_vec().into())
}

/// The only choice of an event, without the role in its delta.
fn without_role(choices: &[u8]) -> Option<Cow<'static, [u8]>> {
    let choice = choices.strip_prefix(b"[")?.strip_suffix(b"]")?;
    let role = |key: &[u8], _: &[u8]| if key == b"role" { Change::Drop } else { Change::Keep };
    let change = |key: &[u8], value: &[u8]| match key {
        b"delta" => {
            let delta = edited_by(value, role, &[]);
            delta.map_or(Change::Keep, |delta| Change::Set(delta.to_vec().into()))
        }
        _ => Change::Keep,
    };
    let choice = edited_by(choice, change, &[])?;
    Some([b"[", &choice[..], b"]"].concat().into())
}
