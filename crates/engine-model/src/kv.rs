//! KV blocks: a fixed pool with reference counts, a content hash for each full block, and eviction of the
//! least recently freed.
//!
//! As in vLLM, a block that nobody uses keeps its content (and can be hit) until the pool needs it for
//! something else, and the blocks of one request are freed from its end, so that the ends of conversations
//! leave before their beginnings. One difference: a hash has at most one block; a second block with the same
//! content stays unhashed.
//!
//! A block has a name, by which it is found, and a content, what is really in it. The two differ once KV was
//! fetched from another engine's blocks that held something else: the block is *spoiled*, and so is all that is
//! computed on top of it. As in a real engine nobody notices but by the answers.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::tokens::{TokenId, to_bytes};

/// The hash of a full block's tokens and of all before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockHash(pub u64);

impl BlockHash {
    /// What the first block's hash is chained to: nothing of one model or tenant is found by another.
    pub fn root(model: &str, cache_salt: &str) -> Self {
        let salt = xxh3_64_with_seed(cache_salt.as_bytes(), cache_salt.len() as u64);
        Self(xxh3_64_with_seed(model.as_bytes(), salt))
    }

    /// The content of a block that was computed from, or filled with, what does not belong to its name.
    pub fn spoiled(self) -> Self {
        Self(xxh3_64_with_seed(b"spoiled", self.0))
    }

    /// The hash of the block with these tokens behind `self`.
    pub fn then(self, tokens: &[TokenId]) -> Self {
        Self(xxh3_64_with_seed(&to_bytes(tokens), self.0))
    }

    /// The hashes of all full blocks of a prompt.
    pub fn chain(self, tokens: &[TokenId], block_tokens: usize) -> Vec<Self> {
        let bytes = to_bytes(tokens);
        let mut last = self.0;
        let blocks = bytes.chunks_exact(block_tokens * size_of::<u32>());
        blocks
            .map(|block| {
                last = xxh3_64_with_seed(block, last);
                Self(last)
            })
            .collect()
    }
}

/// The index of a block in its pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockId(u32);

impl BlockId {
    /// As told to other engines. Like vLLM, which keeps block 0 for itself, these begin at 1.
    pub fn told(self) -> u32 {
        self.0 + 1
    }
}

/// The end of the list, and a place outside it.
const NONE: u32 = u32::MAX;

#[derive(Clone)]
struct Block {
    users: u32,
    hash: Option<BlockHash>,
    /// What was computed in it or copied into it last; freed memory keeps it.
    content: Option<BlockHash>,
    previous: u32,
    next: u32,
}

/// A pool of KV blocks.
#[derive(Clone)]
pub struct BlockPool {
    blocks: Vec<Block>,
    cached: HashMap<BlockHash, BlockId, BuildHasherDefault<AsIs>>,
    /// Unused blocks as a linked list, the next to be reused first.
    first: u32,
    last: u32,
    free: u32,
}

impl BlockPool {
    /// An empty pool of `blocks` blocks.
    pub fn new(blocks: u32) -> Self {
        let mut pool =
            Self { blocks: Vec::new(), cached: HashMap::default(), first: NONE, last: NONE, free: 0 };
        pool.blocks.resize(
            blocks as usize,
            Block { users: 0, hash: None, content: None, previous: NONE, next: NONE },
        );
        for block in 0..blocks {
            pool.push_last(block);
        }
        pool
    }

