//! One binary for the replica, its engines, its load and its demo.

use std::process::ExitCode;

fn main() -> ExitCode {
    grapevine::run(std::env::args().collect())
}
