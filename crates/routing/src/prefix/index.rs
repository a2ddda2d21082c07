//! Block -> holders: which endpoints are believed to have which prefix block in their KV cache.
//!
//! The main choice: a flat, bounded array of pairs in many small parts, each behind a lock of its own that
//! is held for one block at a time. No tree: the hash of a block names all before it, so how deep a prompt
//! is warm is found by bisection. A hole in a prefix is no harm: what counts is the deepest block that is
//! really there.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::crowd::Joined;
use super::depths::WarmDepths;
use super::shard::{ENTRY_BYTES, Shard, Shared, tick, tick_end};
use super::slot::{Generations, Slot};
use crate::{BlockHash, Moment};

/// The least memory that an index makes do with; 133 KB of it are fixed.
pub const INDEX_BYTES_MIN: usize = 1 << 20;

/// How large a part of the index may get: rebuilding one while it grows takes some 20 us.
const PART_BYTES_MAX: usize = 64 << 10;

/// The most parts. Beyond 4 GiB the parts get larger instead.
const PART_BITS_MAX: u32 = 16;

/// One in so many bytes is for blocks that many endpoints hold.
const CROWD_SHARE: usize = 8;

/// What a placement added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// How many leading blocks were already known to be at the slot; those after it are news.
    pub new_from: usize,
}

/// Where a walk over the index goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cursor(u64);

impl Cursor {
    /// The cursor with this raw value, which [`Self::raw`] gave.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// As a plain number, for whoever carries it between two calls.
    pub const fn raw(self) -> u64 {
        self.0
    }
}

/// Which endpoints hold which blocks, as far as this replica knows.
///
/// Memory: never more than the bytes it was made for, counted by what is allocated, except that a part
/// that grows is there twice while it does. A (block, holder) pair takes 16 bytes in arrays that are kept 2/3 to 5/6
/// full, so 19 to 24; of a block with more than six holders each further one takes 8 to 10. When there is no more room
/// the oldest of a few pairs at hand makes room, so what is placed again and again stays.
#[derive(Debug)]
pub struct PrefixIndex {
    parts: Box<[RwLock<Shard>]>,
    shared: Shared,
}

impl PrefixIndex {
    /// An empty index that takes at most `bytes_max`, but not less than [`INDEX_BYTES_MIN`].
    pub fn new(bytes_max: usize) -> Self {
        let bytes_max = bytes_max.max(INDEX_BYTES_MIN);
        let part_bits = (bytes_max / PART_BYTES_MAX).next_power_of_two().ilog2().min(PART_BITS_MAX);
        let parts: Box<[_]> = (0..1_usize << part_bits).map(|_| RwLock::new(Shard::default())).collect();
        let room = bytes_max - fixed_bytes(parts.len());
        let crowd_bytes_max = room / CROWD_SHARE;
        let shared = Shared {
            generations: Generations::new(),
            part_bits,
            entries_max: (room - crowd_bytes_max) / parts.len() / ENTRY_BYTES,
            crowd_bytes_max,
            entry_bytes: AtomicUsize::new(0),
            crowd_bytes: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
        };
        Self { parts, shared }
    }

    /// The part that a block is in, and the block's hash as the parts want it.
    fn part(&self, block: BlockHash) -> (&RwLock<Shard>, u64) {
        // 0 stands for a gap
        let hash = block.raw().max(1);
        (&self.parts[self.part_number(hash)], hash)
    }

    fn part_number(&self, hash: u64) -> usize {
        hash.checked_shr(u64::BITS - self.shared.part_bits).unwrap_or(0) as usize
    }

    /// Notes that `slot` is about to hold these blocks, leading ones of a prompt or a part of its path,
    /// and that they were wanted just now.
    pub fn place(&self, blocks: &[BlockHash], slot: Slot, now: Moment) -> Placed {
        let tenant = self.shared.generations.tenant(slot);
        let tick = tick(now.micros());
        let mut new_from = None;
        for (depth, &block) in blocks.iter().enumerate() {
            let (part, hash) = self.part(block);
            // behind a block that is new all are, as a rule
            if new_from.is_none() && part.read().touch(hash, tenant, tick, &self.shared) {
                continue;
            }
            if part.write().place(hash, tenant, tick, &self.shared) != Joined::Known {
                new_from.get_or_insert(depth);
            }
        }
        Placed { new_from: new_from.unwrap_or(blocks.len()) }
    }

    /// Takes back that `slot` holds these blocks, whoever noted it. After a failed request that is the
    /// blocks from [`Placed::new_from`] on: the others were there before.
    pub fn withdraw(&self, blocks: &[BlockHash], slot: Slot) {
        for &block in blocks {
            let (part, hash) = self.part(block);
            part.write().withdraw(hash, slot, &self.shared);
        }
    }

    /// The engine at `slot` said that of this prompt only the first `depth` blocks were in its cache.
    pub fn trim(&self, blocks: &[BlockHash], slot: Slot, depth: usize) {
        self.withdraw(blocks.get(depth..).unwrap_or_default(), slot);
    }

    /// Forgets all that `slot` holds, at once and in constant time; the memory comes back by and by.
    pub fn clear(&self, slot: Slot) {
        self.shared.generations.advance(slot);
    }

    /// Fills `out` with how many leading blocks of a prompt are believed warm at each slot that holds any.
    ///
    /// Whoever holds a block holds those before it, so the number of holders falls with depth. Only where
    /// it falls the holders are looked at: a prompt of 64 blocks takes some 8 to 20 look-ups, and a common
    /// part that thousands hold is listed once. Where that rule is broken (holes), a depth found is still
    /// one where the slot really is a holder.
    pub fn warm_depths(&self, blocks: &[BlockHash], out: &mut WarmDepths) {
        self.warm_depths_of_few(blocks, usize::MAX, out);
    }

