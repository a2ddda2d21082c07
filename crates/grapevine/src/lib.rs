//! The one binary: CLI, configuration, wiring, demo and load.
