//! Chat and text completions: from a body to sequences on a rank, and the reply that is not streamed.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use serde_json::value::RawValue;

use crate::answer::Answer;
use crate::fault::Fault;
use crate::flight::{Finish, Leg, Phase, Work};
use crate::kv::BlockHash;
use crate::rank::{Rank, Seat};
use crate::scheduler::{Prompt, Refused};
use crate::tokens::{TokenId, tokenize};

use super::Server;
use super::body::Body;
use super::error::ApiError;
use super::legs::{self, Request};
use super::reply::{Failure, Reply};
use super::script::{Api, Choice, PromptInfo, Script, UsageWanted};
use super::stream::EventStream;
use super::template;

/// Prompts times samples of one request; more is an attack or a mistake.
const SEQUENCES_MAX: usize = 1024;
/// What a text completion generates when the request does not say.
const TEXT_TOKENS: u32 = 16;
/// Where the answer of a chat ends when neither request nor engine says.
const CHAT_TOKENS: u32 = 16;

/// Handles `POST /v1/chat/completions` and `POST /v1/completions`.
pub(crate) async fn completions(
    server: &Arc<Server>,
    api: Api,
    headers: &HeaderMap,
    bytes: &Bytes,
    request_id: &str,
) -> Result<Reply, Failure> {
    let body = super::body::parse(bytes)?;
    server.check_model(&body)?;
    let prompts = match api {
        Api::Chat => vec![chat_tokens(&body)?],
        Api::Text => text_prompts(body.prompt.ok_or_else(|| body.missing("prompt"))?)?,
    };
    let stream = body.stream.unwrap_or(false);
    check_parameters(&body, stream)?;
    let rank = server.rank(headers)?;
    let (mut script, mut work) = plan(server, api, &body, prompts, request_id)?;
    let fault = server.faults.take();
    if let Some(failure) = early_failure(server, fault) {
        return failure.await;
    }
    let mut request = legs::assign(server, &rank, &body, &mut script, &mut work)?;
    if let Request::Hosted(hosted) = &mut request {
        hosted.joined(server).await?;
    }
    let seat = submit(&rank, work)?;
    if let Request::Hosted(hosted) = &mut request {
        hosted.hand_over(server, &seat).await?;
    }
    if stream {
        return Ok(Reply::events(EventStream::new(Arc::clone(server), seat, script, fault)));
    }
    let tells_blocks = matches!(request, Request::Prefill);
    let mut whole = Whole { server, rank: &rank, seat, script, fault, tells_blocks };
    let reply = whole.reply().await?;
    Ok(match headers.get("endpoint-load-metrics-format") {
        Some(format) => reply.with_load(format.as_bytes(), server.told(rank.gauges())),
        None => reply,
    })
}

/// What a fault does before anything is computed.
pub(crate) fn early_failure(
    server: &Server,
    fault: Option<Fault>,
) -> Option<impl Future<Output = Result<Reply, Failure>>> {
    let early = |fault: &Fault| {
        matches!(fault, Fault::Status { .. } | Fault::CoreDeath | Fault::Reset | Fault::Freeze)
    };
    let fault = fault.filter(early)?;
    Some(async move {
        match fault {
            Fault::Status { status, retry_after_s } => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                let kind = status.canonical_reason().unwrap_or("InternalServerError");
                let error = ApiError::new(status, kind, None, "fault asked for");
                Ok(Reply::from(error).with_retry_after(retry_after_s))
            }
            Fault::CoreDeath => {
                server.die();
                Err(ApiError::core_died().into())
            }
            Fault::Freeze => std::future::pending().await,
            _ => Err(Failure::Reset),
        }
    })
}

/// What a client sees of a request that ended in this phase, short of its end.
pub(crate) fn unfinished(phase: Phase) -> Failure {
    match phase {
        Phase::Failed => ApiError::internal().into(),
        Phase::CoreDied => ApiError::core_died().into(),
        Phase::Under | Phase::Complete | Phase::Aborted | Phase::Cut => Failure::Reset,
    }
}

