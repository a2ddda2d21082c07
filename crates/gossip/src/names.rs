//! Someone speaks under this replica's own name. Is it its own past, or another replica?
//!
//! Its past is silent: gossip may still repeat it for a while, but its heartbeat no longer grows. If it
//! counts as the later incarnation (the clock was set back) this one begins anew above it. If its heartbeat
//! still grows after a second of watching, it is another replica, alive, and that is for people to mend.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use routing::Moment;

/// Growth in this time may be gossip that is late.
const LATE: Duration = Duration::from_secs(1);
/// Growth after that is life; none until then is the past.
const WATCH: Duration = Duration::from_secs(2);
/// A clash that goes on is reported this often.
const REPORT_EVERY: Duration = Duration::from_secs(60);
/// An incarnation not heard of for so long is no longer watched.
const FORGET: Duration = Duration::from_secs(120);
/// Incarnations watched at a time; if there are more, those that came later are not judged.
const WATCHED_MAX: usize = 16;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Another live replica has this name.
    Clash { address: Option<SocketAddr> },
    /// A past incarnation counts as later than this one.
    Outlive { generation: u64 },
}

#[derive(Default)]
pub(crate) struct Names {
    watched: HashMap<u64, Watched>,
    reported: Option<Moment>,
}

struct Watched {
    since: Moment,
    heard: Moment,
    address: Option<SocketAddr>,
    beat: u64,
    beats_late: bool,
    later: bool,
    judged: bool,
}

impl Names {
    /// Notes that an incarnation of this name with that heartbeat was heard of; `own` is this one's
    /// generation.
    pub(crate) fn hear(
        &mut self,
        generation: u64,
        address: Option<SocketAddr>,
        beat: u64,
        own: u64,
        now: Moment,
    ) -> Option<Verdict> {
        self.watched.retain(|_, watched| now.since(watched.heard) < FORGET);
        if self.watched.len() >= WATCHED_MAX && !self.watched.contains_key(&generation) {
            return None;
        }
        let fresh =
            Watched { since: now, heard: now, address, beat, beats_late: false, later: false, judged: false };
        let watched = self.watched.entry(generation).or_insert(fresh);
        watched.heard = now;
        watched.address = address.or(watched.address);
        watched.later = generation > own;
        if beat > watched.beat {
            watched.beat = beat;
            watched.beats_late |= now.since(watched.since) >= LATE;
        }
        let due = self.reported.is_none_or(|at| now.since(at) >= REPORT_EVERY);
        if watched.beats_late && due {
            // Heard of again and again, it stays on the list; its growth has to be seen anew.
            watched.beats_late = false;
            watched.judged = true;
            self.reported = Some(now);
            return Some(Verdict::Clash { address: watched.address });
        }
        None
    }

    /// The verdict on one that was watched for long enough without a sign of life.
    pub(crate) fn settle(&mut self, now: Moment) -> Option<Verdict> {
        let quiet = |(_, watched): &(&u64, &mut Watched)| {
            watched.later && !watched.judged && !watched.beats_late && now.since(watched.since) >= WATCH
        };
        let (&generation, watched) = self.watched.iter_mut().filter(quiet).max_by_key(|(g, _)| **g)?;
        watched.judged = true;
        Some(Verdict::Outlive { generation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u64 = 10;

    fn at(millis: u64) -> Moment {
        Moment::from_millis(millis)
    }

    #[test]
    fn a_silent_later_incarnation_is_outlived_once() {
        let mut names = Names::default();
        assert_eq!(names.hear(12, None, 5, OWN, at(0)), None);
        assert_eq!(names.hear(12, None, 7, OWN, at(500)), None, "late gossip");
        assert_eq!(names.hear(12, None, 7, OWN, at(1_500)), None);
        assert_eq!(names.settle(at(1_999)), None);
        assert_eq!(names.settle(at(2_000)), Some(Verdict::Outlive { generation: 12 }));
        assert_eq!(names.settle(at(9_000)), None);
    }

    #[test]
    fn the_past_is_nothing_to_act_on() {
        let mut names = Names::default();
        assert_eq!(names.hear(9, None, 5, OWN, at(0)), None);
        assert_eq!(names.hear(9, None, 6, OWN, at(100)), None);
        assert_eq!(names.settle(at(5_000)), None);
    }

    #[test]
    fn one_that_lives_is_a_clash_whichever_began_first() {
        for generation in [9, 10, 12] {
            let mut names = Names::default();
            let address = Some(([127, 0, 0, 1], 9).into());
            assert_eq!(names.hear(generation, address, 5, OWN, at(0)), None);
            assert_eq!(names.hear(generation, None, 6, OWN, at(900)), None);
            assert_eq!(names.hear(generation, None, 7, OWN, at(1_100)), Some(Verdict::Clash { address }));
            assert_eq!(names.hear(generation, None, 8, OWN, at(1_200)), None);
            assert_eq!(names.settle(at(5_000)), None);
            assert_eq!(names.hear(generation, None, 9, OWN, at(61_200)), Some(Verdict::Clash { address }));
        }
    }
}
