//! Requests and sessions of this replica.

use actors::lifecycle::RequestRow;
use routing::SessionKey;
use routing::request::response_key;
use routing::session::SessionState;
use serde::Serialize;

use crate::errors::EdgeError;
use crate::percent;
use crate::state::GatewayState;

/// Where the prompt of a session was computed last for its home to decode.
#[derive(Debug, Serialize)]
pub(super) struct PairShown {
    prefill: String,
    decode: String,
}

#[derive(Debug, Serialize)]
pub(super) struct SessionShown {
    state: &'static str,
    endpoint: Option<String>,
    pair: Option<PairShown>,
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
    let key_decoded = percent::decode(key);
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
    let label = |id| view.get(id).map(|endpoint| endpoint.spec.label());
    let url = home.and_then(|home| label(home.endpoint));
    let pair = home
        .and_then(|home| Some(PairShown { prefill: label(home.prefill?)?, decode: label(home.endpoint)? }));
    Ok(SessionShown {
        state: found.as_str(),
        endpoint: url,
        pair,
        warm_tokens: home.map_or(0, |home| home.warm_tokens),
        qoe: home.and_then(|home| home.qoe),
    })
}
