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
    /// One block long; its first `filled` bytes are text.
    partial: SmallVec<[u8; BLOCK_BYTES_DEFAULT]>,
    filled: usize,
    blocks: Vec<BlockHash>,
    bytes: u64,
}

impl BlockHasher {
    /// A hasher for blocks of `block_bytes` (at least 1) bytes whose first block is chained to `seed`.
    /// Room for `blocks_hint` blocks is taken at once.
    pub fn new(seed: u64, block_bytes: usize, blocks_hint: usize) -> Self {
        let block_bytes = block_bytes.max(1);
        Self {
            block_bytes,
            chain: seed,
            partial: SmallVec::from_elem(0, block_bytes),
            filled: 0,
            blocks: Vec::with_capacity(blocks_hint.min(BLOCKS_MAX)),
            bytes: 0,
        }
    }

    /// Appends text.
    pub fn push(&mut self, text: &[u8]) {
        self.bytes += text.len() as u64;
        let mut rest = text;
        if self.filled > 0 {
            let (now, after) = rest.split_at(rest.len().min(self.block_bytes - self.filled));
            self.fill(now);
            if self.filled < self.block_bytes {
                return;
            }
            self.chain = xxh3_64_with_seed(&self.partial, self.chain);
            self.filled = 0;
            self.keep();
            rest = after;
        }
        while let Some((block, after)) = rest.split_at_checked(self.block_bytes) {
            self.chain = xxh3_64_with_seed(block, self.chain);
            self.keep();
            rest = after;
        }
        self.fill(rest);
    }

    fn fill(&mut self, text: &[u8]) {
        self.partial[self.filled..self.filled + text.len()].copy_from_slice(text);
        self.filled += text.len();
    }

    fn keep(&mut self) {
        if self.blocks.len() < BLOCKS_MAX {
            self.blocks.push(BlockHash::from_raw(self.chain));
        }
    }

    /// The hash of all text so far, with what does not fill a block.
    pub fn tail(&self) -> u64 {
        // the length keeps an unfilled block apart from a full one
        xxh3_64_with_seed(&self.partial[..self.filled], self.chain ^ self.bytes)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hashed(block_bytes: usize, pieces: &[&[u8]]) -> BlockHasher {
        let mut hasher = BlockHasher::new(7, block_bytes, 0);
        pieces.iter().for_each(|piece| hasher.push(piece));
        hasher
    }

    #[test]
    fn a_full_block_and_the_same_text_unfilled_differ() {
        let (short, full) = (hashed(8, &[b"1234567"]), hashed(8, &[b"12345678"]));
        assert_eq!((short.blocks().len(), full.blocks().len()), (0, 1));
        assert_ne!(full.tail(), full.blocks()[0].raw());
        assert_ne!(hashed(8, &[]).tail(), hashed(8, &[b"\0"]).tail());
    }

    proptest! {
        #[test]
        fn how_text_is_cut_makes_no_difference(
            text in prop::collection::vec(any::<u8>(), 0..200),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            block_bytes in 1_usize..40,
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let (whole, cut) = (hashed(block_bytes, &[&text]), hashed(block_bytes, &pieces));
            prop_assert_eq!(whole.tail(), cut.tail());
            prop_assert_eq!(whole.blocks().len(), text.len() / block_bytes);
            prop_assert_eq!(whole.bytes(), text.len() as u64);
            prop_assert_eq!(whole.into_blocks(), cut.into_blocks());
        }
    }
}
