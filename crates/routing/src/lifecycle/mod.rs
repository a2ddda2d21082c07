//! The life of one request, as a pure machine: the one place that decides what a failure, a limit that has
//! passed or a client that leaves means in each phase.
//!
//! ```text
//! admitted -> queued -> prefilling (-> handed-off) -> decoding -> finished
//!                 ^         |              |           |  ^
//!                 +- retrying -------------+           |  |                            any -> cancelled
//!                                          resuming <--+--+
//!                                                      +-> failed (error event)
//! ```
//!
//! A split request has two legs, of which each fails by itself: a failed prefill leg is tried with another prefill
//! endpoint or whole, a failed decode leg with another decode endpoint and the same prefill. What a prefill leg may
//! have staged is either taken by a decode leg that brings a byte, or there is an [`Effect::ReleaseStaged`] for it.
//!
//! Before the first byte a failed leg is tried elsewhere. After it a stream that can be continued exactly is resumed
//! ([`OnBreak`]): the same machine sends its continuation to another endpoint, split or whole, and all that would have
//! been a retry is part of that. Any other reply is ended so that nobody takes it for complete. The machine performs nothing: it answers each [`Event`] with [`Effect`]s, gives each
//! dispatched charge back exactly once and ends exactly once, whatever the order of events.

mod event;
mod limits;
mod outcome;
mod phase;
mod resume;
mod split;

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

pub use event::{AbortCause, DecodeLeg, Effect, Effects, EndCause, Event, GiveUp, LegOrder, Limit, Seen};
pub use limits::{Delivery, Limits};
pub use outcome::{FailedTry, Outcome, Verdict};
pub use phase::Phase;
pub use resume::{Aftermath, Break, NoResume, OnBreak};
pub use split::HANDOFF_AGE_MAX;

use crate::endpoint::{Cause, Signal};
use crate::retry::{LegFailure, LegFault, RetryPlan, WhoseFault};
use crate::{EndpointId, Moment};

use resume::{Begun, Look};
use split::{Handed, Parted};

/// One request.
#[derive(Debug)]
pub struct Lifecycle {
    limits: Limits,
    delivery: Delivery,
    plan: RetryPlan,
    started: Moment,
    state: State,
    failed: SmallVec<[FailedTry; 2]>,
    /// The decode endpoint of the last pair, whose charge came with [`Event::Split`].
    paired: Option<EndpointId>,
    /// The prefill endpoint that is taken to have failed a decode leg.
    suspected: Option<EndpointId>,
    on_break: OnBreak,
    /// Once a byte of the reply has reached the client.
    begun: Option<Begun>,
    breaks: SmallVec<[Break; 1]>,
    /// Silence within a stream after which its endpoint is looked at.
    quiet: Duration,
}

/// The leg whose reply the client gets: all of the request, or the decode of a split one.
#[derive(Clone, Copy, Debug)]
struct Leg {
    endpoint: EndpointId,
    sent: Moment,
    status: Option<u16>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Admitted,
    Queued,
    Prefilling {
        leg: Leg,
    },
    /// The prefill leg of a split request is out.
    Parted(Parted),
    /// It is done, and the decode leg has brought nothing yet.
    HandedOff(Handed),
    /// `handed` if another endpoint computed the prompt.
    Decoding {
        leg: Leg,
        handed: Option<Handed>,
        last_byte: Moment,
        look: Look,
    },
    /// `staged` if a prompt is computed and waits for another decode endpoint.
    Retrying {
        after: LegFailure,
        staged: Option<Handed>,
    },
    Over(Phase),
}

impl Lifecycle {
    /// A request that arrived just now.
    pub fn new(limits: Limits, delivery: Delivery, plan: RetryPlan, now: Moment) -> Self {
        plan.budget().request(now);
        Self {
            quiet: limits.quiet,
            limits,
            delivery,
            plan,
            started: now,
            state: State::Admitted,
            failed: SmallVec::new(),
            paired: None,
            suspected: None,
            on_break: OnBreak::End(NoResume::Off),
            begun: None,
            breaks: SmallVec::new(),
        }
    }

