//! One replica, wired: the core, its actors, gossip and the HTTP edge.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actors::lifecycle::{LifecycleSettings, Lifecycles};
use actors::{ActorKind, ActorSettings, Actors, Clock, Cluster, Surroundings};
use anyhow::Context as _;
use gateway::{
    Executor, GatewaySettings, GatewayState, GossipGauges, Listeners, Metrics, Probe, ReloadResult, Serving,
    UpstreamSettings,
};
use gossip::{Gossip, GossipConfig};
use parking_lot::Mutex;
use routing::Router;
use routing::lifecycle::Limits;
use routing::retry::BudgetConfig;
use tokio::sync::mpsc;
use tracing::info;

use crate::config::{Config, Faults, Sources, read};
use crate::{log, peers};

/// Peer events that may wait for the gossip actor: some hundred pushes of each of a hundred replicas.
const PEER_EVENTS_MAX: usize = 16_384;
/// How often a joining replica looks whether it has caught up.
const CATCH_UP_LOOK: Duration = Duration::from_millis(10);

/// A running replica. Needs an actix system; ends when dropped, gracefully with [`Replica::drain`].
pub struct Replica {
    router: Arc<Router>,
    lifecycles: Lifecycles,
    actors: Arc<Actors>,
    gossip: Arc<Gossip>,
    serving: Serving,
    clock: Clock,
    config: Mutex<Config>,
}

impl Replica {
    /// Starts what `config` asks for.
    ///
    /// # Errors
    /// When an address can't be used, or the gossip refuses its settings.
    pub async fn start(config: Config) -> anyhow::Result<Self> {
        let clock = Clock::start();
        let public = listen("listen", config.listen)?;
        let admin = listen("admin", config.admin)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let epoch = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let router = Router::new(config.replica.clone(), epoch, config.core.clone()).map_err(Faults)?;
        let router = Arc::new(router);
        router.set_endpoints(config.endpoints.clone(), clock.now());
        let (heard, events) = mpsc::channel(PEER_EVENTS_MAX);
        let (to_actors, peer_events) = mpsc::channel(PEER_EVENTS_MAX);
        let facts = Arc::new(peers::OwnFacts::new(Arc::clone(&router), clock));
        let gossip = gossip::start(gossip_config(&config).await?, facts, heard).await?;
        let gossip = Arc::new(gossip);
        let delayed = Arc::new(AtomicU64::new(0));
        tokio::spawn(peers::translate(events, to_actors, Arc::clone(&delayed)));
        router.on_news(gossip.nudger());
        let metrics = Metrics::new()?;
        let heir = Executor::new(Arc::clone(&router), config.connect_timeout, metrics.clone());
        let surroundings = Surroundings {
            router: Arc::clone(&router),
            clock,
            probe: Arc::new(Probe::new(config.connect_timeout)),
            heir: Arc::new(heir),
            peers: peer_events,
        };
        let actors = Arc::new(Actors::start(surroundings, actor_settings(&config)));
        let lifecycles = Lifecycles::new(lifecycle_settings(&config), BudgetConfig::default());
        let state = GatewayState::new(
            Arc::clone(&router),
            lifecycles.clone(),
            clock,
            gateway_settings(&config),
            metrics,
            Arc::clone(actors.cluster()),
            actors.sessions().clone(),
            gauges(&gossip, &actors, &router, delayed),
        );
        let serving = gateway::start(Arc::new(state), Listeners { public, admin, workers: config.workers })?;
        tokio::spawn(announce(Arc::clone(actors.cluster()), Arc::clone(&router)));
        info!(
            replica = %config.replica,
            public = %serving.public_address(),
            admin = %serving.admin_address(),
            gossip = %gossip.address(),
            policy = %config.core.policy,
            endpoints = config.endpoints.len(),
            "serving"
        );
        Ok(Self { router, lifecycles, actors, gossip, serving, clock, config: Mutex::new(config) })
    }

    /// Where clients connect.
    pub const fn public_address(&self) -> SocketAddr {
        self.serving.public_address()
    }

    /// Where operators connect.
    pub const fn admin_address(&self) -> SocketAddr {
        self.serving.admin_address()
    }

    /// Where other replicas connect.
    pub fn gossip_address(&self) -> SocketAddr {
        self.gossip.address()
    }

    /// The core.
    pub const fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// The clock of everything within.
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// The lifecycles of the requests.
    pub const fn lifecycles(&self) -> &Lifecycles {
        &self.lifecycles
    }

    /// The actors of endpoints, sessions and gossip.
    pub fn actors(&self) -> &Actors {
        &self.actors
    }

    /// The gossip.
    pub fn gossip(&self) -> &Gossip {
        &self.gossip
    }

    /// Reads the configuration again and takes it, all or nothing. Index, sessions, counters and open
    /// streams stay.
    ///
    /// # Errors
    /// All faults, among them each key that only a restart can change; nothing has changed then.
    pub fn reload(&self, sources: &Sources) -> Result<(), Faults> {
        let taken = self.take(sources);
        let result = if taken.is_ok() { ReloadResult::Taken } else { ReloadResult::Refused };
        self.serving.state().metrics.reloaded(result);
        taken
    }

