//! The engine over real sockets on the loopback interface.

mod generation;
mod harness;
mod leaving;
mod surface;
