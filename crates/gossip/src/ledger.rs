//! This replica's own ledger: its records in order, the newest kept for those who missed some.

use std::collections::VecDeque;

use routing::facts::LedgerRecord;

use crate::codec;
use crate::wire::{Head, Run, SLOTS_MAX};

/// Blocks in one record. A longer path is cut into several: each block's hash names all before it.
const BLOCKS_MAX: usize = 100;
/// Bytes in one slot before base64 makes them 1.2 KB.
const SLOT_BYTES_MAX: usize = 880;
/// Bytes in one page of a pull.
const PAGE_BYTES_MAX: usize = 256 << 10;
/// What a record costs in memory beyond its encoding.
const ENTRY_OVERHEAD_BYTES: usize = 96;

pub(crate) struct Log {
    entries: VecDeque<Entry>,
    head: Head,
    bytes: usize,
    bytes_max: usize,
    /// The slot written next.
    slot: usize,
}

struct Entry {
    record: LedgerRecord,
    /// Encoded.
    bytes: usize,
}

/// The answer to a request for records from some number on.
#[derive(Debug, PartialEq)]
pub(crate) enum Range {
    Kept(Run, Head),
    /// The first of them is no longer kept.
    Gone,
}

impl Log {
    /// An empty log that keeps up to `bytes_max` bytes.
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { entries: VecDeque::new(), head: Head::default(), bytes: 0, bytes_max, slot: 0 }
    }

    pub(crate) fn head(&self) -> Head {
        self.head
    }

    pub(crate) fn append(&mut self, records: Vec<LedgerRecord>) {
        for record in records.into_iter().flat_map(cut) {
            let bytes = codec::size(&record);
            self.head = self.head.after(codec::digest(&record));
            self.bytes += bytes + ENTRY_OVERHEAD_BYTES;
            self.entries.push_back(Entry { record, bytes });
        }
        while self.bytes > self.bytes_max {
            let Some(entry) = self.entries.pop_front() else { break };
            self.bytes -= entry.bytes + ENTRY_OVERHEAD_BYTES;
        }
    }

    /// The number of the oldest record kept.
    fn oldest(&self) -> u64 {
        self.head.sequence + 1 - self.entries.len() as u64
    }

    /// The records from number `from` on, with their sizes.
    pub(crate) fn since(&self, from: u64) -> impl Iterator<Item = (u64, &LedgerRecord, usize)> {
        let first = from.max(self.oldest());
        let skip = usize::try_from(first - self.oldest()).unwrap_or(usize::MAX);
        let numbered = self.entries.iter().skip(skip).zip(first..);
        numbered.map(|(entry, sequence)| (sequence, &entry.record, entry.bytes))
    }

    /// One page of the records from number `from` on.
    pub(crate) fn range(&self, from: u64) -> Range {
        if from < self.oldest() {
            return Range::Gone;
        }
        let mut bytes = 0;
        let mut run = Run { first: from, records: Vec::new() };
        for (_, record, size) in self.since(from) {
            bytes += size;
            if bytes > PAGE_BYTES_MAX && !run.records.is_empty() {
                break;
            }
            run.records.push(record.clone());
        }
        Range::Kept(run, self.head)
    }

    /// Fills slots with the records from number `from` on, newest kept if they are more than the ring
    /// holds; records too large for a slot are left to be pulled.
    pub(crate) fn fill_slots(&mut self, from: u64) -> Vec<(usize, Run)> {
        let mut runs: VecDeque<(usize, Run)> = VecDeque::new();
        let mut room = 0;
        for (sequence, record, size) in self.since(from) {
            if size > SLOT_BYTES_MAX {
                room = 0;
                continue;
            }
            if size > room {
                runs.push_back((0, Run { first: sequence, records: Vec::new() }));
                room = SLOT_BYTES_MAX;
                if runs.len() > SLOTS_MAX {
                    runs.pop_front();
                }
            }
            room -= size;
            if let Some((_, run)) = runs.back_mut() {
                run.records.push(record.clone());
            }
        }
        for (slot, _) in &mut runs {
            *slot = self.slot;
            self.slot = (self.slot + 1) % SLOTS_MAX;
        }
        runs.into()
    }
}

