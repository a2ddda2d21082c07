//! How fast KV moves from the engine that computed it to the one that decodes.
//!
//! One figure for all engines: it says whether a split pays, not between whom, so replicas that have learned
//! different ones still choose the same pairs.

use std::time::Duration;

use super::window::Window;
use super::{CLAMP, CLAMP_FAST};
use crate::Moment;

/// The half-life of a sample. 10 s: links don't change from one second to the next.
const SAMPLE_HALF_LIFE: Duration = Duration::from_secs(10);

/// Handed tokens from which a handoff tells the time per token. 256: below, its fixed part hides it.
const TOKENS_MIN: u32 = 256;

/// The time per token as learned from handoffs.
#[derive(Clone, Debug)]
pub struct TransferRate {
    window: Window,
}

impl Default for TransferRate {
    fn default() -> Self {
        Self::new()
    }
}

impl TransferRate {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self { window: Window::new() }
    }

    /// `tokens` took `ms` from the end of their prefill to the first token, of which `fixed_ms` are not theirs. Says
    /// what a token takes now, in microseconds; `prior` is what it was taken for before anything was known.
    pub fn learn(&mut self, tokens: u32, ms: f64, fixed_ms: f64, prior: f32, now: Moment) -> f32 {
        if tokens >= TOKENS_MIN {
            let us_per_token = ((ms - fixed_ms) * 1_000.0 / f64::from(tokens)) as f32;
            self.window.add(us_per_token.clamp(prior / CLAMP_FAST, prior * CLAMP), 1.0, now);
        }
        self.window.estimate(prior, SAMPLE_HALF_LIFE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_what_most_handoffs_took_beyond_their_fixed_part() {
        let mut rate = TransferRate::new();
        let mut last = 0.0;
        for number in 0..20 {
            let ms = if number % 7 == 3 { 500.0 } else { 10.0 + 40.0 };
            last = rate.learn(4_000, ms, 10.0, 5.0, Moment::from_millis(number));
        }
        assert!((last - 10.0).abs() < 0.1, "{last}");
    }

    #[test]
    fn short_handoffs_tell_nothing_and_odd_ones_are_bounded() {
        let mut rate = TransferRate::new();
        assert_eq!(rate.learn(255, 900.0, 10.0, 5.0, Moment::from_millis(1)), 5.0);
        for number in 0..9 {
            rate.learn(1_000, 60_000.0, 10.0, 5.0, Moment::from_millis(number));
        }
        assert_eq!(rate.learn(1_000, 60_000.0, 10.0, 5.0, Moment::from_millis(10)), 40.0);
    }
}
