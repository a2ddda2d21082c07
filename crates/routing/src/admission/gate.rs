//! Whether an endpoint has room for one more.

use smallvec::SmallVec;

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
pub struct Gate {
    /// Requests that may run there; 0: any number.
    pub running_max: u32,
    /// How long the wait there may be, in ms; infinite: whatever waits there.
    pub wait_ms_max: f64,
    /// Whether others wait here, and the request was among them.
    pub from_queue: bool,
    /// How many go before it that wait at other replicas: as many endpoints with room are theirs, the cheapest.
    pub before: u32,
}

impl Gate {
    /// For a request that nobody waits before, where the soonest of the mix expects its first token after `ttft_ms`.
    pub const fn of_newcomer(running_max: u32, ttft_ms: f64) -> Self {
        Self { running_max, wait_ms_max: ttft_ms * ENGAGES_AT, from_queue: false, before: 0 }
    }

    /// For a request out of the queue.
    pub const fn of_waiting(running_max: u32, ttft_ms: f64) -> Self {
        Self { running_max, wait_ms_max: ttft_ms * FILLS_TO, from_queue: true, before: 0 }
    }

    /// Whether fewer than the most that may run there do.
    pub(crate) fn is_below_max(&self, candidate: &Candidate<'_>) -> bool {
        self.running_max == 0 || candidate.in_flight.running() < self.running_max
    }

    /// Whether what waits there is little enough.
    fn is_short(&self, candidate: &Candidate<'_>, cost: &Cost, wait_ms_max: f64, now: Moment) -> bool {
        wait_ms_max == f64::INFINITY
            || (wait_ms(candidate, cost, now) <= wait_ms_max
                && !is_full(candidate)
                && !(self.from_queue && is_filled(candidate, now)))
    }

    /// Whether it has room.
    pub(crate) fn is_open(&self, candidate: &Candidate<'_>, cost: &Cost, now: Moment) -> bool {
        candidate.dropped_by.is_none()
            && self.is_below_max(candidate)
            && self.is_short(candidate, cost, self.wait_ms_max, now)
    }

    /// Whether any has room that is not for those who go before it.
    pub(crate) fn any_open(&self, candidates: &Candidates<'_>, costs: &[Cost], now: Moment) -> bool {
        let open = |(candidate, cost): &(&Candidate<'_>, &Cost)| self.is_open(candidate, cost, now);
        candidates.all().iter().zip(costs).filter(open).nth(self.before as usize).is_some()
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
        if self.before > 0 {
            let left = self.left(&candidates, &costs, now);
            return Ok(candidates.at(&left, &costs));
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

impl Gate {
    /// The positions of those with room that are left when those before it have taken the cheapest, in order.
    fn left(&self, candidates: &Candidates<'_>, costs: &[Cost], now: Moment) -> SmallVec<[usize; 8]> {
        let all = candidates.all().iter().zip(costs).enumerate();
        let open = all.filter(|(_, (candidate, cost))| self.is_open(candidate, cost, now));
        let mut open: SmallVec<[usize; 8]> = open.map(|(at, _)| at).collect();
        open.sort_by(|a, b| costs[*a].total_ms.total_cmp(&costs[*b].total_ms));
        let mut left: SmallVec<[usize; 8]> = open.into_iter().skip(self.before as usize).collect();
        left.sort_unstable();
        left
    }
}

/// No endpoint has room now; whoever asked decides whether the request waits.
pub(crate) const NO_ROOM: Refusal = Refusal::Overloaded { retry_after_ms: 0 };

/// How long a request is expected to wait there, in ms: by the engine's speed, or by how its queue was seen to move.
pub(crate) fn wait_ms(candidate: &Candidate<'_>, cost: &Cost, now: Moment) -> f64 {
    let ahead = candidate.in_flight.prefill_tokens();
    let supposed_over = ahead.saturating_sub(candidate.load.prefill_tokens);
    let us_per_token = f64::from(candidate.load.speed.prefill_us_per_token);
    let prompts_ms = cost.wait_ms + supposed_over as f64 * us_per_token / 1_000.0;
    prompts_ms.max(candidate.endpoint.queue_pace().wait_ms(ahead, cost.uncached_tokens, now))
}

/// Whether as many are there as lately filled the engine.
fn is_filled(candidate: &Candidate<'_>, now: Moment) -> bool {
    candidate.in_flight.running() >= candidate.endpoint.places().filled_by(now)
}

/// Whether the engine says that requests wait in it, and no fewer are there now than when it said so.
fn is_full(candidate: &Candidate<'_>) -> bool {
    let glance = &candidate.load.glance;
    match (glance.waiting, glance.running) {
        (Some(1..), Some(running)) if glance.weight >= FRESH => {
            let may_wait = ENGINE_WAITING_MIN.max(running / ENGINE_WAITING_SHARE);
            candidate.in_flight.running() >= running.saturating_add(may_wait)
        }
        _ => false,
    }
}
