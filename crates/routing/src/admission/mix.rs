//! Which classes of requests come, and so how soon the most urgent of them wants its first token.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Moment;
use crate::qoe::ClassTargets;
use crate::request::Priority;

/// How long a class that was seen is counted in. 10 s: about the pauses in anybody's traffic.
const SEEN_FOR: Duration = Duration::from_secs(10);
/// A class seen again within this time need not be noted again.
const NOTED_EVERY: Duration = Duration::from_millis(500);

/// When a request of each class was last seen, in micros and one more; 0 for never.
#[derive(Debug, Default)]
pub struct Mix([AtomicU64; 3]);

impl Mix {
    /// A request of this class has come.
    pub fn seen(&self, priority: Priority, now: Moment) {
        let seen = &self.0[at(priority)];
        let (told, before) = (now.micros() + 1, seen.load(Ordering::Relaxed));
        // Most calls only read.
        if before == 0 || told.saturating_sub(before) > NOTED_EVERY.as_micros() as u64 {
            seen.store(told, Ordering::Relaxed);
        }
    }

    /// The soonest that any class that comes expects its first token, in ms after arrival.
    pub fn ttft_ms(&self, targets: &ClassTargets, now: Moment) -> f64 {
        let comes = |priority: &Priority| {
            let seen = self.0[at(*priority)].load(Ordering::Relaxed);
            seen > 0 && now.since(Moment::from_micros(seen - 1)) <= SEEN_FOR
        };
        let classes = [Priority::High, Priority::Normal, Priority::Low];
        let soonest = classes.iter().filter(|class| comes(class)).map(|class| targets.of(*class).ttft_ms);
        soonest.reduce(f64::min).unwrap_or(targets.normal.ttft_ms)
    }
}

const fn at(priority: Priority) -> usize {
    priority.number() as usize - 1
}
