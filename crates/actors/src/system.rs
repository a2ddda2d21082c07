//! Starts the actors on a thread of their own and watches over them: one that panicked is made anew.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::{Actor, Addr, Arbiter, ArbiterHandle};
use parking_lot::Mutex;
use routing::liveness::{Liveness, LivenessConfig};
use routing::{EndpointId, Router};
use tokio::sync::mpsc;
use tracing::error;

use crate::clock::Clock;
use crate::endpoint::{self, EndpointActor};
use crate::gossip::{Cluster, GossipActor, Heir, PeerEvent};
use crate::mailbox::{ActorCounts, ActorKind};
use crate::probe::EngineProbe;
use crate::session::Sessions;
use crate::settings::ActorSettings;

/// How often the actors are looked at: one that panicked is back well within a second.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// What the actors need from outside.
pub struct Surroundings {
    /// The core.
    pub router: Arc<Router>,
    /// The clock that the edge uses too.
    pub clock: Clock,
    /// How engines are looked at.
    pub probe: Arc<dyn EngineProbe>,
    /// Who sees to what dead replicas leave at engines.
    pub heir: Arc<dyn Heir>,
    /// What other replicas say.
    pub peers: mpsc::Receiver<PeerEvent>,
}

/// The running actors. Dropping it ends them.
pub struct Actors {
    watched: Arc<Watched>,
    sessions: Sessions,
    arbiter: Arbiter,
}

struct Watched {
    shared: Arc<endpoint::Shared>,
    cluster: Arc<Cluster>,
    heir: Arc<dyn Heir>,
    counts: Arc<ActorCounts>,
    endpoints: Mutex<HashMap<EndpointId, Addr<EndpointActor>>>,
    gossip: Mutex<Addr<GossipActor>>,
    /// Where the gossip actor lives.
    transport: ArbiterHandle,
}

impl Actors {
    /// Starts an actor for each endpoint of the router's view and one for gossip; those for endpoints that
    /// come later start by themselves. Needs a running actix system.
    pub fn start(surroundings: Surroundings, settings: ActorSettings) -> Self {
        let Surroundings { router, clock, probe, heir, peers } = surroundings;
        let arbiter = Arbiter::new();
        let counts = Arc::new(ActorCounts::default());
        let liveness = LivenessConfig { silence_max: settings.dead_after, ..LivenessConfig::default() };
        let cluster = Arc::new(Cluster::new(router.own().clone(), Liveness::new(liveness, clock.now())));
        let sessions =
            Sessions::new(Arc::clone(&router), clock, settings.clone(), Arc::clone(&counts), &arbiter);
        let shared = Arc::new(endpoint::Shared { router, clock, probe, settings });
        // Where the transport runs: what peers say is merged without waking another thread for it.
        let transport = Arbiter::current();
        let gossip = Mutex::new(start_gossip(&shared, &cluster, &heir, &transport));
        let watched = Arc::new(Watched {
            shared,
            cluster,
            heir,
            counts,
            endpoints: Mutex::default(),
            gossip,
            transport: transport.clone(),
        });
        transport.spawn(hand_on(Arc::clone(&watched), peers));
        arbiter.spawn(watch(Arc::clone(&watched), sessions.clone()));
        Self { watched, sessions, arbiter }
    }

    /// The sessions' actors.
    pub const fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// What is known of the other replicas.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.watched.cluster
    }

    /// Overloads and recreations so far.
    pub fn counts(&self) -> &Arc<ActorCounts> {
        &self.watched.counts
    }

    /// Makes the actor of an endpoint panic.
    #[cfg(feature = "panic-injection")]
    pub fn inject_endpoint_panic(&self, endpoint: EndpointId) -> bool {
        let actor = self.watched.endpoints.lock().get(&endpoint).cloned();
        actor.is_some_and(|actor| actor.try_send(crate::mailbox::Panic).is_ok())
    }

    /// Makes the gossip actor panic.
    #[cfg(feature = "panic-injection")]
    pub fn inject_gossip_panic(&self) -> bool {
        self.watched.gossip.lock().try_send(crate::mailbox::Panic).is_ok()
    }
}

impl Drop for Actors {
    fn drop(&mut self) {
        self.arbiter.stop();
    }
}

fn start_gossip(
    shared: &endpoint::Shared,
    cluster: &Arc<Cluster>,
    heir: &Arc<dyn Heir>,
    arbiter: &ArbiterHandle,
) -> Addr<GossipActor> {
    let (router, clock, cluster) = (Arc::clone(&shared.router), shared.clock, Arc::clone(cluster));
    let (heir, handoff) = (Arc::clone(heir), shared.settings.handoff);
    GossipActor::start_in_arbiter(arbiter, move |_| GossipActor { router, clock, cluster, heir, handoff })
}

/// Hands what peers say to the gossip actor; waits while its mailbox is full, so that the bound behind it
/// (the transport's channel) fills and counts instead of this one losing an order of facts.
async fn hand_on(watched: Arc<Watched>, mut peers: mpsc::Receiver<PeerEvent>) {
    while let Some(event) = peers.recv().await {
        let mut event = Some(event);
        while let Some(held) = event.take() {
            let gossip = watched.gossip.lock().clone();
            match gossip.try_send(held) {
                Ok(()) => {}
                Err(actix::prelude::SendError::Full(held)) => {
                    watched.counts.count_overload(ActorKind::Gossip);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    event = Some(held);
                }
                Err(actix::prelude::SendError::Closed(held)) => {
                    tokio::time::sleep(WATCH_EVERY / 4).await;
                    event = Some(held);
                }
            }
        }
    }
}

/// Keeps an actor for each endpoint and one for gossip.
async fn watch(watched: Arc<Watched>, sessions: Sessions) {
    let mut pace = tokio::time::interval(WATCH_EVERY);
    loop {
        pace.tick().await;
        watched.keep_endpoints();
        watched.keep_gossip();
        sessions.revive();
    }
}

impl Watched {
    fn keep_endpoints(&self) {
        let view = self.shared.router.view();
        let mut actors = self.endpoints.lock();
        actors.retain(|id, _| view.get(*id).is_some());
        for endpoint in &view.endpoints {
            let known = actors.get(&endpoint.id);
            if known.is_some_and(Addr::connected) {
                continue;
            }
            if known.is_some() {
                error!(endpoint = %endpoint.spec.label(), "the endpoint's actor is gone; another takes its place");
                self.counts.count_recreated(ActorKind::Endpoint);
            }
            // The watch runs on the arbiter of the actors, so they start where it runs.
            let actor = EndpointActor::new(endpoint.spec.clone(), Arc::clone(&self.shared)).start();
            actors.insert(endpoint.id, actor);
        }
    }

    fn keep_gossip(&self) {
        let mut gossip = self.gossip.lock();
        if gossip.connected() {
            return;
        }
        error!("the gossip actor is gone; another takes its place");
        self.counts.count_recreated(ActorKind::Gossip);
        *gossip = start_gossip(&self.shared, &self.cluster, &self.heir, &self.transport);
    }
}
