//! What replicas tell each other of their load: making this replica's pulse and taking in the others'.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::{EndpointChanges, Router};
use crate::admission::Claim;
use crate::endpoint::{OBSERVED_STALE, Signal, Standing};
use crate::facts::{LoadPush, LoadRow, ObservedRow, Pulse, QueuePush, QueueRow, SpeedRow};
use crate::liveness::REPLICAS_MAX;
use crate::view::View;
use crate::{EndpointId, Moment, ReplicaId};

/// What taking in others' facts did here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Changes to the endpoint list.
    pub changes: EndpointChanges,
    /// Engines found to have begun a new life.
    pub restarted: Vec<EndpointId>,
    /// Facts that were older than what is known, or about endpoints unknown here.
    pub ignored: usize,
}

impl Merged {
    /// Adds what other facts did.
    pub(super) fn extend(&mut self, other: Self) {
        self.changes.extend(other.changes);
        self.restarted.extend(other.restarted);
        self.ignored += other.ignored;
    }
}

/// What was last heard of each other replica, of at most [`REPLICAS_MAX`].
#[derive(Debug, Default)]
pub(super) struct Origins(BTreeMap<ReplicaId, Origin>);

impl Origins {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The queues of the replicas that live.
    pub(super) fn queues(&self) -> impl Iterator<Item = &HeardQueue> {
        self.0.values().filter(|origin| origin.life == Life::Live).map(|origin| &origin.queue)
    }

    /// What the replicas that live claim by their queues.
    pub(super) fn claims(&self) -> impl Iterator<Item = Claim> {
        let live = self.0.iter().filter(|(_, origin)| origin.life == Life::Live);
        live.flat_map(|(replica, Origin { queue, .. })| Claim::of(replica, &queue.row, queue.heard))
    }

    /// What was heard of `from`. When there is no room for one more, one that carries nothing makes room;
    /// `None` if all do.
    fn of(&mut self, from: &ReplicaId) -> Option<&mut Origin> {
        if !self.0.contains_key(from) && self.0.len() >= REPLICAS_MAX {
            let idle = self.0.iter().find(|(_, origin)| origin.rows.is_empty())?.0.clone();
            self.0.remove(&idle);
        }
        Some(self.0.entry(from.clone()).or_default())
    }
}

#[derive(Debug, Default)]
struct Origin {
    epoch: u64,
    /// The version of the newest pulse.
    version: u64,
    /// Each row with the version that told it. A row that is all zero is kept while a pulse that began
    /// before it may still come.
    rows: BTreeMap<EndpointId, (LoadRow, u64)>,
    ejected: Vec<EndpointId>,
    speed: Vec<SpeedRow>,
    queue: HeardQueue,
    life: Life,
}

/// What a replica said of its queue when it last said anything new.
#[derive(Debug, Default)]
pub(super) struct HeardQueue {
    pub(super) row: QueueRow,
    version: u64,
    heard: Moment,
}

impl HeardQueue {
    /// Takes what is newer, whichever way it came; whether it says anything new.
    fn take(&mut self, row: &QueueRow, version: u64, now: Moment) -> bool {
        if version < self.version || self.row.says(row) {
            return false;
        }
        *self = Self { row: row.clone(), version, heard: now };
        true
    }
}

/// Whether what a replica says of its load counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Live,
    /// It is taken for dead. What still comes of it, on its way since before, is kept and does not count.
    Gone,
}

impl Origin {
    /// A later incarnation of the replica may speak: then nothing that an earlier one carried is left. Whether it is one.
    fn begin_epoch(&mut self, epoch: u64, from: &ReplicaId, view: &View) -> bool {
        if epoch == self.epoch {
            return false;
        }
        for id in std::mem::take(&mut self.rows).into_keys() {
            if let Some(endpoint) = view.get(id) {
                endpoint.remove_row(from);
            }
        }
        (self.epoch, self.version, self.life) = (epoch, 0, Life::Live);
        self.queue = HeardQueue::default();
        true
    }

    /// Takes a row unless a newer one is known; whether it did, at an endpoint that exists here. It counts
    /// while its replica lives.
    fn take_row(&mut self, from: &ReplicaId, row: LoadRow, version: u64, view: &View, now: Moment) -> bool {
        if self.rows.get(&row.endpoint).is_some_and(|(_, known)| *known > version) {
            return false;
        }
        self.rows.insert(row.endpoint, (row, version));
        let Some(endpoint) = view.get(row.endpoint) else { return false };
        if self.life == Life::Live {
            endpoint.set_row(from, row, now);
        }
        true
    }
}

