//! What the tests stand on: a gateway, and an engine that does as it is told.

mod fake;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actors::lifecycle::{LifecycleSettings, Lifecycles};
use actors::{
    ActorSettings, Actors, Clock, EngineProbe, Heir, PeerEvent, ProbeError, ProbeReply, Surroundings,
};
use gateway::{GatewaySettings, GatewayState, GossipGauges, Listeners, Metrics, Serving};
use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::retry::BudgetConfig;
use routing::settings::Settings;
use routing::staged::Orphan;
use routing::{ReplicaId, Router};
use tokio::sync::{mpsc, oneshot};

pub(crate) use fake::{Fake, Step};
pub(crate) use test_rig::{Connection, Reply, eventually, get, post, request, until};

/// A chat's body.
pub(crate) fn chat(stream: bool) -> String {
    format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":"Hello, who are you?"}}],"max_tokens":8,"stream":{stream}}}"#
    )
}

/// A gateway that serves on a port of its own.
pub(crate) struct Rig {
    pub(crate) serving: Serving,
    pub(crate) router: Arc<Router>,
    _actors: Actors,
    pub(crate) gossip: mpsc::Sender<PeerEvent>,
    _stop: oneshot::Sender<()>,
}

/// The actors, on an actix system of their own that ends with the rig. Their probes find nobody, which the
/// breaker never hears of: it is the gateway that is tested here.
fn start_actors(
    router: Arc<Router>,
    clock: Clock,
    peers: mpsc::Receiver<PeerEvent>,
) -> (Actors, oneshot::Sender<()>) {
    let (started, actors) = std::sync::mpsc::channel();
    let (stop, stopped) = oneshot::channel();
    std::thread::spawn(move || {
        actix_web::rt::System::new().block_on(async move {
            let surroundings =
                Surroundings { router, clock, probe: Arc::new(NoProbe), heir: Arc::new(NoHeir), peers };
            started.send(Actors::start(surroundings, ActorSettings::default())).unwrap();
            let _ = stopped.await;
        });
    });
    (actors.recv().unwrap(), stop)
}

struct NoHeir;

impl Heir for NoHeir {
    fn inherit(&self, _: Vec<Orphan>) {}
}

struct NoProbe;

#[async_trait::async_trait]
impl EngineProbe for NoProbe {
    async fn get(&self, _: &EndpointSpec, _: &str, _: Duration) -> Result<ProbeReply, ProbeError> {
        std::future::pending().await
    }
}

/// What a test wants different.
#[derive(Default)]
pub(crate) struct Wishes {
    pub(crate) gateway: GatewaySettings,
    pub(crate) lifecycle: LifecycleSettings,
}

impl Rig {
    /// A gateway in front of these endpoints, all in use.
    pub(crate) fn start(endpoints: &[String]) -> Self {
        Self::start_as(endpoints, Wishes::default())
    }

    pub(crate) fn start_as(endpoints: &[String], wishes: Wishes) -> Self {
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
        let (gossip, peers) = mpsc::channel(16);
        gossip.try_send(PeerEvent::CaughtUp).unwrap();
        let (actors, stop) = start_actors(Arc::clone(&router), clock, peers);
        let state = GatewayState::new(
            Arc::clone(&router),
            lifecycles,
            clock,
            wishes.gateway,
            metrics,
            Arc::clone(actors.cluster()),
            actors.sessions().clone(),
            Arc::new(|| GossipGauges { bytes_sent: 7, peer_events_delayed: 3, ..GossipGauges::default() }),
        );
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let listeners = Listeners { public: listen(), admin: listen(), workers: 1 };
        let serving = gateway::start(Arc::new(state), listeners).unwrap();
        Self { serving, router, _actors: actors, gossip, _stop: stop }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.serving.public_address()
    }

    pub(crate) fn admin(&self) -> SocketAddr {
        self.serving.admin_address()
    }

    /// Requests that have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.serving.state().lifecycles.table().in_flight()
    }

    /// All charges at all endpoints.
    pub(crate) fn running(&self) -> u32 {
        let now = self.serving.state().clock.now();
        self.router.view().endpoints.iter().map(|endpoint| endpoint.running(now)).sum()
    }

    /// Waits until nothing of any request is left.
    pub(crate) async fn at_rest(&self) {
        until("every request to end", || self.in_flight() == 0 && self.running() == 0).await;
    }

    /// The phases of the requests that are shown, latest first.
    pub(crate) fn phases(&self) -> Vec<&'static str> {
        let state = self.serving.state();
        state.lifecycles.table().list(state.clock.now()).iter().map(|row| row.phase).collect()
    }
}
