//! Splits a pulse into values of about a kilobyte, by ranges of endpoint ids, and tells which of them have
//! to be posted again.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use routing::facts::{ObservedRow, Pulse};
use routing::{EndpointId, Moment};

use crate::codec;
use crate::wire::{PARTS_MAX, Part};

/// Rows in one part before base64 makes them 1.2 KB. With more the pulse is split further, up to 64 parts;
/// then parts grow, up to what is posted at all.
const PART_BYTES_MAX: usize = 880;
/// Two looks at an engine this close together are one: it is the precision of an age.
const SAME_LOOK: Duration = Duration::from_millis(25);

/// The part among `2^split` that an endpoint belongs to.
pub(crate) fn part_of(endpoint: EndpointId, split: u8) -> usize {
    // A shift by 64 is not defined.
    if split == 0 { 0 } else { (endpoint.raw() >> (64 - u32::from(split))) as usize }
}

/// Knows what was posted.
#[derive(Default)]
pub(crate) struct Planner {
    split: u8,
    posted: HashMap<usize, Posted>,
    /// Endpoints whose load was pushed since their part was posted. Such a push may be the last word that
    /// some replica got, and the next one lost, so the part is posted again even if it is as before.
    pushed: BTreeSet<EndpointId>,
}

struct Posted {
    part: Part,
    at: Moment,
}

impl Planner {
    pub(crate) fn pushed(&mut self, endpoint: EndpointId) {
        self.pushed.insert(endpoint);
    }

    /// The parts of `pulse` that are not as posted, by number; they count as posted from now on.
    pub(crate) fn plan(&mut self, pulse: &Pulse, version: u64, now: Moment) -> Vec<(usize, Part)> {
        let needed = needed_split(pulse);
        // One too many is kept, so that a pulse at the edge does not go back and forth.
        if needed > self.split || needed + 1 < self.split {
            self.split = needed;
        }
        let pushed = std::mem::take(&mut self.pushed);
        let touched: BTreeSet<usize> = pushed.iter().map(|&endpoint| part_of(endpoint, self.split)).collect();
        let mut parts = divide(pulse, self.split);
        // Parts of a finer split that was given up are emptied.
        parts
            .resize_with(parts.len().max(self.posted.keys().max().map_or(0, |last| last + 1)), Part::default);
        let mut changed = Vec::new();
        for (index, mut part) in parts.into_iter().enumerate() {
            (part.version, part.split) = (version, self.split);
            let same = self.posted.get(&index).is_some_and(|posted| posted.says(&part, now));
            if !same || touched.contains(&index) {
                self.posted.insert(index, Posted { part: part.clone(), at: now });
                changed.push((index, part));
            }
        }
        changed
    }
}

impl Posted {
    /// Whether it says what `part` says now.
    fn says(&self, part: &Part, now: Moment) -> bool {
        let same_look = |(old, new): (&ObservedRow, &ObservedRow)| {
            let figures = |row: &ObservedRow| ObservedRow { age_ms: 0, ..*row };
            let at = |told: Moment, row: &ObservedRow| told.minus(Duration::from_millis(row.age_ms.into()));
            let (old_at, new_at) = (at(self.at, old), at(now, new));
            figures(old) == figures(new) && new_at.since(old_at).max(old_at.since(new_at)) <= SAME_LOOK
        };
        let old = &self.part;
        old.split == part.split
            && old.load == part.load
            && old.speed == part.speed
            && old.ejected == part.ejected
            && old.observed.len() == part.observed.len()
            && old.observed.iter().zip(&part.observed).all(same_look)
    }
}

fn needed_split(pulse: &Pulse) -> u8 {
    let finest = PARTS_MAX.ilog2() as u8;
    let bare = codec::size(&Part { version: u64::MAX, ..Part::default() });
    let rows: Vec<usize> =
        divide(pulse, finest).iter().map(|part| codec::size(part).saturating_sub(4)).collect();
    let fits = |split: &u8| {
        let together = 1 << (finest - split);
        rows.chunks(together).all(|rows| bare + rows.iter().sum::<usize>() <= PART_BYTES_MAX)
    };
    (0..finest).find(fits).unwrap_or(finest)
}

fn divide(pulse: &Pulse, split: u8) -> Vec<Part> {
    let mut parts = vec![Part::default(); 1 << split];
    for row in &pulse.load {
        parts[part_of(row.endpoint, split)].load.push(*row);
    }
    for row in &pulse.observed {
        parts[part_of(row.endpoint, split)].observed.push(*row);
    }
    for row in &pulse.speed {
        parts[part_of(row.endpoint, split)].speed.push(*row);
    }
    for &endpoint in &pulse.ejected {
        parts[part_of(endpoint, split)].ejected.push(endpoint);
    }
    for part in &mut parts {
        part.load.sort_unstable_by_key(|row| row.endpoint);
        part.observed.sort_unstable_by_key(|row| row.endpoint);
        part.speed.sort_unstable_by_key(|row| row.endpoint);
        part.ejected.sort_unstable();
    }
    parts
}

