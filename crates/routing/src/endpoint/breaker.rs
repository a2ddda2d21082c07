//! When an endpoint is left alone, and when it is used again.
//!
//! Two kinds of evidence: how requests fare there (passive) and probes (active). Either ejects, only
//! probes readmit. What an engine answers below 500 is its client's affair and never counts here: the
//! edge does not even make a signal of it.

use std::time::Duration;

use super::standing::{Cause, Standing};
use crate::Moment;

/// The numbers of a [`Breaker`].
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerConfig {
    /// Failed requests in a row that eject. 3: one or two are an accident, and each costs a retry.
    pub failures_in_row_max: u32,
    /// 500s in a row that eject. 10: one poisonous request sent again and again must not empty the pool.
    pub server_errors_in_row_max: u32,
    /// A row of failures that is older than this begins anew. 30 s: at a trickle of requests three
    /// accidents in an hour are not a row.
    pub row_span_max: Duration,
    /// The time over which [`Self::window_failure_ratio`] is taken. 10 s: long enough for a ratio at a few
    /// requests a second, short enough to notice before users do.
    pub window: Duration,
    /// Failures within the window below which its ratio says nothing. 10.
    pub window_failures_min: u32,
    /// Share of failures within the window that ejects though successes (of streams begun long ago) break
    /// every row. 0.5, in 0 to 1.
    pub window_failure_ratio: f64,
    /// Failed probes in a row that eject. 3: one never does.
    pub probes_failed_max: u32,
    /// Good probes in a row that readmit. 2: a process that answers once and dies again is common.
    pub probes_good_min: u32,
    /// How often an endpoint in use is probed. 2 s.
    pub probe_every: Duration,
    /// From a failed probe to the next, for an endpoint in use. 500 ms: a death is known a second after the
    /// first failed probe, and a pause of half a second is not a death.
    pub probe_again: Duration,
    /// How long a probe may take; after that a new one may begin. 1 s.
    pub probe_timeout: Duration,
    /// From ejection to the first probe, and from one good probe to the next. 250 ms: an engine that was
    /// ejected by accident is back in half a second.
    pub backoff_min: Duration,
    /// The longest time between probes of an ejected endpoint. 5 s: a restarted engine waits no longer.
    pub backoff_max: Duration,
    /// How long after readmission a single failure ejects again, with a longer backoff. 5 s: an engine
    /// whose health page is better than its health must not flap at the cost of three requests a turn.
    pub trial: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failures_in_row_max: 3,
            server_errors_in_row_max: 10,
            row_span_max: Duration::from_secs(30),
            window: Duration::from_secs(10),
            window_failures_min: 10,
            window_failure_ratio: 0.5,
            probes_failed_max: 3,
            probes_good_min: 2,
            probe_every: Duration::from_secs(2),
            probe_again: Duration::from_millis(500),
            probe_timeout: Duration::from_secs(1),
            backoff_min: Duration::from_millis(250),
            backoff_max: Duration::from_secs(5),
            trial: Duration::from_secs(5),
        }
    }
}

/// What was learned of an endpoint's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// A request ended well there (2xx, to its last byte).
    Success,
    /// A request failed there by the endpoint's fault.
    Failure(Cause),
    /// A probe was answered with a status below 500.
    ProbeOk,
    /// A probe was not.
    ProbeFailed(Cause),
    /// Another replica has ejected it: look sooner.
    EjectedElsewhere,
    /// It answered that it is full and asked to be left alone for as long (`Retry-After`).
    Pause(Duration),
}

/// The longest pause that an endpoint is granted. 60 s: what a mistaken header may cost.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// What a signal changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StandingChange {
    /// Nothing.
    Unchanged,
    /// It has been heard of for the first time and is in use now.
    Joined,
    /// It is left alone now.
    Ejected {
        /// Why.
        cause: Cause,
    },
    /// It would have been ejected, but too few others are left. Said once for a cause, until it is well.
    Spared {
        /// Why it would have been.
        cause: Cause,
    },
    /// It is in use again.
    Readmitted,
}

impl StandingChange {
    /// Whether what was placed there must be taken for cold: the process is gone, and the one that comes
    /// after it begins with an empty cache.
    pub const fn clears_placements(self) -> bool {
        matches!(self, Self::Ejected { cause: Cause::Refused } | Self::Spared { cause: Cause::Refused })
    }

    /// The name in logs and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unchanged => "unchanged",
            Self::Joined => "joined",
            Self::Ejected { .. } => "ejected",
            Self::Spared { .. } => "spared",
            Self::Readmitted => "readmitted",
        }
    }
}

/// Whether a probe may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeStart {
    /// It has begun: report its result as [`Signal::ProbeOk`] or [`Signal::ProbeFailed`].
    Begun,
    /// Not yet.
    NotBefore(Moment),
    /// Nothing will be asked of this endpoint again.
    Never,
}

