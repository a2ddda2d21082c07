//! One binary for the replica, its engines, its load and its demo.

use std::process::ExitCode;

/// A request's memory is many small pieces that the thread which made them soon frees, for which the system's
/// allocator takes some 5 us of CPU more per request (docs/results.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    grapevine::run(std::env::args().collect())
}
