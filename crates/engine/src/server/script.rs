//! The replies of chat and text completions, byte for byte in vLLM's shapes: what is said of each sequence, as
//! one JSON object or as server-sent events.

use std::fmt::Write;

use crate::answer::Answer;
use crate::flight::{Finish, Flight, Leg, Phase};
use crate::tokens::TokenId;

use super::error::push_json;

/// Which of the two completion APIs a reply belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Api {
    Chat,
    Text,
}

/// One choice of a reply.
pub(crate) struct Choice {
    pub(crate) answer: Answer,
    /// Tokens to compute.
    pub(crate) tokens: u32,
    /// Words to say: as many as tokens, but none when the answer was already over.
    pub(crate) words: u32,
    pub(crate) finish: Finish,
}

/// Which prompt a choice answers.
pub(crate) struct PromptInfo {
    pub(crate) tokens: u32,
    /// The prompt's ids, when the reply is to name them.
    pub(crate) ids: Option<Vec<TokenId>>,
}

/// What `usage` is to say, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct UsageWanted {
    /// In a chunk of its own at the end of a stream.
    pub(crate) at_end: bool,
    /// In every chunk of a stream.
    pub(crate) always: bool,
    /// With the prompt's cached tokens.
    pub(crate) cached: bool,
}

/// All that a reply consists of before anything is computed.
pub(crate) struct Script {
    pub(crate) api: Api,
    pub(crate) id: String,
    pub(crate) created_unix_s: u64,
    pub(crate) model: String,
    pub(crate) prompts: Vec<PromptInfo>,
    /// In the order of prompts, the samples of each prompt together.
    pub(crate) choices: Vec<Choice>,
    pub(crate) samples: usize,
    pub(crate) block_tokens: u32,
    pub(crate) usage: UsageWanted,
    pub(crate) return_token_ids: bool,
}

/// What an engine says it is.
pub(crate) const FINGERPRINT: &str = "vllm-0.32.0-simulated";

/// How a choice ends, on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    Finished(Finish),
    Aborted,
}

impl Ending {
    fn reason(self) -> &'static str {
        match self {
            Self::Finished(Finish::Length) => "length",
            Self::Finished(Finish::Stop) => "stop",
            Self::Aborted => "abort",
        }
    }
}

impl Script {
    /// What every event of the stream begins with.
    pub(crate) fn event_open(&self) -> String {
        let mut out = String::with_capacity(128 + self.id.len() + self.model.len());
        out.push_str("data: {\"id\":");
        push_json(&mut out, &self.id);
        let object = match self.api {
            Api::Chat => "chat.completion.chunk",
            Api::Text => "text_completion",
        };
        let _ = write!(out, ",\"object\":\"{object}\",\"created\":{},\"model\":", self.created_unix_s);
        push_json(&mut out, &self.model);
        out.push_str(",\"choices\":[");
        out
    }

    /// The chunk that opens a chat choice: its role and empty content.
    pub(crate) fn push_role(&self, out: &mut String, open: &str, choice: usize) {
        let _ = write!(
            out,
            "{open}{{\"index\":{choice},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\
             \"logprobs\":null,\"finish_reason\":null}}]"
        );
        self.push_running_usage(out, choice, 0);
        out.push_str(",\"prompt_token_ids\":");
        self.push_prompt_ids(out, choice);
        out.push_str(",\"prompt_text\":null}\n\n");
    }

