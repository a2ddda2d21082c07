//! One binary for the replica, its engines, its load and its demo.

use std::process::ExitCode;

/// A request's memory is many small pieces that the thread which made them soon frees, for which the system's
/// allocator takes some 5 us of CPU more per request (docs/results.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // What is no text becomes text that no key allows, and so a fault with a name.
    grapevine::run(std::env::args_os().map(|given| given.to_string_lossy().into_owned()).collect())
}
