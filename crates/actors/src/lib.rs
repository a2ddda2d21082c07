//! Mailboxes, timers and supervision around the pure core.
//!
//! One actor for each thing with a lifetime of its own: an endpoint ([`Actors`]), a session ([`Sessions`]), a
//! request ([`lifecycle`]), and one for what other replicas say. The main choice: an actor only performs. It
//! owns a timer or a stream of events, hands them to a pure machine of `routing`, and carries out what comes
//! back; an `if` about routing here would be a bug. Mailboxes are bounded and a full one is counted. actix
//! does not bring back an actor that panicked, so a watch does.
//!
//! Left out on purpose: HTTP (the ports [`EngineProbe`] and [`Heir`] ask for it) and the gossip's transport (its news come
//! as [`PeerEvent`]s).

mod clock;
mod endpoint;
mod figures;
mod gossip;
pub mod lifecycle;
mod mailbox;
mod probe;
mod session;
mod settings;
mod system;
#[cfg(test)]
mod tests;

pub use clock::Clock;
pub use gossip::{Cluster, Heir, PeerEvent, ReplicaSeen};
pub use mailbox::{ActorCounts, ActorKind, Told};
pub use probe::{EngineProbe, PROBE_BYTES_MAX, ProbeError, ProbeReply};
pub use session::{Sessions, TurnEnded};
pub use settings::ActorSettings;
pub use system::{Actors, Surroundings};
