//! Prefixes: how prompts become chained block hashes, and who is believed to hold which block.

mod crowd;
mod depths;
mod hash;
mod index;
mod shard;
mod slot;

pub use depths::{WarmCrowd, WarmDepths};
pub use hash::{BLOCK_BYTES_DEFAULT, BLOCKS_MAX, BlockHasher};
pub use index::{Cursor, INDEX_BYTES_MIN, Placed, PrefixIndex};
pub use slot::Slot;
