//! The engine over real sockets on the loopback interface.

mod faults;
mod generation;
mod harness;
mod leaving;
mod measures;
mod surface;
