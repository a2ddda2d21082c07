//! Packs what changed into push datagrams, and keeps pushes within their byte budget.

use std::collections::HashMap;
use std::time::Duration;

use routing::facts::{LedgerRecord, LoadRow};
use routing::{EndpointId, Moment};

use crate::codec;
use crate::envelope::{DATAGRAM_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::wire::{Push, Run};

/// The lengths of two lists and the number of the first record, each at most 9 bytes when they grow.
const GROWTH_BYTES: usize = 27;

/// The pushes that carry these rows and records, each within one datagram. `bare` is a push with neither. A
/// record too large for a datagram is left to be pulled.
pub(crate) fn pack<'a>(
    bare: &Push,
    rows: &[LoadRow],
    records: impl Iterator<Item = (u64, &'a LedgerRecord, usize)>,
) -> Vec<Push> {
    let room_max = PAYLOAD_BYTES_MAX - 1 - codec::size(bare) - GROWTH_BYTES;
    let mut pushes = vec![bare.clone()];
    let mut room = room_max;
    let mut current = bare.clone();
    let mut close = |current: &mut Push, room: &mut usize| {
        pushes.push(std::mem::replace(current, bare.clone()));
        *room = room_max;
    };
    for row in rows {
        let size = codec::size(row);
        if size > room {
            close(&mut current, &mut room);
        }
        room -= size;
        current.load.push(*row);
    }
    for (sequence, record, size) in records {
        let follows = current.run.first + current.run.records.len() as u64 == sequence;
        if size > room_max {
            continue;
        }
        if size > room || !(current.run.records.is_empty() || follows) {
            close(&mut current, &mut room);
        }
        if current.run.records.is_empty() {
            current.run = Run { first: sequence, records: Vec::new() };
        }
        room -= size;
        current.run.records.push(record.clone());
    }
    close(&mut current, &mut room);
    // The bare one at the front was only the start of the list, unless nothing else came.
    if pushes.len() > 1 {
        pushes.remove(0);
    }
    pushes
}

/// The rows that are not as they were pushed last; one that vanished is told as zero.
pub(crate) fn changed_rows(pushed: &HashMap<EndpointId, LoadRow>, load: &[LoadRow]) -> Vec<LoadRow> {
    let mut rows: Vec<LoadRow> =
        load.iter().filter(|row| pushed.get(&row.endpoint) != Some(row)).copied().collect();
    if pushed.len() + rows.len() > load.len() {
        let current: std::collections::HashSet<_> = load.iter().map(|row| row.endpoint).collect();
        let gone = pushed.keys().filter(|endpoint| !current.contains(endpoint));
        rows.extend(gone.map(|&endpoint| LoadRow {
            endpoint,
            running: 0,
            prefill_tokens: 0,
            decode_tokens: 0,
            placed_tokens: 0,
        }));
    }
    rows.sort_unstable_by_key(|row| row.endpoint);
    rows
}

/// Pushes that a replica which was quiet may send at once: what a request or two have to say (chosen, first
/// token, ended). Were they held back, a follow-up turn that comes at once through another replica would find
/// its own last turn still in the way.
const BURST: u32 = 8;

/// Spaces pushes out: one each period on average, [`BURST`] at once after a pause.
#[derive(Debug)]
pub(crate) struct Pace {
    every: Duration,
    due: Moment,
}

impl Pace {
    pub(crate) fn new(every: Duration, now: Moment) -> Self {
        Self { every, due: now }
    }

    /// When the next push may go out; past if it may at once.
    pub(crate) const fn due(&self) -> Moment {
        self.due
    }

    /// Counts a push.
    pub(crate) fn spend(&mut self, now: Moment) {
        self.due = self.due.max(now.minus(self.every * (BURST - 1))).plus(self.every);
    }
}

/// A byte budget that fills up at a steady rate, to at most a quarter of a second's worth.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes_per_second: u64,
    bytes: f64,
    at: Moment,
}

impl Budget {
    pub(crate) fn new(bytes_per_second: u64, now: Moment) -> Self {
        let mut budget = Self { bytes_per_second, bytes: 0.0, at: now };
        budget.bytes = budget.bytes_max();
        budget
    }

    /// Room for a burst; a budget of any size affords one datagram to a few peers.
    fn bytes_max(&self) -> f64 {
        (self.bytes_per_second as f64 / 4.0).max(16.0 * DATAGRAM_BYTES_MAX as f64)
    }

