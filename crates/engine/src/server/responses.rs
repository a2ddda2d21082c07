//! `/v1/responses`: made, fetched and cancelled by id, in a bounded store. Not streamed.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, StatusCode};
use parking_lot::Mutex;
use serde_json::value::RawValue;
use tokio::sync::oneshot;

use crate::answer::Answer;
use crate::flight::{Leg, Phase, Work};
use crate::rank::Seat;
use crate::scheduler::Prompt;
use crate::tokens::tokenize;

use super::Server;
use super::body::{Body, Message};
use super::error::{ApiError, push_json};
use super::generate::{early_failure, ended, output, root, submit, unfinished};
use super::reply::{Failure, Reply};
use super::script::Api;
use super::template;

/// Responses kept; a client that comes back later than after so many others gets 404, as after a restart.
const STORED_MAX: usize = 1_000;

/// The responses that can be asked for again.
#[derive(Default)]
pub(crate) struct Store {
    state: Mutex<Stored>,
}

#[derive(Default)]
struct Stored {
    by_id: HashMap<String, Response>,
    oldest_first: VecDeque<String>,
}

struct Response {
    frame: Frame,
    /// The conversation up to and with the answer, for a follow-up to build on.
    said: Arc<str>,
    status: Status,
}

enum Status {
    Queued { cancel: oneshot::Sender<()> },
    Completed { usage: Usage },
    Cancelled,
}

/// What of a response does not change.
#[derive(Clone)]
struct Frame {
    id: String,
    created_unix_s: u64,
    model: String,
    text: Arc<str>,
}

#[derive(Clone, Copy)]
struct Usage {
    input_tokens: u32,
    cached_tokens: u32,
    output_tokens: u32,
}

impl Store {
    pub(crate) fn clear(&self) {
        *self.state.lock() = Stored::default();
    }

    fn insert(&self, response: Response) {
        let mut state = self.state.lock();
        if state.oldest_first.len() == STORED_MAX
            && let Some(oldest) = state.oldest_first.pop_front()
        {
            state.by_id.remove(&oldest);
        }
        state.oldest_first.push_back(response.frame.id.clone());
        state.by_id.insert(response.frame.id.clone(), response);
    }

    fn complete(&self, id: &str, usage: Usage) {
        if let Some(response) = self.state.lock().by_id.get_mut(id) {
            response.status = Status::Completed { usage };
        }
    }
}

pub(crate) async fn handle(server: &Arc<Server>, parts: &Parts, bytes: &Bytes) -> Result<Reply, Failure> {
    let rest = parts.uri.path().strip_prefix("/v1/responses").unwrap_or("").trim_start_matches('/');
    let reply = match (&parts.method, rest.split_once('/')) {
        (&Method::POST, None) if rest.is_empty() => create(server, parts, bytes).await?,
        (&Method::GET, None) if !rest.is_empty() => fetch(server, rest)?,
        (&Method::POST, Some((id, "cancel"))) => cancel(server, id)?,
        (_, Some((_, last))) if last != "cancel" => {
            return Err(ApiError::detail(StatusCode::NOT_FOUND).into());
        }
        _ => {
            let allowed = if rest.is_empty() || rest.ends_with("/cancel") { "POST" } else { "GET" };
            Reply::from(ApiError::detail(StatusCode::METHOD_NOT_ALLOWED)).with_allow(allowed)
        }
    };
    Ok(reply)
}

async fn create(server: &Arc<Server>, parts: &Parts, bytes: &Bytes) -> Result<Reply, Failure> {
    let body = super::body::parse(bytes)?;
    server.check_model(&body)?;
    if body.stream.unwrap_or(false) {
        let message = "This engine does not stream responses.";
        return Err(ApiError::bad_request(Some("stream"), message).into());
    }
    let prompt_text = prompt(server, &body)?;
    let tokens = tokenize(&prompt_text);
    let answer = Answer::to(&tokens);
    let prompt = Prompt::new(root(server, &body), &tokens, server.config.limits.block_tokens, answer);
    let output = output(server, Api::Chat, &body, prompt.tokens, answer.said())?;
    let input_tokens = prompt.tokens;
    let rank = server.rank(&parts.headers)?;
    if let Some(failure) = early_failure(server, server.faults.take()) {
        return failure.await;
    }
    let work = Work { prompt, output_tokens: output.tokens, finish: output.finish, leg: Leg::Whole };
    let seat = submit(&rank, vec![work])?;
    let frame = Frame {
        id: format!("resp_{:016x}{:016x}", server.ids.next(), server.ids.next()),
        created_unix_s: server.unix_s(),
        model: server.config.model.clone(),
        text: answer.text(output.words).into(),
    };
    let said: Arc<str> = format!("{prompt_text}{}<|end|>\n", frame.text).into();
    let usage = move |seat: &Seat| Usage {
        input_tokens,
        cached_tokens: seat.flight.cached_tokens(0),
        output_tokens: output.tokens,
    };
    if body.background.unwrap_or(false) {
        let (cancel, cancelled) = oneshot::channel();
        let json = frame.render("queued", None);
        server.responses.insert(Response { frame: frame.clone(), said, status: Status::Queued { cancel } });
        let server = Arc::clone(server);
        tokio::spawn(async move {
            tokio::select! {
                phase = ended(&seat, 1) => if phase == Phase::Complete {
                    server.responses.complete(&frame.id, usage(&seat));
                },
                // Also when the store has dropped it: nobody can ask for it any more.
                _ = cancelled => {}
            }
        });
        return Ok(Reply::json(StatusCode::OK, json.into()));
    }
    let phase = ended(&seat, 1).await;
    if phase != Phase::Complete {
        return Err(unfinished(phase));
    }
    let usage = usage(&seat);
    let json = frame.render("completed", Some(usage));
    if body.store.unwrap_or(true) {
        server.responses.insert(Response { frame, said, status: Status::Completed { usage } });
    }
    Ok(Reply::json(StatusCode::OK, json.into()))
}

