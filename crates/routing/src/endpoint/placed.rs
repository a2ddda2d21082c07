//! How much was placed at an endpoint lately: what settles ties, so that new prompts spread evenly even
//! while no endpoint is busy.

use std::time::Duration;

use parking_lot::Mutex;

use crate::Moment;

/// After how long a placed token counts half. Long against a chat's turn, short against the time in which
/// a cache turns over.
pub const PLACED_HALF_LIFE: Duration = Duration::from_secs(60);

/// `amount`, measured at `then`, as it counts at `now`.
pub(crate) fn decayed(amount: f64, then: Moment, now: Moment, half_life: Duration) -> f64 {
    if amount == 0.0 {
        return 0.0;
    }
    amount * (-now.since(then).as_secs_f64() / half_life.as_secs_f64()).exp2()
}

/// A sum that halves every [`PLACED_HALF_LIFE`].
#[derive(Debug, Default)]
pub(super) struct PlacedTokens(Mutex<(f64, Moment)>);

impl PlacedTokens {
    pub(super) fn add(&self, tokens: f64, now: Moment) {
        let mut held = self.0.lock();
        let (amount, then) = *held;
        *held = ((decayed(amount, then, now, PLACED_HALF_LIFE) + tokens).max(0.0), now.max(then));
    }

    pub(super) fn read(&self, now: Moment) -> f64 {
        let (amount, then) = *self.0.lock();
        decayed(amount, then, now, PLACED_HALF_LIFE)
    }
}