    /// Blocks in the pool.
    pub fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that nobody uses, cached or not.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// How many of these blocks, from the first on, are cached without a gap.
    pub fn cached_run(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.cached.contains_key(hash)).count()
    }

    /// Takes the blocks of `hits` (all cached, as [`Self::cached_run`] counted) and `new` others into use,
    /// appending them to `held`; `false`, and nothing changed, when too few are free.
    #[must_use]
    pub fn acquire(&mut self, hits: &[BlockHash], new: u32, held: &mut Vec<BlockId>) -> bool {
        let hit = |hash| self.cached.get(hash).copied();
        let unused_hits = hits.iter().filter_map(hit).filter(|id| self.block(*id).users == 0).count() as u32;
        if self.free < unused_hits + new {
            return false;
        }
        for hash in hits {
            if let Some(&id) = self.cached.get(hash) {
                if self.block(id).users == 0 {
                    self.unlink(id.0);
                }
                self.blocks[id.0 as usize].users += 1;
                held.push(id);
            }
        }
        for _ in 0..new {
            let id = self.first;
            self.unlink(id);
            let block = &mut self.blocks[id as usize];
            block.users = 1;
            block.content = None;
            if let Some(hash) = block.hash.take() {
                self.cached.remove(&hash);
            }
            held.push(BlockId(id));
        }
        true
    }

    /// Says what a block in use is to be found as, and what it holds (`None` for what belongs to that name).
    pub fn name(&mut self, id: BlockId, hash: BlockHash, content: Option<BlockHash>) {
        self.fill(id, Some(content.unwrap_or(hash)));
        if self.block(id).hash.is_none() && !self.cached.contains_key(&hash) {
            self.blocks[id.0 as usize].hash = Some(hash);
            self.cached.insert(hash, id);
        }
    }

    /// Says what a block in use holds, without a name to find it by.
    pub fn fill(&mut self, id: BlockId, content: Option<BlockHash>) {
        self.blocks[id.0 as usize].content = content;
    }

    /// Whether any of these blocks, all cached, holds something else than its name says.
    pub fn spoiled(&self, hashes: &[BlockHash]) -> bool {
        let content = |hash| self.cached.get(hash).map(|&id| self.block(id).content);
        hashes.iter().any(|hash| content(hash).is_some_and(|content| content != Some(*hash)))
    }

    /// What blocks hold, by the numbers that were told to another engine; `None` for one that was never written
    /// or does not exist. Whether they are in use does not matter: they are read as memory is.
    pub fn contents(&self, told: &[u32]) -> Vec<Option<BlockHash>> {
        let block = |told: &u32| self.blocks.get(told.checked_sub(1)? as usize);
        told.iter().map(|told| block(told).and_then(|block| block.content)).collect()
    }

    /// Gives blocks back, the last of `held` to be reused first.
    pub fn release(&mut self, held: &mut Vec<BlockId>) {
        while let Some(id) = held.pop() {
            let block = &mut self.blocks[id.0 as usize];
            debug_assert!(block.users > 0, "a block was released twice");
            block.users -= 1;
            if block.users == 0 {
                self.push_last(id.0);
            }
        }
    }

    /// Makes `hashes` the most recently used content, evicting the least; a run longer than the pool is
    /// cut at its end. For schedulers in which a prompt pins nothing.
    pub fn remember(&mut self, hashes: &[BlockHash]) {
        self.remember_as(hashes, false);
    }

    /// As [`Self::remember`]; what was not cached before is spoiled if asked for.
    pub fn remember_as(&mut self, hashes: &[BlockHash], spoiled: bool) {
        let fits = hashes.len().min(self.free as usize);
        let hits = self.cached_run(&hashes[..fits]);
        let mut held = Vec::with_capacity(fits);
        if self.acquire(&hashes[..hits], (fits - hits) as u32, &mut held) {
            for (&id, &hash) in held.iter().zip(hashes).skip(hits) {
                self.name(id, hash, spoiled.then(|| hash.spoiled()));
            }
            self.release(&mut held);
        }
    }

    /// Forgets all content that nobody uses.
    pub fn clear(&mut self) {
        for block in &mut self.blocks {
            if block.users == 0
                && let Some(hash) = block.hash.take()
            {
                self.cached.remove(&hash);
            }
        }
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }

    fn push_last(&mut self, id: u32) {
        let last = self.last;
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (last, NONE);
        match last {
            NONE => self.first = id,
            last => self.blocks[last as usize].next = id,
        }
        self.last = id;
        self.free += 1;
    }

    fn unlink(&mut self, id: u32) {
        let Block { previous, next, .. } = self.blocks[id as usize];
        match previous {
            NONE => self.first = next,
            previous => self.blocks[previous as usize].next = next,
        }
        match next {
            NONE => self.last = previous,
            next => self.blocks[next as usize].previous = previous,
        }
        self.free -= 1;
    }
}

