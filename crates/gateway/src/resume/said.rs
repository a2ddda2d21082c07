//! What a stream has said: its text, and what names it.

use std::borrow::Cow;

use routing::lifecycle::NoResume;
use routing::request::Route;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::stream::{data_of, event_end};

/// What names a stream: the same in all of its events, each as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(super) id: Option<String>,
    pub(super) created: Option<String>,
    pub(super) model: Option<String>,
}

/// What has come of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    route: Route,
    text: String,
    /// Events with a text.
    pieces: u32,
    /// Tokens of answer and prompt, by the engine's count in its last event.
    counted: Option<Counts>,
    /// The same by another engine's count, when so many pieces had come.
    recounted: Option<(Counts, u32)>,
    identity: Option<Identity>,
    role: bool,
}

/// Tokens by an engine's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Counts {
    pub(super) prompt_tokens: u32,
    #[serde(default)]
    pub(super) completion_tokens: u32,
}

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(default, borrow)]
    id: Option<&'a RawValue>,
    #[serde(default, borrow)]
    created: Option<&'a RawValue>,
    #[serde(default, borrow)]
    model: Option<&'a RawValue>,
    #[serde(default, borrow)]
    choices: Option<Vec<Choice<'a>>>,
    #[serde(default)]
    usage: Option<Counts>,
    #[serde(default)]
    error: Option<IgnoredAny>,
}

#[derive(Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    index: u32,
    #[serde(default, borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    pub(super) delta: Option<Delta<'a>>,
    #[serde(default)]
    pub(super) finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
pub(super) struct Delta<'a> {
    #[serde(default)]
    pub(super) role: Option<IgnoredAny>,
    #[serde(default, borrow)]
    pub(super) content: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    reasoning: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(default, borrow)]
    refusal: Option<Cow<'a, str>>,
    #[serde(default)]
    tool_calls: Option<Vec<IgnoredAny>>,
    #[serde(default)]
    function_call: Option<IgnoredAny>,
    #[serde(default)]
    audio: Option<IgnoredAny>,
}

impl Delta<'_> {
    /// Whether it says nothing but text, which may be none.
    pub(super) fn is_text(&self) -> bool {
        let speechless = |text: &Option<Cow<'_, str>>| text.as_deref().is_none_or(str::is_empty);
        [&self.reasoning, &self.reasoning_content, &self.refusal].into_iter().all(speechless)
            && self.tool_calls.as_ref().is_none_or(Vec::is_empty)
            && self.function_call.is_none()
            && self.audio.is_none()
    }
}

impl Said {
    /// Nothing yet.
    pub(crate) const fn new(route: Route) -> Self {
        Self {
            route,
            text: String::new(),
            pieces: 0,
            counted: None,
            recounted: None,
            identity: None,
            role: false,
        }
    }

    /// All text so far.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Tokens so far: by the engine's count if it tells with each event, else by another's of the text, and of what
    /// came since one for each event with a text, which is fewer where an engine puts several into one.
    pub(crate) fn tokens(&self) -> u32 {
        match (self.counted, self.recounted) {
            (Some(counts), _) => counts.completion_tokens,
            (None, Some((counts, pieces))) => counts.completion_tokens.saturating_add(self.pieces - pieces),
            (None, None) => self.pieces,
        }
    }

    /// Events with a text, of each of which an engine has said one token at the least.
    pub(super) const fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Whether tokens are counted by events only.
    pub(crate) fn wants_count(&self) -> bool {
        self.counted.is_none() && !self.text.is_empty()
    }

    /// An engine counts so many tokens in the client's prompt, and so many in the text. A text can be said in fewer
    /// tokens than it was.
    pub(crate) fn count(&mut self, prompt_tokens: u32, tokens: u32) {
        let completion_tokens = tokens.max(self.pieces);
        self.recounted = Some((Counts { prompt_tokens, completion_tokens }, self.pieces));
    }

    /// Tokens of the prompt, if the engine has told.
    pub(super) fn prompt_tokens(&self) -> Option<u32> {
        let recounted = self.recounted.map(|(counts, _)| counts);
        self.counted.or(recounted).map(|counts| counts.prompt_tokens)
    }

    /// What the client knows the stream by.
    pub(super) fn identity(&self) -> Identity {
        self.identity.clone().unwrap_or_default()
    }

    /// Whether it has been said whose words these are.
    pub(super) const fn role(&self) -> bool {
        self.role
    }

    /// Takes in whole events; says how many bytes they were.
    ///
    /// # Errors
    /// If they say something that can't be said again as a text.
    pub(super) fn take(&mut self, events: &[u8]) -> Result<usize, NoResume> {
        let mut at = 0;
        while let Ok(end) = event_end(events, at) {
            self.take_event(&events[at..end])?;
            at = end;
        }
        Ok(at)
    }

    fn take_event(&mut self, event: &[u8]) -> Result<(), NoResume> {
        let data = data_of(event);
        if data.trim_ascii().is_empty() {
            return Ok(());
        }
        let event: Event<'_> = serde_json::from_slice(&data).map_err(|_| NoResume::Unreadable)?;
        if event.error.is_some() {
            return Err(NoResume::Unreadable);
        }
        if self.identity.is_none() {
            let own = |value: Option<&RawValue>| value.map(|value| value.get().to_owned());
            self.identity =
                Some(Identity { id: own(event.id), created: own(event.created), model: own(event.model) });
        }
        self.counted = event.usage.or(self.counted);
        match event.choices.as_deref() {
            None | Some([]) => Ok(()),
            Some([choice]) if choice.index == 0 => self.take_choice(choice),
            Some(_) => Err(NoResume::Unreadable),
        }
    }

    fn take_choice(&mut self, choice: &Choice<'_>) -> Result<(), NoResume> {
        if choice.finish_reason.is_some() {
            return Err(NoResume::Finished);
        }
        let text = match (self.route, &choice.delta) {
            (Route::ChatCompletions, Some(delta)) if delta.is_text() => {
                self.role |= delta.role.is_some();
                delta.content.as_deref()
            }
            (Route::ChatCompletions, Some(_)) => return Err(NoResume::Unreadable),
            _ => choice.text.as_deref(),
        };
        let text = text.unwrap_or_default();
        self.text.push_str(text);
        self.pieces += u32::from(!text.is_empty());
        Ok(())
    }
}
