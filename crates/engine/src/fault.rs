//! What tests can make an engine do wrong. All of it is off until asked for, through the handle or, with
//! `--faults`, through `POST /fault`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::watch;

use crate::scheduler::Gauges;

/// A way for one generating request (`POST /v1/...`) to go wrong. Token counts are those of choice 0. Embeddings
/// and responses know the kinds that strike before anything is computed ([`Fault::Status`],
/// [`Fault::CoreDeath`], [`Fault::Reset`], [`Fault::Freeze`]); another one that falls on them is spent without effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Fault {
    /// Answered with this status and an error body.
    Status {
        /// The HTTP status.
        status: u16,
        /// Seconds for a `Retry-After` header; none without.
        retry_after_s: Option<u32>,
    },
    /// Answered with 500, and the engine's core dies of it: every request under way and to come fails, and the
    /// engine ends unless it is to be kept alive.
    CoreDeath,
    /// The connection is reset before the first byte of the head.
    Reset,
    /// The connection is reset once this many tokens are out (unstreamed: computed).
    ResetAfter {
        /// Tokens before.
        tokens: u32,
    },
    /// Accepted and never answered, not even with a head.
    Freeze,
    /// Nothing more comes once this many tokens are out; the connection stays open.
    FreezeAfter {
        /// Tokens before.
        tokens: u32,
    },
    /// The body comes in pieces with a pause between them.
    Drip {
        /// Bytes in a piece, at least 1.
        bytes: u32,
        /// Pause before each piece, in ms.
        every_ms: u32,
    },
    /// An `error` event and then `[DONE]` once this many tokens are out (unstreamed: status 500).
    ErrorEventAfter {
        /// Tokens before.
        tokens: u32,
    },
    /// The stream ends with `finish_reason` `abort` and a normal `[DONE]`, as on SIGTERM.
    AbortAfter {
        /// Tokens before.
        tokens: u32,
    },
    /// Stalled once this many tokens are out, with a `: ping` comment now and then (unstreamed: no answer).
    CommentsAfter {
        /// Tokens before.
        tokens: u32,
        /// Pause between comments, in ms.
        every_ms: u32,
    },
}

/// What `/health` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// The truth.
    #[default]
    Well,
    /// 503.
    Sick,
    /// Every other probe 503, beginning with the next.
    Flapping,
}

/// Figures that `/metrics` and `/load` show instead of the true ones.
#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lies {
    /// Instead of `num_requests_running`.
    pub running: Option<u32>,
    /// Instead of `num_requests_waiting`.
    pub waiting: Option<u32>,
    /// Instead of `kv_cache_usage_perc`, 0 to 1.
    pub kv_ratio: Option<f64>,
}

impl Lies {
    pub(crate) fn tell(&self, gauges: &mut Gauges) {
        gauges.running = self.running.unwrap_or(gauges.running);
        gauges.waiting = self.waiting.unwrap_or(gauges.waiting);
        gauges.kv_ratio = self.kv_ratio.unwrap_or(gauges.kv_ratio);
    }
}

/// The body of `POST /fault`; what is named is done, in this order.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Order {
    /// Take back every fault, lie and freeze.
    pub(crate) clear: bool,
    /// Start over as a new process would.
    pub(crate) restart: bool,
    /// A fault to plan.
    pub(crate) fault: Option<Fault>,
    /// For how many requests; without it for every one.
    pub(crate) requests: Option<u64>,
    pub(crate) health: Option<Health>,
    pub(crate) lies: Option<Lies>,
    pub(crate) frozen: Option<bool>,
}

struct Planned {
    fault: Fault,
    /// Requests still to be hit; `None` for every one.
    left: Option<u64>,
}

/// Faults planned at once; more is a mistake of the test.
const PLANNED_MAX: usize = 1_000;

/// The faults in force.
pub(crate) struct Faults {
    /// Whether anything is planned: the one look that a healthy request pays for.
    armed: AtomicBool,
    plan: Mutex<VecDeque<Planned>>,
    health: Mutex<Health>,
    probes: AtomicU32,
    lies: Mutex<Lies>,
    frozen: watch::Sender<bool>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            armed: AtomicBool::new(false),
            plan: Mutex::default(),
            health: Mutex::default(),
            probes: AtomicU32::new(0),
            lies: Mutex::default(),
            frozen: watch::Sender::new(false),
        }
    }
}

