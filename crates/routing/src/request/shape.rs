//! A request's shape: everything that routing wants to know of it.

use super::body::{self, Body, ResumeObstacles};
use super::canonical::Prompt;
use super::class::{HeaderView, Priority, Slo, read_headers};
use super::prompt;
use super::refusal::BadRequest;
use super::rules::ShapeRules;
use super::text::Text;
use crate::facts::DecisionSample;
use crate::lifecycle::{NoResume, OnBreak};
use crate::{BlockHash, SessionKey};

/// Which of an engine's faces a request is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Route {
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// `/v1/completions`.
    Completions,
    /// `/v1/embeddings`.
    Embeddings,
    /// `/v1/responses`.
    Responses,
    /// Any other path, passed through.
    Other,
}

impl Route {
    /// The route of this path (without its query).
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::ChatCompletions,
            "/v1/completions" => Self::Completions,
            "/v1/embeddings" => Self::Embeddings,
            "/v1/responses" => Self::Responses,
            _ => Self::Other,
        }
    }

    /// The route as a metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ChatCompletions => "chat_completions",
            Self::Completions => "completions",
            Self::Embeddings => "embeddings",
            Self::Responses => "responses",
            Self::Other => "other",
        }
    }
}

/// What a prompt's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PromptUnit {
    /// Bytes of canonical text: tokens are an estimate.
    Text,
    /// Token ids, four bytes each: tokens are exact.
    Tokens,
    /// No prompt that could be read: size and prefix are unknown.
    None,
}

/// The key under which the endpoint that made the response `id` is pinned.
pub fn response_key(id: &[u8]) -> SessionKey {
    SessionKey::of("response", id)
}

/// What a request is to routing.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestShape {
    /// Which face it is for.
    pub route: Route,
    /// The model it names.
    pub model: Option<String>,
    /// Its prompt's full blocks, shallowest first, at most [`crate::prefix::BLOCKS_MAX`]; of a list of
    /// prompts the first one's.
    pub blocks: Vec<BlockHash>,
    /// Bytes per block.
    pub block_bytes: u32,
    /// Bytes of its prompt's canonical text, media as digests; of a list of prompts, all of them.
    pub prompt_bytes: u64,
    /// What those bytes are.
    pub unit: PromptUnit,
    /// Images, audio and video in the prompt.
    pub media: u32,
    /// Its prompt in tokens: exact for token ids, else an estimate by [`ShapeRules::bytes_per_token`].
    pub prompt_tokens: u32,
    /// What settles the home of a prompt that is warm nowhere, alike on every replica. The session's key if
    /// there is one. Else of a chat the first block after the common part (tools and system prompt), a
    /// short one as it is, seeded with the common part. Else the last full block's hash, or a short prompt's
    /// own; with an index at hand [`Self::first_cold_block`] is better.
    pub rendezvous: u64,
    /// What the request's home is known by though nothing of it may be warm. Of a chat: stays the same over
    /// its turns, and differs where the common part or the first message that is not the system's differ. Of
    /// any other prompt that fills no block: the whole prompt.
    pub conversation: Option<u64>,
    /// Whether it is a chat that goes on: an answer is among its messages.
    pub goes_on: bool,
    /// The hash of the prompt's beginning, if [`ShapeRules::beginning`] asks for it.
    pub beginning: Option<u64>,
    /// The hash of the whole prompt, with the part that does not fill a block.
    pub tail: u64,
    /// The explicit session: a configured header, else `prompt_cache_key`, else `user` if configured.
    pub session: Option<SessionKey>,
    /// The pin of the response that this one goes on from.
    pub previous_response: Option<SessionKey>,
    /// Whether the reply is streamed.
    pub stream: bool,
    /// Whether the stream ends with a usage report.
    pub include_usage: bool,
    /// Output tokens expected per sample: the header's, else the configured default; never more than
    /// the limit.
    pub output_tokens: u32,
    /// The request's own limit on output tokens, if it has one.
    pub output_tokens_max: Option<u32>,
    /// Samples that the engine runs per prompt (`n`, `best_of`).
    pub samples: u32,
    /// Prompts in the body's list; 1 if it is not a list.
    pub prompts: u32,
    /// Whether its prompt has to be computed by the engine that answers: it asks for what computing the prompt shows
    /// (log-probabilities of the prompt's own tokens), or for beams, of which vLLM hands none over.
    pub undivided: bool,
    /// How urgent it is.
    pub priority: Priority,
    /// When it expects its tokens.
    pub slo: Slo,
    /// What stands against continuing its stream on another engine.
    pub obstacles: ResumeObstacles,
    /// Headers meant for routing whose value made no sense; they count as not sent.
    pub ignored_headers: u32,
}

impl RequestShape {
    /// Reads a request. `body` is looked at, never changed, and need not outlive the shape.
    ///
    /// # Errors
    /// If the body of a known route can't be served by any engine (malformed, wrong types, prompt
    /// missing), or if a body of any route carries fields reserved for the router.
    pub fn read(
        route: Route,
        headers: &dyn HeaderView,
        body: &[u8],
        rules: &ShapeRules,
    ) -> Result<Self, BadRequest> {
        let fields = if route == Route::Other { body::read_other(body)? } else { body::read(route, body)? };
        let prompt = prompt::read(route, &fields, rules)?;
        let (unit, prompt) = match prompt {
            None => (PromptUnit::None, Prompt::absent(body)),
            Some(prompt) if prompt.tokens.is_some() => (PromptUnit::Tokens, prompt),
            Some(prompt) => (PromptUnit::Text, prompt),
        };
        Ok(Self::assemble(route, headers, &fields, unit, prompt, rules))
    }

