//! How many requests an engine runs at a time, learned from those that had to wait for another to end.
//!
//! An engine whose batch is full lets a prompt wait though no prompt is ahead of it: so many as were there when it was
//! sent fill the engine. While that is known, no more than these are sent there from the queue; what waits is better
//! ordered here than there. Every so often one more is sent, which finds out whether the engine is still full.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Moment;

/// After what time an engine that was seen to be full is tried with one more, and with another. 2 s: one request of
/// those that it serves in this time finds out anew, and waits in the engine for that.
const TRIED_EVERY: Duration = Duration::from_secs(2);
/// After what time nothing is left of it. 20 s: the requests that filled it are mostly over.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(20);
/// What a first byte must take beyond what it takes alone and what is ahead explain, in ms, for the engine to be full.
/// 50 ms: a twentieth of what the most urgent class expects.
const WAITED_MS_MIN: f64 = 50.0;
/// How many times the time of what is ahead explains a wait: prompts may take longer than was learned.
const AHEAD_FACTOR: f64 = 2.0;

/// How many times what first bytes usually take beyond that is usual still: a busy machine's take long and vary.
const DELAY_FACTOR: f64 = 3.0;
/// How much of the way what is usual moves at each of them.
const DELAY_LEARNED: f64 = 0.1;

/// What a first byte took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstByte {
    /// Beyond what one takes alone, in ms.
    pub(crate) excess_ms: f64,
    /// For the prompts that were ahead, in ms, by the engine's speed.
    pub(crate) ahead_ms: f64,
    /// Requests in flight there when it was sent, without itself.
    pub(crate) in_flight: u32,
    /// Requests in flight there now, itself included, if no prompt waits: all of them have a place. Else 0.
    pub(crate) now_running: u32,
}

/// What was learned of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct Places {
    known: Mutex<Known>,
    /// What is known, for readers in a hurry; 0 for nothing.
    filled_by: AtomicU32,
    seen: AtomicU64,
}

#[derive(Debug, Default)]
struct Known {
    own: Option<Full>,
    /// What another replica has seen.
    elsewhere: Option<Full>,
    /// When it was last seen to take more.
    refuted: Option<Moment>,
    /// The most that it was seen to run at once, and when.
    ran: Option<(u32, Moment)>,
    /// What first bytes take beyond what one takes alone though there is a place, in ms.
    delay_ms: f64,
}

/// The engine was full with so many, when last seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Full {
    pub(crate) filled_by: u32,
    pub(crate) seen: Moment,
}

impl Full {
    /// The two together: of what was seen lately the least holds, for more may have been there than it ran.
    fn and(self, other: Self) -> Self {
        let (older, newer) = if self.seen < other.seen { (self, other) } else { (other, self) };
        Self { filled_by: older.at(newer.seen).min(newer.filled_by), seen: newer.seen }
    }

    /// How many fill it some time later, as far as is known.
    fn at(&self, now: Moment) -> u32 {
        let since = now.since(self.seen);
        if since > FORGOTTEN_AFTER {
            return u32::MAX;
        }
        self.filled_by.saturating_add((since.as_millis() / TRIED_EVERY.as_millis()) as u32)
    }
}

impl Places {
    pub(crate) fn learn(&self, first_byte: FirstByte, now: Moment) {
        let FirstByte { excess_ms, ahead_ms, in_flight, now_running } = first_byte;
        let mut known = self.known.lock();
        let ran = known.ran(now);
        if now_running >= ran {
            known.ran = Some((now_running, now));
        }
        if in_flight == 0 || in_flight < ran {
            known.delay_ms += (excess_ms - known.delay_ms) * DELAY_LEARNED;
            return;
        }
        let usual_ms = WAITED_MS_MIN + ahead_ms * AHEAD_FACTOR;
        if excess_ms > usual_ms + known.delay_ms * DELAY_FACTOR {
            // First bytes are late for other reasons too: an engine is not full with fewer than it runs.
            let full = Full { filled_by: in_flight.max(known.ran(now)), seen: now };
            known.own = Some(known.own.map_or(full, |before| before.and(full)));
        } else if excess_ms < WAITED_MS_MIN + known.delay_ms
            && known.both().is_some_and(|full| in_flight >= full.filled_by)
        {
            known.own = Some(Full { filled_by: in_flight.saturating_add(1), seen: now });
            (known.elsewhere, known.refuted) = (None, Some(now));
        }
        self.publish(&known);
    }

