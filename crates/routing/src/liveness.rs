//! Which replicas are alive, as the view understands it.
//!
//! A replica is dead when its heartbeat has stood still for 1.5 s, when it said goodbye, or when it refused a
//! connection; it is back with its first fresh heartbeat. Silence is measured in time that this replica
//! itself was attentive: one that was stopped, or starved of CPU, has heard nobody and must not take all
//! others for dead.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::{Moment, ReplicaId};

/// The most replicas that are kept, dead ones included. 1,024: far above any cluster of routers, and what a
/// stranger on an unsealed gossip port can make us keep.
pub const REPLICAS_MAX: usize = 1_024;

/// The numbers of a [`Liveness`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivenessConfig {
    /// How long a heartbeat may stand still. 1.5 s: with ticks and gossip a dead replica's load is gone
    /// from the view in less than 2 s, and 15 rounds must be lost in a row to take a live one for dead.
    pub silence_max: Duration,
    /// The most that one tick adds to the measured silence, however late it comes. 250 ms: more than two
    /// ordinary ticks; a pause of any length counts as one late tick.
    pub tick_credit_max: Duration,
    /// How long after a goodbye or a refused connection the beats of the same generation don't bring a
    /// replica back. 1 s: meanwhile others may still pass on what it said before.
    pub echo_span: Duration,
    /// How long a dead replica's last heartbeat is remembered. 2 min: what gossip keeps of it, too.
    pub forget_after: Duration,
}

impl Default for LivenessConfig {
    fn default() -> Self {
        Self {
            silence_max: Duration::from_millis(1_500),
            tick_credit_max: Duration::from_millis(250),
            echo_span: Duration::from_secs(1),
            forget_after: Duration::from_secs(120),
        }
    }
}

/// A heartbeat: the count of one incarnation. Ordered: any beat of a later generation is the fresher one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Beat {
    /// Which incarnation of the replica; grows with each restart.
    pub generation: u64,
    /// How often it has beaten.
    pub heartbeat: u64,
}

/// Why a replica is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeathCause {
    /// Its heartbeat stood still.
    Silent,
    /// It said goodbye.
    Goodbye,
    /// It refused a connection.
    Refused,
}

impl DeathCause {
    /// The name in logs and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Goodbye => "goodbye",
            Self::Refused => "refused",
        }
    }
}

/// What a heartbeat or a goodbye changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessChange {
    /// Nothing.
    Unchanged,
    /// The replica is alive: seen for the first time, restarted, or back.
    Born,
    /// It is dead: its load is to be dropped, its duties to be taken over.
    Died(DeathCause),
}

/// What one replica knows of the others' lives. It does not hold itself.
#[derive(Clone, Debug)]
pub struct Liveness {
    config: LivenessConfig,
    replicas: BTreeMap<ReplicaId, Replica>,
    attention: Attention,
}

#[derive(Clone, Debug)]
struct Replica {
    beat: Beat,
    /// The attentive time at which it last advanced.
    advanced: Duration,
    life: Life,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Live,
    Dead { cause: DeathCause, since: Moment },
}

/// Time that runs only while we are there to see it.
#[derive(Clone, Copy, Debug)]
struct Attention {
    seen: Duration,
    last_tick: Moment,
}

impl Attention {
    fn at(&self, now: Moment, credit_max: Duration) -> Duration {
        self.seen + now.since(self.last_tick).min(credit_max)
    }
}

impl Liveness {
    /// Nobody yet.
    pub const fn new(config: LivenessConfig, now: Moment) -> Self {
        let attention = Attention { seen: Duration::ZERO, last_tick: now };
        Self { config, replicas: BTreeMap::new(), attention }
    }

