//! What the tests stand on: a gateway, a raw client and an engine that does as it is told.

mod client;
mod fake;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actors::Clock;
use actors::lifecycle::{LifecycleSettings, Lifecycles};
use gateway::{GatewaySettings, GatewayState, Listeners, Metrics, Serving};
use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::retry::BudgetConfig;
use routing::settings::Settings;
use routing::{ReplicaId, Router};

pub use client::{Connection, Reply, chat, get, post, request};
pub use fake::{Fake, Step};

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A gateway that serves on a port of its own.
pub struct Rig {
    pub serving: Serving,
    pub router: Arc<Router>,
}

/// What a test wants different.
#[derive(Default)]
pub struct Wishes {
    pub gateway: GatewaySettings,
    pub lifecycle: LifecycleSettings,
}

impl Rig {
    /// A gateway in front of these endpoints, all in use.
    pub fn start(endpoints: &[String]) -> Self {
        Self::start_as(endpoints, Wishes::default())
    }

    pub fn start_as(endpoints: &[String], wishes: Wishes) -> Self {
        let clock = Clock::start();
        let router = Arc::new(Router::new(ReplicaId::new("rig"), 1, Settings::default()).unwrap());
        let specs = endpoints.iter().flat_map(|spec| EndpointSpec::parse(spec).unwrap()).collect();
        router.set_endpoints(specs, clock.now());
        for endpoint in &router.view().endpoints {
            router.report(endpoint.id, Signal::ProbeOk, clock.now());
            if endpoint.spec.models.is_empty() {
                router.set_served(endpoint.id, Served::Any);
            }
        }
        let lifecycles = Lifecycles::new(wishes.lifecycle, BudgetConfig::default());
        let metrics = Metrics::new().unwrap();
        let state =
            Arc::new(GatewayState::new(Arc::clone(&router), lifecycles, clock, wishes.gateway, metrics));
        state.readiness.snapshot_applied();
        let public = TcpListener::bind("127.0.0.1:0").unwrap();
        let serving = gateway::start(state, Listeners { public, workers: 1 }).unwrap();
        Self { serving, router }
    }

    pub fn address(&self) -> SocketAddr {
        self.serving.public_address()
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.serving.state().lifecycles.table().in_flight()
    }

    /// All charges at all endpoints.
    pub fn running(&self) -> u32 {
        let now = self.serving.state().clock.now();
        self.router.view().endpoints.iter().map(|endpoint| endpoint.running(now)).sum()
    }

    /// Waits until nothing of any request is left.
    pub async fn at_rest(&self) {
        until("every request to end", || self.in_flight() == 0 && self.running() == 0).await;
    }

    /// The phases of the requests that are shown, latest first.
    pub fn phases(&self) -> Vec<&'static str> {
        let state = self.serving.state();
        state.lifecycles.table().list(state.clock.now()).iter().map(|row| row.phase).collect()
    }
}

/// Waits for a condition.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
