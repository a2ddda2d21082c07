//! How long an engine keeps what is not asked for, learned from what it reports as cached.
//!
//! Engines evict the least recently used blocks first. So when a prefix that was last wanted `d` inserted
//! tokens ago is found gone, all that was last wanted earlier is gone as well; and when it is found there,
//! all that was wanted since is there. `d` is counted in tokens that were put into the cache since, not in
//! time: an idle engine forgets nothing. An engine that reports nothing is believed to keep everything.
//!
//! A prefix that is missing may also be one that is not there yet: its own prompt still waits, or is being computed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Moment;

/// Steps of history that are kept. When they are full, every other one goes and steps are twice as long from
/// then on.
const STEPS_MAX: usize = 256;

/// How finely the history tells times apart at first.
const STEP_MIN: Duration = Duration::from_millis(100);

/// And in the end: steps of a minute reach back some hours, and then the oldest go.
const STEP_MAX: Duration = Duration::from_secs(60);

/// How far one report moves the estimate towards itself: a report may be odd, two in a row are not.
const PULL: f64 = 0.5;

/// How many tokens were put into a cache since some moment; the history is coarse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inserted {
    /// So many surely were.
    pub least: u64,
    /// And no more than this.
    pub most: u64,
}

/// The tokens put into one engine's cache, and how many it takes to push an untouched block out.
#[derive(Debug, Default)]
pub(crate) struct Retention {
    state: Mutex<State>,
    /// Whether anything was ever found gone, so that who asks of an engine of which nothing was needs no lock.
    forgets: AtomicBool,
}

#[derive(Debug)]
struct State {
    inserted: u64,
    /// What had been inserted before each time, in order.
    steps: VecDeque<(Moment, u64)>,
    step: Duration,
    /// Inserted tokens after which an untouched block is gone.
    keeps: Option<f64>,
}

impl Default for State {
    fn default() -> Self {
        Self { inserted: 0, steps: VecDeque::new(), step: STEP_MIN, keeps: None }
    }
}

impl Retention {
    /// Tokens were put into the cache.
    pub(crate) fn insert(&self, tokens: u64, now: Moment) {
        let mut state = self.state.lock();
        let before = state.inserted;
        state.inserted += tokens;
        if state.steps.back().is_some_and(|(last, _)| now.since(*last) < state.step) {
            return;
        }
        if state.steps.len() >= STEPS_MAX {
            if state.step < STEP_MAX {
                state.step *= 2;
                let mut odd = false;
                state.steps.retain(|_| {
                    odd = !odd;
                    odd
                });
            } else {
                state.steps.drain(..STEPS_MAX / 2);
            }
        }
        state.steps.push_back((now, before));
    }

    /// Tokens put into the cache since `then`.
    pub(crate) fn inserted_since(&self, then: Moment) -> Inserted {
        let state = self.state.lock();
        let after = state.steps.partition_point(|(at, _)| *at <= then);
        let before = after.checked_sub(1).and_then(|at| state.steps.get(at)).map_or(0, |(_, before)| *before);
        let by_next = state.steps.get(after).map_or(state.inserted, |(_, before)| *before);
        Inserted { least: state.inserted - by_next, most: state.inserted - before }
    }

    /// A block after which so much was inserted was still there.
    pub(crate) fn found(&self, since: Inserted) {
        let mut state = self.state.lock();
        let distance = since.most;
        if let Some(keeps) = state.keeps
            && distance as f64 > keeps
        {
            state.keeps = Some(keeps + PULL * (distance as f64 - keeps));
        }
    }

    /// Such a block was not there, for a request before which `ahead` tokens had still to be computed. If the block's
    /// own prompt may be among these, that says nothing.
    pub(crate) fn missed(&self, since: Inserted, ahead: u64) {
        if ahead > 0 && since.least <= ahead {
            return;
        }
        let mut state = self.state.lock();
        let distance = since.most as f64;
        state.keeps = Some(match state.keeps {
            Some(keeps) => keeps - PULL * (keeps - distance).max(0.0),
            None => distance,
        });
        self.forgets.store(true, Ordering::Release);
    }

    /// What was last wanted before this time is believed to be gone; `None` while nothing is.
    pub(crate) fn horizon(&self) -> Option<Moment> {
        if !self.forgets.load(Ordering::Acquire) {
            return None;
        }
        let state = self.state.lock();
        let gone = state.inserted.checked_sub(state.keeps? as u64)?;
        let after = state.steps.partition_point(|(_, before)| *before <= gone);
        after.checked_sub(1).and_then(|at| state.steps.get(at)).map(|(at, _)| *at)
    }

    /// The engine began a new life, perhaps with another cache.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        *state = State::default();
        self.forgets.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: u64) -> Moment {
        Moment::from_millis(second * 1_000)
    }

    /// An engine into which 1,000 tokens go every second.
    fn busy(seconds: u64) -> Retention {
        let retention = Retention::default();
        (0..seconds).for_each(|second| retention.insert(1_000, at(second)));
        retention
    }

    const fn exactly(tokens: u64) -> Inserted {
        Inserted { least: tokens, most: tokens }
    }

    #[test]
    fn what_may_not_have_been_computed_yet_is_not_taken_for_gone() {
        let retention = busy(100);
        // Wanted within the second: its prompt may be the one that is ahead.
        retention.missed(retention.inserted_since(at(99)), 1_000);
        retention.missed(retention.inserted_since(at(97)), 3_000);
        assert_eq!(retention.horizon(), None);
        // More came after it than is left to compute: it was done, and is gone.
        retention.missed(retention.inserted_since(at(90)), 3_000);
        assert_eq!(retention.horizon(), Some(at(90)));
    }

    #[test]
    fn an_engine_that_reports_nothing_keeps_everything() {
        assert_eq!(busy(100).horizon(), None);
    }

    #[test]
    fn what_was_wanted_before_a_missing_block_is_gone_and_stays_as_far_behind() {
        let retention = busy(100);
        assert_eq!(retention.inserted_since(at(90)), Inserted { least: 9_000, most: 10_000 });
        retention.missed(retention.inserted_since(at(90)), 0);
        assert_eq!(retention.horizon(), Some(at(90)));
        (100..150).for_each(|second| retention.insert(1_000, at(second)));
        assert_eq!(retention.horizon(), Some(at(140)));
    }

    #[test]
    fn an_idle_engine_forgets_nothing() {
        let retention = busy(100);
        retention.missed(exactly(10_000), 0);
        assert_eq!(retention.horizon(), Some(at(90)));
        assert_eq!(retention.inserted_since(at(5_000)), Inserted { least: 0, most: 1_000 });
        retention.insert(1_000, at(6_000));
        assert_eq!(retention.horizon(), Some(at(91)));
    }

    #[test]
    fn reports_pull_the_estimate_both_ways() {
        let retention = busy(100);
        retention.missed(exactly(10_000), 0);
        retention.found(exactly(50_000));
        assert_eq!(retention.horizon(), Some(at(70)));
        retention.found(exactly(20_000));
        assert_eq!(retention.horizon(), Some(at(70)), "found nearer than what is kept says nothing");
        retention.missed(exactly(10_000), 0);
        assert_eq!(retention.horizon(), Some(at(80)));
    }

    #[test]
    fn history_is_bounded() {
        let retention = busy(1_000_000);
        assert!(retention.state.lock().steps.len() <= STEPS_MAX);
        let since = retention.inserted_since(at(995_000));
        assert!((5_000_000..5_200_000).contains(&since.most), "{since:?}");
        assert!((4_800_000..=5_000_000).contains(&since.least), "{since:?}");
    }
}
