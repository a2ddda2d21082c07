//! The legs of a split request: what each one's failure means, and who lets go of what was staged.

use std::time::Duration;

use smallvec::smallvec;

use super::event::{AbortCause, DecodeLeg, Effect, Effects, LegOrder, Limit};
use super::outcome::{FailedTry, Verdict};
use super::{Leg, Lifecycle, State, blame, give_up_after};
use crate::endpoint::{Cause, Signal};
use crate::retry::{LegFailure, LegFault};
use crate::{EndpointId, Moment};

/// From this time on a decode leg's word that it failed is taken to be about the engine that it fetches from. 4 s: a
/// real engine says so after 5 (of a request in one piece) or 10, and of its own failures at once.
const PREFILL_GONE_AFTER: Duration = Duration::from_secs(4);

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
        self.state = State::HandedOff(Handed { parted, at: now, sent: now });
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
        self.failed.push(FailedTry { endpoint, failure, next });
        if next.is_ok() {
            self.state = State::Retrying { after: failure, staged: None };
            effects.push(Effect::RetryElsewhere { after: failure });
        } else {
            effects.extend(self.give_up(give_up_after(failure), now));
        }
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
        // Whom it could not fetch from may be gone, of which the decode endpoint is not guilty.
        let says_it_failed = matches!(failure.fault, LegFault::Status(500) | LegFault::ErrorEvent);
        let prefill_is_gone =
            says_it_failed && handed.is_some_and(|handed| now.since(handed.sent) >= PREFILL_GONE_AFTER);
        if !prefill_is_gone {
            effects.extend(blame(endpoint, &failure));
        }
        // Whoever is at fault is not chosen again; the other may be all that is left.
        self.plan.dispatched(if prefill_is_gone { parted.prefill } else { endpoint });
        let next = self.plan.next(&failure, endpoint, in_flight, now);
        self.failed.push(FailedTry { endpoint, failure, next });
        if let (Some(staged), Ok(_), false, LegOrder::PrefillFirst) =
            (handed, next, prefill_is_gone, parted.order)
        {
            let parted = Parted { decode_leg: DecodeLeg::Waiting, ..parted };
            self.state = State::Retrying { after: failure, staged: Some(Handed { parted, ..staged }) };
            effects.push(Effect::DecodeElsewhere { after: failure });
            return effects;
        }
        if handed.is_none() {
            effects.extend(parted.closed(parted.prefill, AbortCause::NotWanted));
        } else {
            effects.push(parted.release_staged());
        }
        if next.is_ok() {
            self.state = State::Retrying { after: failure, staged: None };
            effects.push(Effect::RetryElsewhere { after: failure });
        } else {
            effects.extend(self.give_up(give_up_after(failure), now));
        }
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
        let failure = LegFailure::new(LegFault::EndpointLost(Cause::Silent));
        effects.extend(match self.state {
            State::Parted(_) => self.prefill_failed(failure, 1, now),
            _ => self.leg_failed(failure, 1, now),
        });
        effects
    }
}