/// Cuts a record that is too long for a datagram, if it can be cut.
fn cut(record: LedgerRecord) -> Vec<LedgerRecord> {
    let pieces = |blocks: &[routing::BlockHash]| -> Vec<Vec<routing::BlockHash>> {
        blocks.chunks(BLOCKS_MAX).map(<[_]>::to_vec).collect()
    };
    match record {
        LedgerRecord::Place { endpoint, blocks } if blocks.len() > BLOCKS_MAX => {
            pieces(&blocks).into_iter().map(|blocks| LedgerRecord::Place { endpoint, blocks }).collect()
        }
        LedgerRecord::Withdraw { endpoint, blocks } if blocks.len() > BLOCKS_MAX => {
            pieces(&blocks).into_iter().map(|blocks| LedgerRecord::Withdraw { endpoint, blocks }).collect()
        }
        record => vec![record],
    }
}

#[cfg(test)]
mod tests {
    use routing::{BlockHash, EndpointId, SessionKey};

    use super::*;

    fn pin(n: u64) -> LedgerRecord {
        LedgerRecord::Pin { key: SessionKey::from_raw(n), endpoint: EndpointId::from_raw(u64::MAX - n) }
    }

    fn place(blocks: u64) -> LedgerRecord {
        let blocks = (0..blocks).map(|n| BlockHash::from_raw(u64::MAX - n)).collect();
        LedgerRecord::Place { endpoint: EndpointId::from_raw(u64::MAX), blocks }
    }

    #[test]
    fn a_range_gives_what_is_kept_and_says_what_is_gone() {
        let mut log = Log::new(10 * (codec::size(&pin(0)) + ENTRY_OVERHEAD_BYTES));
        assert_eq!(log.range(1), Range::Kept(Run { first: 1, records: vec![] }, Head::default()));
        log.append((1..=12).map(pin).collect());
        assert_eq!(log.head().sequence, 12);
        assert_eq!(log.range(2), Range::Gone);
        let run = Run { first: 3, records: (3..=12).map(pin).collect() };
        assert_eq!(log.range(3), Range::Kept(run, log.head()));
        assert_eq!(log.range(13), Range::Kept(Run { first: 13, records: vec![] }, log.head()));
    }

    #[test]
    fn a_long_path_is_cut_and_none_of_it_lost() {
        let mut log = Log::new(1 << 20);
        log.append(vec![place(250)]);
        assert_eq!(log.head().sequence, 3);
        let blocks = log.since(1).map(|(_, record, bytes)| {
            assert!(bytes <= SLOT_BYTES_MAX + 64, "{bytes}");
            let LedgerRecord::Place { blocks, .. } = record else { panic!("{record:?}") };
            blocks.clone()
        });
        let LedgerRecord::Place { blocks: all, .. } = place(250) else { unreachable!() };
        assert_eq!(blocks.collect::<Vec<_>>().concat(), all);
    }

    #[test]
    fn slots_go_round_and_hold_the_newest() {
        let mut log = Log::new(1 << 20);
        log.append(vec![pin(1)]);
        assert_eq!(log.fill_slots(1), vec![(0, Run { first: 1, records: vec![pin(1)] })]);
        assert_eq!(log.fill_slots(2), vec![]);
        log.append((0..40).map(|_| place(90)).collect());
        let runs = log.fill_slots(2);
        assert_eq!(runs.len(), SLOTS_MAX);
        assert_eq!(runs[0].0, 1);
        assert_eq!(runs[15].0, 0);
        assert_eq!(runs[15].1.first + runs[15].1.records.len() as u64 - 1, 41);
        for (_, run) in &runs {
            assert!(codec::to_text(run).expect("it is small").len() <= 1_200);
        }
    }
}
