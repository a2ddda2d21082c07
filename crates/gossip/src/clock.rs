//! The one place that reads the clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use routing::Moment;

/// Time since gossip started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn now(self) -> Moment {
        Moment::from_micros(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    /// When `moment` will be on the runtime's clock.
    pub(crate) fn instant(self, moment: Moment) -> tokio::time::Instant {
        tokio::time::Instant::from_std(self.0 + Duration::from_micros(moment.micros()))
    }
}

/// A number for an incarnation of a replica that grows from one to the next as long as the wall clock does.
pub(crate) fn generation() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