    /// The same request, with what becomes of its stream if that breaks.
    #[must_use]
    pub const fn on_break(mut self, on_break: OnBreak) -> Self {
        self.on_break = on_break;
        self
    }

    /// Where it stands.
    pub const fn phase(&self) -> Phase {
        match self.state {
            State::Decoding { .. } => Phase::Decoding,
            State::Over(phase) => phase,
            _ if self.begun.is_some() => Phase::Resuming,
            State::Admitted => Phase::Admitted,
            State::Queued => Phase::Queued,
            State::Prefilling { .. } | State::Parted(_) => Phase::Prefilling,
            State::HandedOff(_) => Phase::HandedOff,
            State::Retrying { .. } => Phase::Retrying,
        }
    }

    /// When it arrived.
    pub const fn started(&self) -> Moment {
        self.started
    }

    /// The endpoint it is at: of a split request the one whose leg it waits for.
    pub const fn endpoint(&self) -> Option<EndpointId> {
        match self.state {
            State::Prefilling { leg } | State::Decoding { leg, .. } => Some(leg.endpoint),
            State::Parted(parted) => Some(parted.prefill),
            State::HandedOff(handed) => Some(handed.parted.decode),
            _ => None,
        }
    }

    /// The endpoint that computes its prompt, or has, for another.
    pub const fn prefill_endpoint(&self) -> Option<EndpointId> {
        match self.state {
            State::Parted(parted) => Some(parted.prefill),
            State::HandedOff(handed)
            | State::Decoding { handed: Some(handed), .. }
            | State::Retrying { staged: Some(handed), .. } => Some(handed.parted.prefill),
            _ => None,
        }
    }

    /// The endpoints it was sent to, never to be chosen again.
    pub fn tried(&self) -> &[EndpointId] {
        self.plan.tried()
    }

    /// When a [`Event::Tick`] will change something, and which limit that is; `None` when it is over.
    pub fn next_deadline(&self) -> Option<(Moment, Limit)> {
        let total = match self.delivery {
            Delivery::Stream => self.started.plus(self.limits.total),
            Delivery::Whole => self.started.plus(self.limits.total_whole),
        };
        let first_byte = self.awaited_since().plus(self.limits.first_byte);
        let sooner = match (self.delivery, self.state) {
            (_, State::Over(_)) => return None,
            (delivery, State::Parted(parted)) => {
                let prefill = parted.sent.plus(self.limits.prefill);
                let none_sooner = delivery == Delivery::Whole || prefill < first_byte;
                Some(if none_sooner { (prefill, Limit::Prefill) } else { (first_byte, Limit::FirstByte) })
            }
            (Delivery::Whole, _) => None,
            (Delivery::Stream, State::HandedOff(handed)) if handed.parted.decode_leg == DecodeLeg::Out => {
                let handoff = handed.sent.plus(self.limits.handoff);
                Some(if handoff < first_byte {
                    (handoff, Limit::Handoff)
                } else {
                    (first_byte, Limit::FirstByte)
                })
            }
            (Delivery::Stream, State::Decoding { last_byte, .. }) => {
                Some((last_byte.plus(self.limits.idle), Limit::Idle))
            }
            (Delivery::Stream, _) => Some((first_byte, Limit::FirstByte)),
        };
        Some(sooner.filter(|(at, _)| *at < total).unwrap_or((total, Limit::Total)))
    }

