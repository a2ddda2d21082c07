//! What is counted, and the page that shows it.
//!
//! Labels come only from what is configured or discovered: a client can't make new ones.

mod registry;
mod scrape;
mod worker;

pub use registry::{Metrics, ReloadResult};
pub use scrape::{Gauges, GossipGauges};
pub(crate) use worker::WorkerMetrics;