    fn take(&self, sources: &Sources) -> Result<(), Faults> {
        let mut newer = read(sources)?;
        let mut config = self.config.lock();
        let fixed = config.fixed_changes(&newer);
        if !fixed.is_empty() {
            return Err(Faults(fixed));
        }
        // A made-up name is made up only once.
        newer.replica = config.replica.clone();
        self.router.reconfigure(newer.core.clone()).map_err(Faults)?;
        let changes = self.router.set_endpoints(newer.endpoints.clone(), self.clock.now());
        self.lifecycles.reconfigure(lifecycle_settings(&newer));
        self.serving.state().settings.store(Arc::new(gateway_settings(&newer)));
        info!(
            policy = %newer.core.policy,
            endpoints = newer.endpoints.len(),
            added = changes.added.len(),
            removed = changes.removed.len(),
            "configuration taken"
        );
        *config = newer;
        Ok(())
    }

    /// Leaves: not ready from now on, still accepting for the settle time, goodbye to the others, then the
    /// streams may finish until the deadline.
    pub async fn drain(self) {
        let (settle, deadline) = {
            let config = self.config.lock();
            (config.drain_settle, config.drain_deadline)
        };
        info!(settle_ms = settle.as_millis(), deadline_ms = deadline.as_millis(), "draining");
        self.serving.state().readiness.draining();
        self.router.set_ready(false, true);
        self.gossip.nudge();
        self.serving.drain(settle, deadline).await;
        self.gossip.goodbye().await;
        info!("drained");
    }
}

/// Tells the others that this replica takes requests, as soon as it knows what they know.
async fn announce(cluster: Arc<Cluster>, router: Arc<Router>) {
    while !cluster.caught_up() {
        tokio::time::sleep(CATCH_UP_LOOK).await;
    }
    router.set_ready(true, false);
}

fn listen(key: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    // A replica that takes another's place at once must not wait for old connections to be forgotten;
    // std sets SO_REUSEADDR, and a long queue takes the burst of clients that a dead replica leaves.
    let listener =
        TcpListener::bind(address).with_context(|| format!("`{key}`: {address} can't be listened on"))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn gossip_config(config: &Config) -> anyhow::Result<GossipConfig> {
    let mut gossip = GossipConfig::new(config.replica.clone(), config.gossip);
    gossip.cluster_id.clone_from(&config.cluster_id);
    gossip.seeds.clone_from(&config.seeds);
    gossip.pulse_every = config.pulse_every;
    gossip.ledger_every = config.ledger_every;
    gossip.push_every = config.push_every;
    gossip.snapshot_wait = config.snapshot_wait;
    if let Some(advertise) = &config.advertise {
        let found = tokio::net::lookup_host(advertise.as_str()).await;
        let found = found.with_context(|| format!("`advertise`: {advertise} can't be looked up"))?;
        gossip.advertise = found.into_iter().next();
    }
    gossip.keys.clone_from(&config.cluster_keys);
    Ok(gossip)
}

fn actor_settings(config: &Config) -> ActorSettings {
    ActorSettings {
        scrape_every: config.scrape_every,
        probe_timeout: config.probe_timeout,
        session_actors_max: config.session_actors_max,
        session_idle: Duration::from_secs(60),
        dead_after: config.dead_after,
        handoff: config.handoff_timeout,
    }
}

fn lifecycle_settings(config: &Config) -> LifecycleSettings {
    let limits = Limits {
        connect: config.connect_timeout,
        first_byte: config.first_byte_timeout,
        prefill: config.prefill_timeout,
        handoff: config.handoff_timeout,
        quiet: config.quiet,
        idle: config.idle_timeout,
        total: config.total_timeout,
        total_whole: config.total_timeout_whole,
    };
    LifecycleSettings { limits, tries_max: config.tries_max, resume: config.resume }
}

fn gateway_settings(config: &Config) -> GatewaySettings {
    GatewaySettings {
        body_bytes_max: config.body_bytes_max as u64,
        body_room_bytes: config.body_room_bytes,
        body_timeout: config.body_timeout,
        resume_bytes_max: config.resume_bytes_max,
        explain_headers: config.explain_headers,
        admin_token: config.admin_token.clone(),
        upstream: UpstreamSettings { connect: config.connect_timeout, ..UpstreamSettings::default() },
        ..GatewaySettings::default()
    }
}

fn gauges(
    gossip: &Arc<Gossip>,
    actors: &Arc<Actors>,
    router: &Arc<Router>,
    peer_events_delayed: Arc<AtomicU64>,
) -> gateway::Gauges {
    let (gossip, actors, router) = (Arc::clone(gossip), Arc::clone(actors), Arc::clone(router));
    Arc::new(move || {
        let stats = gossip.stats();
        let kinds = [ActorKind::Endpoint, ActorKind::Session, ActorKind::Gossip];
        let age = |peer: &gossip::PeerStatus| Some((peer.replica.to_string(), peer.age?.as_secs_f64()));
        GossipGauges {
            age_seconds: stats.peers.iter().filter(|peer| !peer.goodbye).filter_map(age).collect(),
            bytes_sent: stats.bytes().0,
            rejected: stats.rejected.iter().map(|(cause, count)| (cause.as_str(), *count)).collect(),
            overloads: kinds.map(|kind| (kind.as_str(), actors.counts().overloaded(kind))).to_vec(),
            recreated: kinds.map(|kind| (kind.as_str(), actors.counts().recreated(kind))).to_vec(),
            peer_events_delayed: peer_events_delayed.load(Ordering::Relaxed),
            disagreement_ratio: router.stats().disagreement_ratio(),
            log_lines_dropped: log::lines_dropped(),
        }
    })
}
