//! The gateway over loopback sockets, in front of simulated engines and of peers that misbehave.

mod bodies;
mod disconnects;
mod failures;
mod happy;
mod header_matrix;
mod rig;
