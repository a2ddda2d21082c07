//! What an engine says of itself, dated: fresh, stale and absent are three different things.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Moment;
use crate::facts::ObservedRow;

/// Until this age a figure is taken as it is: two scrape periods and the way through the gossip.
pub const OBSERVED_FRESH: Duration = Duration::from_millis(2_500);
/// From this age on it weighs nothing; between the two its weight falls in a straight line.
pub const OBSERVED_STALE: Duration = Duration::from_secs(10);

/// One look at an engine, and what this replica could not explain of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observed {
    /// When the engine was looked at, on this replica's clock.
    pub at: Moment,
    /// Requests that it ran.
    pub running: u32,
    /// Requests that waited in it.
    pub waiting: u32,
    /// Those of the waiting that no replica's row accounted for, neither at this look nor at the one before:
    /// they came past the routers. A request whose end is told a moment before or after a look seems so once.
    pub waiting_unexplained: u32,
    /// Those of the waiting that no row accounted for at this look alone.
    pub waiting_surplus: u32,
    /// Share of its KV blocks in use, 0 to 1, if it says so.
    pub kv_ratio: Option<f32>,
    /// Which life of the engine this is; 0 if unknown.
    pub engine_epoch: u64,
}

/// How much an observation made at `at` weighs at `now`: 1 while fresh, 0 once stale.
pub fn freshness(at: Moment, now: Moment) -> f64 {
    let age = now.since(at).as_secs_f64();
    let (fresh, stale) = (OBSERVED_FRESH.as_secs_f64(), OBSERVED_STALE.as_secs_f64());
    ((stale - age) / (stale - fresh)).clamp(0.0, 1.0)
}

/// The last look, kept so that deciding reads it without a lock.
#[derive(Debug)]
pub(super) struct Observation {
    last: Mutex<Option<Observed>>,
    /// When, in micros; `u64::MAX` while nothing was seen.
    at: AtomicU64,
    /// Waiting, unexplained waiting and KV ratio, packed.
    packed: AtomicU64,
    running: AtomicU32,
}

impl Default for Observation {
    fn default() -> Self {
        Self {
            last: Mutex::new(None),
            at: AtomicU64::new(u64::MAX),
            packed: AtomicU64::new(0),
            running: AtomicU32::new(0),
        }
    }
}

const COUNT_BITS: u32 = 24;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const RATIO_ABSENT: u64 = 0xffff;
const RATIO_SCALE: f32 = 65_000.0;

/// What deciding needs of the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Glance {
    /// Requests waiting in the engine; `None` when absent or stale.
    pub waiting: Option<u32>,
    /// Requests running in the engine; likewise.
    pub running: Option<u32>,
    /// Requests waiting that no row explains, weighed by freshness.
    pub waiting_unexplained: f64,
    /// KV blocks in use, 0 to 1; `None` when absent or stale.
    pub kv_ratio: Option<f32>,
    /// How much the figures weigh, 0 to 1.
    pub weight: f64,
}

impl Observation {
    /// Takes the row in if it is newer than what is held. `running_rows` is what all rows together say
    /// runs there now. Returns the engine's epoch if this look shows that it began a new life.
    pub(super) fn take(&self, row: &ObservedRow, running_rows: u32, now: Moment) -> Option<u64> {
        let at = now.minus(Duration::from_millis(u64::from(row.age_ms)));
        let mut last = self.last.lock();
        if last.is_some_and(|last| last.at >= at) {
            return None;
        }
        let known_epoch = last.map_or(0, |last| last.engine_epoch);
        let in_engine = row.running.saturating_add(row.waiting);
        let waiting_surplus = in_engine.saturating_sub(running_rows).min(row.waiting);
        let seen = Observed {
            at,
            running: row.running,
            waiting: row.waiting,
            waiting_unexplained: last
                .map_or(waiting_surplus, |last| last.waiting_surplus.min(waiting_surplus)),
            waiting_surplus,
            kv_ratio: row.kv_ratio.filter(|ratio| ratio.is_finite()).map(|ratio| ratio.clamp(0.0, 1.0)),
            engine_epoch: if row.engine_epoch == 0 { known_epoch } else { row.engine_epoch },
        };
        *last = Some(seen);
        let count = |count: u32| u64::from(count).min(COUNT_MASK);
        let ratio = seen.kv_ratio.map_or(RATIO_ABSENT, |ratio| (ratio * RATIO_SCALE) as u64);
        let packed =
            count(seen.waiting) | count(seen.waiting_unexplained) << COUNT_BITS | ratio << (2 * COUNT_BITS);
        self.packed.store(packed, Ordering::Release);
        self.running.store(seen.running, Ordering::Release);
        self.at.store(at.micros(), Ordering::Release);
        (known_epoch != 0 && seen.engine_epoch != known_epoch).then_some(seen.engine_epoch)
    }

