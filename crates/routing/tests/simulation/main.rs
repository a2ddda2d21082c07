//! Prefill and decode in virtual time: replicas that hear of each other late, engines that queue and forget. Whole
//! requests are played by the crate `lab`.
//!
//! Everything is seeded; a failing assertion names the seed. `cargo test -p routing --test simulation --
//! --nocapture` prints the figures.

mod cache;
mod overload;
mod pd;
mod replicas;
mod workload;
