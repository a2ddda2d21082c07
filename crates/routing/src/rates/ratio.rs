//! How many prompt bytes make a token, for want of a tokenizer.

use std::time::Duration;

use super::window::Window;
use crate::Moment;

/// What is assumed before `usage` says better: English text in most vocabularies.
const PRIOR: f32 = 4.0;
/// No prompt of text is outside of 1 to 8 bytes a token; what seems to be (images, ids) says nothing of text.
const RANGE: std::ops::RangeInclusive<f32> = 1.0..=8.0;
/// Prompts below this many tokens are mostly template.
const TOKENS_MIN: u32 = 32;
/// Half-life of a sample. 10 min: it changes with the users, not with the load.
const HALF_LIFE: Duration = Duration::from_secs(600);
/// Grid of the ratio that is used: replicas that learn from different requests of the same users agree.
const STEPS_PER_BYTE: f32 = 4.0;

/// Once the window is full the ratio is estimated again after so many samples, a quarter of it: fewer can't move
/// the median far, and every request brings one.
const ESTIMATED_EVERY: usize = 16;

/// Prompt bytes per token of one model, learned from `usage`.
#[derive(Clone, Debug)]
pub struct BytesPerToken {
    window: Window,
    ratio: f32,
    /// Samples since it was estimated.
    unheeded: usize,
}

impl Default for BytesPerToken {
    fn default() -> Self {
        Self::new()
    }
}

impl BytesPerToken {
    /// Nothing learned yet: 4.
    pub const fn new() -> Self {
        Self { window: Window::new(), ratio: PRIOR, unheeded: 0 }
    }

    /// Learns from a prompt of `bytes` that the engine counted as `tokens`.
    pub fn learn(&mut self, bytes: u64, tokens: u32, now: Moment) {
        if tokens >= TOKENS_MIN {
            let ratio = bytes as f32 / tokens as f32;
            if RANGE.contains(&ratio) {
                self.window.add(ratio, 1.0, now);
                self.unheeded += 1;
                if self.unheeded >= ESTIMATED_EVERY || !self.window.is_full() {
                    self.ratio = self.window.estimate(PRIOR, HALF_LIFE);
                    self.unheeded = 0;
                }
            }
        }
    }

    /// Bytes per token, 1 to 8, in quarters.
    pub fn ratio(&self) -> f64 {
        f64::from((self.ratio * STEPS_PER_BYTE).round() / STEPS_PER_BYTE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(samples: &[(u64, u32)], want: f64) {
        let mut learned = BytesPerToken::new();
        for (second, (bytes, tokens)) in (0..).zip(samples) {
            learned.learn(*bytes, *tokens, Moment::from_millis(second * 1_000));
        }
        assert_eq!(learned.ratio(), want, "{samples:?}");
    }

    #[test]
    fn the_ratio_follows_usage_and_not_its_outliers() {
        check(&[], 4.0);
        check(&[(3_000, 1_000); 8], 3.0);
        check(&[(3_000, 1_000), (3_000, 1_000), (3_000, 1_000), (7_900, 1_000), (3_000, 1_000)], 3.0);
    }

    #[test]
    fn a_ratio_that_changes_is_followed_when_the_window_is_full() {
        let changed: Vec<(u64, u32)> = [vec![(3_000, 1_000); 200], vec![(5_000, 1_000); 64]].concat();
        check(&changed, 5.0);
    }

    #[test]
    fn prompts_that_are_not_text_or_hardly_any_say_nothing() {
        check(&[(9_000_000, 1_000); 8], 4.0);
        check(&[(100, 1_000); 8], 4.0);
        check(&[(100, 31); 8], 4.0);
        check(&[(100, 0); 8], 4.0);
    }
}
