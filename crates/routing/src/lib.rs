//! The pure core of Grapevine: every decision it takes, and the state those decisions read.
//!
//! The main choice: nothing here reads a clock, draws randomness, logs, counts or talks. Time and
//! randomness are arguments and consequences are values, so that the code that serves a request is the
//! code that a simulator runs in virtual time. State that many threads share is kept in atomics and
//! short locks; no lock is ever held across an await, because there is none.
//!
//! Left out on purpose: HTTP, actors, gossip transport, metrics (the edges read [`Decision`]s and stats).

mod ids;
mod time;

pub mod endpoint;
pub mod facts;
pub mod lifecycle;
pub mod prefix;
pub mod request;
pub mod retry;

pub use ids::{BlockHash, EndpointId, ReplicaId, SessionKey};
pub use time::Moment;
