//! Time as the core sees it: a monotonic count handed in by the edge, never read here.

use std::time::Duration;

/// A point in monotonic time, in microseconds since an epoch of the process's (or simulator's) own.
///
/// Only differences mean anything, and only within one process: facts between replicas carry ages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Moment(u64);

impl Moment {
    /// The moment `micros` microseconds after the epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// The moment `millis` milliseconds after the epoch.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1_000)
    }

    /// Microseconds since the epoch.
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// The same in milliseconds.
    pub fn millis_since(self, earlier: Self) -> f64 {
        self.0.saturating_sub(earlier.0) as f64 / 1_000.0
    }

    /// The moment `span` later; the far end of time if that does not fit.
    pub fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_micros()).unwrap_or(u64::MAX)))
    }

    /// The moment `span` earlier; the epoch if that does not fit.
    pub fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(span.as_micros()).unwrap_or(u64::MAX)))
    }
}
