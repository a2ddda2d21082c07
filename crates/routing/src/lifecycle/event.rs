//! What a lifecycle is told and what it answers.

use std::time::Duration;

use smallvec::SmallVec;

use super::outcome::Outcome;
use super::resume::NoResume;
use crate::EndpointId;
use crate::endpoint::{Cause, Signal};
use crate::retry::LegFailure;

/// What happened to a request. One driver tells these; whatever their order, the request ends once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// No endpoint has room: it waits for its turn.
    Queued,
    /// A leg was sent to an endpoint, whose charge the driver holds from here to [`Effect::Release`].
    Dispatched {
        /// Where.
        endpoint: EndpointId,
    },
    /// The request was split: its prefill leg was sent, and its decode leg with it or will be. The driver holds
    /// a charge at each, from here to its [`Effect::Release`].
    Split {
        /// Who computes the prompt.
        prefill: EndpointId,
        /// Who is to decode.
        decode: EndpointId,
        /// Which leg goes when.
        order: LegOrder,
    },
    /// The prefill leg is done, and what the decode leg needs of it is there.
    HandedOff,
    /// The prefill leg was answered with a status that is not tried elsewhere: the client gets that answer.
    PrefillAnswered {
        /// The status.
        status: u16,
    },
    /// The prefill leg failed.
    PrefillFailed {
        /// How.
        failure: LegFailure,
        /// How many requests of this replica ran at the endpoint, this one included.
        in_flight: u32,
    },
    /// The decode leg was sent after its handoff: to the endpoint of the pair, or to another one, whose charge
    /// the driver holds from here to [`Effect::Release`].
    DecodeDispatched {
        /// Where.
        endpoint: EndpointId,
    },
    /// No endpoint can be chosen (the first time: the router's refusal says why; later: all were tried).
    Refused,
    /// The reply's head is there, and its status is not one that is tried elsewhere
    /// ([`LegFailure::is_retried_status`]: those are [`Event::LegFailed`]).
    HeadArrived {
        /// Its status.
        status: u16,
    },
    /// The first byte of the body that says something (an SSE comment does not) is there.
    FirstByte,
    /// More of the body is there.
    Progress,
    /// The reply is there to its last byte, and complete.
    Ended,
    /// The leg failed; of a split request the decode leg.
    LegFailed {
        /// How.
        failure: LegFailure,
        /// How many requests of this replica ran at the endpoint, this one included.
        in_flight: u32,
    },
    /// The endpoint it is at was ejected, or the one that its decode leg fetches from. Moves a request that has no
    /// head yet from an engine that is dead or frozen (one in one piece has no other limit than the total): only
    /// causes that say so count.
    EndpointLost {
        /// Which of them.
        endpoint: EndpointId,
        /// Why it was ejected.
        cause: Cause,
    },
    /// What was seen when its endpoint was looked at ([`Effect::Look`]).
    Looked {
        /// Which one.
        endpoint: EndpointId,
        /// What was seen.
        seen: Seen,
        /// How many requests of this replica run there.
        in_flight: u32,
    },
    /// The continuation that [`Effect::ResumeElsewhere`] asks for can't be said.
    Unresumable(NoResume),
    /// The client is gone.
    ClientGone,
    /// The replica ends, and the time for what runs is up.
    Shutdown,
    /// Time has passed.
    Tick,
}

/// Which leg of a split request goes when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LegOrder {
    /// The decode leg goes after the handoff, with what the prefill leg's reply says.
    PrefillFirst,
    /// Both go at once and find each other.
    Together,
}

/// What a look at an endpoint has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// It answers, and not that it can't go on.
    Answers,
    /// It does not, or says that it can't go on, or can't be reached.
    Nothing,
}

/// Whether the decode leg of a split request was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeLeg {
    /// Not yet.
    Waiting,
    /// It was.
    Out,
}

