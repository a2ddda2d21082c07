//! The process's own monotonic clock: the one place where the core's `Moment`s come from.

use std::time::Instant;

use routing::Moment;

/// Counts from its making. Copies count alike.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch: Instant,
}

impl Clock {
    /// A clock that begins now.
    pub fn start() -> Self {
        Self { epoch: Instant::now() }
    }

    /// The time.
    pub fn now(&self) -> Moment {
        self.moment(Instant::now())
    }

    /// The moment that `instant` is.
    pub fn moment(&self, instant: Instant) -> Moment {
        let micros = instant.saturating_duration_since(self.epoch).as_micros();
        Moment::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// The instant that `moment` is.
    pub fn instant(&self, moment: Moment) -> Instant {
        self.epoch + moment.since(Moment::default())
    }
}
