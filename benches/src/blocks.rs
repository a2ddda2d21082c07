//! Paths of blocks as prompts make them, without the prompts.

use routing::BlockHash;

/// A prompt's blocks: the first `common` are everybody's.
pub fn path(prompt: u64, common: usize, blocks: usize) -> Vec<BlockHash> {
    (0..blocks as u64)
        .map(|at| if at < common as u64 { at } else { prompt << 8 | at })
        .map(|word| BlockHash::from_raw(mix(word)))
        .collect()
}

/// splitmix64, a stand-in for the block hashes.
pub fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}