/// One endpoint's health, as one replica sees it.
#[derive(Clone, Debug)]
pub struct Breaker {
    config: BreakerConfig,
    standing: Standing,
    row: Row,
    window: Window,
    /// Failed probes in a row, and why the last one failed.
    probes_failed: u32,
    probe_cause: Option<Cause>,
    probes_good: u32,
    probe_begun: Option<Moment>,
    probe_next: Moment,
    backoff: Duration,
    on_trial_until: Option<Moment>,
    /// Why it would be ejected if others were left; told once.
    spared: Option<Cause>,
    paused_until: Moment,
}

impl Breaker {
    /// The breaker of an endpoint that was just added.
    pub fn new(config: BreakerConfig, now: Moment) -> Self {
        Self {
            standing: Standing::Joining { since: now },
            row: Row::default(),
            window: Window::default(),
            probes_failed: 0,
            probe_cause: None,
            probes_good: 0,
            probe_begun: None,
            probe_next: now,
            backoff: config.backoff_min,
            on_trial_until: None,
            spared: None,
            paused_until: now,
            config,
        }
    }

    /// Where the endpoint stands.
    pub const fn standing(&self) -> Standing {
        self.standing
    }

    /// Until when it asked to be left alone; a moment that has passed if it did not.
    pub const fn paused_until(&self) -> Moment {
        self.paused_until
    }

    /// Takes other numbers; what has been counted stays.
    pub fn reconfigure(&mut self, config: BreakerConfig) {
        self.backoff = self.backoff.clamp(config.backoff_min, config.backoff_max);
        self.config = config;
    }

    /// Takes in a signal. `may_eject` is false when too few others would be left; the caller knows them.
    pub fn report(&mut self, signal: Signal, may_eject: bool, now: Moment) -> StandingChange {
        match signal {
            Signal::Success => self.succeeded(now),
            Signal::Failure(cause) => self.failed(cause, may_eject, now),
            Signal::ProbeOk => self.probe_ok(now),
            Signal::ProbeFailed(cause) => self.probe_failed(cause, may_eject, now),
            Signal::EjectedElsewhere => {
                self.look_sooner(now);
                StandingChange::Unchanged
            }
            Signal::Pause(span) => {
                self.paused_until = self.paused_until.max(now.plus(span.min(PAUSE_MAX)));
                StandingChange::Unchanged
            }
        }
    }

    /// Gives it nothing new from now on. A drain that already runs keeps the earlier deadline.
    pub fn drain(&mut self, deadline: Moment) {
        let deadline = match self.standing {
            Standing::Draining { deadline: earlier } => earlier.min(deadline),
            _ => deadline,
        };
        self.standing = Standing::Draining { deadline };
    }

    /// Takes a drain back: the endpoint joins anew.
    pub fn undrain(&mut self, now: Moment) {
        if matches!(self.standing, Standing::Draining { .. }) {
            *self = Self::new(self.config.clone(), now);
        }
    }

    /// When [`Self::begin_probe`] is worth calling next; `None` while it drains.
    pub fn next_probe(&self) -> Option<Moment> {
        if matches!(self.standing, Standing::Draining { .. }) {
            return None;
        }
        Some(match self.probe_begun {
            Some(begun) => begun.plus(self.config.probe_timeout),
            None => self.probe_next,
        })
    }

    /// Begins a probe if one is due. There is one at a time: an ejected endpoint is not knocked at by all
    /// who miss it.
    pub fn begin_probe(&mut self, now: Moment) -> ProbeStart {
        match self.next_probe() {
            None => ProbeStart::Never,
            Some(due) if due > now => ProbeStart::NotBefore(due),
            Some(_) => {
                self.probe_begun = Some(now);
                ProbeStart::Begun
            }
        }
    }

    fn succeeded(&mut self, now: Moment) -> StandingChange {
        self.window.count(false, self.config.window, now);
        if !self.in_use() {
            // A stream that began before the ejection may end well; only probes readmit.
            return StandingChange::Unchanged;
        }
        self.row = Row::default();
        self.spared = None;
        // An engine that serves, and is too busy to answer a probe in time, is not dead.
        if matches!(self.probe_cause, Some(Cause::Silent | Cause::ConnectTimeout)) {
            self.probes_failed = 0;
        }
        self.join()
    }

    fn failed(&mut self, cause: Cause, may_eject: bool, now: Moment) -> StandingChange {
        self.window.count(true, self.config.window, now);
        if !self.in_use() {
            return StandingChange::Unchanged;
        }
        self.row.count(cause, self.config.row_span_max, now);
        self.look_sooner(now);
        let ejects = match cause {
            Cause::ServerError => self.row.server_errors >= self.config.server_errors_in_row_max,
            _ => {
                self.on_trial(now)
                    || self.row.failures >= self.config.failures_in_row_max
                    || self.window.ejects(&self.config, now)
            }
        };
        if ejects { self.eject(cause, may_eject, now) } else { StandingChange::Unchanged }
    }