    /// Takes in an event. Events that make no sense where the request stands (late ones, mostly) change
    /// nothing, except that a charge they bring is given back.
    pub fn step(&mut self, event: Event, now: Moment) -> Effects {
        match event {
            Event::Queued => {
                if matches!(self.state, State::Admitted) {
                    self.state = State::Queued;
                }
                Effects::new()
            }
            Event::Dispatched { endpoint } => self.dispatched(endpoint, now),
            Event::Split { prefill, decode, order } => self.split(prefill, decode, order, now),
            Event::HandedOff => self.handed_off(now),
            Event::PrefillAnswered { status } => self.prefill_answered(status, now),
            Event::PrefillFailed { failure, in_flight } => self.prefill_failed(failure, in_flight, now),
            Event::DecodeDispatched { endpoint } => self.decode_dispatched(endpoint, now),
            Event::Refused => self.refused(now),
            Event::HeadArrived { status } => {
                match &mut self.state {
                    State::Prefilling { leg } => leg.status = Some(status),
                    State::Parted(parted) | State::HandedOff(Handed { parted, .. }) => {
                        parted.status = Some(status);
                    }
                    _ => {}
                }
                Effects::new()
            }
            Event::FirstByte => self.first_byte(now),
            Event::Progress => {
                if let State::Decoding { last_byte, .. } = &mut self.state {
                    *last_byte = now.max(*last_byte);
                }
                Effects::new()
            }
            Event::Ended => self.ended(now),
            Event::LegFailed { failure, in_flight } => self.leg_failed(failure, in_flight, now),
            Event::EndpointLost { endpoint, cause } => self.endpoint_lost(endpoint, cause, now),
            Event::ClientGone => self.client_gone(now),
            Event::Shutdown => self.stopped(None, now),
            Event::Tick => match self.next_deadline() {
                Some((at, limit)) if at <= now => self.stopped(Some(limit), now),
                _ => self.look(now),
            },
            Event::Looked { endpoint, seen, in_flight } => self.looked(endpoint, seen, in_flight, now),
            Event::Unresumable(why) => self.unresumable(why, now),
        }
    }

    fn dispatched(&mut self, endpoint: EndpointId, now: Moment) -> Effects {
        let waiting = self.is_waiting();
        if !waiting || self.plan.tried().contains(&endpoint) {
            let cause = AbortCause::NotWanted;
            let mut effects =
                smallvec![Effect::AbortUpstream { endpoint, cause }, Effect::Release { endpoint }];
            if waiting {
                effects.extend(self.refused(now));
            }
            return effects;
        }
        self.plan.dispatched(endpoint);
        self.state = State::Prefilling { leg: Leg { endpoint, sent: now, status: None } };
        Effects::new()
    }

    /// Whether it is to be sent somewhere.
    const fn is_waiting(&self) -> bool {
        matches!(self.state, State::Admitted | State::Queued | State::Retrying { staged: None, .. })
    }

    fn refused(&mut self, now: Moment) -> Effects {
        match self.state {
            State::Admitted | State::Queued => self.give_up(GiveUp::Refusal, now),
            State::Retrying { after, staged: None } => match self.suspected.take() {
                // All that is left is whom it was held against that a decode leg failed, which may be wrong.
                Some(suspected) => {
                    self.plan.clear(suspected);
                    smallvec![self.elsewhere(after)]
                }
                None => {
                    self.settle_break(Aftermath::NoEndpoint);
                    self.give_up(give_up_after(after), now)
                }
            },
            State::Retrying { after, staged: Some(staged) } => {
                // Nobody takes over what is computed: it may still be served whole.
                if staged.doubted.is_some() {
                    self.prefill_is_gone(staged.parted.prefill, staged.doubted);
                }
                self.state = State::Retrying { after, staged: None };
                smallvec![staged.parted.release_staged(), self.elsewhere(after)]
            }
            _ => Effects::new(),
        }
    }

    fn first_byte(&mut self, now: Moment) -> Effects {
        let (leg, handed, mut effects) = match self.state {
            State::Prefilling { leg } => (leg, None, Effects::new()),
            State::HandedOff(handed) => {
                // What this one fetched another could have.
                let signal = Signal::Failure(Cause::ServerError);
                let guilty = handed.doubted.map(|endpoint| Effect::Report { endpoint, signal });
                (handed.leg(), Some(handed), guilty.into_iter().collect())
            }
            State::Parted(parted) if parted.decode_leg == DecodeLeg::Out => {
                // An answer that comes before the prefill leg's end says that the prompt is computed.
                let effects = self.handed_off(now);
                let handed = Handed { parted, at: now, sent: parted.sent, doubted: None };
                (handed.leg(), Some(handed), effects)
            }
            _ => return Effects::new(),
        };
        match self.begun {
            None => self.begun = Some(Begun::new(&leg, handed.as_ref(), now)),
            Some(_) => self.settle_break(Aftermath::Resumed),
        }
        self.state = State::Decoding { leg, handed, last_byte: now, look: Look::from(now) };
        effects.push(Effect::FirstToken { endpoint: leg.endpoint });
        effects
    }

