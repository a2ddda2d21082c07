//! Field cases and cluster tests over real sockets.

mod program;
mod until;

pub use program::program;
pub use until::{PATIENCE, stated, until};
