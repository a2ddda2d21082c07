//! What all workers of one replica's gateway share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actors::Clock;
use actors::lifecycle::Lifecycles;
use arc_swap::ArcSwap;
use routing::Router;
use serde::Serialize;

use crate::metrics::Metrics;
use crate::upstream::UpstreamSettings;

/// What can be set of the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewaySettings {
    /// Longest request body, in bytes. 64 MiB: several large images.
    pub body_bytes_max: u64,
    /// Longest silence within a request's body. 30 s.
    pub body_idle: Duration,
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
            body_idle: Duration::from_secs(30),
            explain_headers: false,
            admin_token: None,
            upstream: UpstreamSettings::default(),
        }
    }
}

/// Whether the replica should be sent requests. Apart from liveness: a process that is not ready is well.
#[derive(Debug, Default)]
pub struct Readiness {
    snapshot_applied: AtomicBool,
    draining: AtomicBool,
}

impl Readiness {
    /// The replica has learned from another (or found itself alone, or waited long enough).
    pub fn snapshot_applied(&self) {
        self.snapshot_applied.store(true, Ordering::Release);
    }

    /// The replica is on its way out.
    pub fn draining(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether it is on its way out.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// What is missing; empty means ready.
    pub fn missing(&self, router: &Router) -> Vec<Missing> {
        let mut missing = Vec::new();
        if !self.snapshot_applied.load(Ordering::Acquire) {
            missing.push(Missing::Snapshot);
        }
        if !router.has_usable_endpoint() {
            missing.push(Missing::Endpoint);
        }
        if self.is_draining() {
            missing.push(Missing::Draining);
        }
        missing
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
    /// It drains.
    Draining,
}

/// What all workers share.
#[derive(Debug)]
pub struct GatewayState {
    /// The core.
    pub router: Arc<Router>,
    /// The lifecycles of all requests.
    pub lifecycles: Lifecycles,
    /// The process's clock.
    pub clock: Clock,
    /// What can be set; replaced whole on reload.
    pub settings: ArcSwap<GatewaySettings>,
    /// Whether the replica should be sent requests.
    pub readiness: Readiness,
    /// What is counted.
    pub metrics: Metrics,
}

impl GatewayState {
    /// A gateway in front of `router`.
    pub fn new(
        router: Arc<Router>,
        lifecycles: Lifecycles,
        clock: Clock,
        settings: GatewaySettings,
        metrics: Metrics,
    ) -> Self {
        Self {
            router,
            lifecycles,
            clock,
            settings: ArcSwap::from_pointee(settings),
            readiness: Readiness::default(),
            metrics,
        }
    }
}
