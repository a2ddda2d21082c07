//! Mailboxes, timers and supervision around the pure core.

pub mod lifecycle;