    /// A beat of `replica` was heard, first hand or passed on.
    pub fn heard(&mut self, replica: &ReplicaId, beat: Beat, now: Moment) -> LivenessChange {
        let advanced = self.attention.at(now, self.config.tick_credit_max);
        let Some(known) = self.replicas.get_mut(replica) else {
            if self.replicas.len() >= REPLICAS_MAX {
                return LivenessChange::Unchanged;
            }
            self.replicas.insert(replica.clone(), Replica { beat, advanced, life: Life::Live });
            return LivenessChange::Born;
        };
        if beat <= known.beat {
            return LivenessChange::Unchanged;
        }
        let restarted = beat.generation > known.beat.generation;
        known.beat = beat;
        known.advanced = advanced;
        let back = restarted
            || match known.life {
                Life::Live => false,
                Life::Dead { cause: DeathCause::Silent, .. } => true,
                Life::Dead { cause: DeathCause::Goodbye | DeathCause::Refused, since } => {
                    now.since(since) > self.config.echo_span
                }
            };
        if back {
            known.life = Life::Live;
            LivenessChange::Born
        } else {
            LivenessChange::Unchanged
        }
    }

    /// The incarnation `generation` of `replica` said goodbye. A later one brings it back at once.
    pub fn goodbye(&mut self, replica: &ReplicaId, generation: u64, now: Moment) -> LivenessChange {
        match self.replicas.get(replica) {
            Some(known) if known.beat.generation <= generation => self.die(replica, DeathCause::Goodbye, now),
            _ => LivenessChange::Unchanged,
        }
    }

    /// `replica` refused a connection: nobody listens at its address.
    pub fn refused(&mut self, replica: &ReplicaId, now: Moment) -> LivenessChange {
        self.die(replica, DeathCause::Refused, now)
    }

    /// Time has passed; to be called every 100 ms or so. Names those that died, sorted.
    pub fn tick(&mut self, now: Moment) -> Vec<(ReplicaId, DeathCause)> {
        self.attention.seen = self.attention.at(now, self.config.tick_credit_max);
        self.attention.last_tick = self.attention.last_tick.max(now);
        let (seen, config) = (self.attention.seen, &self.config);
        let mut died = Vec::new();
        self.replicas.retain(|id, replica| match replica.life {
            Life::Live => {
                if seen.saturating_sub(replica.advanced) >= config.silence_max {
                    replica.life = Life::Dead { cause: DeathCause::Silent, since: now };
                    died.push((id.clone(), DeathCause::Silent));
                }
                true
            }
            Life::Dead { since, .. } => now.since(since) < config.forget_after,
        });
        died
    }

    /// Those that live, sorted.
    pub fn live(&self) -> impl Iterator<Item = &ReplicaId> {
        self.replicas.iter().filter(|(_, replica)| replica.life == Life::Live).map(|(id, _)| id)
    }

    /// Whether `replica` lives.
    pub fn is_live(&self, replica: &ReplicaId) -> bool {
        self.replicas.get(replica).is_some_and(|known| known.life == Life::Live)
    }

