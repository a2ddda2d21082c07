//! Streams that break after their first byte: whether they go on elsewhere, how silence is told from death, and what
//! became of each.

use smallvec::smallvec;

use super::event::{AbortCause, Effect, Effects, EndCause, Seen};
use super::outcome::{FailedTry, Verdict};
use super::split::Handed;
use super::{Delivery, Leg, Lifecycle, State};
use crate::endpoint::{Cause, Signal};
use crate::retry::{LegFailure, LegFault, NoRetry};
use crate::{EndpointId, Moment};

/// Looks in a row that must see nothing before a stream is ended that can't be resumed. 3: an engine that is merely
/// busy misses one; a stream that can be resumed loses little by moving, and moves at the first.
const BLIND_LOOKS_TO_END: u32 = 3;

/// What becomes of a stream that breaks after its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBreak {
    /// It goes on at another endpoint.
    Resume,
    /// It is ended, for this reason.
    End(NoResume),
}

/// Why a broken stream is not resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoResume {
    /// The operator does not want it, or it is a reply in one piece.
    Off,
    /// What the request asks for can't be continued exactly by another engine.
    Inexact,
    /// Request and answer together are longer than what is kept.
    TooLong,
    /// What has come of the answer is more than a text: reasoning, calls of tools.
    Unreadable,
    /// The answer was said to be over; only its end did not come.
    Finished,
}

impl NoResume {
    /// The name in logs and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Inexact => "inexact",
            Self::TooLong => "too-long",
            Self::Unreadable => "unreadable",
            Self::Finished => "finished",
        }
    }
}

/// What became of a stream that broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Aftermath {
    /// It went on elsewhere.
    Resumed,
    /// It was ended without a try.
    NotResumed(NoResume),
    /// The tries of one request were used up.
    TriesUsed,
    /// The budget of all requests' tries was used up.
    BudgetUsed,
    /// There was no other endpoint.
    NoEndpoint,
    /// No endpoint that was tried went on with it.
    Failed,
    /// Its client left before it went on, or the replica ended.
    Interrupted,
}

impl Aftermath {
    /// The name in logs and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Resumed => "resumed",
            Self::NotResumed(why) => why.as_str(),
            Self::TriesUsed => "tries-used",
            Self::BudgetUsed => "budget-used",
            Self::NoEndpoint => "no-endpoint",
            Self::Failed => "failed",
            Self::Interrupted => "interrupted",
        }
    }
}

/// A stream that broke.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Break {
    /// Where.
    pub endpoint: EndpointId,
    /// How.
    pub failure: LegFailure,
    /// What became of it.
    pub then: Aftermath,
}

/// A reply of which the client has a byte.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    /// When the leg that brought it was sent.
    pub(super) sent: Moment,
    /// When that one's handoff was done, if it was split.
    pub(super) handed: Option<Moment>,
    pub(super) first_byte: Moment,
    /// When it broke last.
    broke: Option<Moment>,
}

impl Begun {
    pub(super) fn new(leg: &Leg, handed: Option<&Handed>, now: Moment) -> Self {
        Self { sent: leg.sent, handed: handed.map(|handed| handed.at), first_byte: now, broke: None }
    }
}

/// What is seen of the endpoint of a stream that is silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// Since when it is silent as far as looks go: an endpoint that answered is given time again.
    since: Moment,
    /// When a look was ordered of which nothing has been heard.
    out: Option<Moment>,
    /// Looks in a row that saw nothing.
    blind: u32,
}

impl Look {
    pub(super) const fn from(now: Moment) -> Self {
        Self { since: now, out: None, blind: 0 }
    }
}

impl Lifecycle {
    /// What becomes of its stream if that breaks.
    pub const fn on_a_break(&self) -> OnBreak {
        self.on_break
    }

    /// The endpoint that it is at says a token every `token_ms`, as far as is known: how long it may be silent before
    /// it is looked at follows from that.
    pub fn pace(&mut self, token_ms: f64) {
        self.quiet = self.limits.quiet_at(token_ms);
    }

    /// When a [`super::Event::Tick`] will have its endpoint looked at, unless something comes.
    pub fn next_look(&self) -> Option<Moment> {
        match (self.delivery, self.state) {
            (Delivery::Stream, State::Decoding { last_byte, look, .. }) if look.out.is_none() => {
                Some(last_byte.max(look.since).plus(self.quiet))
            }
            _ => None,
        }
    }

