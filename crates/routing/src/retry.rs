//! Whether a failed leg is tried elsewhere: what failed, how often, and what all retries may cost.
//!
//! Two wishes pull against each other. When one engine dies, each of its requests must move, and at once.
//! When all engines are overloaded, retries must not multiply the load. Which of the two it is shows in the
//! others: a retry that another endpoint is known to be able to serve draws on the failed endpoint's burst;
//! one that nobody is known to serve draws on a fifth of the recent requests.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

mod budget;
pub use budget::{BudgetConfig, Draw, RetryBudget, Source};

use crate::endpoint::Cause;
use crate::lifecycle::Limit;
use crate::{EndpointId, Moment};

/// The most tries a request may ever be given, whatever is configured: bounds what is kept for each.
pub const TRIES_MAX: u32 = 8;
/// The tries after which a 500 is passed on, whatever else is allowed. 2: see [`MayRetry::EndpointFailed`].
const TRIES_OF_FAILED_MAX: usize = 2;

/// How a leg failed. Of limits only those of one leg are among them: the lifecycle sees to the others itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LegFault {
    /// Nobody listens there.
    ConnectRefused,
    /// No connection in time (or no route, or no such host).
    ConnectTimeout,
    /// The connection was reset, or closed before the reply's head.
    Reset,
    /// The endpoint answered with this status, and it is not one to pass on without a second try.
    Status(u16),
    /// The reply broke off before its end.
    Truncated,
    /// The engine gave up on the request, as one does that is shut down.
    Aborted,
    /// The engine sent an error event within its stream.
    ErrorEvent,
    /// The reply is not HTTP, or breaks its own framing.
    Garbled,
    /// The endpoint was found dead by other means while this waited for its first byte.
    EndpointLost(Cause),
    /// One leg of a split request used up this limit of its own.
    LimitPassed(Limit),
}

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WhoseFault {
    /// The client's: the same would happen anywhere.
    Client,
    /// The endpoint's, for this reason.
    Endpoint(Cause),
    /// Nobody's that has to be told: the endpoint says that it is full, or is known to be dead.
    Nobody,
}

/// Whether a failure may be answered with another try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MayRetry {
    /// No: it would fail again.
    Never,
    /// The endpoint is gone; what it had must move.
    EndpointGone,
    /// The endpoint answered that it can't now; others may be as full.
    EndpointUnable,
    /// The endpoint failed at it. A dying engine answers so for a moment, and so does a sound one whose bug
    /// the request meets: a second endpoint tells which, and no third one is put at risk.
    EndpointFailed,
}

/// A leg's failure, with what the endpoint said of trying again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LegFailure {
    /// What happened.
    pub fault: LegFault,
    /// The endpoint's `Retry-After`, if it gave one.
    pub retry_after: Option<Duration>,
}

impl LegFailure {
    /// A failure without a word of when to try again.
    pub const fn new(fault: LegFault) -> Self {
        Self { fault, retry_after: None }
    }

    /// Whether an answer with this status is worth another endpoint before it is passed on: 502, 503 and
    /// 504; 500, which a real vLLM answers between the death of its core, or a SIGTERM, and its own end;
    /// and 429, which says that this engine's queue is full and nothing of the others'. All else is the
    /// engine's word to its client.
    pub const fn is_retried_status(status: u16) -> bool {
        matches!(status, 429 | 500 | 502 | 503 | 504)
    }

    /// Whether it may be tried elsewhere, as long as no byte has reached the client.
    pub const fn may_retry(&self) -> MayRetry {
        match self.fault {
            LegFault::ConnectRefused
            | LegFault::ConnectTimeout
            | LegFault::Reset
            | LegFault::Truncated
            | LegFault::Aborted
            | LegFault::EndpointLost(_)
            | LegFault::LimitPassed(_) => MayRetry::EndpointGone,
            LegFault::Garbled | LegFault::ErrorEvent => MayRetry::EndpointUnable,
            LegFault::Status(500) => MayRetry::EndpointFailed,
            LegFault::Status(status) if Self::is_retried_status(status) => MayRetry::EndpointUnable,
            LegFault::Status(_) => MayRetry::Never,
        }
    }

    /// Whose fault it is; what the breaker is told follows from this.
    pub const fn whose_fault(&self) -> WhoseFault {
        match self.fault {
            LegFault::ConnectRefused => WhoseFault::Endpoint(Cause::Refused),
            LegFault::ConnectTimeout => WhoseFault::Endpoint(Cause::ConnectTimeout),
            LegFault::Reset => WhoseFault::Endpoint(Cause::Reset),
            // What found the endpoint dead, or late, has told its breaker already.
            LegFault::Status(429) | LegFault::EndpointLost(_) | LegFault::LimitPassed(_) => {
                WhoseFault::Nobody
            }
            LegFault::Status(502..=504) => WhoseFault::Endpoint(Cause::Unavailable),
            LegFault::Status(500..) | LegFault::ErrorEvent => WhoseFault::Endpoint(Cause::ServerError),
            LegFault::Status(_) => WhoseFault::Client,
            LegFault::Truncated | LegFault::Aborted => WhoseFault::Endpoint(Cause::Truncated),
            LegFault::Garbled => WhoseFault::Endpoint(Cause::Garbled),
        }
    }