    fn probe_ok(&mut self, now: Moment) -> StandingChange {
        self.probe_begun = None;
        self.probes_failed = 0;
        self.probe_cause = None;
        self.probe_next = now.plus(self.config.probe_every);
        let Standing::Ejected { cause, .. } = self.standing else { return self.join() };
        self.probes_good += 1;
        if self.probes_good < self.config.probes_good_min {
            self.probe_next = now.plus(self.config.backoff_min);
            self.standing = Standing::Ejected { until: self.probe_next, cause };
            return StandingChange::Unchanged;
        }
        self.standing = Standing::Ready;
        self.row = Row::default();
        self.window = Window::default();
        self.on_trial_until = Some(now.plus(self.config.trial));
        StandingChange::Readmitted
    }

    fn probe_failed(&mut self, cause: Cause, may_eject: bool, now: Moment) -> StandingChange {
        self.probe_begun = None;
        self.probes_good = 0;
        self.probes_failed = self.probes_failed.saturating_add(1);
        self.probe_cause = Some(cause);
        match self.standing {
            Standing::Ejected { cause: first, .. } => {
                self.backoff = (self.backoff * 2).min(self.config.backoff_max);
                self.probe_next = now.plus(self.backoff);
                // Who was slow or cut streams, and has gone since, is gone.
                let gone = cause == Cause::Refused && first != Cause::Refused;
                let cause = if gone { cause } else { first };
                self.standing = Standing::Ejected { until: self.probe_next, cause };
                if gone { StandingChange::Ejected { cause } } else { StandingChange::Unchanged }
            }
            Standing::Joining { .. } | Standing::Ready => {
                self.probe_next = now.plus(self.config.probe_again);
                if self.probes_failed >= self.config.probes_failed_max {
                    self.eject(cause, may_eject, now)
                } else {
                    StandingChange::Unchanged
                }
            }
            Standing::Draining { .. } => StandingChange::Unchanged,
        }
    }

    fn join(&mut self) -> StandingChange {
        if matches!(self.standing, Standing::Joining { .. }) {
            self.standing = Standing::Ready;
            StandingChange::Joined
        } else {
            StandingChange::Unchanged
        }
    }

    fn eject(&mut self, cause: Cause, may_eject: bool, now: Moment) -> StandingChange {
        if !may_eject {
            let told = self.spared.replace(cause) == Some(cause);
            return if told { StandingChange::Unchanged } else { StandingChange::Spared { cause } };
        }
        self.backoff = if self.on_trial(now) {
            (self.backoff * 2).min(self.config.backoff_max)
        } else {
            self.config.backoff_min
        };
        self.on_trial_until = None;
        self.spared = None;
        self.probes_good = 0;
        self.probes_failed = 0;
        self.probe_next = now.plus(self.backoff);
        self.standing = Standing::Ejected { until: self.probe_next, cause };
        StandingChange::Ejected { cause }
    }

    /// A failure seen here or elsewhere: a probe tells more.
    fn look_sooner(&mut self, now: Moment) {
        if self.in_use() {
            self.probe_next = self.probe_next.min(now.plus(self.config.backoff_min));
        }
    }

    fn on_trial(&self, now: Moment) -> bool {
        self.on_trial_until.is_some_and(|until| now < until)
    }

    const fn in_use(&self) -> bool {
        matches!(self.standing, Standing::Joining { .. } | Standing::Ready)
    }
}

/// Failures without a success between them.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    failures: u32,
    server_errors: u32,
    last: Moment,
}

impl Row {
    fn count(&mut self, cause: Cause, span_max: Duration, now: Moment) {
        if now.since(self.last) > span_max {
            *self = Self::default();
        }
        self.last = now;
        if cause == Cause::ServerError {
            self.server_errors = self.server_errors.saturating_add(1);
        } else {
            self.failures = self.failures.saturating_add(1);
        }
    }
}

/// Successes and failures of the last window, in two halves so that none is kept longer than it.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    half: u64,
    now: Tally,
    before: Tally,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    successes: u32,
    failures: u32,
}

impl Window {
    fn turn(&mut self, span: Duration, now: Moment) {
        let half_micros = u64::try_from(span.as_micros() / 2).unwrap_or(u64::MAX).max(1);
        let half = now.micros() / half_micros;
        match half.saturating_sub(self.half) {
            0 => return,
            1 => self.before = self.now,
            _ => self.before = Tally::default(),
        }
        self.now = Tally::default();
        self.half = half;
    }

    fn count(&mut self, failed: bool, span: Duration, now: Moment) {
        self.turn(span, now);
        let count = if failed { &mut self.now.failures } else { &mut self.now.successes };
        *count = count.saturating_add(1);
    }

    fn ejects(&mut self, config: &BreakerConfig, now: Moment) -> bool {
        self.turn(config.window, now);
        let failures = self.now.failures + self.before.failures;
        let all = failures + self.now.successes + self.before.successes;
        failures >= config.window_failures_min
            && f64::from(failures) >= config.window_failure_ratio * f64::from(all)
    }
}

#[cfg(test)]
mod tests;
