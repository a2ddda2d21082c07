//! The gateway over loopback sockets, in front of simulated engines and of peers that misbehave.

mod admin;
mod bodies;
mod disconnects;
mod drain;
mod failures;
mod happy;
mod header_matrix;
mod metrics;
mod rig;
