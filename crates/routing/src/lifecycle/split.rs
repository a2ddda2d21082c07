//! The legs of a split request: what each one's failure means, and who lets go of what was staged.

use std::time::Duration;

use smallvec::smallvec;

use super::event::{AbortCause, DecodeLeg, Effect, Effects, LegOrder, Limit};
use super::outcome::{FailedTry, Verdict};
use super::{Delivery, Leg, Lifecycle, State, blame};
use crate::endpoint::{Cause, Signal};
use crate::retry::{LegFailure, LegFault};
use crate::{EndpointId, Moment};

/// From this time on a decode leg's word that it failed is taken to be about the engine that it fetches from. 4 s: a
/// vLLM that never spoke to that one says so after 5 s (of a request in one piece) or 10, and of its own failures at
/// once. One that did speak to it says so at once too: see [`Fault::Open`].
const PREFILL_GONE_AFTER: Duration = Duration::from_secs(4);
/// How old a handoff may be to be taken over by another decode endpoint. 20 s: vLLM frees KV that nobody has asked for
/// 30 s after it was computed, and an engine that reads it later, or long after another one has, reads what others
/// have put there since, and does not notice.
pub const HANDOFF_AGE_MAX: Duration = Duration::from_secs(20);

/// A pair of legs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parted {
    pub(super) prefill: EndpointId,
    /// When the prefill leg was sent.
    pub(super) sent: Moment,
    pub(super) decode: EndpointId,
    order: LegOrder,
    pub(super) decode_leg: DecodeLeg,
    /// The status of the decode leg's reply, once it is there.
    pub(super) status: Option<u16>,
}

/// A pair of legs of which the first is done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handed {
    pub(super) parted: Parted,
    /// When it was done.
    pub(super) at: Moment,
    /// When the decode leg's time began: at the handoff, or when it was sent again.
    pub(super) sent: Moment,
    /// The decode endpoint of which it is open whether it failed, or whom it fetched from.
    pub(super) doubted: Option<EndpointId>,
}

/// At whom the failure of a decode leg lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The decode endpoint, or nobody.
    Decode,
    /// The prefill endpoint, which can't be fetched from.
    Prefill,
    /// One of them. If another decode endpoint can fetch the same, it was the first decode endpoint; if it can't, or
    /// there is no other, the prefill endpoint is taken to be gone, and the decode endpoint may serve the request
    /// whole.
    Open,
}

impl Parted {
    /// The decode leg, as the outcome sees it: its time begins with the pair's.
    pub(super) const fn leg(&self) -> Leg {
        Leg { endpoint: self.decode, sent: self.sent, status: self.status }
    }

    pub(super) const fn release_staged(&self) -> Effect {
        Effect::ReleaseStaged { prefill: self.prefill, decode: self.decode, leg: self.decode_leg }
    }

    /// What is to be done when nobody wants the answer any more while the prefill leg is out.
    pub(super) fn abandoned(&self, cause: AbortCause) -> Effects {
        let mut effects = match self.order {
            // The leg is read to its end, which leaves the prompt warm.
            LegOrder::PrefillFirst => {
                smallvec![self.release_staged(), Effect::Release { endpoint: self.prefill }]
            }
            LegOrder::Together => self.closed(self.prefill, cause),
        };
        effects.extend(match self.decode_leg {
            DecodeLeg::Out => self.closed(self.decode, cause),
            DecodeLeg::Waiting => self.given_back(self.decode),
        });
        effects
    }

    /// One of its legs is closed for nothing.
    fn closed(&self, endpoint: EndpointId, cause: AbortCause) -> Effects {
        let mut effects: Effects = smallvec![Effect::AbortUpstream { endpoint, cause }];
        effects.extend(self.given_back(endpoint));
        effects
    }

    fn given_back(&self, endpoint: EndpointId) -> Effects {
        smallvec![Effect::Release { endpoint }, Effect::Withdraw { endpoint }]
    }

    /// The prefill leg is over without a handoff: the decode leg goes too.
    fn without_decode(&self) -> Effects {
        match self.decode_leg {
            DecodeLeg::Out => self.closed(self.decode, AbortCause::NotWanted),
            DecodeLeg::Waiting => self.given_back(self.decode),
        }
    }
}

impl Handed {
    pub(super) const fn leg(&self) -> Leg {
        self.parted.leg()
    }