    /// The name in logs and labels.
    pub const fn as_str(&self) -> &'static str {
        match self.fault {
            LegFault::ConnectRefused => "connect-refused",
            LegFault::ConnectTimeout => "connect-timeout",
            LegFault::Reset => "reset",
            LegFault::Status(429) => "status-429",
            LegFault::Status(500) => "status-500",
            LegFault::Status(502) => "status-502",
            LegFault::Status(503) => "status-503",
            LegFault::Status(504) => "status-504",
            LegFault::Status(_) => "status-other",
            LegFault::Truncated => "truncated",
            LegFault::Aborted => "aborted",
            LegFault::ErrorEvent => "error-event",
            LegFault::Garbled => "garbled",
            LegFault::EndpointLost(_) => "endpoint-lost",
            LegFault::LimitPassed(Limit::Prefill) => "prefill-timeout",
            LegFault::LimitPassed(Limit::Handoff) => "handoff-timeout",
            LegFault::LimitPassed(Limit::Idle) => "idle-timeout",
            LegFault::LimitPassed(_) => "timeout",
        }
    }
}

/// The tries of one request: where it has been, and whether it may go on.
#[derive(Clone, Debug)]
pub struct RetryPlan {
    tries_max: u32,
    tried: SmallVec<[EndpointId; 3]>,
    /// Those of them that failed a prefill for others: they don't count as tries.
    prefills_failed: u32,
    budget: Arc<RetryBudget>,
}

/// Why there is no further try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoRetry {
    /// The failure is not one that another endpoint would mend.
    NotRetryable,
    /// All tries are used.
    TriesUsed,
    /// The budget of all requests together is used.
    BudgetUsed,
}

impl RetryPlan {
    /// The default of `tries_max`. 3: the first, one elsewhere, and one more for two deaths at once.
    pub const TRIES_DEFAULT: u32 = 3;

    /// A plan of at most `tries_max` tries (1 to [`TRIES_MAX`]) on the common budget.
    pub fn new(tries_max: u32, budget: Arc<RetryBudget>) -> Self {
        Self { tries_max: tries_max.clamp(1, TRIES_MAX), tried: SmallVec::new(), prefills_failed: 0, budget }
    }

    /// Where it has been, the latest last: never to be chosen again for this request.
    pub fn tried(&self) -> &[EndpointId] {
        &self.tried
    }

    /// The budget it draws on.
    pub fn budget(&self) -> &RetryBudget {
        &self.budget
    }

    pub(crate) fn dispatched(&mut self, endpoint: EndpointId) {
        self.tried.push(endpoint);
    }

    /// A reply from `endpoint` broke, which for the decode leg of a split request is the first failure there.
    pub(crate) fn broke_at(&mut self, endpoint: EndpointId) {
        if !self.tried.contains(&endpoint) {
            self.tried.push(endpoint);
        }
    }

    /// What failed at `endpoint` was another's fault, or may have been: it may be chosen again.
    pub(crate) fn acquit(&mut self, endpoint: EndpointId) {
        self.tried.retain(|tried| *tried != endpoint);
    }

    /// A decode leg failed for want of what `prefill` held, as far as can be told. Like a failed prefill, that is no try.
    pub(crate) fn suspect(&mut self, prefill: EndpointId) {
        self.tried.push(prefill);
        self.prefills_failed += 1;
    }

    /// It is not held against `prefill` any more.
    pub(crate) fn clear(&mut self, prefill: EndpointId) {
        self.acquit(prefill);
        self.prefills_failed = self.prefills_failed.saturating_sub(1);
    }

    /// Whether to go on after the prefill leg of a split request failed at `endpoint`. It may always, for who chooses
    /// ends with splitting after a few, and the tries of whole requests are for their own failures.
    pub(crate) fn next_after_prefill(
        &mut self,
        failure: &LegFailure,
        endpoint: EndpointId,
        in_flight: u32,
        now: Moment,
    ) -> Result<Source, NoRetry> {
        self.tried.push(endpoint);
        self.prefills_failed += 1;
        let may_retry = self.may_retry(failure, endpoint, in_flight, now)?;
        if self.prefills_failed >= TRIES_MAX {
            return Err(NoRetry::TriesUsed);
        }
        match self.budget.draw(may_retry, endpoint, now) {
            Draw::Granted(source) => Ok(source),
            Draw::Refused => Err(NoRetry::BudgetUsed),
        }
    }

    /// Whether such a failure may be tried elsewhere at all; the budget is told of it if so.
    fn may_retry(
        &self,
        failure: &LegFailure,
        endpoint: EndpointId,
        in_flight: u32,
        now: Moment,
    ) -> Result<MayRetry, NoRetry> {
        let may_retry = failure.may_retry();
        if may_retry == MayRetry::Never {
            return Err(NoRetry::NotRetryable);
        }
        match failure.fault {
            LegFault::EndpointLost(_) | LegFault::LimitPassed(_) => {
                self.budget.lost(endpoint, in_flight, now);
            }
            _ => self.budget.failed(endpoint, in_flight, now),
        }
        Ok(may_retry)
    }

    /// Tries so far, prefills for others not counted.
    fn tries(&self) -> usize {
        self.tried.len().saturating_sub(self.prefills_failed as usize)
    }

    /// Whether to try elsewhere after `failure` at `endpoint`, where `in_flight` requests of this replica
    /// ran when it failed. Draws on the budget if so.
    pub(crate) fn next(
        &self,
        failure: &LegFailure,
        endpoint: EndpointId,
        in_flight: u32,
        now: Moment,
    ) -> Result<Source, NoRetry> {
        let may_retry = self.may_retry(failure, endpoint, in_flight, now)?;
        if may_retry == MayRetry::EndpointFailed && self.tries() >= TRIES_OF_FAILED_MAX {
            return Err(NoRetry::NotRetryable);
        }
        if self.tries() >= self.tries_max as usize {
            return Err(NoRetry::TriesUsed);
        }
        match self.budget.draw(may_retry, endpoint, now) {
            Draw::Granted(source) => Ok(source),
            Draw::Refused => Err(NoRetry::BudgetUsed),
        }
    }
}

#[cfg(test)]
mod tests;