    /// The same, but a depth to which more than `holders_max` hold the prompt is noted as a crowd and its holders are
    /// not listed: whether one of them is meant, [`Self::holds`] says.
    pub fn warm_depths_of_few(&self, blocks: &[BlockHash], holders_max: usize, out: &mut WarmDepths) {
        out.clear();
        let (Some(&first), Some(&last)) = (blocks.first(), blocks.last()) else { return };
        let at_end = self.holders(last);
        let high = Level { depth: blocks.len(), holders: at_end };
        if at_end > 0 {
            self.note_level(last, high, holders_max, out);
        }
        if blocks.len() > 1 {
            let low = Level { depth: 1, holders: self.holders(first) };
            self.note_between(blocks, low, high, holders_max, out);
        }
    }

    /// Notes who holds `low.depth` blocks or more, but not `high.depth`; deepest first.
    fn note_between(
        &self,
        blocks: &[BlockHash],
        low: Level,
        high: Level,
        holders_max: usize,
        out: &mut WarmDepths,
    ) {
        if low.holders == high.holders {
            return;
        }
        if high.depth - low.depth == 1 {
            return self.note_level(blocks[low.depth - 1], low, holders_max, out);
        }
        let depth = low.depth.midpoint(high.depth);
        let middle = Level { depth, holders: self.holders(blocks[depth - 1]) };
        self.note_between(blocks, middle, high, holders_max, out);
        self.note_between(blocks, low, middle, holders_max, out);
    }

    /// How many hold a block.
    pub fn holders(&self, block: BlockHash) -> usize {
        let (part, hash) = self.part(block);
        part.read().holders(hash, &self.shared)
    }

    /// Whether `slot` holds a block.
    pub fn holds(&self, block: BlockHash, slot: Slot) -> bool {
        self.touched(block, slot).is_some()
    }

    /// Some of the holders of a block, at most `count`: those that follow `from` in an order of the index's own,
    /// which begins anew after its end.
    pub fn some_holders(&self, block: BlockHash, from: u64, count: usize) -> Vec<Slot> {
        let (part, hash) = self.part(block);
        part.read().some_holders(hash, from, count, &self.shared)
    }

    fn note_level(&self, block: BlockHash, level: Level, holders_max: usize, out: &mut WarmDepths) {
        let (part, hash) = self.part(block);
        let depth = u32::try_from(level.depth).unwrap_or(u32::MAX);
        if level.holders > holders_max {
            return out.note_crowd(depth, level.holders);
        }
        part.read().each_holder(hash, &self.shared, |slot| out.note(slot, depth));
    }

    /// When `slot` was last noted to hold the block, to an eighth of a second, the later end of it; `None` if
    /// it is not.
    pub fn touched(&self, block: BlockHash, slot: Slot) -> Option<Moment> {
        let tenant = self.shared.generations.tenant(slot);
        let (part, hash) = self.part(block);
        part.read().touched(hash, tenant, &self.shared).map(|tick| Moment::from_micros(tick_end(tick)))
    }

    /// How many of these leading blocks, all held by `slot`, were wanted there since `then`. Whoever wants a
    /// block wants those before it, though not each of them may have been noted: the deepest one noted counts.
    pub fn depth_since(&self, blocks: &[BlockHash], slot: Slot, then: Moment) -> usize {
        let wanted = |block: &BlockHash| self.touched(*block, slot).is_some_and(|at| at >= then);
        blocks.iter().rposition(wanted).map_or(0, |at| at + 1)
    }

    /// Bytes of memory taken, by what is allocated.
    pub fn bytes(&self) -> usize {
        fixed_bytes(self.parts.len())
            + self.shared.entry_bytes.load(Ordering::Relaxed)
            + self.shared.crowd_bytes.load(Ordering::Relaxed)
    }

    /// Blocks noted. Looks at every part: for reports.
    pub fn blocks(&self) -> usize {
        self.parts.iter().map(|part| part.read().blocks()).sum()
    }

    /// Pairs of a block and a holder noted; those of cleared slots count until they are met. Looks at
    /// every part: for reports.
    pub fn pairs(&self) -> usize {
        self.parts.iter().map(|part| part.read().pairs()).sum()
    }

    /// Pairs that had to make room for others so far.
    pub fn evicted(&self) -> u64 {
        self.shared.evicted.load(Ordering::Relaxed)
    }

    /// The pairs from `cursor` (the start if `None`) on, block by block, and where to go on; `None` at the
    /// end. A page has at most `limit` pairs and the rest of the last block's holders, which may be as
    /// many as there are endpoints. What is placed or evicted meanwhile may or may not be met.
    pub fn walk(&self, cursor: Option<Cursor>, limit: usize) -> (Vec<(BlockHash, Slot)>, Option<Cursor>) {
        let from = cursor.map_or(1, |Cursor(hash)| hash.max(1));
        let mut page = Vec::new();
        for (number, part) in self.parts.iter().enumerate().skip(self.part_number(from)) {
            let shard = part.read();
            let from = if number == self.part_number(from) { from } else { 1 };
            if let Some(next) = shard.walk(from, limit.max(1), &self.shared, &mut page) {
                return (page, Some(Cursor(next)));
            }
        }
        (page, None)
    }
}

/// A depth in a prompt and how many are noted as holders of that block.
#[derive(Clone, Copy)]
struct Level {
    depth: usize,
    holders: usize,
}

fn fixed_bytes(parts: usize) -> usize {
    Generations::BYTES + parts * size_of::<RwLock<Shard>>()
}

#[cfg(test)]
mod tests;