    /// What is to be done when nobody wants the answer any more after the handoff.
    pub(super) fn abandoned(&self, cause: AbortCause) -> Effects {
        let parted = &self.parted;
        let mut effects = match parted.decode_leg {
            DecodeLeg::Out => parted.closed(parted.decode, cause),
            DecodeLeg::Waiting => parted.given_back(parted.decode),
        };
        effects.push(parted.release_staged());
        effects
    }
}

impl Lifecycle {
    pub(super) fn split(
        &mut self,
        prefill: EndpointId,
        decode: EndpointId,
        order: LegOrder,
        now: Moment,
    ) -> Effects {
        let decode_leg = match order {
            LegOrder::PrefillFirst => DecodeLeg::Waiting,
            LegOrder::Together => DecodeLeg::Out,
        };
        let parted = Parted { prefill, sent: now, decode, order, decode_leg, status: None };
        let waiting = self.is_waiting();
        if waiting && ![prefill, decode].iter().any(|each| self.plan.tried().contains(each)) {
            self.paired = Some(decode);
            self.state = State::Parted(parted);
            return Effects::new();
        }
        let mut effects = parted.abandoned(AbortCause::NotWanted);
        if waiting {
            effects.extend(self.refused(now));
        }
        effects
    }

    pub(super) fn handed_off(&mut self, now: Moment) -> Effects {
        let State::Parted(parted) = self.state else { return Effects::new() };
        let endpoint = parted.prefill;
        self.plan.budget().succeeded(endpoint, now);
        self.state = State::HandedOff(Handed { parted, at: now, sent: now, doubted: None });
        smallvec![Effect::Release { endpoint }, Effect::Report { endpoint, signal: Signal::Success }]
    }

    pub(super) fn decode_dispatched(&mut self, endpoint: EndpointId, now: Moment) -> Effects {
        match &mut self.state {
            State::HandedOff(Handed { parted, .. })
                if parted.decode == endpoint && parted.decode_leg == DecodeLeg::Waiting =>
            {
                parted.decode_leg = DecodeLeg::Out;
                Effects::new()
            }
            State::Retrying { staged: Some(handed), .. } if !self.plan.tried().contains(&endpoint) => {
                let parted =
                    Parted { decode: endpoint, decode_leg: DecodeLeg::Out, status: None, ..handed.parted };
                self.state = State::HandedOff(Handed { parted, sent: now, ..*handed });
                Effects::new()
            }
            _ => {
                let cause = AbortCause::NotWanted;
                let mut effects: Effects = smallvec![Effect::AbortUpstream { endpoint, cause }];
                // The charge of the pair's own is given back already.
                if self.paired != Some(endpoint) {
                    effects.push(Effect::Release { endpoint });
                }
                if matches!(self.state, State::Retrying { staged: Some(_), .. }) {
                    effects.extend(self.refused(now));
                }
                effects
            }
        }
    }

    /// The engine's answer to the prefill leg is the client's.
    pub(super) fn prefill_answered(&mut self, status: u16, now: Moment) -> Effects {
        let State::Parted(parted) = self.state else { return Effects::new() };
        if self.begun.is_some() {
            return self.prefill_failed(LegFailure::new(LegFault::Status(status)), 1, now);
        }
        let mut effects = parted.given_back(parted.prefill);
        if status >= 500 {
            let signal = Signal::Failure(Cause::ServerError);
            effects.push(Effect::Report { endpoint: parted.prefill, signal });
        }
        effects.extend(parted.without_decode());
        // As if it had been sent there whole.
        let leg = Leg { endpoint: parted.prefill, sent: parted.sent, status: Some(status) };
        self.state = State::Prefilling { leg };
        effects.push(self.done(Verdict::Finished { status }, now));
        effects
    }

    pub(super) fn prefill_failed(&mut self, failure: LegFailure, in_flight: u32, now: Moment) -> Effects {
        let State::Parted(parted) = self.state else { return Effects::new() };
        let endpoint = parted.prefill;
        let mut effects = parted.given_back(endpoint);
        effects.extend(blame(endpoint, &failure));
        effects.extend(parted.without_decode());
        let next = self.plan.next_after_prefill(&failure, endpoint, in_flight, now);
        effects.extend(self.go_on(FailedTry { endpoint, failure, next }, now));
        effects
    }