/// The conversation that a request continues, its input, and the opening of an answer.
fn prompt(server: &Server, body: &Body<'_>) -> Result<String, ApiError> {
    let mut text = String::new();
    if let Some(previous) = &body.previous_response_id {
        let state = server.responses.state.lock();
        let previous = state.by_id.get(&*previous.0).ok_or_else(|| unknown(&previous.0))?;
        text.push_str(&previous.said);
    } else if let Some(instructions) = &body.instructions {
        for part in ["<|system|>\n", &instructions.0, "<|end|>\n"] {
            text.push_str(part);
        }
    }
    let input: &RawValue = body.input.ok_or_else(|| body.missing("input"))?;
    match template::string(input) {
        Some(input) => {
            for part in ["<|user|>\n", &input, "<|end|>\n<|assistant|>\n"] {
                text.push_str(part);
            }
        }
        None => {
            let messages: Vec<Message<'_>> = serde_json::from_str(input.get()).map_err(|_| {
                let fault = "{'type': 'list_type', 'loc': 'body.input', 'msg': 'Input should be a string or a \
                             list of messages'}";
                ApiError::invalid(Some("body.input"), fault)
            })?;
            let rendered = template::render(body, &messages)
                .map_err(|error| ApiError::bad_request(None, &error.to_string()))?;
            text.push_str(&rendered);
        }
    }
    Ok(text)
}

fn fetch(server: &Server, id: &str) -> Result<Reply, ApiError> {
    let state = server.responses.state.lock();
    let response = state.by_id.get(id).ok_or_else(|| unknown(id))?;
    Ok(Reply::json(StatusCode::OK, response.render().into()))
}

fn cancel(server: &Server, id: &str) -> Result<Reply, ApiError> {
    let mut state = server.responses.state.lock();
    let response = state.by_id.get_mut(id).ok_or_else(|| unknown(id))?;
    if !matches!(response.status, Status::Queued { .. }) {
        let message = "Cannot cancel a synchronous response.";
        return Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_request_error",
            Some("response_id"),
            message,
        ));
    }
    if let Status::Queued { cancel } = std::mem::replace(&mut response.status, Status::Cancelled) {
        // The receiver is gone when the answer was completed in this very moment; the reply then says cancelled.
        let _ = cancel.send(());
    }
    Ok(Reply::json(StatusCode::OK, response.render().into()))
}

fn unknown(id: &str) -> ApiError {
    let message = format!("Response with id '{id}' not found.");
    ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", Some("response_id"), &message)
}

impl Response {
    fn render(&self) -> String {
        match self.status {
            Status::Queued { .. } => self.frame.render("queued", None),
            Status::Completed { usage } => self.frame.render("completed", Some(usage)),
            Status::Cancelled => self.frame.render("cancelled", None),
        }
    }
}

impl Frame {
    /// The response object; its output is told with its usage.
    fn render(&self, status: &str, usage: Option<Usage>) -> String {
        let mut out = String::with_capacity(512 + self.text.len());
        let _ = write!(
            out,
            "{{\"id\":\"{}\",\"object\":\"response\",\"created_at\":{},\"status\":\"{status}\",\"model\":",
            self.id, self.created_unix_s
        );
        push_json(&mut out, &self.model);
        out.push_str(",\"output\":[");
        if usage.is_some() {
            let _ = write!(
                out,
                "{{\"id\":\"msg_{}\",\"type\":\"message\",\"role\":\"assistant\",\"status\":\"completed\",\
                 \"content\":[{{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":null,\"text\":",
                &self.id[5..]
            );
            push_json(&mut out, &self.text);
            out.push_str("}]}");
        }
        out.push_str("],\"usage\":");
        match usage {
            Some(usage) => {
                let _ = write!(
                    out,
                    "{{\"input_tokens\":{},\"input_tokens_details\":{{\"cached_tokens\":{}}},\
                     \"output_tokens\":{},\"output_tokens_details\":{{\"reasoning_tokens\":0}},\
                     \"total_tokens\":{}}}",
                    usage.input_tokens,
                    usage.cached_tokens,
                    usage.output_tokens,
                    usage.input_tokens + usage.output_tokens
                );
            }
            None => out.push_str("null"),
        }
        out.push('}');
        out
    }
}