    fn ended(&mut self, now: Moment) -> Effects {
        match self.state {
            State::Decoding { leg, .. } => self.finished(leg, leg.status.unwrap_or(200), now),
            State::HandedOff(handed) => match handed.parted.status.filter(|_| self.begun.is_none()) {
                Some(status) if self.delivery == Delivery::Whole || status >= 300 => {
                    let mut effects: Effects = smallvec![handed.parted.release_staged()];
                    effects.extend(self.finished(handed.leg(), status, now));
                    effects
                }
                _ => self.decode_failed(handed.parted, LegFailure::new(LegFault::Truncated), 1, now),
            },
            State::Prefilling { leg } => match leg.status.filter(|_| self.begun.is_none()) {
                // A reply without a body. A stream that was promised and brought nothing is not one.
                Some(status) if self.delivery == Delivery::Whole || status >= 300 => {
                    self.finished(leg, status, now)
                }
                _ => {
                    let failure = LegFailure::new(LegFault::Truncated);
                    self.leg_failed(failure, 1, now)
                }
            },
            State::Retrying { .. } if self.begun.is_some() => self.ended_after_all(now),
            _ => Effects::new(),
        }
    }

    fn finished(&mut self, leg: Leg, status: u16, now: Moment) -> Effects {
        let endpoint = leg.endpoint;
        let mut effects: Effects = smallvec![Effect::Release { endpoint }];
        match status {
            200..=299 => {
                self.plan.budget().succeeded(endpoint, now);
                effects.push(Effect::Report { endpoint, signal: Signal::Success });
            }
            500.. => {
                let signal = Signal::Failure(Cause::ServerError);
                effects.push(Effect::Report { endpoint, signal });
                effects.push(Effect::Withdraw { endpoint });
            }
            // The engine refused the request: it computed nothing.
            _ => effects.push(Effect::Withdraw { endpoint }),
        }
        effects.push(self.done(Verdict::Finished { status }, now));
        effects
    }

    fn leg_failed(&mut self, failure: LegFailure, in_flight: u32, now: Moment) -> Effects {
        let (leg, begun) = match self.state {
            State::Prefilling { leg } => (leg, false),
            State::Decoding { leg, .. } => (leg, true),
            State::HandedOff(Handed { parted, .. }) | State::Parted(parted) => {
                return self.decode_failed(parted, failure, in_flight, now);
            }
            _ => return Effects::new(),
        };
        let endpoint = leg.endpoint;
        let mut effects: Effects = smallvec![Effect::Release { endpoint }];
        effects.extend(blame(endpoint, &failure));
        if begun {
            effects.extend(self.broke(endpoint, failure, in_flight, now));
            return effects;
        }
        effects.push(Effect::Withdraw { endpoint });
        let next = self.plan.next(&failure, endpoint, in_flight, now);
        effects.extend(self.go_on(FailedTry { endpoint, failure, next }, now));
        effects
    }

    /// Tries elsewhere from the start if that was granted, else gives up.
    fn go_on(&mut self, failed: FailedTry, now: Moment) -> Effects {
        let FailedTry { failure, next, .. } = failed;
        self.failed.push(failed);
        if next.is_err() {
            self.settle_break(Aftermath::Failed);
            return self.give_up(give_up_after(failure), now);
        }
        self.state = State::Retrying { after: failure, staged: None };
        smallvec![self.elsewhere(failure)]
    }

    /// What has the driver choose again, and send the request or its continuation there.
    const fn elsewhere(&self, after: LegFailure) -> Effect {
        if self.begun.is_some() {
            Effect::ResumeElsewhere { after }
        } else {
            Effect::RetryElsewhere { after }
        }
    }

