//! The router as its edges see it.

mod charges;
mod choosing;
mod endpoints;
mod facts;
mod fleet;
mod policies;
mod split;

use rand::SeedableRng as _;

use super::{Rng, Router};
use crate::endpoint::{EndpointSpec, Served, Signal};
use crate::facts::ObservedRow;
use crate::request::{RequestShape, Route};
use crate::settings::Settings;
use crate::{Chosen, EndpointId, Moment, ReplicaId};

pub(super) fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

pub(super) fn rng() -> Rng {
    Rng::seed_from_u64(7)
}

pub(super) fn spec(number: usize) -> EndpointSpec {
    EndpointSpec::at(&format!("http://10.0.0.{number}:8000")).unwrap()
}

pub(super) fn id(number: usize) -> EndpointId {
    spec(number).id()
}

/// A replica with `count` ready endpoints that serve the model `m`.
pub(super) fn router_named(name: &str, count: usize, settings: Settings) -> Router {
    let router = Router::new(ReplicaId::new(name), 1, settings).unwrap();
    router.set_endpoints((0..count).map(spec).collect(), at(0));
    for number in 0..count {
        router.set_served(id(number), Served::Models(vec!["m".to_owned()]));
        router.report(id(number), Signal::ProbeOk, at(0));
    }
    router
}

pub(super) fn router(count: usize, settings: Settings) -> Router {
    router_named("a", count, settings)
}

/// The shape of a streamed raw prompt, as the router wants it read.
pub(super) fn shape(router: &Router, prompt: &str) -> RequestShape {
    shape_of(router, &serde_json::json!({"model": "m", "prompt": prompt, "stream": true, "max_tokens": 16}))
}

pub(super) fn shape_of(router: &Router, body: &serde_json::Value) -> RequestShape {
    shape_with(router, body, &[])
}

pub(super) fn shape_with(
    router: &Router,
    body: &serde_json::Value,
    headers: &[(&str, &str)],
) -> RequestShape {
    let route = if body.get("messages").is_some() {
        Route::ChatCompletions
    } else if body.get("input").is_some() || body.get("previous_response_id").is_some() {
        Route::Responses
    } else {
        Route::Completions
    };
    let headers = headers.to_vec();
    let view = Headers(&headers);
    RequestShape::read(route, &view, body.to_string().as_bytes(), &router.rules()).unwrap()
}

struct Headers<'a>(&'a [(&'a str, &'a str)]);

impl crate::request::HeaderView for Headers<'_> {
    fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_bytes())
    }
}

/// Text of about `bytes` bytes that begins unlike that of any other name.
pub(super) fn text(name: &str, bytes: usize) -> String {
    let mut text = String::new();
    let mut line = 0;
    while text.len() < bytes {
        text.push_str(&format!("{name} {line}; "));
        line += 1;
    }
    text.truncate(bytes);
    text
}

pub(super) fn choose(router: &Router, shape: &RequestShape, now: Moment) -> Chosen {
    router.choose(shape, &[], now, &mut rng()).unwrap()
}

/// A look at an engine with this many requests waiting.
pub(super) fn look(number: usize, waiting: u32, engine_epoch: u64) -> ObservedRow {
    ObservedRow { endpoint: id(number), age_ms: 0, running: 0, waiting, kv_ratio: None, engine_epoch }
}

/// Warm tokens that `explain` gives for an endpoint.
pub(super) fn warm_tokens(router: &Router, shape: &RequestShape, number: usize, now: Moment) -> u32 {
    let decision = router.explain(shape, now, &mut rng()).unwrap();
    decision.candidates.iter().find(|each| each.endpoint == id(number)).unwrap().warm_tokens
}
