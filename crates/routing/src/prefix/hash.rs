//! Prompt text to chained block hashes, as the text comes along.

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::BlockHash;

/// The block size unless configured, in bytes: about 128 tokens, a few KV blocks of any engine.
pub const BLOCK_BYTES_DEFAULT: usize = 512;

/// The most blocks that are kept of one prompt: 2 MiB at the default size, about half a million tokens.
/// What lies deeper is counted in bytes but not indexed, so that one request can't hold the index up.
pub const BLOCKS_MAX: usize = 4_096;

/// Cuts text into blocks and hashes each, seeded with the hash of all before it, so that one hash names a
/// whole prefix. How the text is cut into pushes makes no difference.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    block_bytes: usize,
    chain: u64,
    partial: SmallVec<[u8; BLOCK_BYTES_DEFAULT]>,
    blocks: Vec<BlockHash>,
    bytes: u64,
}

impl BlockHasher {
    /// A hasher for blocks of `block_bytes` (at least 1) bytes whose first block is chained to `seed`.
    /// Room for `blocks_hint` blocks is taken at once.
    pub fn new(seed: u64, block_bytes: usize, blocks_hint: usize) -> Self {
        Self {
            block_bytes: block_bytes.max(1),
            chain: seed,
            partial: SmallVec::new(),
            blocks: Vec::with_capacity(blocks_hint.min(BLOCKS_MAX)),
            bytes: 0,
        }
    }

    /// Appends text.
    pub fn push(&mut self, text: &[u8]) {
        self.bytes += text.len() as u64;
        let mut rest = text;
        if !self.partial.is_empty() {
            let wanted = self.block_bytes - self.partial.len();
            if rest.len() < wanted {
                self.partial.extend_from_slice(rest);
                return;
            }
            let (end, after) = rest.split_at(wanted);
            self.partial.extend_from_slice(end);
            self.chain = xxh3_64_with_seed(&self.partial, self.chain);
            self.partial.clear();
            self.keep();
            rest = after;
        }
        while rest.len() >= self.block_bytes {
            let (block, after) = rest.split_at(self.block_bytes);
            self.chain = xxh3_64_with_seed(block, self.chain);
            self.keep();
            rest = after;
        }
        self.partial.extend_from_slice(rest);
    }

    fn keep(&mut self) {
        if self.blocks.len() < BLOCKS_MAX {
            self.blocks.push(BlockHash::from_raw(self.chain));
        }
    }

    /// The hash of all text so far, with what does not fill a block.
    pub fn tail(&self) -> u64 {
        // the length keeps an unfilled block apart from a full one
        xxh3_64_with_seed(&self.partial, self.chain ^ self.bytes)
    }

    /// The hash of the first block, or of all text if that is shorter.
    pub fn first(&self) -> u64 {
        self.blocks.first().map_or_else(|| self.tail(), |block| block.raw())
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The hashes of the full blocks so far, at most [`BLOCKS_MAX`].
    pub fn blocks(&self) -> &[BlockHash] {
        &self.blocks
    }

    /// The hashes of the full blocks, at most [`BLOCKS_MAX`].
    pub fn into_blocks(self) -> Vec<BlockHash> {
        self.blocks
    }
}
