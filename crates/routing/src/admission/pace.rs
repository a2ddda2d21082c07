//! How fast an engine's own queue moves, whatever it is that requests wait for there.
//!
//! Prompts before others' are one thing to wait for; places in a batch that is full are another, of which an
//! engine's speed says nothing. So what first bytes took beyond what they take alone is set in proportion to the
//! prompt tokens that were ahead, which all replicas count, and its own, which stand for its place.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Moment;

/// What is left of earlier samples at each new one: the last ten dominate.
const KEPT_PER_SAMPLE: f64 = 0.9;
/// How soon what was learned loses half its weight when nothing new is learned. 2 s: an engine that stood still for
/// a moment must not be held for slow while it is sent too little to show that it is not.
const HALF_LIFE: Duration = Duration::from_secs(2);
/// No first byte counts for more than this, in ms.
const SAMPLE_MS_MAX: f64 = 10_000.0;
/// How much of the way the time alone moves up to a longer one; down it moves at once. Little: while an engine is full,
/// what comes with nothing ahead waits for a place too.
const ALONE_UP: f64 = 1.0 / 512.0;

/// What was learned of one endpoint's queue.
#[derive(Debug, Default)]
pub(crate) struct QueuePace {
    sums: Mutex<Sums>,
    /// The bits of ms per token ahead.
    ms_per_token: AtomicU32,
    learned: AtomicU64,
}

#[derive(Debug, Default)]
struct Sums {
    excess_ms: f64,
    tokens: f64,
    /// What a first byte takes with nothing ahead, beyond its own prompt.
    alone_ms: Option<f64>,
}

impl QueuePace {
    /// A first byte came after `took_ms`, of which `own_ms` are for its own prompt of `own_tokens`, behind `ahead_tokens`.
    /// Returns what it took beyond what one takes alone, in ms.
    pub(crate) fn learn(
        &self,
        took_ms: f64,
        own_ms: f64,
        own_tokens: u32,
        ahead_tokens: u32,
        now: Moment,
    ) -> f64 {
        let beyond_ms = (took_ms.min(SAMPLE_MS_MAX) - own_ms).max(0.0);
        let mut sums = self.sums.lock();
        if ahead_tokens == 0 {
            let alone_ms = sums.alone_ms.map_or(beyond_ms, |alone| {
                if beyond_ms < alone { beyond_ms } else { alone + (beyond_ms - alone) * ALONE_UP }
            });
            sums.alone_ms = Some(alone_ms);
        }
        let excess_ms = (beyond_ms - sums.alone_ms.unwrap_or(0.0)).max(0.0);
        sums.excess_ms = sums.excess_ms * KEPT_PER_SAMPLE + excess_ms;
        let tokens = f64::from(ahead_tokens) + f64::from(own_tokens.max(1));
        sums.tokens = sums.tokens * KEPT_PER_SAMPLE + tokens;
        let ms_per_token = (sums.excess_ms / sums.tokens) as f32;
        self.ms_per_token.store(ms_per_token.to_bits(), Ordering::Relaxed);
        self.learned.store(now.micros(), Ordering::Relaxed);
        excess_ms
    }

    /// How long a prompt of `own_tokens` is expected to wait for its own place behind so many tokens, in ms: nothing
    /// where none are ahead.
    pub(crate) fn wait_ms(&self, ahead_tokens: u64, own_tokens: u32, now: Moment) -> f64 {
        let ms_per_token = f64::from(f32::from_bits(self.ms_per_token.load(Ordering::Relaxed)));
        if ahead_tokens == 0 || ms_per_token == 0.0 {
            return 0.0;
        }
        let age = now.since(Moment::from_micros(self.learned.load(Ordering::Relaxed)));
        let weight = (-age.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2();
        (ahead_tokens as f64 + f64::from(own_tokens)) * ms_per_token * weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_millis(ms)
    }

    #[test]
    fn places_in_a_full_batch_are_waited_for_however_short_the_prompts() {
        let pace = QueuePace::default();
        pace.learn(20.0, 2.0, 8, 0, at(0));
        for ahead in (0..20_u32).cycle().take(60) {
            pace.learn(20.0 + 125.0 * f64::from(ahead + 1), 2.0, 8, ahead * 8, at(100));
        }
        let wait_ms = pace.wait_ms(8, 8, at(100));
        assert!((200.0..=300.0).contains(&wait_ms), "two places of 125 ms: {wait_ms}");
        assert_eq!(pace.wait_ms(0, 8, at(100)), 0.0);
    }

    #[test]
    fn an_engine_that_takes_its_time_with_every_request_has_no_queue() {
        let pace = QueuePace::default();
        for ahead in [0, 0, 50, 100, 200] {
            pace.learn(900.0, 10.0, 40, ahead, at(0));
        }
        assert_eq!(pace.wait_ms(1_000, 0, at(0)), 0.0);
    }

    #[test]
    fn what_was_learned_fades_so_that_it_can_be_learned_anew() {
        let pace = QueuePace::default();
        pace.learn(20.0, 0.0, 10, 0, at(0));
        pace.learn(30_000.0, 0.0, 10, 0, at(0));
        assert!(pace.wait_ms(10, 10, at(0)) > 9_000.0);
        assert!(pace.wait_ms(10, 10, at(20_000)) < 20.0);
    }
}
