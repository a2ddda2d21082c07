//! The one actor that takes in what other replicas say: it merges their facts into the core, decides who is
//! alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::prelude::{Actor, AsyncContext as _, Context, Handler, Message};
use parking_lot::Mutex;
use routing::facts::{LedgerRecord, LoadPush, Pulse, QueuePush, StagedPush};
use routing::liveness::{Beat, DeathCause, Liveness, LivenessChange};
use routing::staged::Orphan;
use routing::{ReplicaId, Router};
use tracing::{info, warn};

use crate::clock::Clock;

/// How often lives are looked at.
const TICK: Duration = Duration::from_millis(100);
/// The bound of its mailbox: a burst of pushes from a hundred replicas.
const MAILBOX_MAX: usize = 1_024;

/// What was heard of another replica.
#[derive(Clone, Debug, PartialEq, Message)]
#[rtype(result = "()")]
pub enum PeerEvent {
    /// It has just shown that it lives.
    Heartbeat {
        /// Who.
        replica: ReplicaId,
    },
    /// All that it says of itself.
    Pulse {
        /// Who.
        replica: ReplicaId,
        /// What.
        pulse: Pulse,
    },
    /// Load rows of it that changed.
    Load {
        /// Who.
        replica: ReplicaId,
        /// The rows.
        push: LoadPush,
    },
    /// Who waits at it for room.
    Queue {
        /// Where.
        replica: ReplicaId,
        /// All of its queue.
        push: QueuePush,
    },
    /// What it has staged at prefill engines.
    Staged {
        /// Who.
        replica: ReplicaId,
        /// All that is staged, and some of the rows.
        push: StagedPush,
    },
    /// Facts about caches, sessions and the endpoint list.
    Ledger {
        /// The facts.
        records: Vec<LedgerRecord>,
    },
    /// Part of another replica's whole index.
    Snapshot {
        /// The facts.
        records: Vec<LedgerRecord>,
    },
    /// It is about to end.
    Goodbye {
        /// Who.
        replica: ReplicaId,
    },
    /// Nobody listens at its port any more.
    Refused {
        /// Who.
        replica: ReplicaId,
    },
    /// This replica has learned what there was to learn before it may say ready.
    CaughtUp,
}

/// Has engines let go of what a dead replica has staged there.
pub trait Heir: Send + Sync + 'static {
    /// Sees to each of them, in its own time. Called on the gossip actor's thread: it must return at once.
    fn inherit(&self, orphans: Vec<Orphan>);
}

/// What the gossip actor knows, for whoever asks.
pub struct Cluster {
    own: ReplicaId,
    lives: Mutex<Lives>,
    caught_up: AtomicBool,
}

struct Lives {
    liveness: Liveness,
    beats: u64,
    heard: std::collections::BTreeMap<ReplicaId, routing::Moment>,
}

/// One replica as this one sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaSeen {
    /// Who.
    pub replica: ReplicaId,
    /// Whether it is alive.
    pub live: bool,
    /// Time since it was last heard of, in ms; 0 for this replica itself.
    pub age_ms: f64,
}

impl Cluster {
    pub(crate) fn new(own: ReplicaId, liveness: Liveness) -> Self {
        let lives = Mutex::new(Lives { liveness, beats: 0, heard: std::collections::BTreeMap::new() });
        Self { own, lives, caught_up: AtomicBool::new(false) }
    }

    /// Whether what a joiner has to learn has been learned (or can't be had).
    pub fn caught_up(&self) -> bool {
        self.caught_up.load(Ordering::Acquire)
    }

    /// Every replica heard of, this one first.
    pub fn replicas(&self, now: routing::Moment) -> Vec<ReplicaSeen> {
        let lives = self.lives.lock();
        let own = ReplicaSeen { replica: self.own.clone(), live: true, age_ms: 0.0 };
        let others = lives.heard.iter().map(|(replica, heard)| ReplicaSeen {
            replica: replica.clone(),
            live: lives.liveness.is_live(replica),
            age_ms: now.millis_since(*heard),
        });
        std::iter::once(own).chain(others).collect()
    }
}

