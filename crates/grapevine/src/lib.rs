//! The one binary: CLI, configuration, wiring, demo and load.

pub mod load;
