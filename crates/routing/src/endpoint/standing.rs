//! Where an endpoint stands, as one replica sees it, and why it stands there.

use std::time::Duration;

use crate::Moment;

/// Where an endpoint stands, as one replica sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// New, and nothing has been heard of it: used when nobody better known is left.
    Joining {
        /// When it was added.
        since: Moment,
    },
    /// In use.
    Ready,
    /// Left alone until probes say that it is well.
    Ejected {
        /// When it is probed next.
        until: Moment,
        /// Why it was ejected.
        cause: Cause,
    },
    /// Given nothing new; what runs there may finish.
    Draining {
        /// When what still runs there is ended.
        deadline: Moment,
    },
}

/// Whether new requests may go to an endpoint that stands so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Usable {
    /// Not at all.
    No,
    /// Only when no endpoint that is [`Usable::Yes`] is left.
    IfNobodyElse,
    /// Yes.
    Yes,
}

impl Standing {
    /// Whether new requests may go there.
    pub const fn usable(&self) -> Usable {
        match self {
            Self::Ready => Usable::Yes,
            Self::Joining { .. } => Usable::IfNobodyElse,
            Self::Ejected { .. } | Self::Draining { .. } => Usable::No,
        }
    }

    /// The name in JSON and labels.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Joining { .. } => "joining",
            Self::Ready => "ready",
            Self::Ejected { .. } => "ejected",
            Self::Draining { .. } => "draining",
        }
    }

    /// How a drain goes, with `running` requests there in the whole cluster (own and others').
    pub const fn drained(&self, running: u32, now: Moment) -> Drained {
        match self {
            Self::Draining { deadline } => {
                if running == 0 {
                    Drained::Idle
                } else if now.micros() >= deadline.micros() {
                    Drained::DeadlinePassed
                } else {
                    Drained::Waiting { left: deadline.since(now) }
                }
            }
            _ => Drained::NotDraining,
        }
    }
}

/// How a drain goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// The endpoint does not drain.
    NotDraining,
    /// Requests run there, and they have time.
    Waiting {
        /// How much.
        left: Duration,
    },
    /// Nothing runs there any more: it can go.
    Idle,
    /// The time is up: what runs there is ended, and it goes.
    DeadlinePassed,
}

/// What went wrong at an endpoint. Only what is the endpoint's own fault has a cause: no answer below
/// 500 does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Nobody listens at its address: the process is gone.
    Refused,
    /// The connection was not made in time.
    ConnectTimeout,
    /// The connection was reset or closed without an answer.
    Reset,
    /// It answered 502, 503 or 504.
    Unavailable,
    /// It answered 500 (or another 5xx), or with an error event: perhaps the request's fault.
    ServerError,
    /// It took the request and then said nothing for too long.
    Silent,
    /// Its reply broke off.
    Truncated,
    /// It does not speak HTTP.
    Garbled,
}

impl Cause {
    /// The name in JSON and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::ConnectTimeout => "connect-timeout",
            Self::Reset => "reset",
            Self::Unavailable => "unavailable",
            Self::ServerError => "server-error",
            Self::Silent => "silent",
            Self::Truncated => "truncated",
            Self::Garbled => "garbled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(standing: Standing, usable: Usable, name: &str) {
        assert_eq!(standing.usable(), usable, "{standing:?}");
        assert_eq!(standing.as_str(), name);
    }

    #[test]
    fn only_a_ready_endpoint_is_taken_while_others_are_left() {
        let at = Moment::from_millis(5);
        check(Standing::Ready, Usable::Yes, "ready");
        check(Standing::Joining { since: at }, Usable::IfNobodyElse, "joining");
        check(Standing::Ejected { until: at, cause: Cause::Reset }, Usable::No, "ejected");
        check(Standing::Draining { deadline: at }, Usable::No, "draining");
    }

    #[test]
    fn a_drain_ends_when_idle_or_when_its_time_is_up() {
        let draining = Standing::Draining { deadline: Moment::from_millis(10) };
        let waiting = Drained::Waiting { left: Duration::from_millis(9) };
        assert_eq!(draining.drained(3, Moment::from_millis(1)), waiting);
        assert_eq!(draining.drained(0, Moment::from_millis(1)), Drained::Idle);
        assert_eq!(draining.drained(3, Moment::from_millis(10)), Drained::DeadlinePassed);
        assert_eq!(Standing::Ready.drained(0, Moment::from_millis(1)), Drained::NotDraining);
    }
}
