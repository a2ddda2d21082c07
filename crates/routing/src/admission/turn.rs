//! Sharing room between replicas that each have a queue, in proportion to what waits.
//!
//! All replicas know how long each other's queue is, and how many requests run at an endpoint: a hash of the two
//! says whose turn it is, so that of several that see the same room one takes it. A request has its turn
//! among those of its own class, once none of a higher one waits elsewhere. Who sees room for a while though
//! it is another's turn takes it all the same: the other may know better, or not be there any more.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::request::Priority;
use crate::{EndpointId, Moment, ReplicaId};

/// How long the replica whose turn it is may take. 30 ms: some pushes and a wake-up on a busy machine.
const PATIENCE: Duration = Duration::from_millis(30);

/// A replica with requests that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rival {
    seed: u64,
    /// By class, the high one first.
    waiting: [u32; 3],
}

impl Rival {
    /// The replica with so many, by class, the high one first.
    pub fn new(replica: &ReplicaId, waiting: [u32; 3]) -> Self {
        Self { seed: xxh3_64_with_seed(replica.as_str().as_bytes(), 0), waiting }
    }

    /// How highly it ranks for what has this key: weighted rendezvous hashing, by which each wins in proportion to
    /// its weight (Schindelhauer and Schomaker, 2005).
    fn rank(self, class: Priority, key: u64) -> f64 {
        let hash = xxh3_64_with_seed(&key.to_le_bytes(), self.seed);
        let lot = ((hash >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        -f64::from(self.waiting[usize::from(class.number()) - 1]) / lot.ln()
    }

    /// Whether requests of higher classes wait there.
    fn has_above(self, class: Priority) -> bool {
        self.waiting[..usize::from(class.number()) - 1].iter().any(|waiting| *waiting > 0)
    }
}

/// Who waits where.
#[derive(Clone, Debug)]
pub struct Turn {
    own: Rival,
    rivals: Vec<Rival>,
    class: Priority,
}

impl Turn {
    /// This replica's turns beside those of the others that have queues, for a request of this class, which waits here.
    pub const fn new(own: Rival, rivals: Vec<Rival>, class: Priority) -> Self {
        Self { own, rivals, class }
    }

    /// The same for a request of another class.
    pub fn set_class(&mut self, class: Priority) {
        self.class = class;
    }

    /// Whether room at the endpoint, where so many run, is for this replica.
    pub fn is_ours(&self, endpoint: EndpointId, running: u32) -> bool {
        let key = endpoint.raw() ^ (u64::from(running) << 48);
        let own = self.own.rank(self.class, key);
        let goes_before = |rival: &Rival| rival.has_above(self.class) || rival.rank(self.class, key) > own;
        !self.rivals.iter().any(goes_before)
    }
}

/// Since when room was left to others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Yielding(Option<Moment>);

impl Yielding {
    /// Room was left to another now; whether that has gone on for too long.
    pub(crate) fn yielded(&mut self, now: Moment) -> bool {
        now.since(*self.0.get_or_insert(now)) > PATIENCE
    }

    /// Something was taken, or nothing is there to take.
    pub(crate) fn over(&mut self) {
        self.0 = None;
    }
}