    fn endpoint_lost(&mut self, lost: EndpointId, cause: Cause, now: Moment) -> Effects {
        // An engine that merely failed others may well be serving this one.
        let silent = matches!(cause, Cause::Refused | Cause::ConnectTimeout | Cause::Silent);
        let (endpoint, status) = match self.state {
            State::Prefilling { leg } => (leg.endpoint, leg.status),
            State::Parted(parted) => (parted.prefill, None),
            State::HandedOff(handed) if handed.parted.prefill == lost => {
                return self.prefill_lost(handed, cause, now);
            }
            State::HandedOff(Handed { parted, .. }) if parted.decode_leg == DecodeLeg::Out => {
                (parted.decode, parted.status)
            }
            _ => return Effects::new(),
        };
        if endpoint != lost || !silent || status.is_some() {
            return Effects::new();
        }
        let cause_of_abort = AbortCause::EndpointLost(cause);
        let mut effects: Effects = smallvec![Effect::AbortUpstream { endpoint, cause: cause_of_abort }];
        let failure = LegFailure::new(LegFault::EndpointLost(cause));
        effects.extend(match self.state {
            State::Parted(_) => self.prefill_failed(failure, 1, now),
            _ => self.leg_failed(failure, 1, now),
        });
        effects
    }

    fn client_gone(&mut self, now: Moment) -> Effects {
        let during = self.phase();
        if during.is_terminal() {
            return Effects::new();
        }
        let mut effects = self.abort(AbortCause::ClientGone);
        effects.push(self.done(Verdict::Cancelled { during }, now));
        effects
    }

    /// Ends it by a limit, or for want of a replica. A leg that is too slow is tried elsewhere.
    fn stopped(&mut self, limit: Option<Limit>, now: Moment) -> Effects {
        if let Some(limit @ (Limit::Prefill | Limit::Handoff | Limit::Idle)) = limit {
            return self.leg_is_silent(limit, now);
        }
        let cause = limit.map_or(AbortCause::Shutdown, AbortCause::Limit);
        let mut effects = self.abort(cause);
        if let (Some(endpoint), Some(Limit::FirstByte)) = (self.endpoint(), limit) {
            effects.push(Effect::Report { endpoint, signal: Signal::Failure(Cause::Silent) });
        }
        match self.state {
            State::Over(_) => {}
            State::Decoding { .. } => {
                let cause = limit.map_or(EndCause::Shutdown, EndCause::Limit);
                effects.extend(self.break_off(cause, now));
            }
            // What was sent to go on with a broken stream has not come to a byte in time.
            State::Prefilling { .. } | State::Parted(_) | State::HandedOff(_)
                if self.begun.is_some() && limit.is_some() =>
            {
                self.settle_break(Aftermath::Failed);
                effects.extend(self.give_up(give_up_by(limit), now));
            }
            State::Admitted
            | State::Queued
            | State::Prefilling { .. }
            | State::Parted(_)
            | State::HandedOff(_)
            | State::Retrying { .. } => {
                effects.extend(self.give_up(give_up_by(limit), now));
            }
        }
        effects
    }

    /// Closes the legs that are out.
    fn abort(&self, cause: AbortCause) -> Effects {
        match self.state {
            State::Parted(parted) => return parted.abandoned(cause),
            State::HandedOff(handed) => return handed.abandoned(cause),
            State::Retrying { staged: Some(staged), .. } => return smallvec![staged.parted.release_staged()],
            _ => {}
        }
        let Some(endpoint) = self.endpoint() else { return Effects::new() };
        let mut effects: Effects =
            smallvec![Effect::AbortUpstream { endpoint, cause }, Effect::Release { endpoint }];
        if matches!(self.state, State::Prefilling { .. }) {
            effects.push(Effect::Withdraw { endpoint });
        }
        effects
    }

