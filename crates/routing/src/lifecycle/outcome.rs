//! How a request went, for logs, metrics and learning.

use smallvec::SmallVec;

use super::Phase;
use super::event::{EndCause, GiveUp};
use super::resume::{Aftermath, Break};
use crate::EndpointId;
use crate::retry::{LegFailure, NoRetry, Source};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The engine's reply reached the client to its end.
    Finished {
        /// Its status; what an engine answers below 500 is a finished request as well.
        status: u16,
    },
    /// The client was told that it failed, before any byte of a reply.
    GaveUp(GiveUp),
    /// The reply broke off, and the client can tell.
    Broken(EndCause),
    /// The client left.
    Cancelled {
        /// In which phase.
        during: Phase,
    },
}

impl Verdict {
    /// The terminal phase it belongs to.
    pub const fn phase(&self) -> Phase {
        match self {
            Self::Finished { .. } => Phase::Finished,
            Self::GaveUp(_) | Self::Broken(_) => Phase::Failed,
            Self::Cancelled { .. } => Phase::Cancelled,
        }
    }
}

/// A leg that failed and was (or was not) tried elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedTry {
    /// Where.
    pub endpoint: EndpointId,
    /// How.
    pub failure: LegFailure,
    /// What paid for the next try, or why there was none.
    pub next: Result<Source, NoRetry>,
}

/// How a request went.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// How it ended.
    pub verdict: Verdict,
    /// The endpoint whose reply the client got (or would have got); `None` if it never was at one.
    pub endpoint: Option<EndpointId>,
    /// The endpoint that computed the prompt for it, if it was split.
    pub prefill_endpoint: Option<EndpointId>,
    /// The tries that failed, in order.
    pub failed: SmallVec<[FailedTry; 2]>,
    /// The times that its stream broke, in order.
    pub breaks: SmallVec<[Break; 1]>,
    /// From arrival to the dispatch that brought the first byte (or to the last one, or to
    /// the end, if there was none), in ms: queueing and failed tries.
    pub queued_ms: f64,
    /// From the last dispatch to its first byte, in ms, or to the handoff if it was split; `None` without one.
    pub prefill_ms: Option<f64>,
    /// From the handoff to the first byte, in ms; `None` without one.
    pub handoff_ms: Option<f64>,
    /// From the first byte to the last, in ms; `None` without one.
    pub decode_ms: Option<f64>,
    /// From arrival to the first byte, in ms; `None` without one.
    pub ttft_ms: Option<f64>,
    /// From arrival to the end, in ms.
    pub total_ms: f64,
}

impl Outcome {
    /// How often it went on at another endpoint after its stream had broken.
    pub fn resumed(&self) -> usize {
        self.breaks.iter().filter(|broke| broke.then == Aftermath::Resumed).count()
    }

    /// From the last dispatch to the end, in ms: what the endpoint itself took. Of a split request from the
    /// handoff.
    pub fn leg_ms(&self) -> f64 {
        self.of_leg_ms(self.total_ms)
    }

    /// From the same moment to one that came `at_ms` after arrival, in ms.
    pub fn of_leg_ms(&self, at_ms: f64) -> f64 {
        let before = if self.prefill_endpoint.is_some() { self.prefill_ms.unwrap_or(0.0) } else { 0.0 };
        (at_ms - self.queued_ms - before).max(0.0)
    }

    /// From the last dispatch to the first byte, in ms, of a split request from the handoff; `None` without one.
    pub const fn first_byte_of_leg_ms(&self) -> Option<f64> {
        if self.prefill_endpoint.is_some() { self.handoff_ms } else { self.prefill_ms }
    }
}