    /// Another replica has seen it full.
    pub(crate) fn hear(&self, full: Full) {
        let mut known = self.known.lock();
        if full.filled_by > 0 && known.refuted.is_none_or(|refuted| refuted < full.seen) {
            let full = Full { filled_by: full.filled_by.max(known.ran(full.seen)), ..full };
            known.elsewhere = Some(known.elsewhere.map_or(full, |before| before.and(full)));
            self.publish(&known);
        }
    }

    fn publish(&self, known: &Known) {
        let Full { filled_by, seen } = known.both().unwrap_or_default();
        self.seen.store(seen.micros(), Ordering::Relaxed);
        self.filled_by.store(filled_by, Ordering::Relaxed);
    }

    /// How many requests fill it, as far as is known; `u32::MAX` if nothing is.
    pub(crate) fn filled_by(&self, now: Moment) -> u32 {
        let filled_by = self.filled_by.load(Ordering::Relaxed);
        let seen = Moment::from_micros(self.seen.load(Ordering::Relaxed));
        if filled_by == 0 { u32::MAX } else { Full { filled_by, seen }.at(now) }
    }

    /// What this replica has itself seen lately. It alone is told: else what was seen once would go round for ever.
    pub(crate) fn seen_here(&self, now: Moment) -> Option<Full> {
        self.known.lock().own.filter(|full| full.at(now) < u32::MAX)
    }
}

impl Known {
    /// The most that it was seen to run at once lately.
    fn ran(&self, now: Moment) -> u32 {
        self.ran.filter(|(_, at)| now.since(*at) <= FORGOTTEN_AFTER).map_or(0, |(count, _)| count)
    }

    fn both(&self) -> Option<Full> {
        match (self.own, self.elsewhere) {
            (Some(own), Some(elsewhere)) => Some(own.and(elsewhere)),
            (own, elsewhere) => own.or(elsewhere),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_millis(ms)
    }

    fn first_byte(excess_ms: f64, in_flight: u32, now_running: u32) -> FirstByte {
        FirstByte { excess_ms, ahead_ms: 0.0, in_flight, now_running }
    }

    /// Runs eight at once, and let the ninth wait.
    fn full_with_eight() -> Places {
        let places = Places::default();
        for in_flight in 0..8 {
            places.learn(first_byte(2.0, in_flight, in_flight + 1), at(10));
        }
        assert_eq!(places.filled_by(at(10)), u32::MAX);
        places.learn(first_byte(220.0, 8, 0), at(250));
        places
    }

    #[test]
    fn an_engine_that_lets_a_request_wait_is_full_with_those_before_it() {
        assert_eq!(full_with_eight().filled_by(at(250)), 8);
    }

    #[test]
    fn one_more_is_tried_now_and_then_and_if_it_need_not_wait_there_are_more_places() {
        let places = full_with_eight();
        assert_eq!(places.filled_by(at(2_249)), 8);
        assert_eq!(places.filled_by(at(2_250)), 9);
        places.learn(first_byte(200.0, 8, 0), at(2_500));
        assert_eq!(places.filled_by(at(2_600)), 8);
        places.learn(first_byte(1.0, 8, 9), at(4_600));
        assert_eq!(places.filled_by(at(4_600)), 9);
        assert_eq!(places.filled_by(at(30_000)), u32::MAX);
    }

    #[test]
    fn a_late_first_byte_does_not_make_an_engine_smaller_than_it_was_seen_to_be() {
        let places = full_with_eight();
        places.learn(first_byte(900.0, 3, 0), at(300));
        assert_eq!(places.filled_by(at(300)), 8);
    }

    #[test]
    fn prompts_that_are_ahead_explain_a_wait() {
        let places = Places::default();
        places.learn(FirstByte { ahead_ms: 200.0, ..first_byte(220.0, 8, 0) }, at(10));
        assert_eq!(places.filled_by(at(10)), u32::MAX);
    }

    #[test]
    fn what_others_have_seen_counts_until_it_is_refuted_here() {
        let places = Places::default();
        places.hear(Full { filled_by: 8, seen: at(100) });
        assert_eq!((places.filled_by(at(100)), places.seen_here(at(100))), (8, None));
        places.learn(first_byte(1.0, 8, 9), at(200));
        assert_eq!(places.filled_by(at(200)), 9);
        places.hear(Full { filled_by: 8, seen: at(150) });
        assert_eq!(places.filled_by(at(200)), 9);
    }
}
