//! One actor per request, around the pure [`routing::lifecycle::Lifecycle`].
//!
//! The request's driver (the edge) holds a [`LifecycleHandle`]: it tells what happens and does what it is
//! ordered. The actor lives on the driver's own thread, so that neither a lock nor a core is crossed. Time is
//! watched once per worker, not once per request: a sweep ticks what is due and recreates an actor that
//! panicked. Whatever becomes of the actor, the charge lives in the handle and goes with it.

mod actor;
mod handle;
mod shared;
mod table;
mod worker;

pub use handle::{Account, LifecycleHandle, Order, Staged};
pub use table::{BreakShown, RequestRow, RequestTable, SloShown};
pub use worker::{Ended, LifecycleCounts, LifecyclePort, LifecycleSettings, Lifecycles, WorkerLifecycles};

#[cfg(test)]
mod tests;
