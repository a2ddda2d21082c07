//! Edges of one replica, as an operator and a client meet them: faults of engines, odd input, limits, the
//! admin plane, configuration, and what is left behind.

#![expect(unreachable_pub, reason = "the rig is shared between modules, and a test has no other users")]

mod actors;
mod admin;
mod bad_input;
mod commands;
mod drain;
mod health;
mod keys;
mod leaks;
mod metrics;
mod pairs;
mod quality;
mod queue;
mod reload;
mod resume;
mod retries;
mod rig;
