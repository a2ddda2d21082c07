//! What is known of one incarnation of another replica: its newest facts, whichever way they came.
//!
//! Its load rows come twice, by push and with the pulse, and may overtake each other. Each row here carries
//! the version under which it was told, and only a newer one replaces it.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use routing::facts::{LoadRow, Pulse};
use routing::{EndpointId, Moment};

use crate::inbox::Inbox;
use crate::parts::part_of;
use crate::wire::{Meta, PARTS_MAX, Part, Presence, Waiting};

/// Pushed rows kept until the pulse covers them; a cluster has fewer endpoints.
const PUSHED_MAX: usize = 16_384;

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) generation: u64,
    /// Its port P, once it has been gossiped.
    pub(crate) address: Option<SocketAddr>,
    /// When it last showed that it lives.
    pub(crate) lived: Option<Moment>,
    pub(crate) inbox: Inbox,
    heartbeat: Option<u64>,
    /// The newest version of anything it told: its clock.
    version: u64,
    meta: Meta,
    waiting: Waiting,
    /// Of the newest part.
    split: u8,
    split_version: u64,
    parts: BTreeMap<usize, Part>,
    /// Rows pushed since their part.
    pushed: HashMap<EndpointId, (u64, LoadRow)>,
}

impl Peer {
    pub(crate) fn new(generation: u64, address: Option<SocketAddr>) -> Self {
        Self {
            generation,
            address,
            lived: None,
            inbox: Inbox::default(),
            heartbeat: None,
            version: 0,
            meta: Meta::default(),
            waiting: Waiting::default(),
            split: 0,
            split_version: 0,
            parts: BTreeMap::new(),
            pushed: HashMap::new(),
        }
    }

    /// Whether a heartbeat heard from anyone shows that the replica lives. The first one does not: it may
    /// be a dead one's last.
    pub(crate) fn beat(&mut self, heartbeat: u64) -> bool {
        let known = self.heartbeat;
        self.heartbeat = known.max(Some(heartbeat));
        known.is_some_and(|known| heartbeat > known)
    }

    /// Whether a version heard from the replica itself is new.
    pub(crate) fn advance(&mut self, version: u64) -> bool {
        let new = version > self.version;
        self.version = self.version.max(version);
        new
    }

    pub(crate) fn state(&self) -> Presence {
        self.meta.state
    }

    /// Whether how it stands has changed.
    pub(crate) fn take_meta(&mut self, meta: Meta) -> bool {
        self.version = self.version.max(meta.version);
        if meta.version <= self.meta.version {
            return false;
        }
        let changed = meta.state != self.meta.state;
        self.meta = meta;
        changed
    }

    /// Whether who waits there has changed.
    pub(crate) fn take_waiting(&mut self, waiting: Waiting) -> bool {
        self.version = self.version.max(waiting.version);
        if waiting.version <= self.waiting.version {
            return false;
        }
        let changed = !self.waiting.queue.says(&waiting.queue);
        self.waiting = waiting;
        changed
    }

    /// Whether the part says anything new.
    pub(crate) fn take_part(&mut self, index: usize, part: Part) -> bool {
        let parts_max = PARTS_MAX.ilog2() as u8;
        if part.split > parts_max || self.parts.get(&index).is_some_and(|old| old.version >= part.version) {
            return false;
        }
        self.version = self.version.max(part.version);
        if part.version > self.split_version {
            (self.split_version, self.split) = (part.version, part.split);
        }
        if part.split == self.split {
            let covered = |endpoint: &EndpointId, version: u64| {
                part_of(*endpoint, part.split) == index && version <= part.version
            };
            self.pushed.retain(|endpoint, (version, _)| !covered(endpoint, *version));
        }
        self.parts.insert(index, part);
        true
    }

    /// The pushed rows that are news.
    pub(crate) fn take_rows(&mut self, version: u64, rows: &[LoadRow]) -> Vec<LoadRow> {
        let mut news = Vec::new();
        for &row in rows {
            let (told, known) = self.load_at(row.endpoint);
            let room = self.pushed.len() < PUSHED_MAX || self.pushed.contains_key(&row.endpoint);
            if version <= told || !room {
                continue;
            }
            self.pushed.insert(row.endpoint, (version, row));
            if known != row {
                news.push(row);
            }
        }
        news
    }

