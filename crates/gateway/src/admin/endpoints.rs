//! Changes to the endpoint list. Each becomes a cluster fact, whichever replica it is made at.

use std::time::Duration;

use actix_web::HttpResponse;
use routing::EndpointId;
use routing::endpoint::EndpointSpec;
use routing::facts::{AdminFact, AdminOperation};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::Answered;
use crate::errors::EdgeError;
use crate::state::GatewayState;

/// How long requests at a drained endpoint may still run if nothing is said. 5 min.
const DRAIN_DEFAULT: Duration = Duration::from_secs(300);
/// The longest that may be asked for: a day.
const DRAIN_MAX: Duration = Duration::from_secs(86_400);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Addition {
    /// `URL[,key=value]...` as on the command line.
    url: String,
    role: Option<String>,
    model: Option<String>,
    group: Option<String>,
    zone: Option<String>,
    connector: Option<String>,
    bootstrap: Option<String>,
    dp: Option<u16>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DrainAsked {
    deadline_ms: Option<u64>,
}

/// How long an answer waits for another replica to have the change. 300 ms: some pushes there and back; where
/// nobody answers by then, an operator should know.
const SHARE_WAIT: Duration = Duration::from_millis(300);
/// How often it is looked whether one has.
const SHARE_LOOK: Duration = Duration::from_millis(5);

#[derive(Serialize)]
struct Changed {
    endpoints: Vec<String>,
    /// Whether another replica is known to keep the change too, so that it outlives this one.
    replicated: bool,
}

impl Changed {
    /// Waits a little for others to have these changes.
    async fn by(state: &GatewayState, facts: &[AdminFact]) -> Self {
        let is_shared = || facts.iter().all(|fact| state.router.is_shared(fact));
        let others = || state.cluster.replicas(state.clock.now()).iter().filter(|seen| seen.live).count() > 1;
        let deadline = Instant::now() + SHARE_WAIT;
        while others() && !is_shared() && Instant::now() < deadline {
            sleep(SHARE_LOOK).await;
        }
        let endpoints = facts.iter().map(|fact| fact.endpoint.to_string()).collect();
        Self { endpoints, replicated: is_shared() }
    }
}

pub(super) async fn add(state: &GatewayState, body: &[u8]) -> Answered {
    let addition: Addition = parse(body)?;
    let keys = [
        ("role", addition.role),
        ("model", addition.model),
        ("group", addition.group),
        ("zone", addition.zone),
        ("connector", addition.connector),
        ("bootstrap", addition.bootstrap),
        ("dp", addition.dp.map(|ranks| ranks.to_string())),
    ];
    let mut text = addition.url;
    for (key, value) in keys {
        if let Some(value) = value {
            if value.contains(',') {
                return Err(EdgeError::bad_request(format!("`{key}` must not contain a comma.")));
            }
            text.push_str(&format!(",{key}={value}"));
        }
    }
    let specs = EndpointSpec::parse(&text).map_err(|error| EdgeError::bad_request(error.to_string()))?;
    let mut facts = Vec::with_capacity(specs.len());
    for spec in specs {
        tracing::info!(endpoint = %spec.label(), "added by an operator");
        facts.push(change(state, spec.id(), AdminOperation::Add(spec))?);
    }
    Ok(HttpResponse::Created().json(Changed::by(state, &facts).await))
}

pub(super) async fn remove(state: &GatewayState, id: &str) -> Answered {
    let id = known(state, id)?;
    tracing::info!(endpoint = %id, "removed by an operator");
    let fact = change(state, id, AdminOperation::Remove)?;
    Ok(HttpResponse::Ok().json(Changed::by(state, &[fact]).await))
}

pub(super) async fn drain(state: &GatewayState, id: &str, body: &[u8]) -> Answered {
    let id = known(state, id)?;
    let asked = if body.trim_ascii().is_empty() { DrainAsked { deadline_ms: None } } else { parse(body)? };
    let deadline = asked.deadline_ms.map_or(DRAIN_DEFAULT, Duration::from_millis);
    if deadline > DRAIN_MAX {
        return Err(EdgeError::bad_request("`deadline_ms` must be at most 86400000."));
    }
    let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
    tracing::info!(endpoint = %id, deadline_ms, "drained by an operator");
    let fact = change(state, id, AdminOperation::Drain { deadline_ms })?;
    Ok(HttpResponse::Accepted().json(Changed::by(state, &[fact]).await))
}

fn change(state: &GatewayState, id: EndpointId, operation: AdminOperation) -> Result<AdminFact, EdgeError> {
    let changed = state.router.administer(id, operation, state.clock.now());
    changed.map(|(fact, _)| fact).map_err(|full| EdgeError::too_many_changes(&full))
}

fn known(state: &GatewayState, text: &str) -> Result<EndpointId, EdgeError> {
    let id = EndpointId::parse(text).ok_or_else(|| {
        EdgeError::bad_request("An endpoint's id is 16 hexadecimal digits; `GET /endpoints` lists them.")
    })?;
    if state.router.view().get(id).is_none() {
        return Err(EdgeError::unknown("endpoint", text));
    }
    Ok(id)
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, EdgeError> {
    serde_json::from_slice(body)
        .map_err(|error| EdgeError::bad_request(format!("The body can't be read: {error}.")))
}
