//! Waiting for conditions.

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long anything may take before a test gives up. Far above what anything takes, for busy machines.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How often a condition is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Waits for a condition.
///
/// # Panics
/// If it does not hold within [`PATIENCE`].
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, async || holds().then_some(())).await;
}

/// Waits until `ask` answers with something.
///
/// # Panics
/// If it does not within [`PATIENCE`].
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
        sleep(LOOK_EVERY).await;
    }
}
