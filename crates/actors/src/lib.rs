//! Mailboxes, timers and supervision around the pure core.