    /// The load at an endpoint and the version under which it was told.
    fn load_at(&self, endpoint: EndpointId) -> (u64, LoadRow) {
        let nothing = LoadRow { endpoint, running: 0, prefill_tokens: 0, decode_tokens: 0, placed_tokens: 0 };
        if let Some(&pushed) = self.pushed.get(&endpoint) {
            return pushed;
        }
        let part = self.parts.get(&part_of(endpoint, self.split)).filter(|part| part.split == self.split);
        part.map_or((0, nothing), |part| {
            let row = part.load.iter().find(|row| row.endpoint == endpoint);
            (part.version, row.copied().unwrap_or(nothing))
        })
    }

    /// Whether it has told anything of itself yet.
    pub(crate) fn has_told(&self) -> bool {
        self.version > 0
    }

    /// All that is known, as one pulse.
    pub(crate) fn pulse(&self) -> Pulse {
        let mut pulse = Pulse {
            epoch: self.generation,
            version: self.version,
            ready: self.meta.state.ready,
            draining: self.meta.state.draining,
            queue: self.waiting.queue.clone(),
            ..Pulse::default()
        };
        // How old what was told is by the teller's clock.
        let age = |version: u64| u32::try_from(self.version - version).unwrap_or(u32::MAX);
        pulse.queue.age(age(self.waiting.version));
        let current =
            self.parts.iter().filter(|(index, part)| part.split == self.split && **index < 1 << self.split);
        for (_, part) in current {
            let unpushed = part.load.iter().filter(|row| !self.pushed.contains_key(&row.endpoint));
            pulse.load.extend(unpushed);
            let since = age(part.version);
            pulse.observed.extend(part.observed.iter().map(|row| {
                let mut row = *row;
                row.age_ms = row.age_ms.saturating_add(since);
                row
            }));
            pulse.speed.extend(&part.speed);
            pulse.ejected.extend(&part.ejected);
        }
        let is_loaded = |row: &&LoadRow| {
            row.running > 0 || row.prefill_tokens > 0 || row.decode_tokens > 0 || row.placed_tokens > 0
        };
        pulse.load.extend(self.pushed.values().map(|(_, row)| row).filter(is_loaded));
        pulse.load.sort_unstable_by_key(|row| row.endpoint);
        pulse
    }

