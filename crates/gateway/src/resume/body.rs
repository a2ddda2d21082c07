//! The request for the rest of an answer: the client's own bytes, with what was said in its place.

use std::borrow::Cow;

use bytes::Bytes;
use routing::lifecycle::NoResume;
use routing::request::Route;

use super::Said;
use crate::edit::{Change, edited_by};

/// The body that asks for what follows `said` of the answer to `body`. A chat gets the text as an assistant's message
/// that is to be continued, a text completion behind its prompt; limits on tokens are lowered by those that have come.
/// Where nothing was said it is the same body.
///
/// # Errors
/// If all tokens have come, or the body's fields are not of the kinds they must be.
pub(crate) fn continued(route: Route, body: &Bytes, said: &Said) -> Result<Bytes, NoResume> {
    lowered_by(route, body, said.text(), (u64::from(said.tokens()), u64::from(said.pieces())))
}

/// The same with its limits as they were: what tokens are to be counted of.
///
/// # Errors
/// As [`continued`].
pub(crate) fn continued_prompt(route: Route, body: &Bytes, said: &Said) -> Result<Bytes, NoResume> {
    lowered_by(route, body, said.text(), (0, 0))
}

/// As [`continued`], where `tokens` have come, of which so many are certain.
fn lowered_by(
    route: Route,
    body: &Bytes,
    text: &str,
    (tokens, certain): (u64, u64),
) -> Result<Bytes, NoResume> {
    if text.is_empty() {
        return Ok(body.clone());
    }
    // A string always serialises.
    let text = serde_json::to_string(text).map_err(|_| NoResume::Unreadable)?;
    let mut fault = None;
    let mut placed = false;
    let change = |key: &[u8], value: &[u8]| match (route, key) {
        (_, b"max_tokens" | b"max_completion_tokens") => match lowered(value, tokens) {
            Lowered::To(0) if matches!(lowered(value, certain), Lowered::To(0)) => {
                fault = Some(NoResume::Finished);
                Change::Keep
            }
            // Counted by another engine all have come, but then the end would have been said.
            Lowered::To(0) => Change::set("1"),
            Lowered::To(left) => Change::Set(left.to_string().into_bytes().into()),
            Lowered::Absent => Change::Keep,
            Lowered::Unknown => {
                fault = Some(NoResume::Unreadable);
                Change::Keep
            }
        },
        (_, b"min_tokens") => match lowered(value, tokens) {
            Lowered::To(left) => Change::Set(left.to_string().into_bytes().into()),
            Lowered::Absent | Lowered::Unknown => Change::Keep,
        },
        (Route::ChatCompletions, b"continue_final_message" | b"add_generation_prompt") => Change::Drop,
        (Route::ChatCompletions, b"messages") if value.starts_with(b"[") => {
            let first = value[1..].trim_ascii().len() == 1;
            let comma = if first { "" } else { "," };
            let message = format!("{comma}{{\"role\":\"assistant\",\"content\":{text}}}");
            placed = true;
            Change::Set(before_last(value, b']', &message))
        }
        // A list of one is that one; longer lists are not resumed.
        (Route::Completions, b"prompt") if value.starts_with(b"\"") || value.starts_with(b"[") => {
            placed = true;
            Change::Set(before_last(value, b'"', &text[1..text.len() - 1]))
        }
        _ => Change::Keep,
    };
    let continues: &[(&str, &[u8])] =
        &[("continue_final_message", b"true"), ("add_generation_prompt", b"false")];
    let added = if route == Route::ChatCompletions { continues } else { &[] };
    let edited = edited_by(body, change, added);
    match (fault, edited) {
        (Some(fault), _) => Err(fault),
        (None, Some(edited)) if placed => Ok(edited),
        (None, _) => Err(NoResume::Unreadable),
    }
}

/// A limit, less what has come.
enum Lowered {
    To(u64),
    Absent,
    Unknown,
}

fn lowered(value: &[u8], by: u64) -> Lowered {
    match serde_json::from_slice::<Option<f64>>(value) {
        Ok(None) => Lowered::Absent,
        // A whole number, however it is written; `as` saturates.
        Ok(Some(limit)) if limit >= 0.0 && limit.fract() == 0.0 => {
            Lowered::To((limit as u64).saturating_sub(by))
        }
        Ok(Some(_)) | Err(_) => Lowered::Unknown,
    }
}

/// The value with `what` put before the last `byte` in it.
fn before_last(value: &[u8], byte: u8, what: &str) -> Cow<'static, [u8]> {
    let at = memchr::memrchr(byte, value).unwrap_or(value.len());
    [&value[..at], what.as_bytes(), &value[at..]].concat().into()
}