    /// The chunk of one token, or of none at the end of an answer that was over; `ending` in the last one.
    pub(crate) fn push_token(
        &self,
        out: &mut String,
        open: &str,
        choice: usize,
        index: u32,
        ending: Option<Ending>,
    ) {
        let said = &self.choices[choice];
        let token = (index < said.words).then(|| said.answer.token(index));
        let _ = write!(out, "{open}{{\"index\":{choice},");
        out.push_str(match self.api {
            Api::Chat => "\"delta\":{\"content\":\"",
            Api::Text => "\"text\":\"",
        });
        if let Some(token) = token {
            push_word(out, token);
        }
        out.push_str(match self.api {
            Api::Chat => "\"},\"logprobs\":null,\"finish_reason\":",
            Api::Text => "\",\"logprobs\":null,\"finish_reason\":",
        });
        match ending {
            Some(ending) => {
                let _ = write!(out, "\"{}\",\"stop_reason\":null", ending.reason());
            }
            None if self.api == Api::Chat => out.push_str("null"),
            None => out.push_str("null,\"stop_reason\":null"),
        }
        if self.api == Api::Text {
            out.push_str(",\"prompt_token_ids\":");
            if index == 0 { self.push_prompt_ids(out, choice) } else { out.push_str("null") }
        }
        out.push_str(",\"token_ids\":");
        match token.filter(|_| self.return_token_ids) {
            Some(TokenId(id)) => {
                let _ = write!(out, "[{id}]");
            }
            None => out.push_str("null"),
        }
        out.push_str("}]");
        self.push_running_usage(out, choice, index + 1);
        if ending.is_some() && !self.usage.at_end {
            let _ = write!(out, ",\"system_fingerprint\":\"{FINGERPRINT}\"");
        }
        out.push_str("}\n\n");
    }

    /// The chunk of usage and the end mark.
    pub(crate) fn push_end(&self, out: &mut String, open: &str, flight: &Flight, said: &[u32]) {
        if self.usage.at_end {
            let prompt = self.prompt_tokens();
            let completion: u32 = said.iter().sum();
            let total = prompt + completion;
            let _ = write!(
                out,
                "{open}],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
                 \"completion_tokens\":{completion}"
            );
            if self.usage.cached {
                let _ = write!(out, ",\"prompt_tokens_details\":{{\"cached_tokens\":{}", self.cached(flight));
                if self.api == Api::Chat {
                    let _ = write!(out, ",\"created_cache_tokens\":{}", self.created(flight));
                }
                out.push('}');
            }
            let _ = write!(out, "}},\"system_fingerprint\":\"{FINGERPRINT}\"}}\n\n");
        }
        out.push_str(DONE);
    }

    /// Has a choice say what comes of the KV that it was computed from.
    pub(crate) fn settle(&mut self, flight: &Flight, choice: usize) {
        if flight.spoiled(choice) {
            let said = &mut self.choices[choice];
            said.answer = said.answer.spoiled();
        }
    }

    /// The whole reply as one object, once every sequence has ended; `staged` is where a prefill's blocks are.
    pub(crate) fn whole(&self, flight: &Flight, said: &[u32], aborted: bool, staged: Option<&str>) -> String {
        let words: u32 = said.iter().sum();
        let mut out = String::with_capacity(800 + self.choices.len() * 220 + words as usize * 6);
        out.push_str("{\"id\":");
        push_json(&mut out, &self.id);
        let object = match self.api {
            Api::Chat => "chat.completion",
            Api::Text => "text_completion",
        };
        let _ = write!(out, ",\"object\":\"{object}\",\"created\":{},\"model\":", self.created_unix_s);
        push_json(&mut out, &self.model);
        out.push_str(",\"choices\":[");
        for (choice, &said) in said.iter().enumerate() {
            if choice > 0 {
                out.push(',');
            }
            let short = said < self.choices[choice].tokens;
            self.push_choice(&mut out, choice, said, aborted && short);
        }
        let _ = write!(out, "],\"service_tier\":null,\"system_fingerprint\":\"{FINGERPRINT}\",\"usage\":");
        self.push_whole_usage(&mut out, flight, words);
        if self.api == Api::Chat {
            out.push_str(",\"prompt_logprobs\":null,\"prompt_token_ids\":");
            self.push_prompt_ids(&mut out, 0);
            out.push_str(",\"prompt_text\":null");
        }
        out.push_str(",\"kv_transfer_params\":");
        out.push_str(staged.unwrap_or("null"));
        out.push_str(",\"ec_transfer_params\":null,\"metrics\":null}");
        out
    }