/// Takes a seat, or says that the engine is busy.
pub(crate) fn submit(rank: &Arc<Rank>, work: Vec<Work>) -> Result<Seat, ApiError> {
    rank.submit(work).map_err(|refused| match refused {
        Refused::QueueFull => ApiError::busy(),
        Refused::TooLong => ApiError::bad_request(
            Some("input_tokens"),
            "The request needs more KV cache than this engine has. Please reduce its length.",
        ),
        Refused::Empty => ApiError::bad_request(Some("prompt"), "The prompt must not be empty."),
    })
}

/// A reply that is not streamed, to be.
struct Whole<'a> {
    server: &'a Server,
    rank: &'a Rank,
    seat: Seat,
    script: Script,
    fault: Option<Fault>,
    /// Whether it says where its blocks are kept.
    tells_blocks: bool,
}

impl Whole<'_> {
    async fn reply(&mut self) -> Result<Reply, Failure> {
        let Self { server, rank, seat, script, fault, tells_blocks } = self;
        let strikes_at = fault.and_then(Fault::after_tokens);
        let (phase, said) = wait(seat, script.choices.len(), strikes_at).await;
        let struck = strikes_at.is_some_and(|tokens| said[0] >= tokens);
        let aborted = match fault.filter(|_| struck) {
            Some(Fault::AbortAfter { .. }) => true,
            Some(Fault::ErrorEventAfter { .. }) => return Err(ApiError::internal().into()),
            Some(Fault::FreezeAfter { .. } | Fault::CommentsAfter { .. }) => std::future::pending().await,
            Some(_) => return Err(Failure::Reset),
            None => phase == Phase::Aborted,
        };
        if matches!(phase, Phase::Cut | Phase::Failed | Phase::CoreDied) {
            return Err(unfinished(phase));
        }
        for choice in 0..said.len() {
            script.settle(&seat.flight, choice);
        }
        let staged = if *tells_blocks { legs::staged(server, rank, seat, script) } else { None };
        let json = script.whole(&seat.flight, &said, aborted, staged.as_deref());
        let reply = Reply::json(StatusCode::OK, json.into());
        Ok(match fault.and_then(Fault::drip) {
            Some(drip) => reply.dripped(drip),
            None => reply,
        })
    }
}

/// Waits until so many sequences have ended; the worst of their phases.
pub(crate) async fn ended(seat: &Seat, sequences: usize) -> Phase {
    wait(seat, sequences, None).await.0
}

/// Waits until so many sequences have ended, or the first has `until` tokens; the worst phase, and the tokens of
/// each.
async fn wait(seat: &Seat, sequences: usize, until: Option<u32>) -> (Phase, Vec<u32>) {
    poll_fn(|cx| {
        seat.flight.watch(cx);
        let progress: Vec<(Phase, u32)> = (0..sequences).map(|index| seat.flight.progress(index)).collect();
        let mut said: Vec<u32> = progress.iter().map(|(_, said)| *said).collect();
        if let (Some(until), Some(first)) = (until, said.first_mut())
            && *first >= until
        {
            *first = until;
            return Poll::Ready((Phase::Under, said));
        }
        let has = |phase| progress.iter().any(|(at, _)| *at == phase);
        let worst = [Phase::CoreDied, Phase::Cut, Phase::Failed].into_iter().find(|&phase| has(phase));
        let phase = if let Some(worst) = worst {
            worst
        } else if has(Phase::Under) {
            return Poll::Pending;
        } else if has(Phase::Aborted) {
            Phase::Aborted
        } else {
            Phase::Complete
        };
        Poll::Ready((phase, said))
    })
    .await
}

fn check_parameters(body: &Body<'_>, stream: bool) -> Result<(), ApiError> {
    if body.kv_transfer_params.is_some_and(|params| !params.get().starts_with('{')) {
        let message = "kv_transfer_params must be an object.";
        return Err(ApiError::bad_request(Some("kv_transfer_params"), message));
    }
    if body.stream_options.is_some() && !stream {
        let message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)";
        return Err(ApiError::bad_request(Some("stream_options"), message));
    }
    if let Some(n) = body.n.filter(|&n| n < 1) {
        return Err(ApiError::bad_request(None, &format!("n must be at least 1, got {n}.")));
    }
    if let Some(temperature) = body.temperature.filter(|&temperature| temperature < 0.0) {
        let value = format!("{temperature:?}");
        let message = format!("temperature must be non-negative, got {value}.");
        return Err(ApiError::bad_value("temperature", &value, &message));
    }
    Ok(())
}

