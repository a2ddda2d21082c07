//! Block -> holders: which endpoints are believed to have which prefix block in their KV cache.

use std::mem;
use std::sync::atomic::{AtomicU32, Ordering};

use hashbrown::HashMap;
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::{BlockHash, Moment};

/// An endpoint's number in this replica's index; reusable once [`PrefixIndex::clear`] was called on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Slot(u16);

impl Slot {
    /// The most endpoints that one replica can number.
    pub const COUNT_MAX: usize = u16::MAX as usize;

    /// The slot with this number.
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u16 {
        self.0
    }
}

/// What a placement added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// How many leading blocks were already known to be at the slot; the others are news.
    pub new_from: usize,
}

/// How deep a prompt is warm, for each slot that holds any of it. Reusable: filling it allocates nothing
/// once it has grown.
#[derive(Clone, Default, Debug)]
pub struct WarmDepths {
    depths: SmallVec<[(Slot, u32); 16]>,
}

impl WarmDepths {
    /// How many leading blocks are believed warm at `slot`.
    pub fn at(&self, slot: Slot) -> u32 {
        self.depths.iter().find(|(held, _)| *held == slot).map_or(0, |(_, depth)| *depth)
    }

    /// The slots with any warm block and their depths in blocks, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, u32)> + '_ {
        self.depths.iter().copied()
    }

    /// How many leading blocks are warm anywhere.
    pub fn deepest(&self) -> u32 {
        self.depths.iter().map(|(_, depth)| *depth).max().unwrap_or(0)
    }
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

type Holders = SmallVec<[(Slot, u8); 4]>;

#[derive(Default)]
struct Shard {
    young: HashMap<BlockHash, Holders>,
    old: HashMap<BlockHash, Holders>,
}

const SHARDS: usize = 64;
const ENTRY_BYTES: usize = size_of::<(BlockHash, Holders)>() + 1;

/// See the module.
pub struct PrefixIndex {
    shards: Vec<RwLock<Shard>>,
    generations: Vec<AtomicU32>,
    shard_entries_max: usize,
}

impl PrefixIndex {
    /// An empty index that never takes more than `bytes_max`.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| RwLock::default()).collect(),
            generations: (0..=u16::MAX).map(|_| AtomicU32::new(0)).collect(),
            shard_entries_max: (bytes_max / SHARDS / ENTRY_BYTES / 4).max(1),
        }
    }

    fn shard(&self, block: BlockHash) -> &RwLock<Shard> {
        &self.shards[(block.raw() >> 58) as usize]
    }

    fn generation(&self, slot: Slot) -> u8 {
        self.generations[usize::from(slot.0)].load(Ordering::Relaxed) as u8
    }

    /// Notes that `slot` is about to hold these leading blocks of a prompt.
    pub fn place(&self, blocks: &[BlockHash], slot: Slot, _now: Moment) -> Placed {
        let generation = self.generation(slot);
        let mut new_from = blocks.len();
        for (depth, &block) in blocks.iter().enumerate() {
            let mut shard = self.shard(block).write();
            let mut holders = match shard.young.remove(&block) {
                Some(holders) => holders,
                None => shard.old.remove(&block).unwrap_or_default(),
            };
            holders.retain(|(held, at)| *at == self.generation(*held));
            if !holders.iter().any(|(held, _)| *held == slot) {
                holders.push((slot, generation));
                new_from = new_from.min(depth);
            }
            if shard.young.len() >= self.shard_entries_max {
                shard.old = mem::take(&mut shard.young);
            }
            shard.young.insert(block, holders);
        }
        Placed { new_from }
    }

    /// Takes back what [`Self::place`] noted.
    pub fn withdraw(&self, blocks: &[BlockHash], slot: Slot) {
        for &block in blocks {
            let mut shard = self.shard(block).write();
            let Shard { young, old } = &mut *shard;
            for map in [young, old] {
                if let Some(holders) = map.get_mut(&block) {
                    holders.retain(|(held, _)| *held != slot);
                    if holders.is_empty() {
                        map.remove(&block);
                    }
                }
            }
        }
    }

    /// The engine at `slot` said that only the first `depth` of these blocks were in its cache.
    pub fn trim(&self, blocks: &[BlockHash], slot: Slot, depth: usize) {
        self.withdraw(blocks.get(depth..).unwrap_or_default(), slot);
    }

    /// Fills `out` with how many leading blocks are believed warm at each slot that holds any.
    pub fn warm_depths(&self, blocks: &[BlockHash], out: &mut WarmDepths) {
        out.depths.clear();
        for (depth, &block) in blocks.iter().enumerate().rev() {
            let shard = self.shard(block).read();
            let holders = shard.young.get(&block).or_else(|| shard.old.get(&block));
            for &(slot, generation) in holders.into_iter().flatten() {
                if generation == self.generation(slot) && out.at(slot) == 0 {
                    out.depths.push((slot, depth as u32 + 1));
                }
            }
        }
    }

    /// Forgets all that `slot` holds.
    pub fn clear(&self, slot: Slot) {
        self.generations[usize::from(slot.0)].fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes of memory taken.
    pub fn bytes(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| {
                let shard = shard.read();
                (shard.young.allocation_size()) + shard.old.allocation_size()
            })
            .sum()
    }

    /// Blocks known.
    pub fn blocks(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| {
                let shard = shard.read();
                shard.young.len() + shard.old.len()
            })
            .sum()
    }

    /// The pairs from `cursor` (the start if `None`) on, about `limit` of them, and where to go on;
    /// `None` at the end.
    pub fn walk(&self, cursor: Option<Cursor>, limit: usize) -> (Vec<(BlockHash, Slot)>, Option<Cursor>) {
        let mut page = Vec::new();
        let mut at = cursor.map_or(0, |cursor| cursor.0 as usize);
        while page.len() < limit {
            let Some(shard) = self.shards.get(at) else { return (page, None) };
            let shard = shard.read();
            for (block, holders) in shard.old.iter().chain(&shard.young) {
                page.extend(
                    holders
                        .iter()
                        .filter(|(slot, generation)| *generation == self.generation(*slot))
                        .map(|(slot, _)| (*block, *slot)),
                );
            }
            at += 1;
        }
        (page, (at < self.shards.len()).then_some(Cursor(at as u64)))
    }
}
