//! When replicas tell each other what, and what becomes of it on the way.

use std::time::Duration;

use engine_model::timing::Moment;
use rand::Rng as _;
use rand::rngs::SmallRng;

/// How facts travel. The core decides what is told; this decides when it is heard.
#[derive(Clone, Debug, PartialEq)]
pub struct Gossip {
    /// Between two pushes of what changed at a replica; zero: at each change. `None`: replicas tell nothing.
    pub push_every: Option<Duration>,
    /// Between two pulses, in which all of a replica's load is told anew.
    pub pulse_every: Duration,
    /// From a push to when it is heard. A pulse, which is handed from replica to replica, takes half its own
    /// period longer.
    pub delay: Duration,
    /// Share of pushes and pulses that never arrive, 0 to 1, for each hearer by itself.
    pub loss: f64,
    /// How long a gap in the ledger stands before it is noticed and pulled.
    pub repair_after: Duration,
    /// Times in which the replicas are cut in two: the first half, rounded up, and the others.
    pub cuts: Vec<Cut>,
    /// Silence after which the load of a replica counts no more.
    pub dead_after: Duration,
}

/// A time in which two sides do not hear each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its begin, from the workload's start.
    pub from: Duration,
    /// Its end.
    pub until: Duration,
}

impl Default for Gossip {
    /// As `grapevine serve` has it unless told otherwise, on a network of a millisecond.
    fn default() -> Self {
        Self {
            push_every: Some(Duration::from_millis(2)),
            pulse_every: Duration::from_millis(100),
            delay: Duration::from_millis(1),
            loss: 0.0,
            repair_after: Duration::from_millis(200),
            cuts: Vec::new(),
            dead_after: Duration::from_millis(1_500),
        }
    }
}

/// What becomes of a word on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is heard.
    Heard { at: Moment },
    /// It is lost; what it said of the ledger is pulled.
    Lost { repaired_at: Moment },
}

impl Gossip {
    /// What becomes of a push from one of `replicas` to another. The same lots are drawn whatever comes of them.
    pub(crate) fn push(
        &self,
        from: usize,
        to: usize,
        replicas: usize,
        now: Moment,
        lots: &mut SmallRng,
    ) -> Fate {
        let lost = self.is_lost(lots);
        match self.cut(from, to, replicas, now) {
            Some(cut) => {
                let healed = Moment::default().plus(cut.until);
                Fate::Lost { repaired_at: healed.plus(self.repair_after + self.delay) }
            }
            None if lost => Fate::Lost { repaired_at: now.plus(self.repair_after + self.delay) },
            None => Fate::Heard { at: now.plus(self.delay) },
        }
    }

    /// When a pulse from one of `replicas` is heard by another, if it is.
    pub(crate) fn pulse(
        &self,
        from: usize,
        to: usize,
        replicas: usize,
        now: Moment,
        lots: &mut SmallRng,
    ) -> Option<Moment> {
        let lost = self.is_lost(lots) || self.cut(from, to, replicas, now).is_some();
        (!lost).then(|| now.plus(self.delay + self.pulse_every / 2))
    }

    fn is_lost(&self, lots: &mut SmallRng) -> bool {
        self.loss > 0.0 && lots.random_bool(self.loss)
    }

    fn cut(&self, from: usize, to: usize, replicas: usize, now: Moment) -> Option<&Cut> {
        if side(from, replicas) == side(to, replicas) {
            return None;
        }
        let past = now.since(Moment::default());
        self.cuts.iter().find(|cut| (cut.from..cut.until).contains(&past))
    }
}

/// On which side of a cut one of `replicas` is.
pub(crate) fn side(replica: usize, replicas: usize) -> bool {
    replica < replicas.div_ceil(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;

    fn at(ms: u64) -> Moment {
        Moment::default().plus(Duration::from_millis(ms))
    }

    #[test]
    fn a_cut_separates_its_sides_while_it_lasts_and_the_ledger_is_made_good_after_it() {
        let cut = Cut { from: Duration::from_millis(100), until: Duration::from_millis(500) };
        let gossip = Gossip { cuts: vec![cut], ..Gossip::default() };
        let mut lots = SmallRng::seed_from_u64(1);
        let mut push = |from, to, now| gossip.push(from, to, 3, at(now), &mut lots);
        assert_eq!(push(0, 2, 99), Fate::Heard { at: at(100) });
        assert_eq!(push(0, 2, 100), Fate::Lost { repaired_at: at(701) });
        assert_eq!(push(0, 1, 100), Fate::Heard { at: at(101) });
        assert_eq!(push(2, 1, 500), Fate::Heard { at: at(501) });
        assert_eq!(gossip.pulse(1, 2, 3, at(499), &mut lots), None);
        assert_eq!(gossip.pulse(1, 2, 3, at(500), &mut lots), Some(at(551)));
    }

    #[test]
    fn as_many_are_lost_as_asked_for() {
        let gossip = Gossip { loss: 0.2, ..Gossip::default() };
        let mut lots = SmallRng::seed_from_u64(1);
        let lost = (0..10_000).filter(|_| {
            let fate = gossip.push(0, 1, 2, at(0), &mut lots);
            assert!(fate == Fate::Heard { at: at(1) } || fate == Fate::Lost { repaired_at: at(201) });
            fate != Fate::Heard { at: at(1) }
        });
        let lost = lost.count();
        assert!((1_850..2_150).contains(&lost), "{lost}");
    }
}