/// The tokens that an engine computes for this body of a chat request; `None` for one that it would refuse.
pub fn chat_prompt(body: &[u8]) -> Option<Vec<TokenId>> {
    chat_tokens(&super::body::parse(body).ok()?).ok()
}

/// The tokens of a chat request's prompt.
pub(crate) fn chat_tokens(body: &Body<'_>) -> Result<Vec<TokenId>, ApiError> {
    let messages = body.messages.as_ref().ok_or_else(|| body.missing("messages"))?;
    let text =
        template::render(body, messages).map_err(|error| ApiError::bad_request(None, &error.to_string()))?;
    Ok(tokenize(&text))
}

/// The prompts of a text completion: a string, a list of strings, token ids, or a list of those.
pub(crate) fn text_prompts(raw: &RawValue) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let wrong = || {
        let fault = "{'type': 'string_type', 'loc': 'body.prompt', 'msg': 'Input should be a string, a list of \
                     strings, token ids or a list of lists of token ids'}";
        ApiError::invalid(Some("body.prompt"), fault)
    };
    if let Some(text) = template::string(raw) {
        return not_empty(vec![tokenize(&text)]);
    }
    if let Ok(ids) = serde_json::from_str::<Vec<u32>>(raw.get()) {
        return not_empty(vec![ids.into_iter().map(TokenId).collect()]);
    }
    let items: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|_| wrong())?;
    let prompt = |item: &RawValue| match template::string(item) {
        Some(text) => Ok(tokenize(&text)),
        None => serde_json::from_str::<Vec<u32>>(item.get())
            .map(|ids| ids.into_iter().map(TokenId).collect())
            .map_err(|_| wrong()),
    };
    not_empty(items.into_iter().map(prompt).collect::<Result<_, _>>()?)
}

/// Refuses prompts of no tokens, and no prompts: nothing could be computed.
fn not_empty(prompts: Vec<Vec<TokenId>>) -> Result<Vec<Vec<TokenId>>, ApiError> {
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::bad_request(Some("prompt"), "The prompt must not be empty."));
    }
    Ok(prompts)
}

/// Turns prompts into sequences and the reply that will tell of them.
fn plan(
    server: &Server,
    api: Api,
    body: &Body<'_>,
    prompts: Vec<Vec<TokenId>>,
    request_id: &str,
) -> Result<(Script, Vec<Work>), ApiError> {
    let samples = usize::try_from(body.n.unwrap_or(1)).unwrap_or(usize::MAX);
    if prompts.len().saturating_mul(samples) > SEQUENCES_MAX {
        let message = format!("n times the number of prompts must be at most {SEQUENCES_MAX}.");
        return Err(ApiError::bad_request(Some("n"), &message));
    }
    let limits = server.config.limits;
    let root = root(server, body);
    let options = body.stream_options.unwrap_or_default();
    let return_token_ids = body.return_token_ids.unwrap_or(false);
    let mut script = Script {
        api,
        id: server.completion_id(api, request_id),
        created_unix_s: server.unix_s(),
        model: server.config.model.clone(),
        prompts: Vec::with_capacity(prompts.len()),
        choices: Vec::with_capacity(prompts.len() * samples),
        samples,
        block_tokens: limits.block_tokens,
        usage: UsageWanted {
            at_end: options.include_usage.unwrap_or(false),
            always: options.include_usage.unwrap_or(false) && options.continuous_usage_stats.unwrap_or(false),
            cached: server.config.cached_tokens,
        },
        return_token_ids,
    };
    let mut work = Vec::with_capacity(script.choices.capacity());
    for tokens in prompts {
        let answer = Answer::to(&tokens);
        let prompt = Prompt::new(root, &tokens, limits.block_tokens, answer);
        let output = output(server, api, body, prompt.tokens, answer.said())?;
        for sample in 0..samples {
            let answer = answer.sample(sample as u32);
            let mut prompt = prompt.clone();
            if let Some(tail) = &mut prompt.tail {
                tail.answer = answer;
            }
            let leg = Leg::Whole;
            work.push(Work { prompt, output_tokens: output.tokens, finish: output.finish, leg });
            script.choices.push(Choice {
                answer,
                tokens: output.tokens,
                words: output.words,
                finish: output.finish,
            });
        }
        script.prompts.push(PromptInfo { tokens: prompt.tokens, ids: return_token_ids.then_some(tokens) });
    }
    Ok((script, work))
}