/// Block hashes are hashes already.
#[derive(Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hashes(names: &[u64]) -> Vec<BlockHash> {
        names.iter().map(|&name| BlockHash(name)).collect()
    }

    #[test]
    fn the_least_recently_used_content_leaves_first_and_ends_before_beginnings() {
        let mut pool = BlockPool::new(4);
        pool.remember(&hashes(&[1, 2]));
        pool.remember(&hashes(&[3, 4]));
        pool.remember(&hashes(&[1, 2])); // 3 and 4 are now the oldest
        pool.remember(&hashes(&[5])); // evicts 4, the end of the oldest
        assert_eq!(pool.cached_run(&hashes(&[1, 2])), 2);
        assert_eq!(pool.cached_run(&hashes(&[3])), 1);
        assert_eq!(pool.cached_run(&hashes(&[4])), 0);
        assert_eq!(pool.cached_run(&hashes(&[5])), 1);
    }

    #[test]
    fn a_run_longer_than_the_pool_keeps_its_beginning() {
        let mut pool = BlockPool::new(3);
        pool.remember(&hashes(&[1, 2, 3, 4, 5]));
        assert_eq!(pool.cached_run(&hashes(&[1, 2, 3, 4, 5])), 3);
        assert_eq!(pool.free(), 3);
    }

    #[test]
    fn blocks_in_use_are_never_evicted() {
        let mut pool = BlockPool::new(2);
        let mut held = Vec::new();
        assert!(pool.acquire(&[], 2, &mut held));
        assert!(!pool.acquire(&[], 1, &mut Vec::new()));
        pool.release(&mut held);
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn clear_forgets_only_what_nobody_uses() {
        let mut pool = BlockPool::new(4);
        let mut held = Vec::new();
        assert!(pool.acquire(&[], 1, &mut held));
        pool.name(held[0], BlockHash(1), None);
        pool.remember(&hashes(&[2]));
        pool.clear();
        assert_eq!((pool.cached_run(&hashes(&[1])), pool.cached_run(&hashes(&[2]))), (1, 0));
    }

    proptest! {
        #[test]
        fn blocks_are_either_free_or_held_and_content_is_found_where_it_is(
            steps in prop::collection::vec((0_u8..4, prop::collection::vec(0_u64..12, 0..6)), 0..120),
        ) {
            let mut pool = BlockPool::new(8);
            let mut holders: Vec<Vec<BlockId>> = Vec::new();
            for (what, names) in steps {
                let names = hashes(&names);
                match what {
                    0 => pool.remember(&names),
                    1 if !holders.is_empty() => pool.release(&mut holders.remove(0)),
                    2 => pool.clear(),
                    _ => {
                        let hits = pool.cached_run(&names);
                        let mut held = Vec::new();
                        if pool.acquire(&names[..hits], (names.len() - hits) as u32, &mut held) {
                            for (&id, &hash) in held.iter().zip(&names) {
                                pool.name(id, hash, None);
                            }
                            holders.push(held);
                        } else {
                            prop_assert!(held.is_empty());
                        }
                    }
                }
                let mut users = vec![0; 8];
                for id in holders.iter().flatten() {
                    users[id.0 as usize] += 1;
                }
                let seen: Vec<u32> = pool.blocks.iter().map(|block| block.users).collect();
                prop_assert_eq!(&seen, &users);
                prop_assert_eq!(pool.free() as usize, users.iter().filter(|&&users| users == 0).count());
                for (hash, id) in &pool.cached {
                    prop_assert_eq!(pool.block(*id).hash, Some(*hash));
                }
            }
            for mut held in holders {
                pool.release(&mut held);
            }
            prop_assert_eq!(pool.free(), 8);
        }
    }
}
