//! Bounded mailboxes: what happens when one is full is counted, never waited for and never ignored.

use std::sync::atomic::{AtomicU64, Ordering};

use actix::dev::{MessageResponse, ToEnvelope};
use actix::prelude::{Actor, Addr, Handler, Message, SendError};

/// The four kinds of actors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActorKind {
    /// One for each endpoint.
    Endpoint,
    /// One for each session in use.
    Session,
    /// One for each request.
    Lifecycle,
    /// One for the replica.
    Gossip,
}

impl ActorKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Endpoint, Self::Session, Self::Lifecycle, Self::Gossip];

    /// The name in labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Endpoint => "endpoint",
            Self::Session => "session",
            Self::Lifecycle => "lifecycle",
            Self::Gossip => "gossip",
        }
    }
}

/// What actors did that operators want to know of, by kind.
#[derive(Debug, Default)]
pub struct ActorCounts {
    overloaded: [AtomicU64; 4],
    recreated: [AtomicU64; 4],
}

impl ActorCounts {
    /// Messages that a full mailbox did not take.
    pub fn overloaded(&self, kind: ActorKind) -> u64 {
        self.overloaded[kind as usize].load(Ordering::Relaxed)
    }

    /// Actors that were made anew after a panic.
    pub fn recreated(&self, kind: ActorKind) -> u64 {
        self.recreated[kind as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn count_overload(&self, kind: ActorKind) {
        self.overloaded[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count_recreated(&self, kind: ActorKind) {
        self.recreated[kind as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// It is in the mailbox.
    Taken,
    /// The mailbox was full; counted.
    Overloaded,
    /// The actor is gone.
    Gone,
}

/// Puts `message` into the mailbox if there is room.
pub(crate) fn tell<A, M>(to: &Addr<A>, message: M, kind: ActorKind, counts: &ActorCounts) -> Told
where
    A: Actor + Handler<M>,
    A::Context: ToEnvelope<A, M>,
    M: Message + Send + 'static,
    M::Result: MessageResponse<A, M> + Send,
{
    match to.try_send(message) {
        Ok(()) => Told::Taken,
        Err(SendError::Full(_)) => {
            counts.count_overload(kind);
            Told::Overloaded
        }
        Err(SendError::Closed(_)) => Told::Gone,
    }
}

/// Makes the actor that gets it panic: how tests show that the watchdog brings it back.
#[cfg(feature = "panic-injection")]
#[derive(Clone, Copy, Debug, actix::prelude::Message)]
#[rtype(result = "()")]
pub(crate) struct Panic;