/// See the module.
pub(crate) struct GossipActor {
    pub(crate) router: Arc<Router>,
    pub(crate) clock: Clock,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) heir: Arc<dyn Heir>,
    /// How long a decode leg of a replica that may yet live can take to its first byte.
    pub(crate) handoff: Duration,
}

impl GossipActor {
    fn heard(&self, replica: &ReplicaId) {
        let now = self.clock.now();
        let change = {
            let mut lives = self.cluster.lives.lock();
            lives.beats += 1;
            // The transport tells only of heartbeats that have advanced, so counting them is enough.
            let beat = Beat { generation: 0, heartbeat: lives.beats };
            let change = lives.liveness.heard(replica, beat, now);
            if lives.liveness.is_live(replica) {
                lives.heard.insert(replica.clone(), now);
            }
            change
        };
        self.lived(replica, change);
    }

    fn lived(&self, replica: &ReplicaId, change: LivenessChange) {
        match change {
            LivenessChange::Unchanged => {}
            LivenessChange::Born => {
                info!(%replica, "replica is alive");
                self.router.replica_back(replica, self.clock.now());
                self.share_duties();
            }
            LivenessChange::Died(cause) => self.died(replica, cause),
        }
    }

    fn died(&self, replica: &ReplicaId, cause: DeathCause) {
        match cause {
            DeathCause::Goodbye => info!(%replica, "replica said goodbye"),
            DeathCause::Silent | DeathCause::Refused => {
                warn!(%replica, cause = cause.as_str(), "replica is dead");
            }
        }
        self.router.replica_gone(replica);
        self.router.open_estate(replica, cause, self.handoff, self.clock.now());
        self.share_duties();
    }

    /// Shares the scrapes out among those who live.
    fn share_duties(&self) {
        let live: Vec<ReplicaId> = self.cluster.lives.lock().liveness.live().cloned().collect();
        self.router.set_replicas(&live);
    }

    fn tick(&mut self, _: &mut Context<Self>) {
        let now = self.clock.now();
        let dead = {
            let mut lives = self.cluster.lives.lock();
            let dead = lives.liveness.tick(now);
            let keep = Duration::from_secs(120);
            lives.heard.retain(|_, heard| now.since(*heard) < keep);
            dead
        };
        for (replica, cause) in dead {
            self.died(&replica, cause);
        }
        let orphans = self.router.take_orphans(now);
        if !orphans.is_empty() {
            self.heir.inherit(orphans);
        }
    }
}

impl Actor for GossipActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        context.run_interval(TICK, Self::tick);
    }
}

impl Handler<PeerEvent> for GossipActor {
    type Result = ();

    fn handle(&mut self, event: PeerEvent, _: &mut Self::Context) {
        let now = self.clock.now();
        match event {
            PeerEvent::Heartbeat { replica } => self.heard(&replica),
            PeerEvent::Pulse { replica, pulse } => {
                self.router.merge_pulse(&replica, &pulse, now);
            }
            PeerEvent::Load { replica, push } => {
                self.router.merge_load(&replica, &push, now);
            }
            PeerEvent::Queue { replica, push } => {
                self.router.merge_queue(&replica, &push, now);
            }
            PeerEvent::Staged { replica, push } => {
                self.router.merge_staged(&replica, &push);
            }
            PeerEvent::Ledger { records } => {
                self.router.merge_ledger(&records, now);
            }
            PeerEvent::Snapshot { records } => {
                self.router.merge_snapshot(&records, now);
            }
            PeerEvent::Goodbye { replica } => {
                let change = self.cluster.lives.lock().liveness.goodbye(&replica, 0, now);
                self.lived(&replica, change);
            }
            PeerEvent::Refused { replica } => {
                let change = self.cluster.lives.lock().liveness.refused(&replica, now);
                self.lived(&replica, change);
            }
            PeerEvent::CaughtUp => self.cluster.caught_up.store(true, Ordering::Release),
        }
    }
}

#[cfg(feature = "panic-injection")]
impl Handler<crate::mailbox::Panic> for GossipActor {
    type Result = ();

    fn handle(&mut self, _: crate::mailbox::Panic, _: &mut Self::Context) {
        panic!("made to panic");
    }
}