/// What a request's first block is chained to.
pub(crate) fn root(server: &Server, body: &Body<'_>) -> BlockHash {
    BlockHash::root(&server.config.model, body.cache_salt.as_ref().map_or("", |salt| &salt.0))
}

pub(crate) struct Output {
    pub(crate) tokens: u32,
    pub(crate) words: u32,
    pub(crate) finish: Finish,
}

/// How much is generated behind a prompt of so many tokens that already holds `said` words of the answer.
pub(crate) fn output(
    server: &Server,
    api: Api,
    body: &Body<'_>,
    prompt_tokens: u32,
    said: u32,
) -> Result<Output, ApiError> {
    let model_max = server.config.model_tokens_max;
    if prompt_tokens >= model_max {
        // As vLLM does, which stops counting there.
        let prompt_tokens = prompt_tokens.min(model_max + 1);
        let message = format!(
            "This model's maximum context length is {model_max} tokens. However, your prompt contains at least \
             {prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce \
             the length of the input prompt."
        );
        return Err(ApiError::bad_value("input_tokens", &prompt_tokens, &message));
    }
    let asked = match api {
        Api::Chat => body.max_completion_tokens.or(body.max_output_tokens).or(body.max_tokens),
        Api::Text => body.max_tokens.or(Some(i64::from(TEXT_TOKENS))),
    };
    let room = model_max - prompt_tokens;
    let limit = match asked {
        None => room,
        Some(asked) if asked < 1 => {
            let message = format!("max_tokens must be at least 1, got {asked}.");
            return Err(ApiError::bad_value("max_tokens", &asked, &message));
        }
        Some(asked) if asked > i64::from(model_max) => {
            let message = format!(
                "max_tokens={asked} cannot be greater than max_model_len={model_max}. Please request fewer output \
                 tokens."
            );
            return Err(ApiError::bad_value("max_tokens", &asked, &message));
        }
        Some(asked) => {
            let asked = asked as u32;
            if asked > room && body.max_tokens.or(body.max_completion_tokens).is_some() {
                let message = format!(
                    "This model's maximum context length is {model_max} tokens. However, you requested {asked} \
                     output tokens and your prompt contains at least {prompt_tokens} input tokens, for a total of \
                     at least {} tokens. Please reduce the length of the input prompt or the number of requested \
                     output tokens.",
                    prompt_tokens + asked
                );
                return Err(ApiError::bad_value("input_tokens", &prompt_tokens, &message));
            }
            asked.min(room)
        }
    };
    let natural = server.config.natural_tokens.or_else(|| asked.is_none().then_some(CHAT_TOKENS));
    let natural = natural.filter(|_| !(body.ignore_eos.unwrap_or(false) && asked.is_some()));
    let min_tokens = match body.min_tokens.unwrap_or(0) {
        asked if (0..=i64::from(limit)).contains(&asked) => asked as u32,
        asked => {
            let message =
                format!("min_tokens must be at least 0 and at most max_tokens={limit}, got {asked}.");
            return Err(ApiError::bad_value("min_tokens", &asked, &message));
        }
    };
    let left = natural.map(|natural| natural.saturating_sub(said).max(min_tokens));
    Ok(match left.filter(|&left| left <= limit) {
        // An answer that is over still costs the token that says so.
        Some(words) => Output { tokens: words.max(1), words, finish: Finish::Stop },
        None => Output { tokens: limit, words: limit, finish: Finish::Length },
    })
}