    /// Since when the first byte, or the next one of a broken stream, is waited for.
    pub(super) fn awaited_since(&self) -> Moment {
        self.begun.and_then(|begun| begun.broke).unwrap_or(self.started)
    }

    pub(super) fn look(&mut self, now: Moment) -> Effects {
        let due = self.next_look().is_some_and(|at| at <= now);
        match &mut self.state {
            State::Decoding { leg, look, .. } if due => {
                look.out = Some(now);
                smallvec![Effect::Look { endpoint: leg.endpoint }]
            }
            _ => Effects::new(),
        }
    }

    pub(super) fn looked(&mut self, at: EndpointId, seen: Seen, in_flight: u32, now: Moment) -> Effects {
        let State::Decoding { leg, last_byte, look, .. } = &mut self.state else { return Effects::new() };
        let endpoint = leg.endpoint;
        let Some(out) = look.out.take().filter(|_| endpoint == at) else { return Effects::new() };
        look.since = now;
        if seen == Seen::Answers || *last_byte > out {
            look.blind = 0;
            return Effects::new();
        }
        look.blind += 1;
        let enough = match self.on_break {
            OnBreak::Resume => 1,
            OnBreak::End(_) => BLIND_LOOKS_TO_END,
        };
        if look.blind < enough {
            return Effects::new();
        }
        let mut effects: Effects = smallvec![
            Effect::AbortUpstream { endpoint, cause: AbortCause::EndpointLost(Cause::Silent) },
            Effect::Report { endpoint, signal: Signal::Failure(Cause::Silent) },
        ];
        let failure = LegFailure::new(LegFault::EndpointLost(Cause::Silent));
        effects.extend(self.leg_failed(failure, in_flight, now));
        effects
    }

    /// The stream broke at `endpoint`, whose charge is given back.
    pub(super) fn broke(
        &mut self,
        endpoint: EndpointId,
        failure: LegFailure,
        in_flight: u32,
        now: Moment,
    ) -> Effects {
        let granted = match self.on_break {
            OnBreak::End(why) => Err(Aftermath::NotResumed(why)),
            OnBreak::Resume => {
                self.plan.broke_at(endpoint);
                self.plan.next(&failure, endpoint, in_flight, now).map_err(|why| match why {
                    NoRetry::TriesUsed | NoRetry::NotRetryable => Aftermath::TriesUsed,
                    NoRetry::BudgetUsed => Aftermath::BudgetUsed,
                })
            }
        };
        let then = granted.err().unwrap_or(Aftermath::Interrupted);
        self.breaks.push(Break { endpoint, failure, then });
        if granted.is_err() {
            self.failed.push(FailedTry { endpoint, failure, next: Err(NoRetry::NotRetryable) });
            return self.break_off(EndCause::of(failure), now);
        }
        if let Some(begun) = &mut self.begun {
            begun.broke = Some(now);
        }
        self.state = State::Retrying { after: failure, staged: None };
        smallvec![Effect::ResumeElsewhere { after: failure }]
    }

    /// The driver can't say what would continue it.
    pub(super) fn unresumable(&mut self, why: NoResume, now: Moment) -> Effects {
        match self.state {
            State::Retrying { after, staged } if self.begun.is_some() => {
                self.settle_break(Aftermath::NotResumed(why));
                let mut effects: Effects =
                    staged.iter().map(|handed| handed.parted.release_staged()).collect();
                effects.extend(self.break_off(EndCause::of(after), now));
                effects
            }
            _ => Effects::new(),
        }
    }

    /// The last break has come to this.
    pub(super) fn settle_break(&mut self, then: Aftermath) {
        if let Some(last) = self.breaks.last_mut().filter(|last| last.then == Aftermath::Interrupted) {
            last.then = then;
        }
    }

    /// Its endpoint was taken for dead, and its reply came to an end all the same.
    pub(super) fn ended_after_all(&mut self, now: Moment) -> Effects {
        smallvec![self.done(Verdict::Finished { status: 200 }, now)]
    }
}

impl EndCause {
    /// The cause that a failure of the leg is.
    pub(super) const fn of(failure: LegFailure) -> Self {
        match failure.fault {
            LegFault::LimitPassed(limit) => Self::Limit(limit),
            _ => Self::Failure(failure),
        }
    }
}