impl Faults {
    pub(crate) fn plan(&self, fault: Fault, requests: Option<u64>) {
        let mut plan = self.plan.lock();
        if plan.len() < PLANNED_MAX {
            plan.push_back(Planned { fault, left: requests });
        }
        self.armed.store(true, Ordering::Release);
    }

    pub(crate) fn clear(&self) {
        self.plan.lock().clear();
        self.armed.store(false, Ordering::Release);
        *self.health.lock() = Health::Well;
        *self.lies.lock() = Lies::default();
        self.freeze(false);
    }

    /// The fault that hits the next generating request, if any.
    pub(crate) fn take(&self) -> Option<Fault> {
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut plan = self.plan.lock();
        while let Some(next) = plan.front_mut() {
            match &mut next.left {
                None => return Some(next.fault),
                Some(0) => {
                    plan.pop_front();
                }
                Some(left) => {
                    *left -= 1;
                    return Some(next.fault);
                }
            }
        }
        self.armed.store(false, Ordering::Release);
        None
    }

    pub(crate) fn set_health(&self, health: Health) {
        *self.health.lock() = health;
        self.probes.store(0, Ordering::Relaxed);
    }

    /// Whether this probe of `/health` is answered well.
    pub(crate) fn healthy(&self) -> bool {
        match *self.health.lock() {
            Health::Well => true,
            Health::Sick => false,
            Health::Flapping => self.probes.fetch_add(1, Ordering::Relaxed) % 2 == 1,
        }
    }

    pub(crate) fn set_lies(&self, lies: Lies) {
        *self.lies.lock() = lies;
    }

    pub(crate) fn lies(&self) -> Lies {
        *self.lies.lock()
    }

    pub(crate) fn freeze(&self, frozen: bool) {
        self.frozen.send_replace(frozen);
    }

    pub(crate) fn frozen(&self) -> bool {
        *self.frozen.borrow()
    }

    /// Waits until the engine is not frozen.
    pub(crate) fn thawed(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut frozen = self.frozen.subscribe();
        async move {
            // An error means that the engine is gone, which is no reason to wait on.
            let _ = frozen.wait_for(|frozen| !frozen).await;
        }
    }
}

impl Fault {
    /// The token count at which this fault strikes a request under way.
    pub(crate) fn after_tokens(self) -> Option<u32> {
        match self {
            Self::ResetAfter { tokens }
            | Self::FreezeAfter { tokens }
            | Self::ErrorEventAfter { tokens }
            | Self::AbortAfter { tokens }
            | Self::CommentsAfter { tokens, .. } => Some(tokens),
            Self::Status { .. } | Self::CoreDeath | Self::Reset | Self::Freeze | Self::Drip { .. } => None,
        }
    }

    /// The pieces and the pause of a dripping body.
    pub(crate) fn drip(self) -> Option<(usize, Duration)> {
        match self {
            Self::Drip { bytes, every_ms } => {
                Some((bytes.max(1) as usize, Duration::from_millis(u64::from(every_ms))))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_hits_as_many_requests_as_planned_and_then_no_more() {
        let faults = Faults::default();
        assert_eq!(faults.take(), None);
        faults.plan(Fault::Reset, Some(2));
        faults.plan(Fault::Freeze, Some(1));
        let hits: Vec<_> = (0..4).map(|_| faults.take()).collect();
        assert_eq!(hits, [Some(Fault::Reset), Some(Fault::Reset), Some(Fault::Freeze), None]);
    }

    #[test]
    fn a_fault_without_a_count_stays_until_cleared() {
        let faults = Faults::default();
        faults.plan(Fault::Reset, None);
        assert!((0..5).all(|_| faults.take() == Some(Fault::Reset)));
        faults.clear();
        assert_eq!(faults.take(), None);
    }

    #[test]
    fn a_flapping_engine_is_sick_at_every_other_probe() {
        let faults = Faults::default();
        faults.set_health(Health::Flapping);
        let probes: Vec<_> = (0..4).map(|_| faults.healthy()).collect();
        assert_eq!(probes, [false, true, false, true]);
    }
}
