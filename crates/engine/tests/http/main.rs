//! The engine over real sockets on the loopback interface.

mod faults;
mod generation;
mod handoff;
mod handoff_faults;
mod harness;
mod leaving;
mod measures;
mod rooms;
mod surface;
