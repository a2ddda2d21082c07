//! What all workers of one replica's gateway share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actors::lifecycle::Lifecycles;
use actors::{Clock, Cluster, Sessions};
use arc_swap::ArcSwap;
use routing::Router;
use routing::endpoint::Role;
use routing::view::Lack;
use serde::Serialize;

use crate::data::BodyRoom;
use crate::metrics::{Gauges, Metrics};
use crate::upstream::UpstreamSettings;

/// What can be set of the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewaySettings {
    /// Longest request body, in bytes. 64 MiB: several large images.
    pub body_bytes_max: u64,
    /// What the bodies of all requests may take together, in bytes. 1 GiB: sixteen of the longest.
    pub body_room_bytes: u64,
    /// Longest time for the whole of a body. 5 minutes: the longest at 220 KB/s.
    pub body_timeout: Duration,
    /// Longest silence within a request's body. 30 s.
    pub body_idle: Duration,
    /// What is kept of one stream, its request and what the client has of the answer, so that it can go on elsewhere,
    /// in bytes. 2 MiB: a prompt and an answer of 250,000 tokens each.
    pub resume_bytes_max: u64,
    /// Whether replies say which replica, endpoint and reason served them.
    pub explain_headers: bool,
    /// The bearer token that the admin listener asks for; none: it asks for nothing.
    pub admin_token: Option<String>,
    /// Connections to the engines; read once, when a worker starts.
    pub upstream: UpstreamSettings,
}

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            body_bytes_max: 64 << 20,
            body_room_bytes: 1 << 30,
            body_timeout: Duration::from_secs(300),
            body_idle: Duration::from_secs(30),
            resume_bytes_max: 2 << 20,
            explain_headers: false,
            admin_token: None,
            upstream: UpstreamSettings::default(),
        }
    }
}

/// Whether the replica should be sent requests. Apart from liveness: a process that is not ready is well.
#[derive(Debug, Default)]
pub struct Readiness {
    draining: AtomicBool,
}

impl Readiness {
    /// The replica is on its way out.
    pub fn draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether it is on its way out.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

/// Why a replica is not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Missing {
    /// It has not yet learned what the others know.
    Snapshot,
    /// No endpoint can be used.
    Endpoint,
    /// No endpoint prefills, and those that are there decode only what others have prefilled.
    PrefillEndpoint,
    /// No endpoint decodes.
    DecodeEndpoint,
    /// It drains.
    Draining,
}

/// What all workers share.
pub struct GatewayState {
    /// The core.
    pub router: Arc<Router>,
    /// The lifecycles of all requests.
    pub lifecycles: Lifecycles,
    /// The process's clock.
    pub clock: Clock,
    /// What can be set; replaced whole on reload.
    pub settings: ArcSwap<GatewaySettings>,
    /// Memory taken by the bodies of requests.
    pub(crate) body_room: Arc<BodyRoom>,
    /// Whether the replica should be sent requests.
    pub readiness: Readiness,
    /// What is counted.
    pub metrics: Metrics,
    /// The other replicas.
    pub cluster: Arc<Cluster>,
    /// The sessions' actors.
    pub sessions: Sessions,
    /// Figures that only the gossip and the actors know.
    pub gauges: Gauges,
}

impl std::fmt::Debug for GatewayState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GatewayState").field("router", &self.router).finish_non_exhaustive()
    }
}

impl GatewayState {
    /// A gateway in front of `router`.
    #[expect(clippy::too_many_arguments, reason = "each is a part of the replica, handed over once")]
    pub fn new(
        router: Arc<Router>,
        lifecycles: Lifecycles,
        clock: Clock,
        settings: GatewaySettings,
        metrics: Metrics,
        cluster: Arc<Cluster>,
        sessions: Sessions,
        gauges: Gauges,
    ) -> Self {
        Self {
            router,
            lifecycles,
            clock,
            settings: ArcSwap::from_pointee(settings),
            body_room: Arc::default(),
            readiness: Readiness::default(),
            metrics,
            cluster,
            sessions,
            gauges,
        }
    }

    /// What is missing for the replica to be sent requests; empty means ready.
    pub fn missing(&self) -> Vec<Missing> {
        let mut missing = Vec::new();
        if !self.cluster.caught_up() {
            missing.push(Missing::Snapshot);
        }
        missing.extend(self.router.lacks().map(|lack| match lack {
            Lack::Role(Role::Prefill) => Missing::PrefillEndpoint,
            Lack::Role(Role::Decode) => Missing::DecodeEndpoint,
            Lack::Role(Role::Both) | Lack::Endpoint => Missing::Endpoint,
        }));
        if self.readiness.is_draining() {
            missing.push(Missing::Draining);
        }
        missing
    }
}