    fn assemble(
        route: Route,
        headers: &dyn HeaderView,
        fields: &Body<'_>,
        unit: PromptUnit,
        prompt: Prompt,
        rules: &ShapeRules,
    ) -> Self {
        let told = read_headers(headers, rules);
        let session = told
            .session
            .or_else(|| session_of(fields.prompt_cache_key, "prompt_cache_key"))
            .or_else(|| session_of(fields.user.filter(|_| rules.session_from_user), "user"));
        let output_tokens_max = fields
            .output_tokens_max
            .or(fields.max_tokens)
            .map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        let output_tokens = told
            .output_tokens
            .map_or(rules.output_tokens, std::num::NonZeroU32::get)
            .min(output_tokens_max.unwrap_or(u32::MAX));
        let mut obstacles = fields.obstacles;
        obstacles.join(prompt.obstacles);
        Self {
            route,
            model: fields.model.map(Text::to_owned),
            block_bytes: u32::try_from(rules.block_bytes).unwrap_or(u32::MAX),
            prompt_tokens: prompt_tokens(&prompt, rules),
            blocks: prompt.blocks,
            prompt_bytes: prompt.bytes,
            unit,
            media: prompt.media,
            rendezvous: session.map_or(prompt.lead, SessionKey::raw),
            conversation: prompt.conversation,
            goes_on: prompt.answered,
            beginning: prompt.beginning,
            tail: prompt.tail,
            session,
            previous_response: fields.previous_response.map(|id| response_key(id.to_owned().as_bytes())),
            stream: fields.stream,
            include_usage: fields.include_usage,
            output_tokens,
            output_tokens_max,
            samples: fields.samples_run(),
            prompts: prompt.prompts,
            undivided: fields.undivided(),
            priority: told.priority,
            slo: told.slo,
            obstacles,
            ignored_headers: told.ignored,
        }
    }

    /// The request that another replica tells a sample of.
    pub(crate) fn of_sample(sample: &DecisionSample) -> Self {
        let unit = if sample.prompt_bytes == 0 { PromptUnit::None } else { PromptUnit::Tokens };
        Self {
            route: Route::Completions,
            model: sample.model.clone(),
            blocks: sample.blocks.clone(),
            block_bytes: sample.block_bytes,
            prompt_bytes: sample.prompt_bytes,
            // The teller's count of tokens is taken as it is.
            unit,
            media: 0,
            prompt_tokens: sample.prompt_tokens,
            rendezvous: sample.rendezvous,
            conversation: sample.conversation,
            goes_on: false,
            beginning: sample.beginning,
            tail: sample.tail,
            session: sample.session,
            previous_response: None,
            stream: true,
            include_usage: false,
            output_tokens: sample.output_tokens,
            output_tokens_max: None,
            samples: 1,
            prompts: 1,
            undivided: false,
            priority: Priority::Normal,
            slo: Slo::of(Priority::Normal),
            obstacles: ResumeObstacles::default(),
            ignored_headers: 0,
        }
    }

    /// What becomes of its stream if that breaks, where streams are resumed at all: only what another engine continues
    /// exactly goes on.
    pub fn on_break(&self) -> OnBreak {
        let can_continue = matches!(self.route, Route::ChatCompletions | Route::Completions);
        match (self.stream, can_continue && self.obstacles.is_empty()) {
            (true, true) => OnBreak::Resume,
            (true, false) => OnBreak::End(NoResume::Inexact),
            (false, _) => OnBreak::End(NoResume::Off),
        }
    }

    /// Answers that come side by side in the reply: each prompt's samples.
    pub const fn samples_streamed(&self) -> u32 {
        self.samples.saturating_mul(self.prompts)
    }

    /// The rendezvous key of a prompt of which the first `warm` blocks are warm somewhere: the session's
    /// key or a chat's own, else the first block that is nowhere. So prompts that share a prefix part
    /// company where they first differ.
    pub fn first_cold_block(&self, warm: u32) -> u64 {
        if self.session.is_some() || self.conversation.is_some() {
            return self.rendezvous;
        }
        self.blocks.get(warm as usize).map_or(self.tail, |block| block.raw())
    }
}

fn session_of(text: Option<Text<'_>>, field: &str) -> Option<SessionKey> {
    text.filter(|text| !text.is_empty()).map(|text| SessionKey::of(field, text.to_owned().as_bytes()))
}

/// Tokens of all the request's prompts; at least one where there is a prompt.
fn prompt_tokens(prompt: &Prompt, rules: &ShapeRules) -> u32 {
    let tokens = prompt.tokens.map_or_else(
        || {
            let text = (prompt.bytes as f64 / rules.bytes_per_token.max(f64::MIN_POSITIVE)).ceil();
            text + f64::from(prompt.media) * f64::from(rules.media_tokens)
        },
        |tokens| tokens as f64,
    );
    // `as` saturates
    tokens as u32
}
