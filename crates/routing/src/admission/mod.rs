//! Admission: who waits here when every engine has enough to do, who goes next, and who is refused.
//!
//! The main choice: requests wait here rather than in the engines' own queues, which serve in order of arrival. So
//! a request is held back as soon as every engine that could take it has more than a little ahead of it, whatever
//! the request's own class: else those that can wait would fill the engines, and those that can't would stand behind
//! them. See docs/adr/0015.
//!
//! [`Queue`] is the order and its bounds, a plain state machine without a clock; [`Gate`] says whether an endpoint
//! has room; [`Holdings`] counts what each session has in flight; a [`Claim`] is what waits at another replica.

mod gate;
mod holdings;
mod mix;
mod order;
mod pace;
mod places;
mod queue;
mod turn;

use std::time::Duration;

pub use gate::Gate;
pub(crate) use gate::NO_ROOM;
pub(crate) use holdings::Held;
pub use holdings::Holdings;
pub use mix::Mix;
pub use order::Next;
pub(crate) use pace::QueuePace;
pub(crate) use places::{FirstByte, Full, Places};
pub use queue::{Entry, Queue, Service, Shed, Ticket};
pub use turn::{Claim, Claimant};
pub(crate) use turn::{Patience, number_of};

/// What can be set of admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionSettings {
    /// Requests that may run at one endpoint through all replicas; 0: as many as come. Default 0: how much an
    /// endpoint can take is learned from how long first bytes take.
    pub running_max: u32,
    /// Requests that may wait. Default 1,024: what four endpoints of ten requests a second serve within the wait
    /// limit twice over. 0: nothing waits; what finds `running_max` everywhere is refused at once.
    pub queue_requests_max: u32,
    /// Bytes of the bodies of those that wait. Default 256 MiB.
    pub queue_bytes_max: u64,
    /// How long a request may wait. Default 10 s: three times the longest first token that a class expects; who
    /// waits longer has mostly left.
    pub queue_wait_max: Duration,
}

impl Default for AdmissionSettings {
    fn default() -> Self {
        Self {
            running_max: 0,
            queue_requests_max: 1_024,
            queue_bytes_max: 256 << 20,
            queue_wait_max: Duration::from_secs(10),
        }
    }
}

#[cfg(test)]
mod tests;
