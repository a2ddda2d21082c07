//! Waiting for conditions.

use std::time::{Duration, Instant};

use tokio::time::sleep;

/// How long anything may take for which no time is promised. Long: it only ends tests that would fail anyway.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The time in which `promised` must have happened for the test to pass. Unoptimised builds that share their
/// cores with other tests get three times as long; a release build is held to the promise.
pub const fn stated(promised: Duration) -> Duration {
    if cfg!(debug_assertions) { promised.saturating_mul(3) } else { promised }
}

/// Looks until `look` finds something, and returns it.
///
/// # Panics
/// If it has found nothing within `limit`: with `what` was waited for and what was seen last.
pub async fn until<T>(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match look().await {
            Ok(found) => return found,
            Err(seen) => assert!(begun.elapsed() < limit, "{what}: not within {limit:?}; seen last: {seen}"),
        }
        sleep(LOOK_EVERY).await;
    }
}
