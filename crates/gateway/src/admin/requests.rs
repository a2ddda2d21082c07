//! Requests and sessions of this replica.

use actors::lifecycle::RequestRow;
use routing::SessionKey;
use routing::request::response_key;
use routing::session::SessionState;
use serde::Serialize;

use crate::errors::EdgeError;
use crate::state::GatewayState;

#[derive(Debug, Serialize)]
pub(super) struct SessionShown {
    state: &'static str,
    endpoint: Option<String>,
    pair: Option<String>,
    warm_tokens: u32,
    qoe: Option<f32>,
}

pub(super) fn list(state: &GatewayState) -> Vec<RequestRow> {
    state.lifecycles.table().list(state.clock.now())
}

pub(super) fn one(state: &GatewayState, id: &str) -> Result<RequestRow, EdgeError> {
    let found = state.lifecycles.table().find(id, state.clock.now());
    found.ok_or_else(|| EdgeError::unknown("request", id))
}

/// A session by the value that its clients send, in whichever place sessions are read from, or by a
/// response's id.
pub(super) fn session(state: &GatewayState, key: &str) -> Result<SessionShown, EdgeError> {
    let key_decoded = decode(key);
    let rules = state.router.rules();
    let places = rules.session_headers.iter().map(String::as_str).chain(["prompt_cache_key", "user"]);
    let found = places
        .map(|place| SessionKey::of(place, &key_decoded))
        .chain([response_key(&key_decoded)])
        .map(|key| state.router.session(key))
        .find(|session| !matches!(session, SessionState::New))
        .ok_or_else(|| EdgeError::unknown("session", key))?;
    let home = found.home();
    let view = state.router.view();
    let url = home.and_then(|home| view.get(home.endpoint)).map(|endpoint| endpoint.spec.label());
    Ok(SessionShown {
        state: found.as_str(),
        endpoint: url,
        pair: None,
        warm_tokens: home.map_or(0, |home| home.warm_tokens),
        qoe: home.and_then(|home| home.qoe),
    })
}

/// Undoes percent-encoding; what is none stays as it is.
fn decode(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.filter(|_| bytes[at] == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_percent_decoded_and_odd_ones_survive() {
        for (text, want) in
            [("a%20b", "a b"), ("50%", "50%"), ("%zz", "%zz"), ("a/b", "a/b"), ("%C3%A9", "é")]
        {
            assert_eq!(decode(text), want.as_bytes(), "{text}");
        }
    }
}
