//! A run, settled before it starts.

use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;

use super::body::Envelope;
use super::client::{Target, Wire};
use super::workload::Source;

/// What to send, where, how fast and for how long.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Who takes the requests.
    pub targets: Targets,
    /// What stays on one target.
    pub spread: Spread,
    /// What to ask.
    pub source: Source,
    /// When to ask it.
    pub pace: Pace,
    /// What bodies have besides their text.
    pub envelope: Envelope,
    /// How requests are sent.
    pub wire: Wire,
    /// Where the run ends.
    pub limits: Limits,
    /// Settles every text and every drawn time.
    pub seed: u64,
}

impl Plan {
    /// Streamed requests of `source` to `targets`, everything else by default.
    pub fn new(targets: Targets, source: Source, pace: Pace) -> Self {
        Self {
            targets,
            spread: Spread::default(),
            source,
            pace,
            envelope: Envelope { stream: true, ..Envelope::default() },
            wire: Wire::default(),
            limits: Limits::default(),
            seed: 0,
        }
    }

    /// How many requests the run will have, when that is settled.
    pub fn requests_total(&self) -> Option<u64> {
        match (self.source.requests_total(), self.limits.requests_max) {
            (Some(total), Some(max)) => Some(total.min(max)),
            (total, max) => total.or(max),
        }
    }
}

/// One target or more.
#[derive(Debug, Clone)]
pub struct Targets(Vec<Target>);

impl Targets {
    /// At least one target, in the order in which they take turns.
    pub fn new(targets: Vec<Target>) -> anyhow::Result<Self> {
        ensure!(!targets.is_empty(), "no target");
        Ok(Self(targets))
    }

    /// The target whose turn the `turn`th is.
    pub(super) fn at(&self, turn: u64) -> &Target {
        &self.0[(turn % self.0.len() as u64) as usize]
    }
}

/// How requests are spread over several targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Spread {
    /// Each request goes to the next target, whatever chat it belongs to.
    #[default]
    Request,
    /// Each chat stays on one target.
    Session,
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// When the trace says, its time divided by `speed`. Generated chats all start at once.
    Recorded {
        /// How many times faster than recorded, above 0.
        speed: f64,
    },
    /// Conversations start at random so that requests come at this rate on average.
    Poisson {
        /// Requests a second, above 0.
        requests_per_second: f64,
    },
    /// Each client sends its next request when the answer is there and the user has thought.
    Closed {
        /// Clients at once, at least 1.
        clients: usize,
        /// What a client does between two turns.
        order: Order,
    },
}

/// In which order the clients of a closed loop go through the chats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Order {
    /// A client ends its chat before it begins another.
    #[default]
    Chats,
    /// Every chat's first turn, then every chat's second, and so on.
    Turns,
}

/// Where a run ends, and what it may hold meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Requests sent at most.
    pub requests_max: Option<u64>,
    /// Time after which no request is sent.
    pub run_max: Option<Duration>,
    /// Time after that for answers under way; what is left then is abandoned.
    pub drain_max: Duration,
    /// Requests in flight at once in an open loop; more wait, which the report tells.
    pub in_flight_max: usize,
    /// How often one request is sent again after a failure that client libraries retry.
    pub retries_max: u32,
}

impl Default for Limits {
    /// 1,000 in flight stay below the usual limit of 1,024 descriptors.
    fn default() -> Self {
        Self {
            requests_max: None,
            run_max: None,
            drain_max: Duration::from_secs(30),
            in_flight_max: 1000,
            retries_max: 0,
        }
    }
}