    /// How long it has been silent; `None` if it never showed that it lives.
    pub(crate) fn silence(&self, now: Moment) -> Option<Duration> {
        self.lived.map(|lived| now.since(lived))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use routing::facts::{ObservedRow, QueueRow};

    use super::*;
    use crate::parts::Planner;

    fn row(n: u64, running: u32) -> LoadRow {
        let endpoint = EndpointId::of(&format!("http://10.0.0.{n}:8000"), None);
        LoadRow { endpoint, running, prefill_tokens: running * 90_000, decode_tokens: 0, placed_tokens: 0 }
    }

    fn part(version: u64, load: Vec<LoadRow>) -> Part {
        Part { version, load, ..Part::default() }
    }

    #[test]
    fn an_older_pulse_does_not_undo_a_push() {
        let mut peer = Peer::new(1, None);
        assert_eq!(peer.take_rows(10, &[row(1, 5)]), vec![row(1, 5)]);
        assert!(peer.take_part(0, part(9, vec![row(1, 3), row(2, 2)])));
        let mut expected = vec![row(1, 5), row(2, 2)];
        expected.sort_unstable_by_key(|row| row.endpoint);
        assert_eq!(peer.pulse().load, expected);
        assert!(peer.take_part(0, part(11, vec![row(2, 2)])));
        assert_eq!(peer.pulse().load, vec![row(2, 2)], "absent from a newer pulse is zero");
        assert_eq!(peer.take_rows(10, &[row(1, 5)]), vec![], "a late push is old");
    }

    #[test]
    fn an_older_push_does_not_undo_a_newer_one_and_zero_clears() {
        let mut peer = Peer::new(1, None);
        peer.take_rows(10, &[row(1, 5)]);
        assert_eq!(peer.take_rows(9, &[row(1, 4)]), vec![]);
        assert_eq!(peer.take_rows(10, &[row(1, 4)]), vec![]);
        assert_eq!(peer.take_rows(11, &[row(1, 5)]), vec![], "nothing new in it");
        assert_eq!(peer.take_rows(12, &[row(1, 0)]), vec![row(1, 0)]);
        assert_eq!(peer.pulse().load, vec![]);
    }

    #[test]
    fn a_look_at_an_engine_ages_by_the_tellers_clock() {
        let observed = ObservedRow {
            endpoint: EndpointId::from_raw(1),
            age_ms: 30,
            running: 1,
            waiting: 0,
            kv_ratio: None,
            engine_epoch: 0,
        };
        let mut peer = Peer::new(1, None);
        peer.take_part(0, Part { version: 1_000, observed: vec![observed], ..Part::default() });
        assert!(peer.advance(3_500));
        assert_eq!(peer.pulse().observed[0].age_ms, 2_530);
    }

    #[test]
    fn the_newest_word_of_who_waits_stands() {
        let waiting = |version, requests| Waiting {
            version,
            queue: QueueRow { requests: [0, 0, requests], ..QueueRow::default() },
        };
        let mut peer = Peer::new(1, None);
        assert!(peer.take_waiting(waiting(2, 7)));
        assert!(!peer.take_waiting(waiting(1, 9)));
        assert!(!peer.take_waiting(waiting(3, 7)), "nothing new in it");
        assert_eq!(peer.pulse().queue.len(), 7);
    }

    #[test]
    fn the_first_heartbeat_may_be_a_dead_replicas_last() {
        let mut peer = Peer::new(1, None);
        assert!(!peer.beat(7));
        assert!(!peer.beat(7));
        assert!(!peer.beat(6));
        assert!(peer.beat(8));
    }

    proptest! {
        /// A sender changes rows, pushes some changes (some lost) and posts its pulse; the receiver gets all
        /// that is not lost in any order. Once it has the newest parts it knows what the sender knows.
        #[test]
        fn any_order_and_loss_of_pushes_ends_at_the_newest_pulse(
            steps in proptest::collection::vec((0_u64..80, 0_u32..4, any::<bool>(), any::<bool>()), 1..120),
            shuffle in any::<u64>(),
        ) {
            enum Told { Rows(u64, Vec<LoadRow>), Part(usize, Part) }
            let mut own: BTreeMap<u64, LoadRow> = BTreeMap::new();
            let mut planner = Planner::default();
            let mut told = Vec::new();
            let count = steps.len() as u64;
            for (version, (n, running, lost, post)) in (1..).zip(steps) {
                own.insert(n, row(n, running));
                planner.pushed(row(n, running).endpoint);
                if !lost {
                    told.push(Told::Rows(version, vec![row(n, running)]));
                }
                if post || version == count {
                    let load = own.values().copied().filter(|row| row.running > 0).collect();
                    let pulse = Pulse { load, ..Pulse::default() };
                    for (index, part) in planner.plan(&pulse, version, Moment::default()) {
                        told.push(Told::Part(index, part));
                    }
                }
            }
            let mut keyed: Vec<_> = told.into_iter().enumerate().collect();
            keyed.sort_by_key(|(i, _)| (*i as u64 + 1).wrapping_mul(shuffle | 1));
            let mut peer = Peer::new(1, None);
            for (_, told) in keyed {
                match told {
                    Told::Rows(version, rows) => drop(peer.take_rows(version, &rows)),
                    Told::Part(index, part) => drop(peer.take_part(index, part)),
                }
            }
            let mut expected: Vec<_> = own.into_values().filter(|row| row.running > 0).collect();
            expected.sort_unstable_by_key(|row| row.endpoint);
            prop_assert_eq!(peer.pulse().load, expected);
        }
    }
}
