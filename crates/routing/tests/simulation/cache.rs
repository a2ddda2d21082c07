//! A prefix cache in which the least recently used block goes first.

use std::collections::BTreeMap;

use routing::BlockHash;

pub(crate) struct Cache {
    blocks_max: usize,
    used: BTreeMap<BlockHash, u64>,
    by_use: BTreeMap<u64, BlockHash>,
    clock: u64,
}

impl Cache {
    pub(crate) fn new(blocks_max: usize) -> Self {
        Self { blocks_max, used: BTreeMap::new(), by_use: BTreeMap::new(), clock: 0 }
    }

    /// Takes a prompt in; its first blocks are the last to go.
    pub(crate) fn hold(&mut self, blocks: &[BlockHash]) {
        for block in blocks.iter().rev() {
            self.touch(*block);
        }
    }

    fn touch(&mut self, block: BlockHash) {
        self.clock += 1;
        if let Some(before) = self.used.insert(block, self.clock) {
            self.by_use.remove(&before);
        }
        self.by_use.insert(self.clock, block);
        if self.used.len() > self.blocks_max
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.used.remove(&oldest);
        }
    }

    /// How many of a prompt's tokens are held: never its last.
    pub(crate) fn cached_tokens(&self, blocks: &[BlockHash], tokens: u64) -> u64 {
        let held = blocks.iter().take_while(|block| self.used.contains_key(block)).count();
        if blocks.is_empty() {
            return 0;
        }
        (tokens * held as u64 / blocks.len() as u64).min(tokens - 1)
    }
}