    /// The decode leg failed before its first byte.
    pub(super) fn decode_failed(
        &mut self,
        parted: Parted,
        failure: LegFailure,
        in_flight: u32,
        now: Moment,
    ) -> Effects {
        if parted.decode_leg == DecodeLeg::Waiting {
            return Effects::new();
        }
        let handed = match self.state {
            State::HandedOff(handed) => Some(handed),
            _ => None,
        };
        let endpoint = parted.decode;
        let mut effects = parted.given_back(endpoint);
        let fault = fault_of(&failure, handed.as_ref(), now);
        let doubted = match fault {
            Fault::Decode => {
                effects.extend(blame(endpoint, &failure));
                self.plan.dispatched(endpoint);
                handed.and_then(|handed| handed.doubted)
            }
            Fault::Open => {
                self.plan.dispatched(endpoint);
                Some(endpoint)
            }
            Fault::Prefill => {
                self.prefill_is_gone(parted.prefill, handed.and_then(|handed| handed.doubted));
                None
            }
        };
        let next = self.plan.next(&failure, endpoint, in_flight, now);
        let failed = FailedTry { endpoint, failure, next };
        let staged = handed.filter(|handed| {
            parted.order == LegOrder::PrefillFirst && now.since(handed.at) <= HANDOFF_AGE_MAX
        });
        if let (Some(staged), Ok(_), Fault::Decode | Fault::Open) = (staged, next, fault) {
            self.failed.push(failed);
            let parted = Parted { decode_leg: DecodeLeg::Waiting, ..parted };
            self.state =
                State::Retrying { after: failure, staged: Some(Handed { parted, doubted, ..staged }) };
            effects.push(Effect::DecodeElsewhere { after: failure });
            return effects;
        }
        if handed.is_none() {
            effects.extend(parted.closed(parted.prefill, AbortCause::NotWanted));
        } else {
            effects.push(parted.release_staged());
        }
        effects.extend(self.go_on(failed, now));
        effects
    }

    /// The prefill endpoint can't be fetched from: it is not chosen again for this request, and who failed for want of
    /// it may be.
    pub(super) fn prefill_is_gone(&mut self, prefill: EndpointId, doubted: Option<EndpointId>) {
        if let Some(doubted) = doubted {
            self.plan.acquit(doubted);
        }
        self.plan.suspect(prefill);
        self.suspected = Some(prefill);
    }

    /// The endpoint that a decode leg may still be fetching from is dead to its probes and does not say so itself: a
    /// real engine waits for it for ever. A leg in one piece that has had the time of a handoff is taken to have
    /// fetched what it needs.
    pub(super) fn prefill_lost(&mut self, handed: Handed, cause: Cause, now: Moment) -> Effects {
        let Handed { parted, .. } = handed;
        let fetching = match self.delivery {
            Delivery::Stream => true,
            Delivery::Whole => parted.status.is_none() && now.since(handed.sent) < self.limits.handoff,
        };
        let speechless = matches!(cause, Cause::Silent | Cause::ConnectTimeout);
        if parted.decode_leg == DecodeLeg::Waiting || !fetching || !speechless {
            return Effects::new();
        }
        let mut effects = parted.closed(parted.decode, AbortCause::EndpointLost(cause));
        effects.push(parted.release_staged());
        self.prefill_is_gone(parted.prefill, handed.doubted);
        let failure = LegFailure::new(LegFault::EndpointLost(cause));
        let next = self.plan.next(&failure, parted.prefill, 1, now);
        effects.extend(self.go_on(FailedTry { endpoint: parted.prefill, failure, next }, now));
        effects
    }

    /// A leg has used up its time; the request has some left.
    pub(super) fn leg_is_silent(&mut self, limit: Limit, now: Moment) -> Effects {
        let Some(endpoint) = self.endpoint() else { return Effects::new() };
        let signal = Signal::Failure(Cause::Silent);
        let mut effects: Effects = smallvec![
            Effect::AbortUpstream { endpoint, cause: AbortCause::Limit(limit) },
            Effect::Report { endpoint, signal },
        ];
        let failure = LegFailure::new(LegFault::LimitPassed(limit));
        effects.extend(match self.state {
            State::Parted(_) => self.prefill_failed(failure, 1, now),
            _ => self.leg_failed(failure, 1, now),
        });
        effects
    }
}

fn fault_of(failure: &LegFailure, handed: Option<&Handed>, now: Moment) -> Fault {
    let says_it_failed = matches!(failure.fault, LegFault::Status(500) | LegFault::ErrorEvent);
    match handed {
        Some(handed) if says_it_failed => {
            if handed.doubted.is_some() || now.since(handed.sent) >= PREFILL_GONE_AFTER {
                Fault::Prefill
            } else if handed.parted.order == LegOrder::PrefillFirst {
                Fault::Open
            } else {
                Fault::Decode
            }
        }
        _ => Fault::Decode,
    }
}
