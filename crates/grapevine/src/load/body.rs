//! Request bodies: what was said so far, kept as the JSON it will be sent as.

use std::fmt::Write as _;

use bytes::Bytes;
use clap::ValueEnum;

/// Which OpenAI API a request speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Api {
    /// `messages`, one per turn.
    #[default]
    Chat,
    /// `prompt`, one string.
    Completions,
}

impl Api {
    /// Where the API is served unless told otherwise.
    pub fn default_path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

/// What every body of a run has besides its text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Envelope {
    /// Which API the body is for.
    pub api: Api,
    /// The `model` field; left out of the body when absent.
    pub model: Option<String>,
    /// Whether the reply is asked for as a stream (with its usage at the end).
    pub stream: bool,
    /// Whether to send vLLM's `ignore_eos`, so that the answer has all of `max_tokens`.
    pub ignore_eos: bool,
}

/// Who says a line of a chat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speaker {
    /// The instructions in front.
    System,
    /// The client.
    User,
    /// The model.
    Assistant,
}

/// The text of a conversation so far, as a fragment of JSON.
#[derive(Debug, Clone)]
pub struct Transcript {
    api: Api,
    json: String,
}

impl Transcript {
    /// Nothing said yet.
    pub fn new(api: Api) -> Self {
        Self { api, json: String::new() }
    }

    /// A conversation of one prompt, sent as it is: no speaker's name in front of it.
    pub fn of_prompt(api: Api, prompt: &str) -> Self {
        let mut transcript = Self::new(api);
        match api {
            Api::Chat => transcript.say(Speaker::User, prompt),
            Api::Completions => push_escaped(&mut transcript.json, prompt),
        }
        transcript
    }

    /// Adds what `speaker` says.
    pub fn say(&mut self, speaker: Speaker, text: &str) {
        match self.api {
            Api::Chat => {
                let role = match speaker {
                    Speaker::System => "system",
                    Speaker::User => "user",
                    Speaker::Assistant => "assistant",
                };
                if !self.json.is_empty() {
                    self.json.push(',');
                }
                let _ = write!(self.json, r#"{{"role":"{role}","content":""#);
                push_escaped(&mut self.json, text);
                self.json.push_str("\"}");
            }
            Api::Completions => {
                // The model continues after "Assistant:", so its answer closes that line.
                match speaker {
                    Speaker::System => push_escaped(&mut self.json, text),
                    Speaker::User => {
                        self.json.push_str(r"\n\nUser: ");
                        push_escaped(&mut self.json, text);
                        self.json.push_str(r"\n\nAssistant:");
                    }
                    Speaker::Assistant => push_escaped(&mut self.json, text),
                }
            }
        }
    }

    /// The request's body, asking for at most `max_tokens` tokens.
    pub fn body(&self, envelope: &Envelope, max_tokens: u32) -> Bytes {
        let mut body = String::with_capacity(self.json.len() + 192);
        body.push('{');
        if let Some(model) = &envelope.model {
            body.push_str(r#""model":""#);
            push_escaped(&mut body, model);
            body.push_str("\",");
        }
        match self.api {
            Api::Chat => {
                let _ = write!(body, r#""messages":[{}]"#, self.json);
            }
            Api::Completions => {
                let _ = write!(body, r#""prompt":"{}""#, self.json);
            }
        }
        let _ = write!(body, r#","max_tokens":{max_tokens}"#);
        if envelope.ignore_eos {
            body.push_str(r#","ignore_eos":true"#);
        }
        if envelope.stream {
            body.push_str(r#","stream":true,"stream_options":{"include_usage":true}"#);
        }
        body.push('}');
        Bytes::from(body)
    }
}

/// Appends `text` as the inside of a JSON string.
fn push_escaped(json: &mut String, text: &str) {
    let needs_escape = |byte: &u8| *byte < 0x20 || *byte == b'"' || *byte == b'\\';
    if !text.as_bytes().iter().any(needs_escape) {
        return json.push_str(text);
    }
    for character in text.chars() {
        match character {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            control if control < ' ' => {
                let _ = write!(json, "\\u{:04x}", u32::from(control));
            }
            other => json.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(body: &Bytes) -> Value {
        serde_json::from_slice(body).unwrap()
    }

    #[test]
    fn a_chat_body_holds_every_message_as_it_was_said() {
        let mut transcript = Transcript::new(Api::Chat);
        let odd = "a \"quote\", a \\, a\nline, a \u{1} and é 🦀";
        transcript.say(Speaker::System, "be brief");
        transcript.say(Speaker::User, odd);
        transcript.say(Speaker::Assistant, "yes");
        let envelope = Envelope { model: Some("m\"1".into()), stream: true, ..Envelope::default() };
        assert_eq!(
            parse(&transcript.body(&envelope, 9)),
            json!({"model": "m\"1", "messages": [
                    {"role": "system", "content": "be brief"},
                    {"role": "user", "content": odd},
                    {"role": "assistant", "content": "yes"}],
                "max_tokens": 9, "stream": true, "stream_options": {"include_usage": true}})
        );
    }

    #[test]
    fn a_completions_body_holds_the_prompt_alone() {
        let envelope = Envelope { api: Api::Completions, ignore_eos: true, ..Envelope::default() };
        let body = Transcript::of_prompt(Api::Completions, "some text").body(&envelope, 1);
        assert_eq!(parse(&body), json!({"prompt": "some text", "max_tokens": 1, "ignore_eos": true}));
    }

    #[test]
    fn each_completions_turn_extends_the_prompt_of_the_last() {
        let envelope = Envelope { api: Api::Completions, ..Envelope::default() };
        let mut transcript = Transcript::new(Api::Completions);
        transcript.say(Speaker::System, "sys");
        transcript.say(Speaker::User, "one");
        let first = parse(&transcript.body(&envelope, 1));
        transcript.say(Speaker::Assistant, " answer");
        transcript.say(Speaker::User, "two");
        let second = parse(&transcript.body(&envelope, 1));
        assert_eq!(first["prompt"], "sys\n\nUser: one\n\nAssistant:");
        assert!(
            second["prompt"]
                .as_str()
                .unwrap()
                .starts_with("sys\n\nUser: one\n\nAssistant: answer\n\nUser: two")
        );
    }
}
