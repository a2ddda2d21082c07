//! The one binary: command line, configuration, wiring, demo, load and lab.
//!
//! The main choice: everything that reads files, flags, environment and signals is here, and only here;
//! what it finds becomes plain checked values for the crates below. The library exists so that tests and
//! benches start a [`replica::Replica`] in their own process and drive it with [`load`].
//!
//! Left out on purpose: decisions. Nothing here knows why an endpoint is chosen.

pub mod chart;
pub mod cli;
pub mod config;
pub mod demo;
pub mod explain;
pub mod fetch;
pub mod lab;
pub mod load;
pub mod log;
mod peers;
pub mod ports;
pub mod replica;
mod run;
pub mod serve;

pub use run::run;
