//! The pure core of Grapevine: every decision it takes, and the state those decisions read.
//!
//! The main choice: nothing here reads a clock, draws randomness, logs, counts or talks. Time and
//! randomness are arguments and consequences are values, so that the code that serves a request is the
//! code that a simulator runs in virtual time. State that many threads share is kept in atomics and
//! short locks; no lock is ever held across an await, because there is none.
//!
//! Left out on purpose: HTTP, actors, gossip transport, metrics (the edges read [`Decision`]s and stats).

mod heard;
mod ids;
mod news;
mod roster;
mod time;

pub mod admission;
pub mod affinity;
pub mod candidates;
pub mod cost;
pub mod decision;
pub mod endpoint;
pub mod endpoint_filter;
pub mod facts;
pub mod lifecycle;
pub mod liveness;
pub mod pd;
pub mod picker;
pub mod policy;
pub mod prefix;
pub mod qoe;
pub mod rates;
pub mod rendezvous;
pub mod request;
pub mod reserve;
pub mod retry;
pub mod ring;
pub mod router;
pub mod scene;
pub mod session;
pub mod settings;
pub mod share;
pub mod staged;
pub mod tie;
pub mod view;

pub use decision::{CandidateCost, Chosen, Decision, PrefillLeg, Reason, Refusal, SplitReason};
pub use ids::{BlockHash, EndpointId, ReplicaId, SessionKey};
pub use reserve::Reservation;
pub use router::{AdminFactsFull, Rng, Router};
pub use time::Moment;
