//! Gossip between the replicas: who is there, what each carries, and which prefixes went where.
//!
//! The main choice: each replica tells only its own facts, as absolute state, on three ways that back each
//! other up. A *push* tells every live replica within milliseconds what just changed. Two *boards*, each an
//! instance of the chitchat library, carry the same state for good: the pulse (load, observations,
//! membership) and the ledger (the newest placements, and how far the ledger goes). Whoever sees by that
//! that it missed something *pulls* it over TCP. A lost push or post costs time, never truth. What a replica has
//! staged at prefill engines is over in moments and told to its heirs alone, by pushes of its own, a few times.
//!
//! Everything on the UDP ports is in an envelope of ours, sealed if there is a cluster key. What does not
//! open is counted and thrown away before the library sees it.
//!
//! Left out on purpose: what the facts mean, and when a silent replica is dead (both are `routing`'s); the
//! library's own failure detector only chooses whom to gossip with.

mod board;
mod clock;
mod codec;
mod config;
mod directory;
mod envelope;
mod error;
mod event;
mod faults;
mod fragments;
mod hop;
mod hub;
mod inbox;
mod join;
mod ledger;
mod link;
mod names;
mod parts;
mod peer;
mod ports;
mod publish;
mod pull;
mod push;
mod repair;
mod replay;
mod seeds;
mod serve;
mod shared;
mod staged;
mod start;
mod stats;
mod wire;

pub use config::{ClusterKey, GossipConfig};
pub use envelope::FrameKind;
pub use error::GossipError;
pub use event::{GossipEvent, Outcome};
pub use faults::Faults;
pub use shared::Facts;
pub use start::{Gossip, start};
pub use stats::{GossipStats, PeerStatus, Rejection, Traffic};
