//! What tests over real sockets stand on, in whichever package they are: a client that sends the very bytes it
//! is told to, well formed or not, and takes replies apart; and waiting for conditions with a deadline.
//!
//! It knows nothing of the product, so that any crate's tests can use it. A client that behaves well is
//! `grapevine::load::Client`.

mod client;
mod patience;

pub use client::{Connection, Reply, ask, get, post, post_as, request, try_get};
pub use patience::{PATIENCE, eventually, until};
