//! Replicas and engines in virtual time: the real core of `routing` over the real model of `engine-model`.
//!
//! The main choice: one queue of events and one seed. Nothing here reads a clock or waits, so an hour of a trace
//! takes seconds, and the same [`Scenario`] gives the same [`Figures`] bit for bit, on any machine and beside any
//! other run. What replicas tell each other are the core's own facts (pushes, pulses, ledger records); what is
//! modelled of the gossip is when they arrive, and whether.
//!
//! Left out: HTTP, sockets and their cost, failures of engines and of requests, admission, prefill and decode
//! apart, and reading files: a [`Trace`] is made of rows that somebody else read.

mod engine;
mod figures;
mod gossip;
mod queue;
mod replicas;
mod scenario;
mod simulation;
mod sweep;
mod workload;

pub use engine_model::scheduler::{Limits, SchedulerKind};
pub use engine_model::timing::{Crowding, Profile, Timing};
pub use figures::{Chats as ChatFigures, Figures, Told};
pub use gossip::{Cut, Gossip};
pub use scenario::{Decider, EngineSpec, Scenario};
pub use simulation::run;
pub use sweep::sweep;
pub use workload::Workload;
pub use workload::chats::ChatShape;
pub use workload::trace::{Part, TRACE_BLOCK_TOKENS, Trace, TraceRow};
