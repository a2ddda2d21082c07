//! The cluster as this replica sees it.

use std::collections::BTreeMap;

use routing::Moment;
use routing::endpoint::{Endpoint, Served, Standing, Usable};
use serde::Serialize;

use crate::state::{GatewayState, Missing};

/// `GET /cluster`.
#[derive(Debug, Serialize)]
pub(super) struct ClusterShown {
    replica: String,
    ready: bool,
    missing: Vec<Missing>,
    policy: &'static str,
    in_flight: usize,
    queue: QueueShown,
    replicas: Vec<ReplicaShown>,
    endpoints: Vec<EndpointShown>,
}

/// Requests that wait for room.
#[derive(Debug, Serialize)]
struct QueueShown {
    requests: usize,
    bytes: u64,
    requests_elsewhere: u32,
}

#[derive(Debug, Serialize)]
struct ReplicaShown {
    id: String,
    live: bool,
    age_ms: f64,
}

/// An endpoint in `/cluster` and `/endpoints`.
#[derive(Debug, Serialize)]
pub(super) struct EndpointShown {
    id: String,
    url: String,
    role: &'static str,
    standing: &'static str,
    cause: Option<&'static str>,
    usable: bool,
    running: u32,
    by_replica: BTreeMap<String, RunningShown>,
    models: Option<Vec<String>>,
    group: Option<String>,
    zone: Option<String>,
    connector: Option<String>,
    bootstrap: Option<String>,
    prefill_tokens: u64,
    decode_tokens: u64,
    engine: Option<EngineShown>,
    prefill_us_per_token: f32,
    itl_us: f32,
}

#[derive(Debug, Serialize)]
struct RunningShown {
    running: u32,
}

/// What the engine last said of itself.
#[derive(Debug, Serialize)]
struct EngineShown {
    age_ms: f64,
    running: u32,
    waiting: u32,
    kv_ratio: Option<f32>,
}

pub(super) fn cluster(state: &GatewayState) -> ClusterShown {
    let now = state.clock.now();
    let missing = state.missing();
    let replicas = state.cluster.replicas(now).into_iter().map(|seen| ReplicaShown {
        id: seen.replica.to_string(),
        live: seen.live,
        age_ms: seen.age_ms,
    });
    ClusterShown {
        replica: state.router.own().to_string(),
        ready: missing.is_empty(),
        missing,
        policy: state.router.settings().policy.as_str(),
        in_flight: state.lifecycles.table().in_flight(),
        queue: {
            let queue = state.router.queue_stats();
            let requests_elsewhere = state.router.queued_elsewhere();
            QueueShown { requests: queue.requests, bytes: queue.bytes, requests_elsewhere }
        },
        replicas: replicas.collect(),
        endpoints: endpoints(state),
    }
}

pub(super) fn endpoints(state: &GatewayState) -> Vec<EndpointShown> {
    let now = state.clock.now();
    let own = state.router.own().as_str();
    state.router.view().endpoints.iter().map(|endpoint| show(endpoint, own, now)).collect()
}

fn show(endpoint: &Endpoint, own: &str, now: Moment) -> EndpointShown {
    let standing = endpoint.standing();
    let load = endpoint.load(now);
    let own_running = endpoint.own_running(now);
    let mut by_replica: BTreeMap<String, RunningShown> = endpoint
        .running_by_replica()
        .into_iter()
        .map(|(replica, running)| (replica.to_string(), RunningShown { running }))
        .collect();
    if own_running > 0 {
        by_replica.insert(own.to_owned(), RunningShown { running: own_running });
    }
    EndpointShown {
        id: endpoint.id.to_string(),
        url: endpoint.spec.label(),
        role: endpoint.spec.role.as_str(),
        standing: standing.as_str(),
        cause: match standing {
            Standing::Ejected { cause, .. } => Some(cause.as_str()),
            _ => None,
        },
        usable: endpoint.usable() != Usable::No,
        running: load.running,
        by_replica,
        models: match &*endpoint.served() {
            Served::Models(models) => Some(models.clone()),
            Served::Unknown | Served::Any => None,
        },
        group: endpoint.spec.group.clone(),
        zone: endpoint.spec.zone.clone(),
        connector: endpoint.spec.connector.clone(),
        bootstrap: endpoint.spec.bootstrap.clone(),
        prefill_tokens: load.prefill_tokens,
        decode_tokens: load.decode_tokens,
        engine: endpoint.observed().map(|observed| EngineShown {
            age_ms: now.millis_since(observed.at),
            running: observed.running,
            waiting: observed.waiting,
            kv_ratio: observed.kv_ratio,
        }),
        prefill_us_per_token: load.speed.prefill_us_per_token,
        itl_us: load.speed.itl_us,
    }
}
