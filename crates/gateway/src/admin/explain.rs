//! What would be decided for a request now, without sending it.

use actix_web::HttpRequest;
use rand::SeedableRng;
use routing::decision::{CandidateCost, SplitDecision};
use routing::request::{RequestShape, Route};
use routing::router::Rng;
use serde::Serialize;

use crate::data::Headers;
use crate::errors::EdgeError;
use crate::state::GatewayState;

#[derive(Debug, Serialize)]
pub(super) struct Explained {
    policy: &'static str,
    chosen: Option<String>,
    prefill: Option<String>,
    reason: &'static str,
    /// Whether it would have to wait for room first.
    waits: bool,
    candidates: Vec<CandidateShown>,
    reverted: Vec<&'static str>,
    /// Where endpoints have roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    split: Option<SplitShown>,
    prefill_candidates: Vec<CandidateShown>,
    shape: ShapeShown,
}

/// Whether it is split, and why.
#[derive(Debug, Serialize)]
struct SplitShown {
    split: bool,
    reason: &'static str,
    policy: &'static str,
    prefill_reason: Option<&'static str>,
    pair_ms: Option<f64>,
    whole_ms: Option<f64>,
    reverted: Vec<&'static str>,
}

impl From<&SplitDecision> for SplitShown {
    fn from(decision: &SplitDecision) -> Self {
        Self {
            split: decision.reason.splits(),
            reason: decision.reason.as_str(),
            policy: decision.policy,
            prefill_reason: decision.prefill.map(|prefill| prefill.reason.as_str()),
            pair_ms: decision.pair_ms,
            whole_ms: decision.whole_ms,
            reverted: decision.reverted.to_vec(),
        }
    }
}

#[derive(Debug, Serialize)]
struct CandidateShown {
    url: Option<String>,
    cost_ms: f64,
    wait_ms: f64,
    warm_tokens: u32,
    uncached_tokens: u32,
    running: u32,
    dropped_by: Option<&'static str>,
}

/// What was read of the request.
#[derive(Debug, Serialize)]
struct ShapeShown {
    route: &'static str,
    model: Option<String>,
    blocks: usize,
    prompt_bytes: u64,
    prompt_tokens: u32,
    output_tokens: u32,
    session: Option<String>,
    stream: bool,
}

pub(super) fn explain(
    state: &GatewayState,
    request: &HttpRequest,
    body: &[u8],
) -> Result<Explained, EdgeError> {
    let route = route_of(request.query_string())?;
    let shape = RequestShape::read(route, &Headers(request.headers()), body, &state.router.rules())?;
    let mut rng = Rng::from_rng(&mut rand::rng());
    let now = state.clock.now();
    let decision = state.router.explain(&shape, now, &mut rng)?;
    let waits = state.router.would_wait(&shape, now, &mut rng);
    let view = state.router.view();
    let label = |id| view.get(id).map(|endpoint| endpoint.spec.label());
    let shown = |candidates: &[CandidateCost]| -> Vec<CandidateShown> {
        let one = |each: &CandidateCost| CandidateShown {
            url: label(each.endpoint),
            cost_ms: each.cost_ms,
            wait_ms: each.wait_ms,
            warm_tokens: each.warm_tokens,
            uncached_tokens: each.uncached_tokens,
            running: each.running,
            dropped_by: each.dropped_by,
        };
        candidates.iter().map(one).collect()
    };
    Ok(Explained {
        policy: decision.policy,
        chosen: label(decision.chosen),
        prefill: decision.prefill().and_then(label),
        reason: decision.reason.as_str(),
        waits,
        candidates: shown(&decision.candidates),
        reverted: decision.reverted.to_vec(),
        split: decision.split.as_deref().map(SplitShown::from),
        prefill_candidates: decision.split.as_ref().map_or_else(Vec::new, |split| shown(&split.candidates)),
        shape: ShapeShown {
            route: shape.route.as_str(),
            blocks: shape.blocks.len(),
            prompt_bytes: shape.prompt_bytes,
            prompt_tokens: shape.prompt_tokens,
            output_tokens: shape.output_tokens,
            session: shape.session.map(|key| key.to_string()),
            stream: shape.stream,
            model: shape.model,
        },
    })
}

/// `?route=/v1/completions`; chats are what is asked about when nothing is said.
fn route_of(query: &str) -> Result<Route, EdgeError> {
    let named = query.split('&').find_map(|pair| pair.strip_prefix("route="));
    let Some(named) = named else { return Ok(Route::ChatCompletions) };
    let path = named.replace("%2F", "/").replace("%2f", "/");
    match Route::of(&path) {
        Route::Other => Err(EdgeError::bad_request(
            "`route` must be /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/responses.",
        )),
        route => Ok(route),
    }
}
