//! What these tests stand on: replicas in this process, a raw client, and an engine that answers as it is told.

mod client;
mod fake;
mod node;
mod process;

use std::time::Duration;

pub use client::{Connection, Reply, ask, chat, get, post, post_as, request, try_get};
pub use fake::{Answer, Asked, Fake, piece};
pub use node::{Node, sources};
pub use process::{Process, run};

/// How long anything may take before a test gives up. Far above what anything takes, for busy machines.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a condition.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until `ask` answers with something.
pub async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(tokio::time::Instant::now() < deadline, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