fn is_nothing(row: &LoadRow) -> bool {
    (row.running, row.prefill_tokens, row.decode_tokens, row.placed_tokens) == (0, 0, 0, 0)
}

impl Router {
    /// Everything that this replica has to say of its load, absolute.
    pub fn pulse(&self, now: Moment) -> Pulse {
        let view = self.view();
        let version = self.version.fetch_add(1, Ordering::Relaxed) + 1;
        let mut pulse = Pulse {
            epoch: self.epoch,
            version,
            ready: self.ready.load(Ordering::Relaxed),
            draining: self.draining.load(Ordering::Relaxed),
            ..Pulse::default()
        };
        for endpoint in &view.endpoints {
            let row = endpoint.own_row(now);
            if !is_nothing(&row) {
                pulse.load.push(row);
            }
            if matches!(endpoint.standing(), Standing::Ejected { .. }) {
                pulse.ejected.push(endpoint.id);
            }
        }
        self.measure_placed(now);
        pulse.observed = self.observed_rows(&view, now);
        pulse.speed = self.speed_rows(now);
        let mut rows = pulse.speed.clone();
        rows.extend(
            self.origins
                .lock()
                .0
                .values()
                .filter(|origin| origin.life == Life::Live)
                .flat_map(|origin| origin.speed.iter().copied()),
        );
        self.apply_speeds(&rows);
        pulse.queue = self.queue_row(now);
        pulse
    }

    /// This replica's load rows as they are now, those that are all zero left out.
    pub fn load_rows(&self, now: Moment) -> Vec<LoadRow> {
        let view = self.view.load();
        view.endpoints.iter().map(|endpoint| endpoint.own_row(now)).filter(|row| !is_nothing(row)).collect()
    }

    /// What this replica itself saw at the engines that it looks after.
    fn observed_rows(&self, view: &View, now: Moment) -> Vec<ObservedRow> {
        view.endpoints
            .iter()
            .filter(|endpoint| self.scrape_owner(endpoint.id).as_ref() == Some(&self.own))
            .filter_map(|endpoint| {
                let seen = endpoint.observed()?;
                let age = now.since(seen.at);
                (age < OBSERVED_STALE).then(|| ObservedRow {
                    endpoint: endpoint.id,
                    age_ms: age.as_millis() as u32,
                    running: seen.running,
                    waiting: seen.waiting,
                    kv_ratio: seen.kv_ratio,
                    engine_epoch: seen.engine_epoch,
                })
            })
            .collect()
    }

    /// Which live replica looks after an endpoint's own figures; all agree who.
    pub fn scrape_owner(&self, endpoint: EndpointId) -> Option<ReplicaId> {
        self.replicas.load().owner(endpoint.raw()).cloned()
    }

    /// The replicas that are alive; this one counts in any case.
    pub fn set_replicas(&self, live: &[ReplicaId]) {
        let mut members = live.to_vec();
        members.push(self.own.clone());
        self.replicas.set_members(&members);
    }

    /// Takes in another replica's pulse. Pulses and pushes go different ways and overtake each other, so it
    /// is decided row by row which is the newer.
    pub fn merge_pulse(&self, from: &ReplicaId, pulse: &Pulse, now: Moment) -> Merged {
        let mut merged = Merged::default();
        if *from == self.own {
            return merged;
        }
        let view = self.view();
        let mut origins = self.origins.lock();
        let Some(origin) = origins.of(from) else {
            merged.ignored = 1;
            return merged;
        };
        if (pulse.epoch, pulse.version) < (origin.epoch, origin.version) {
            merged.ignored = 1;
            return merged;
        }
        if origin.begin_epoch(pulse.epoch, from, &view) {
            self.estates.lock().lives_as(from, pulse.epoch);
        }
        origin.version = pulse.version;
        let told: BTreeMap<EndpointId, LoadRow> = pulse.load.iter().map(|row| (row.endpoint, *row)).collect();
        let gone: Vec<LoadRow> = origin
            .rows
            .keys()
            .filter(|id| !told.contains_key(id))
            .map(|id| LoadRow {
                endpoint: *id,
                running: 0,
                prefill_tokens: 0,
                decode_tokens: 0,
                placed_tokens: 0,
            })
            .collect();
        for row in gone.iter().chain(told.values()) {
            merged.ignored += usize::from(!origin.take_row(from, *row, pulse.version, &view, now));
        }
        origin.rows.retain(|_, (row, version)| !is_nothing(row) || *version > pulse.version);
        for id in pulse.ejected.iter().filter(|id| !origin.ejected.contains(id)) {
            if let Some(endpoint) = view.get(*id) {
                endpoint.with_breaker(|breaker| breaker.report(Signal::EjectedElsewhere, true, now));
            }
        }
        origin.ejected.clone_from(&pulse.ejected);
        origin.speed.clone_from(&pulse.speed);
        if origin.queue.take(&pulse.queue, pulse.version, now) {
            self.hear_full(&pulse.queue, now);
            self.hear_queues(&origins);
        }
        drop(origins);
        self.news.ring_here();
        for row in &pulse.observed {
            self.take_observation(row, now, &mut merged);
        }
        merged
    }