/// What is to be done. Every charge is answered by exactly one [`Effect::Release`], every lifecycle by exactly one
/// [`Effect::Done`], which is the last.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Close the leg to this endpoint.
    AbortUpstream {
        /// Whose leg.
        endpoint: EndpointId,
        /// Why.
        cause: AbortCause,
    },
    /// Give back the charge at this endpoint.
    Release {
        /// Which one.
        endpoint: EndpointId,
    },
    /// The prompt is computed there: its charge turns from prefill to decode.
    FirstToken {
        /// Where.
        endpoint: EndpointId,
    },
    /// The request's placement at this endpoint was for nothing.
    Withdraw {
        /// Which one.
        endpoint: EndpointId,
    },
    /// Tell the endpoint's breaker.
    Report {
        /// Whose.
        endpoint: EndpointId,
        /// What.
        signal: Signal,
    },
    /// Choose again, not among those tried, and dispatch there.
    RetryElsewhere {
        /// What failed.
        after: LegFailure,
    },
    /// The stream broke: choose again, not among those tried, and dispatch what continues it there. The client hears
    /// nothing of it. [`Event::Refused`] if there is no endpoint, [`Event::Unresumable`] if it can't be said.
    ResumeElsewhere {
        /// What failed.
        after: LegFailure,
    },
    /// Look whether this endpoint still answers anything, and say so by [`Event::Looked`].
    Look {
        /// Which one.
        endpoint: EndpointId,
    },
    /// Choose another endpoint for the decode leg and dispatch it there, with what the prefill leg's reply says.
    /// [`Event::Refused`] if there is none.
    DecodeElsewhere {
        /// What failed.
        after: LegFailure,
    },
    /// What the prefill endpoint holds for the decode leg is wanted by nobody: have it let go, in the
    /// connector's way. A prefill leg that is still out is to be read to its end for that, for none can be told
    /// from one that has just staged its KV, and what is staged can only be released by what its reply says. The
    /// charge there may go with it: the release that follows is for the request, not for the engine's work.
    ReleaseStaged {
        /// Who holds it.
        prefill: EndpointId,
        /// For whom.
        decode: EndpointId,
        /// Whether the decode leg was sent: an engine that has got it lets go when it is closed.
        leg: DecodeLeg,
    },
    /// Answer the client, who has no byte yet.
    GiveUp(GiveUp),
    /// End the client's stream with an error event, and never with `[DONE]`.
    EndWithErrorEvent(EndCause),
    /// Close the client's connection so that the reply can't be taken for complete.
    CutReply(EndCause),
    /// The request is over.
    Done(Box<Outcome>),
}

/// The effects of one step, in the order in which they are to be performed.
pub type Effects = SmallVec<[Effect; 4]>;

/// Why a leg is closed by us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AbortCause {
    /// The client is gone.
    ClientGone,
    /// A limit has passed.
    Limit(Limit),
    /// The endpoint is dead.
    EndpointLost(Cause),
    /// The replica ends.
    Shutdown,
    /// The request was over (or elsewhere) before the leg was sent.
    NotWanted,
}

/// A limit on a request's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// For the prefill leg of a split request.
    Prefill,
    /// From the handoff to the decode leg's first byte.
    Handoff,
    /// Until the first byte, over all tries.
    FirstByte,
    /// Between two parts of a stream.
    Idle,
    /// For the whole request.
    Total,
}

impl Limit {
    /// The name in logs and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Handoff => "handoff",
            Self::FirstByte => "first-byte",
            Self::Idle => "idle",
            Self::Total => "total",
        }
    }
}

/// What a client that has no byte yet is told. HTTP numbers are the gateway's affair, but for a status that
/// the engine itself gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveUp {
    /// What the router's refusal says (which the driver holds).
    Refusal,
    /// The engine's own last answer, as it is, with its `Retry-After`.
    PassOn {
        /// Its status.
        status: u16,
        /// How long the engine said to wait.
        retry_after: Option<Duration>,
    },
    /// No endpoint that was tried could be reached, or none kept to HTTP.
    BadGateway {
        /// The last failure.
        failure: LegFailure,
    },
    /// The time is up.
    Timeout {
        /// Which time.
        limit: Limit,
    },
    /// The replica ends: come again, another will answer.
    Unavailable,
}

/// Why a reply that has begun ends before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndCause {
    /// Its leg failed.
    Failure(LegFailure),
    /// A limit has passed.
    Limit(Limit),
    /// The replica ends.
    Shutdown,
}

impl EndCause {
    /// The name in logs, labels and the error event.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Failure(failure) => failure.as_str(),
            Self::Limit(Limit::Prefill) => "prefill-timeout",
            Self::Limit(Limit::Handoff) => "handoff-timeout",
            Self::Limit(Limit::FirstByte) => "first-byte-timeout",
            Self::Limit(Limit::Idle) => "idle-timeout",
            Self::Limit(Limit::Total) => "total-timeout",
            Self::Shutdown => "shutdown",
        }
    }
}