/// When a pulse may be rewritten again, if rewriting it now costs this many bytes in all: soon enough to
/// use the budget, never sooner than `every`, never later than a second.
pub(crate) fn next_after(cost_bytes: u64, bytes_per_second_max: u64, every: Duration) -> Duration {
    let seconds = cost_bytes as f64 / bytes_per_second_max.max(1) as f64;
    Duration::from_secs_f64(seconds.min(1.0)).max(every)
}

#[cfg(test)]
mod tests {
    use routing::facts::LoadRow;

    use super::*;

    fn endpoint(n: u64) -> EndpointId {
        EndpointId::of(&format!("http://10.0.0.{n}:8000"), None)
    }

    fn load(n: u64, running: u32) -> LoadRow {
        let endpoint = endpoint(n);
        LoadRow { endpoint, running, prefill_tokens: 40_000, decode_tokens: 70_000, placed_tokens: 1 << 20 }
    }

    fn busy(endpoints: u64) -> Pulse {
        Pulse { load: (0..endpoints).map(|n| load(n, 300)).collect(), ..Pulse::default() }
    }

    #[test]
    fn parts_stay_small_and_hold_every_row_once() {
        for endpoints in [0, 1, 64, 300, 1_000] {
            let mut planner = Planner::default();
            let parts = planner.plan(&busy(endpoints), 1, Moment::default());
            let rows: usize = parts.iter().map(|(_, part)| part.load.len()).sum();
            assert_eq!(rows as u64, endpoints);
            for (index, part) in &parts {
                let text = codec::to_text(part).expect("it is small");
                assert!(text.len() <= 1_200, "{endpoints} endpoints: {} bytes", text.len());
                assert!(part.load.iter().all(|row| part_of(row.endpoint, part.split) == *index));
            }
        }
    }

    #[test]
    fn only_the_parts_that_changed_are_posted() {
        let mut planner = Planner::default();
        let mut pulse = busy(64);
        let all = planner.plan(&pulse, 1, Moment::default()).len();
        assert!(all > 1);
        assert_eq!(planner.plan(&pulse, 2, Moment::default()), vec![]);
        pulse.load[7].running = 0;
        let changed = planner.plan(&pulse, 3, Moment::default());
        assert_eq!(changed.len(), 1);
        assert_eq!(changed[0].1.version, 3);
        planner.pushed(endpoint(9));
        assert_eq!(planner.plan(&pulse, 4, Moment::default()).len(), 1, "a pushed row is posted once more");
        assert_eq!(planner.plan(&pulse, 5, Moment::default()), vec![]);
    }

    #[test]
    fn a_look_that_only_grew_older_is_not_posted_again() {
        let row = |age_ms| ObservedRow {
            endpoint: endpoint(1),
            age_ms,
            running: 2,
            waiting: 1,
            kv_ratio: Some(0.5),
            engine_epoch: 3,
        };
        let pulse = |age_ms| Pulse { observed: vec![row(age_ms)], ..Pulse::default() };
        let mut planner = Planner::default();
        assert_eq!(planner.plan(&pulse(40), 1, Moment::from_millis(1_000)).len(), 1);
        assert_eq!(planner.plan(&pulse(541), 2, Moment::from_millis(1_500)).len(), 0);
        assert_eq!(planner.plan(&pulse(10), 3, Moment::from_millis(1_600)).len(), 1, "a new look");
    }

    #[test]
    fn parts_of_a_finer_split_are_emptied() {
        let mut planner = Planner::default();
        assert!(planner.plan(&busy(300), 1, Moment::default()).len() >= 8);
        let parts = planner.plan(&busy(1), 2, Moment::default());
        assert!(parts.len() >= 8, "all old parts are written over");
        assert_eq!(parts.iter().filter(|(_, part)| !part.load.is_empty()).count(), 1);
    }

    #[test]
    fn a_costly_pulse_is_rewritten_less_often() {
        let every = Duration::from_millis(100);
        assert_eq!(next_after(0, 1_000, every), every);
        assert_eq!(next_after(500, 1_000, every), Duration::from_millis(500));
        assert_eq!(next_after(1 << 40, 1_000, every), Duration::from_secs(1));
        assert_eq!(next_after(1, 0, every), Duration::from_secs(1));
    }
}