    /// Takes in some of another replica's load rows, those that are newer than what is known.
    pub fn merge_load(&self, from: &ReplicaId, push: &LoadPush, now: Moment) -> Merged {
        let mut merged = Merged::default();
        if *from == self.own {
            return merged;
        }
        let view = self.view();
        let mut origins = self.origins.lock();
        let Some(origin) = origins.of(from) else {
            merged.ignored = 1;
            return merged;
        };
        if push.epoch < origin.epoch {
            merged.ignored = push.rows.len();
            return merged;
        }
        if origin.begin_epoch(push.epoch, from, &view) {
            self.estates.lock().lives_as(from, push.epoch);
        }
        for row in &push.rows {
            merged.ignored += usize::from(!origin.take_row(from, *row, push.version, &view, now));
        }
        drop(origins);
        self.news.ring_here();
        merged
    }

    /// Takes in another replica's queue, if this is newer than what is known.
    pub fn merge_queue(&self, from: &ReplicaId, push: &QueuePush, now: Moment) -> Merged {
        let mut merged = Merged::default();
        if *from == self.own {
            return merged;
        }
        let view = self.view();
        let mut origins = self.origins.lock();
        let known = origins.of(from).filter(|origin| push.epoch >= origin.epoch);
        let Some(origin) = known else {
            merged.ignored = 1;
            return merged;
        };
        if origin.begin_epoch(push.epoch, from, &view) {
            self.estates.lock().lives_as(from, push.epoch);
        }
        if origin.queue.take(&push.queue, push.version, now) {
            self.hear_full(&push.queue, now);
            self.hear_queues(&origins);
            drop(origins);
            self.news.ring_here();
        }
        merged
    }

    /// The replica is dead or gone: its load is no more. What it placed stays, for it describes the
    /// engines.
    pub fn replica_gone(&self, replica: &ReplicaId) {
        // Its epoch and version stay known, so that an older message can't bring rows back; and that it is
        // gone, so that one that was on its way can't either.
        let mut origins = self.origins.lock();
        if let Some(origin) = origins.0.get_mut(replica) {
            origin.rows.clear();
            origin.ejected.clear();
            origin.speed.clear();
            origin.queue.row = QueueRow::default();
            origin.life = Life::Gone;
        }
        self.hear_queues(&origins);
        for endpoint in &self.view().endpoints {
            endpoint.remove_row(replica);
        }
    }

    /// A replica that was taken for dead lives: what it has said meanwhile counts.
    pub fn replica_back(&self, replica: &ReplicaId, now: Moment) {
        self.estates.lock().back(replica);
        let mut origins = self.origins.lock();
        let Some(origin) = origins.0.get_mut(replica) else { return };
        origin.life = Life::Live;
        let view = self.view();
        for (id, (row, _)) in &origin.rows {
            if let Some(endpoint) = view.get(*id) {
                endpoint.set_row(replica, *row, now);
            }
        }
        self.hear_queues(&origins);
    }

    /// Takes in this replica's own look at an engine.
    pub fn observe(&self, row: &ObservedRow, now: Moment) -> Merged {
        let mut merged = Merged::default();
        self.take_observation(row, now, &mut merged);
        merged
    }

    fn take_observation(&self, row: &ObservedRow, now: Moment, merged: &mut Merged) {
        let view = self.view();
        let Some(endpoint) = view.get(row.endpoint) else {
            merged.ignored += 1;
            return;
        };
        if let Some(engine_epoch) = endpoint.observe(row, now) {
            self.clear_placements(endpoint, engine_epoch);
            merged.restarted.push(endpoint.id);
        }
    }

    /// Gives endpoints that were just added the rows that others told before.
    pub(super) fn reapply_rows(&self, added: &[EndpointId], now: Moment) {
        if added.is_empty() {
            return;
        }
        let view = self.view();
        let origins = self.origins.lock();
        for (replica, origin) in origins.0.iter().filter(|(_, origin)| origin.life == Life::Live) {
            for id in added {
                if let (Some((row, _)), Some(endpoint)) = (origin.rows.get(id), view.get(*id)) {
                    endpoint.set_row(replica, *row, now);
                }
            }
        }
    }
}
