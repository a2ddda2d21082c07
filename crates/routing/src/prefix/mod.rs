//! Prefixes: how prompts become chained block hashes, and who is believed to hold which block.

mod hash;
mod index;

pub use hash::{BLOCK_BYTES_DEFAULT, BLOCKS_MAX, BlockHasher};
pub use index::{Cursor, Placed, PrefixIndex, Slot, WarmDepths};