    fn push_choice(&self, out: &mut String, choice: usize, said: u32, aborted: bool) {
        let Choice { answer, words, finish, .. } = &self.choices[choice];
        let words = said.min(*words);
        let _ = write!(out, "{{\"index\":{choice},");
        out.push_str(match self.api {
            Api::Chat => "\"message\":{\"role\":\"assistant\",\"content\":\"",
            Api::Text => "\"text\":\"",
        });
        for index in 0..words {
            push_word(out, answer.token(index));
        }
        out.push_str(match self.api {
            Api::Chat => {
                "\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"reasoning\":null}"
            }
            Api::Text => "\"",
        });
        let ending = if aborted { Ending::Aborted } else { Ending::Finished(*finish) };
        let _ = write!(
            out,
            ",\"logprobs\":null,\"finish_reason\":\"{}\",\"stop_reason\":null,\"token_ids\":",
            ending.reason()
        );
        if self.return_token_ids {
            push_ids(out, (0..words).map(|index| answer.token(index)));
        } else {
            out.push_str("null");
        }
        if self.api == Api::Text {
            out.push_str(",\"prompt_logprobs\":null,\"prompt_token_ids\":");
            self.push_prompt_ids(out, choice);
        }
        out.push_str(",\"routed_experts\":null}");
    }

    fn push_whole_usage(&self, out: &mut String, flight: &Flight, completion: u32) {
        let prompt = self.prompt_tokens();
        let total = prompt + completion;
        let _ = write!(
            out,
            "{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{completion},\
             \"prompt_tokens_details\":"
        );
        if self.usage.cached {
            let _ = write!(out, "{{\"cached_tokens\":{},\"created_cache_tokens\":", self.cached(flight));
            match self.api {
                Api::Chat => {
                    let _ = write!(out, "{}", self.created(flight));
                }
                Api::Text => out.push_str("null"),
            }
            out.push_str(",\"multimodal_tokens\":null}");
        } else {
            out.push_str("null");
        }
        out.push_str(",\"completion_tokens_details\":null}");
    }

    fn push_running_usage(&self, out: &mut String, choice: usize, said: u32) {
        if self.usage.always {
            let prompt = self.prompts[choice / self.samples].tokens;
            let total = prompt + said;
            let _ = write!(
                out,
                ",\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
                 \"completion_tokens\":{said},\"completion_tokens_details\":null}}"
            );
        }
    }

    fn push_prompt_ids(&self, out: &mut String, choice: usize) {
        match self.prompts.get(choice / self.samples).and_then(|prompt| prompt.ids.as_ref()) {
            Some(ids) => push_ids(out, ids.iter().copied()),
            None => out.push_str("null"),
        }
    }

    fn prompt_tokens(&self) -> u32 {
        self.prompts.iter().map(|prompt| prompt.tokens).sum()
    }

    /// Cached prompt tokens: those of each prompt's first sample; of a fetched prompt those of who computed it.
    fn cached(&self, flight: &Flight) -> u32 {
        let of = |sequence| match flight.leg(sequence) {
            Leg::Decode { source } => {
                source.cached_tokens().unwrap_or_else(|| flight.cached_tokens(sequence))
            }
            Leg::Whole | Leg::Prefill { .. } => flight.cached_tokens(sequence),
        };
        (0..self.prompts.len()).map(|prompt| of(prompt * self.samples)).sum()
    }

    /// Prompt tokens that this request put into the cache.
    fn created(&self, flight: &Flight) -> u32 {
        let full = |tokens: u32| tokens / self.block_tokens * self.block_tokens;
        let created = |(index, prompt): (usize, &PromptInfo)| {
            if matches!(flight.leg(index * self.samples), Leg::Decode { .. }) {
                // Fetched, not computed: a real engine says 0.
                return 0;
            }
            full(prompt.tokens).saturating_sub(flight.cached_tokens(index * self.samples))
        };
        self.prompts.iter().enumerate().map(created).sum()
    }
}

/// The mark at the end of every stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// How a sequence in this phase ends, if it has.
pub(crate) fn ending(phase: Phase, finish: Finish) -> Option<Ending> {
    match phase {
        Phase::Under | Phase::Cut | Phase::Failed | Phase::CoreDied => None,
        Phase::Complete => Some(Ending::Finished(finish)),
        Phase::Aborted => Some(Ending::Aborted),
    }
}

fn push_word(out: &mut String, token: TokenId) {
    out.extend(token.word_bytes().map(char::from));
}

/// Appends a JSON list of token ids.
pub(crate) fn push_ids(out: &mut String, ids: impl Iterator<Item = TokenId>) {
    out.push('[');
    for (index, TokenId(id)) in ids.enumerate() {
        let _ = write!(out, "{}{id}", if index > 0 { "," } else { "" });
    }
    out.push(']');
}