    /// Takes this much, if it is there.
    pub(crate) fn take(&mut self, bytes: usize, now: Moment) -> bool {
        let seconds = Duration::as_secs_f64(&now.since(self.at));
        self.bytes = (self.bytes + seconds * self.bytes_per_second as f64).min(self.bytes_max());
        self.at = now;
        let affordable = self.bytes >= bytes as f64;
        if affordable {
            self.bytes -= bytes as f64;
        }
        affordable
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use routing::{BlockHash, ReplicaId, SessionKey};

    use super::*;
    use crate::wire::{Head, Presence};

    fn bare() -> Push {
        Push {
            replica: ReplicaId::new("grapevine-0"),
            generation: u64::MAX,
            version: u64::MAX,
            state: Presence::default(),
            head: Head { sequence: u64::MAX, digest: u64::MAX },
            run: Run::default(),
            load: Vec::new(),
        }
    }

    fn row(n: u64) -> LoadRow {
        let endpoint = EndpointId::from_raw(u64::MAX - n);
        LoadRow { endpoint, running: n as u32, prefill_tokens: 70_000, decode_tokens: 1, placed_tokens: 0 }
    }

    proptest! {
        #[test]
        fn everything_is_told_once_in_datagrams_that_fit(
            rows in 0_u64..200,
            lengths in proptest::collection::vec(0_usize..130, 0..40),
        ) {
            let rows: Vec<_> = (0..rows).map(row).collect();
            let records: Vec<_> = lengths
                .iter()
                .map(|&n| match n {
                    0 => LedgerRecord::Pin { key: SessionKey::from_raw(1), endpoint: EndpointId::from_raw(2) },
                    n => LedgerRecord::Place {
                        endpoint: EndpointId::from_raw(u64::MAX),
                        blocks: (0..n as u64).map(|b| BlockHash::from_raw(u64::MAX - b)).collect(),
                    },
                })
                .collect();
            let sizes: Vec<_> = records.iter().map(codec::size).collect();
            let numbered = (1..).zip(&records).zip(&sizes).map(|((n, record), &size)| (n, record, size));
            let pushes = pack(&bare(), &rows, numbered);
            let mut told = Vec::new();
            let mut told_rows = Vec::new();
            for push in &pushes {
                prop_assert!(codec::encode(push).expect("it is small").len() <= PAYLOAD_BYTES_MAX);
                told_rows.extend(push.load.iter().copied());
                told.extend((push.run.first..).zip(push.run.records.iter().cloned()));
            }
            let room = PAYLOAD_BYTES_MAX - 1 - codec::size(&bare()) - GROWTH_BYTES;
            let fitting: Vec<_> =
                (1..).zip(records).zip(sizes).filter(|(_, size)| *size <= room).map(|(record, _)| record).collect();
            prop_assert_eq!(told_rows, rows);
            prop_assert_eq!(told, fitting);
        }
    }

    #[test]
    fn nothing_to_tell_is_one_bare_push() {
        assert_eq!(pack(&bare(), &[], std::iter::empty()), vec![bare()]);
    }

    #[test]
    fn rows_that_vanish_are_told_as_zero() {
        let pushed: HashMap<_, _> = [row(1), row(2), row(3)].map(|row| (row.endpoint, row)).into();
        let changed = LoadRow { running: 9, ..row(2) };
        let zero = LoadRow { running: 0, prefill_tokens: 0, decode_tokens: 0, placed_tokens: 0, ..row(3) };
        let mut expected = vec![zero, changed, row(4)];
        expected.sort_unstable_by_key(|row| row.endpoint);
        assert_eq!(changed_rows(&pushed, &[row(1), changed, row(4)]), expected);
        assert_eq!(changed_rows(&pushed, &[row(1), row(2), row(3)]), vec![]);
    }

    #[test]
    fn pushes_after_a_pause_go_out_at_once_and_a_stream_of_them_is_spaced_out() {
        let at = Moment::from_millis;
        let mut pace = Pace::new(Duration::from_millis(2), at(0));
        let mut sent = Vec::new();
        let mut now = at(1_000);
        while now < at(1_050) {
            if pace.due() <= now {
                pace.spend(now);
                sent.push(now.micros() / 1_000 - 1_000);
            }
            now = now.plus(Duration::from_micros(100));
        }
        assert_eq!(sent[..8], [0; 8]);
        assert_eq!(sent[8..12], [2, 4, 6, 8]);
        assert_eq!(sent.len(), 8 + 24);
    }

    #[test]
    fn a_budget_that_is_used_up_fills_again() {
        let mut budget = Budget::new(100_000, Moment::default());
        assert!(budget.take(25_000, Moment::default()));
        assert!(!budget.take(1, Moment::default()));
        assert!(!budget.take(1_001, Moment::from_millis(10)));
        assert!(budget.take(1_000, Moment::from_millis(10)));
        assert!(!budget.take(26_000, Moment::from_millis(60_000)));
        assert!(budget.take(25_000, Moment::from_millis(60_000)));
    }
}
