//! The harness of the cluster tests: replicas as processes of their own, engines within the test, and what a
//! client, an operator and a bystander can see of them.
//!
//! The main choice: replicas are the product's own binary, so that `kill -9`, signals, descriptors and memory
//! are the real ones; engines run in the test, so that it can look into them and break them. Everything is on
//! the loopback interface, on ports of the moment, and ends with the test.
//!
//! What may take time is waited for ([`until`]) with a deadline; nothing sleeps for luck.

mod admin;
mod chat;
mod client;
mod cluster;
mod engine_process;
mod fleet;
mod program;
mod until;

pub use admin::{Admin, Candidate, Explained, Metrics, Seen};
pub use chat::{Chat, words};
pub use client::{Reply, Talker};
pub use cluster::{Cluster, Plan, Replica};
pub use engine_process::EngineProcess;
pub use fleet::{Fleet, MODEL};
pub use program::program;
pub use until::{PATIENCE, stated, until};