    fn give_up(&mut self, what: GiveUp, now: Moment) -> Effects {
        if self.begun.is_some() {
            return self.break_off(end_of(what), now);
        }
        let done = self.done(Verdict::GaveUp(what), now);
        smallvec![Effect::GiveUp(what), done]
    }

    fn break_off(&mut self, cause: EndCause, now: Moment) -> Effects {
        let end = match self.delivery {
            Delivery::Stream => Effect::EndWithErrorEvent(cause),
            Delivery::Whole => Effect::CutReply(cause),
        };
        smallvec![end, self.done(Verdict::Broken(cause), now)]
    }

    fn done(&mut self, verdict: Verdict, now: Moment) -> Effect {
        let (leg, handed) = match self.state {
            State::Prefilling { leg } => (Some(leg), None),
            State::Parted(parted) => (Some(parted.leg()), None),
            State::HandedOff(handed) => (Some(handed.leg()), Some(handed.at)),
            State::Decoding { leg, .. } => (Some(leg), None),
            _ => (None, None),
        };
        // How long anything took is told of the first reply's beginning.
        let sent = self.begun.map_or_else(|| leg.map_or(now, |leg| leg.sent), |begun| begun.sent);
        let handed = self.begun.map_or(handed, |begun| begun.handed);
        let first_byte = self.begun.map(|begun| begun.first_byte);
        let prefilled = handed.or(first_byte);
        let outcome = Outcome {
            verdict,
            endpoint: leg.map(|leg| leg.endpoint).or_else(|| self.plan.tried().last().copied()),
            prefill_endpoint: self.prefill_endpoint(),
            failed: std::mem::take(&mut self.failed),
            breaks: std::mem::take(&mut self.breaks),
            queued_ms: sent.millis_since(self.started),
            prefill_ms: prefilled.map(|at| at.millis_since(sent)),
            handoff_ms: handed.zip(first_byte).map(|(handed, at)| at.millis_since(handed)),
            decode_ms: first_byte.map(|at| now.millis_since(at)),
            ttft_ms: first_byte.map(|at| at.millis_since(self.started)),
            total_ms: now.millis_since(self.started),
        };
        self.state = State::Over(verdict.phase());
        Effect::Done(Box::new(outcome))
    }
}

/// What the breaker of a leg's endpoint is told of its failure.
fn blame(endpoint: EndpointId, failure: &LegFailure) -> Effects {
    let mut effects = Effects::new();
    if let WhoseFault::Endpoint(cause) = failure.whose_fault() {
        effects.push(Effect::Report { endpoint, signal: Signal::Failure(cause) });
    }
    if let Some(pause) = failure.retry_after {
        effects.push(Effect::Report { endpoint, signal: Signal::Pause(pause) });
    }
    effects
}

/// What a client is told when `failure` was the last: the engine's own answer if it gave one.
const fn give_up_after(failure: LegFailure) -> GiveUp {
    match failure.fault {
        LegFault::LimitPassed(limit) => GiveUp::Timeout { limit },
        LegFault::Status(status) => GiveUp::PassOn { status, retry_after: failure.retry_after },
        LegFault::ConnectRefused
        | LegFault::ConnectTimeout
        | LegFault::Reset
        | LegFault::Truncated
        | LegFault::Aborted
        | LegFault::ErrorEvent
        | LegFault::Garbled
        | LegFault::EndpointLost(_) => GiveUp::BadGateway { failure },
    }
}

/// What ends a reply that has begun where another one would have been given up.
const fn end_of(what: GiveUp) -> EndCause {
    match what {
        GiveUp::Timeout { limit } => EndCause::Limit(limit),
        GiveUp::BadGateway { failure } => EndCause::Failure(failure),
        GiveUp::PassOn { status, .. } => EndCause::Failure(LegFailure::new(LegFault::Status(status))),
        GiveUp::Unavailable | GiveUp::Refusal => EndCause::Shutdown,
    }
}

const fn give_up_by(limit: Option<Limit>) -> GiveUp {
    match limit {
        Some(limit) => GiveUp::Timeout { limit },
        None => GiveUp::Unavailable,
    }
}

#[cfg(test)]
mod tests;
