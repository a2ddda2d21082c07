//! Mailboxes, timers and supervision around the pure core.

mod clock;
pub mod lifecycle;

pub use clock::Clock;
