//! `/v1/embeddings`: a small vector that follows from the input's tokens, after its prefill.

use std::fmt::Write;
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::answer::Answer;
use crate::flight::{Finish, Leg, Phase, Work};
use crate::scheduler::Prompt;
use crate::tokens::TokenId;

use super::Server;
use super::error::{ApiError, push_json};
use super::generate::{early_failure, ended, root, submit, text_prompts, unfinished};
use super::reply::{Failure, Reply};

/// Numbers in a vector.
const DIMENSIONS: u32 = 16;

pub(crate) async fn handle(
    server: &Arc<Server>,
    headers: &HeaderMap,
    bytes: &Bytes,
) -> Result<Reply, Failure> {
    let body = super::body::parse(bytes)?;
    server.check_model(&body)?;
    let inputs = text_prompts(body.input.ok_or_else(|| body.missing("input"))?)?;
    let max = server.config.model_tokens_max;
    let prompt_tokens: usize = inputs.iter().map(Vec::len).sum();
    if let Some(long) = inputs.iter().map(Vec::len).find(|&tokens| tokens > max as usize) {
        let message = format!("This model's maximum context length is {max} tokens.");
        return Err(ApiError::bad_value("input_tokens", &long, &message).into());
    }
    let root = root(server, &body);
    let work = inputs.iter().map(|tokens| {
        let prompt = Prompt::new(root, tokens, server.config.limits.block_tokens, Answer::to(tokens));
        Work { prompt, output_tokens: 1, finish: Finish::Stop, leg: Leg::Whole }
    });
    let work: Vec<Work> = work.collect();
    let rank = server.rank(headers)?;
    if let Some(failure) = early_failure(server, server.faults.take()) {
        return failure.await;
    }
    let seat = submit(&rank, work)?;
    let phase = ended(&seat, inputs.len()).await;
    if phase != Phase::Complete {
        return Err(unfinished(phase));
    }
    let base64 = body.encoding_format.as_ref().is_some_and(|format| format.0 == "base64");
    let mut out = format!("{{\"id\":\"embd-{:016x}\",\"object\":\"list\",\"created\":", server.ids.next());
    let _ = write!(out, "{},\"model\":", server.unix_s());
    push_json(&mut out, &server.config.model);
    out.push_str(",\"data\":[");
    for (index, tokens) in inputs.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(out, "{comma}{{\"index\":{index},\"object\":\"embedding\",\"embedding\":");
        push_vector(&mut out, &vector(tokens), base64);
        out.push('}');
    }
    let _ = write!(
        out,
        "],\"usage\":{{\"prompt_tokens\":{prompt_tokens},\"total_tokens\":{prompt_tokens},\
         \"completion_tokens\":0,\"prompt_tokens_details\":null}}}}"
    );
    Ok(Reply::json(StatusCode::OK, out.into()))
}

/// A vector of length 1 that follows from the tokens.
fn vector(tokens: &[TokenId]) -> Vec<f32> {
    let answer = Answer::to(tokens);
    let raw: Vec<f32> =
        (0..DIMENSIONS).map(|i| (answer.token(i).0 & 0xffff) as f32 / 65_535.0 - 0.5).collect();
    let norm = raw.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    raw.into_iter().map(|x| x / norm).collect()
}

fn push_vector(out: &mut String, vector: &[f32], base64: bool) {
    if base64 {
        let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        push_json(out, &BASE64_STANDARD.encode(bytes));
        return;
    }
    for (index, x) in vector.iter().enumerate() {
        let _ = write!(out, "{}{x:?}", if index == 0 { '[' } else { ',' });
    }
    out.push(']');
}
