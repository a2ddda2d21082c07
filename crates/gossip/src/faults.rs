//! Makes the network bad on purpose, for tests and chaos runs. A replica has none unless its configuration
//! brings one.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::FrameKind;

/// What befalls the datagrams that a replica sends and the pulls that it makes. Can be changed at any time.
#[derive(Debug)]
pub struct Faults {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rng: SmallRng,
    drop_ratio: HashMap<FrameKind, f64>,
    delay: Duration,
    cut: HashSet<SocketAddr>,
}

/// What is to be done with one datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Send,
    Delay(Duration),
    Drop,
}

impl Faults {
    /// No faults yet; what is dropped later is drawn from `seed`.
    pub fn new(seed: u64) -> Self {
        let rng = SmallRng::seed_from_u64(seed);
        let state = State { rng, drop_ratio: HashMap::new(), delay: Duration::ZERO, cut: HashSet::new() };
        Self { state: Mutex::new(state) }
    }

    /// Loses this share (0 to 1) of all datagrams of a kind. For pulls 1 refuses all and less none.
    pub fn drop_ratio(&self, kind: FrameKind, ratio: f64) {
        self.state.lock().drop_ratio.insert(kind, ratio.clamp(0.0, 1.0));
    }

    /// Holds every datagram back for this long.
    pub fn delay(&self, delay: Duration) {
        self.state.lock().delay = delay;
    }

    /// Cuts the way to the replica whose gossip listens at `peer` (the port P); the other direction is for
    /// that replica's faults to cut.
    pub fn cut(&self, peer: SocketAddr) {
        self.state.lock().cut.insert(peer);
    }

    /// Ends all cuts, losses and delays.
    pub fn heal(&self) {
        let mut state = self.state.lock();
        state.drop_ratio.clear();
        state.delay = Duration::ZERO;
        state.cut.clear();
    }

    /// What happens to a datagram of `kind` for the replica at `peer` (its port P).
    pub(crate) fn fate(&self, kind: FrameKind, peer: SocketAddr) -> Fate {
        let mut state = self.state.lock();
        let ratio = state.drop_ratio.get(&kind).copied().unwrap_or(0.0);
        if state.cut.contains(&peer) || (ratio > 0.0 && state.rng.random_bool(ratio)) {
            return Fate::Drop;
        }
        if state.delay.is_zero() { Fate::Send } else { Fate::Delay(state.delay) }
    }
}
