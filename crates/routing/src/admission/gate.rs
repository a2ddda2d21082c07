//! Whether an endpoint has room for one more.

use smallvec::SmallVec;

use super::Turn;
use crate::Moment;
use crate::candidates::{Candidate, Candidates};
use crate::cost::{Cost, Costs};
use crate::decision::Refusal;

/// The part of the soonest TTFT* that may be ahead at every candidate before the first request waits here. Half:
/// the other half is for its own prompt, and for what the estimate lacks.
const ENGAGES_AT: f64 = 0.5;
/// The part of it up to which endpoints are filled again from the queue. A quarter: enough that no engine runs dry
/// between two of our looks, and little to stand behind.
const FILLS_TO: f64 = 0.25;
/// How many times what endpoints are filled to may be ahead at one that a waiting request prefers, while another has
/// room: warmth is worth a short wait.
const PREFERRED_FACTOR: f64 = 2.0;
/// Requests that may wait in an engine that says how many do, at least, and as a share of those that it runs.
const ENGINE_WAITING_MIN: u32 = 4;
const ENGINE_WAITING_SHARE: u32 = 4;
/// How fresh, 0 to 1, an engine's own figures must be to close it.
const FRESH: f64 = 1.0;

/// What an endpoint must have for a request to be sent there.
#[derive(Clone, Copy, Debug)]
pub struct Gate<'a> {
    /// Requests that may run there; 0: any number.
    pub running_max: u32,
    /// How long the wait there may be, in ms; infinite: whatever waits there.
    pub wait_ms_max: f64,
    /// Whether others wait here, and the request was among them.
    pub from_queue: bool,
    /// Whose turn it is where other replicas have queues as well.
    pub turn: Option<&'a Turn>,
}

impl Gate<'_> {
    /// For a request that nobody waits before, where the soonest of the mix expects its first token after `ttft_ms`.
    pub const fn of_newcomer(running_max: u32, ttft_ms: f64) -> Self {
        Self { running_max, wait_ms_max: ttft_ms * ENGAGES_AT, from_queue: false, turn: None }
    }

    /// For a request out of the queue.
    pub const fn of_waiting(running_max: u32, ttft_ms: f64) -> Self {
        Self { running_max, wait_ms_max: ttft_ms * FILLS_TO, from_queue: true, turn: None }
    }

    /// Whether fewer than the most that may run there do.
    pub(crate) fn is_below_max(&self, candidate: &Candidate<'_>) -> bool {
        self.running_max == 0 || candidate.load.running < self.running_max
    }

    /// Whether what waits there is little enough.
    fn is_short(&self, candidate: &Candidate<'_>, cost: &Cost, wait_ms_max: f64, now: Moment) -> bool {
        wait_ms_max == f64::INFINITY || (wait_ms(candidate, cost, now) <= wait_ms_max && !is_full(candidate))
    }

    /// Whether it has room.
    pub(crate) fn is_open(&self, candidate: &Candidate<'_>, cost: &Cost, now: Moment) -> bool {
        candidate.dropped_by.is_none()
            && self.is_below_max(candidate)
            && self.is_short(candidate, cost, self.wait_ms_max, now)
            && self.turn.is_none_or(|turn| turn.is_ours(candidate.endpoint.id, candidate.load.running))
    }

    /// Whether any has room.
    pub(crate) fn any_open(&self, candidates: &Candidates<'_>, costs: &[Cost], now: Moment) -> bool {
        candidates.all().iter().zip(costs).any(|(candidate, cost)| self.is_open(candidate, cost, now))
    }

    /// Those that run fewer than the most that may; `None` if there are none.
    pub(crate) fn below_max<'v>(
        &self,
        candidates: Candidates<'v>,
        costs: Costs,
    ) -> Option<(Candidates<'v>, Costs)> {
        if self.running_max == 0 {
            return Some((candidates, costs));
        }
        let stays = |each: &Candidate<'_>| self.is_below_max(each) && each.dropped_by.is_none();
        let all = candidates.all().iter().enumerate();
        let staying: SmallVec<[usize; 8]> = all.filter(|(_, each)| stays(each)).map(|(at, _)| at).collect();
        (!staying.is_empty()).then(|| candidates.at(&staying, &costs))
    }

    /// The candidates among which to choose: all, but for those that run as many as they may, and for those before
    /// which more than a little waits if the request comes from the queue.
    ///
    /// # Errors
    /// If none has room.
    pub(crate) fn narrow<'v>(
        &self,
        candidates: Candidates<'v>,
        costs: Costs,
        now: Moment,
    ) -> Result<(Candidates<'v>, Costs), Refusal> {
        if !self.any_open(&candidates, &costs, now) {
            return Err(NO_ROOM);
        }
        if self.running_max == 0 && !self.from_queue {
            return Ok((candidates, costs));
        }
        let preferred_max = self.wait_ms_max * PREFERRED_FACTOR;
        let stays = |(candidate, cost): (&Candidate<'_>, &Cost)| {
            self.is_below_max(candidate)
                && (!self.from_queue || self.is_short(candidate, cost, preferred_max, now))
        };
        let all = candidates.all().iter().zip(&costs).enumerate();
        let staying: SmallVec<[usize; 8]> = all.filter(|(_, each)| stays(*each)).map(|(at, _)| at).collect();
        if staying.len() == costs.len() {
            Ok((candidates, costs))
        } else {
            Ok(candidates.at(&staying, &costs))
        }
    }
}

/// No endpoint has room now; whoever asked decides whether the request waits.
pub(crate) const NO_ROOM: Refusal = Refusal::Overloaded { retry_after_ms: 0 };

/// How long a request is expected to wait there, in ms: by the engine's speed, or by how its queue was seen to move.
pub(crate) fn wait_ms(candidate: &Candidate<'_>, cost: &Cost, now: Moment) -> f64 {
    let seen_ms =
        candidate.endpoint.queue_pace().wait_ms(candidate.load.prefill_tokens, cost.uncached_tokens, now);
    cost.wait_ms.max(seen_ms)
}

/// Whether the engine says that requests wait in it, and no fewer are there now than when it said so.
fn is_full(candidate: &Candidate<'_>) -> bool {
    let glance = &candidate.load.glance;
    match (glance.waiting, glance.running) {
        (Some(1..), Some(running)) if glance.weight >= FRESH => {
            let may_wait = ENGINE_WAITING_MIN.max(running / ENGINE_WAITING_SHARE);
            candidate.load.running >= running.saturating_add(may_wait)
        }
        _ => false,
    }
}
