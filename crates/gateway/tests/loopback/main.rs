//! The gateway over loopback sockets, in front of simulated engines and of peers that misbehave.

mod happy;
mod rig;