    fn die(&mut self, replica: &ReplicaId, cause: DeathCause, now: Moment) -> LivenessChange {
        match self.replicas.get_mut(replica) {
            Some(known) if known.life == Life::Live => {
                known.life = Life::Dead { cause, since: now };
                LivenessChange::Died(cause)
            }
            _ => LivenessChange::Unchanged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cluster of one other replica, `a`, that beats as the script says.
    struct Script {
        liveness: Liveness,
        now_ms: u64,
        heartbeat: u64,
    }

    impl Script {
        fn new() -> Self {
            let liveness = Liveness::new(LivenessConfig::default(), Moment::from_millis(0));
            let mut script = Self { liveness, now_ms: 0, heartbeat: 0 };
            assert_eq!(script.beat(1), LivenessChange::Born);
            script
        }

        fn beat(&mut self, generation: u64) -> LivenessChange {
            self.heartbeat += 1;
            let beat = Beat { generation, heartbeat: self.heartbeat };
            self.liveness.heard(&ReplicaId::new("a"), beat, Moment::from_millis(self.now_ms))
        }

        fn old_beat(&mut self) -> LivenessChange {
            let beat = Beat { generation: 1, heartbeat: self.heartbeat };
            self.liveness.heard(&ReplicaId::new("a"), beat, Moment::from_millis(self.now_ms))
        }

        /// Ticks every `every_ms` for `span_ms`; when it died, in ms from now.
        fn silence(&mut self, span_ms: u64, every_ms: u64) -> Option<u64> {
            let begun = self.now_ms;
            while self.now_ms < begun + span_ms {
                self.now_ms += every_ms;
                if !self.liveness.tick(Moment::from_millis(self.now_ms)).is_empty() {
                    return Some(self.now_ms - begun);
                }
            }
            None
        }

        fn lives(&self) -> bool {
            self.liveness.is_live(&ReplicaId::new("a"))
        }
    }

    #[test]
    fn a_heartbeat_that_stands_still_is_a_death_and_a_fresh_one_a_return() {
        let mut script = Script::new();
        assert_eq!(script.silence(5_000, 100), Some(1_500));
        assert_eq!(script.old_beat(), LivenessChange::Unchanged);
        assert!(!script.lives());
        assert_eq!(script.beat(1), LivenessChange::Born);
        assert!(script.lives());
    }

    #[test]
    fn beats_in_time_keep_it_alive() {
        let mut script = Script::new();
        for _ in 0..20 {
            assert_eq!(script.silence(1_400, 100), None);
            script.beat(1);
        }
        assert!(script.lives());
    }

    #[test]
    fn after_a_pause_of_our_own_others_have_time_to_be_heard() {
        let mut script = Script::new();
        script.silence(100, 100);
        script.now_ms += 60_000;
        assert_eq!(script.liveness.tick(Moment::from_millis(script.now_ms)), vec![]);
        assert_eq!(script.silence(5_000, 100), Some(1_200), "and the dead are still found");
    }

    #[test]
    fn a_replica_starved_of_cpu_takes_longer_to_see_a_death_and_sees_no_false_one() {
        let mut script = Script::new();
        for _ in 0..50 {
            script.now_ms += 1_400;
            assert_eq!(script.liveness.tick(Moment::from_millis(script.now_ms)), vec![]);
            script.beat(1);
        }
        assert_eq!(script.silence(20_000, 500), Some(3_000));
    }

    #[test]
    fn a_goodbye_of_an_earlier_life_is_not_heard_and_a_later_life_returns_at_once() {
        let mut script = Script::new();
        let (a, now) = (ReplicaId::new("a"), Moment::from_millis(0));
        assert_eq!(script.liveness.goodbye(&a, 0, now), LivenessChange::Unchanged);
        assert_eq!(script.liveness.goodbye(&a, 1, now), LivenessChange::Died(DeathCause::Goodbye));
        assert_eq!(script.liveness.goodbye(&a, 1, now), LivenessChange::Unchanged);
        assert_eq!(script.beat(2), LivenessChange::Born);
    }

    #[test]
    fn what_others_pass_on_just_after_a_death_that_was_told_does_not_bring_it_back() {
        let (a, now) = (ReplicaId::new("a"), Moment::from_millis(0));
        for cause in [DeathCause::Refused, DeathCause::Goodbye] {
            let mut script = Script::new();
            let died = match cause {
                DeathCause::Refused => script.liveness.refused(&a, now),
                _ => script.liveness.goodbye(&a, 1, now),
            };
            assert_eq!(died, LivenessChange::Died(cause));
            script.now_ms = 900;
            assert_eq!(script.beat(1), LivenessChange::Unchanged);
            script.now_ms = 1_100;
            assert_eq!(script.beat(1), LivenessChange::Born);
        }
    }

    #[test]
    fn a_restart_without_a_gap_is_noticed() {
        let mut script = Script::new();
        assert_eq!(script.beat(2), LivenessChange::Born);
    }

    #[test]
    fn the_dead_are_forgotten_and_strangers_are_bounded() {
        let mut script = Script::new();
        script.silence(130_000, 100);
        script.silence(130_000, 100);
        assert_eq!(script.liveness.replicas.len(), 0);
        for n in 0..REPLICAS_MAX + 10 {
            let beat = Beat { generation: 1, heartbeat: 1 };
            let stranger = ReplicaId::new(&n.to_string());
            script.liveness.heard(&stranger, beat, Moment::from_millis(script.now_ms));
        }
        assert_eq!(script.liveness.live().count(), REPLICAS_MAX);
    }
}
