//! How long an engine has been at the first of its prompts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::Moment;

/// Bits of the moment, in micros: 142 years. Those above hold how many prompts were done, as far as they go: a look is
/// taken at every decision, between which 4,096 prompts are not done.
const MOMENT_BITS: u32 = 52;
const MOMENT_MASK: u64 = (1 << MOMENT_BITS) - 1;

/// How many prompts were done when the engine was last looked at, and since when it is at the first of those left, in
/// one word that deciding reads without a lock.
#[derive(Debug, Default)]
pub(super) struct Head(AtomicU64);

impl Head {
    /// For how long the engine is known to be at the first of its prompts, in ms: since another was done, or since
    /// it was last seen without any. That one more waits there, through whatever replica, is no new begin.
    pub(super) fn look(&self, done: u32, is_idle: bool, now: Moment) -> f64 {
        let held = self.0.load(Ordering::Relaxed);
        let done = u64::from(done) << MOMENT_BITS;
        if is_idle || held & !MOMENT_MASK != done {
            let begins = done | now.micros() & MOMENT_MASK;
            if begins != held {
                self.0.store(begins, Ordering::Relaxed);
            }
            return 0.0;
        }
        now.millis_since(Moment::from_micros(held & MOMENT_MASK))
    }
}