    pub(super) fn last(&self) -> Option<Observed> {
        *self.last.lock()
    }

    pub(super) fn glance(&self, now: Moment) -> Glance {
        let at = self.at.load(Ordering::Acquire);
        if at == u64::MAX {
            return Glance::default();
        }
        let weight = freshness(Moment::from_micros(at), now);
        if weight <= 0.0 {
            return Glance::default();
        }
        let packed = self.packed.load(Ordering::Acquire);
        let ratio = packed >> (2 * COUNT_BITS);
        Glance {
            waiting: Some((packed & COUNT_MASK) as u32),
            running: Some(self.running.load(Ordering::Acquire)),
            waiting_unexplained: ((packed >> COUNT_BITS) & COUNT_MASK) as f64 * weight,
            kv_ratio: (ratio != RATIO_ABSENT).then(|| ratio as f32 / RATIO_SCALE),
            weight,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EndpointId;

    fn row(age_ms: u32, waiting: u32, engine_epoch: u64) -> ObservedRow {
        ObservedRow {
            endpoint: EndpointId::from_raw(1),
            age_ms,
            running: 4,
            waiting,
            kv_ratio: Some(0.5),
            engine_epoch,
        }
    }

    fn at(millis: u64) -> Moment {
        Moment::from_millis(millis)
    }

    #[test]
    fn an_absent_figure_is_not_zero() {
        assert_eq!(Observation::default().glance(at(5)).waiting, None);
    }

    #[test]
    fn a_fresh_figure_counts_whole_and_a_stale_one_not_at_all() {
        let seen = Observation::default();
        seen.take(&row(0, 8, 0), 0, at(0));
        assert_eq!(seen.glance(at(2_000)).waiting_unexplained, 8.0);
        let older = seen.glance(at(5_000)).waiting_unexplained;
        assert!(older > 0.0 && older < 8.0, "{older}");
        assert_eq!(seen.glance(at(10_000)), Glance::default());
    }

    #[test]
    fn only_waiting_that_no_row_explains_is_added() {
        for (rows, unexplained) in [(0, 8.0), (4, 8.0), (8, 4.0), (12, 0.0), (50, 0.0)] {
            let seen = Observation::default();
            seen.take(&row(0, 8, 0), rows, at(0));
            seen.take(&row(0, 8, 0), rows, at(1));
            assert_eq!(seen.glance(at(1)).waiting_unexplained, unexplained, "{rows} running by the rows");
        }
    }

    #[test]
    fn a_surplus_of_one_look_alone_is_none() {
        let seen = Observation::default();
        seen.take(&row(0, 8, 0), 12, at(250));
        seen.take(&row(0, 8, 0), 0, at(500));
        assert_eq!(seen.glance(at(500)).waiting_unexplained, 0.0);
    }

    #[test]
    fn an_older_look_never_replaces_a_newer_one() {
        let seen = Observation::default();
        seen.take(&row(0, 8, 0), 0, at(1_000));
        seen.take(&row(500, 1, 0), 0, at(1_100));
        assert_eq!(seen.glance(at(1_100)).waiting, Some(8));
    }

    #[test]
    fn a_new_life_is_told_once_and_an_unknown_epoch_is_none() {
        let seen = Observation::default();
        assert_eq!(seen.take(&row(0, 0, 7), 0, at(1)), None, "the first sight is no restart");
        assert_eq!(seen.take(&row(0, 0, 0), 0, at(2)), None);
        assert_eq!(seen.take(&row(0, 0, 8), 0, at(3)), Some(8));
        assert_eq!(seen.take(&row(0, 0, 8), 0, at(4)), None);
    }
}
