//! What other replicas say they carry at an endpoint: one absolute row an origin, summed.
//!
//! A row replaces its origin's earlier row and touches nobody else's (invariant I-02), so the sum is the
//! same whatever order the reports of different origins came in.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::placed::{PLACED_HALF_LIFE, decayed};
use crate::facts::LoadRow;
use crate::reserve::PackedCharge;
use crate::{Moment, ReplicaId};

/// The rows of all other replicas at one endpoint, with their sums at hand.
#[derive(Debug, Default)]
pub(super) struct Rows {
    by_origin: Mutex<Vec<OriginRow>>,
    packed: AtomicU64,
    decode_tokens: AtomicU64,
    /// Counts each time the prompts of an origin became less: some were done.
    done: AtomicU32,
}

#[derive(Debug)]
struct OriginRow {
    origin: ReplicaId,
    row: LoadRow,
    heard: Moment,
}

impl Rows {
    /// Replaces `origin`'s row. A row that is all zero leaves nothing behind.
    pub(super) fn set(&self, origin: &ReplicaId, row: LoadRow, now: Moment) {
        let mut rows = self.by_origin.lock();
        let at = rows.binary_search_by(|held| held.origin.cmp(origin));
        let nothing =
            row.running == 0 && row.prefill_tokens == 0 && row.decode_tokens == 0 && row.placed_tokens == 0;
        match (at, nothing) {
            (Ok(at), _) => {
                if row.prefill_tokens < rows[at].row.prefill_tokens {
                    self.done.fetch_add(1, Ordering::Relaxed);
                }
                if nothing {
                    rows.remove(at);
                } else {
                    rows[at] = OriginRow { origin: origin.clone(), row, heard: now };
                }
            }
            (Err(_), true) => return,
            (Err(at), false) => rows.insert(at, OriginRow { origin: origin.clone(), row, heard: now }),
        }
        self.publish(&rows);
    }

    /// Forgets `origin`.
    pub(super) fn remove(&self, origin: &ReplicaId) {
        let mut rows = self.by_origin.lock();
        rows.retain(|held| held.origin != *origin);
        self.publish(&rows);
    }

    fn publish(&self, rows: &[OriginRow]) {
        let sum = |part: fn(&LoadRow) -> u32| rows.iter().map(|held| u64::from(part(&held.row))).sum::<u64>();
        let running = u32::try_from(sum(|row| row.running)).unwrap_or(u32::MAX);
        let packed = PackedCharge::new(running, sum(|row| row.prefill_tokens));
        self.packed.store(packed.raw(), Ordering::Release);
        self.decode_tokens.store(sum(|row| row.decode_tokens), Ordering::Release);
    }

    /// Running requests and prefill tokens of all others.
    pub(super) fn charge(&self) -> PackedCharge {
        PackedCharge::from_raw(self.packed.load(Ordering::Acquire))
    }

    /// How often prompts of theirs were done so far.
    pub(super) fn prompts_done(&self) -> u32 {
        self.done.load(Ordering::Relaxed)
    }

    /// Decode tokens of all others.
    pub(super) fn decode_tokens(&self) -> u64 {
        self.decode_tokens.load(Ordering::Acquire)
    }

    /// Placed tokens of all others, decayed since each was heard.
    pub(super) fn placed_tokens(&self, now: Moment) -> f64 {
        let rows = self.by_origin.lock();
        rows.iter()
            .map(|held| decayed(f64::from(held.row.placed_tokens), held.heard, now, PLACED_HALF_LIFE))
            .sum()
    }

    /// Who runs how many requests here, by name.
    pub(super) fn running_by_replica(&self) -> Vec<(ReplicaId, u32)> {
        let rows = self.by_origin.lock();
        rows.iter()
            .filter(|held| held.row.running > 0)
            .map(|held| (held.origin.clone(), held.row.running))
            .collect()
    }
}
