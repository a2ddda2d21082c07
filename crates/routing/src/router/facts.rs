//! What replicas tell each other of their load: making this replica's pulse and taking in the others'.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::{EndpointChanges, Router};
use crate::endpoint::{PLACED_HALF_LIFE, PLACED_QUANTUM, Signal, Standing, decayed};
use crate::facts::{LoadPush, LoadRow, ObservedRow, Pulse};
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

/// What was last heard of each other replica.
#[derive(Debug, Default)]
pub(super) struct Origins(BTreeMap<ReplicaId, Origin>);

#[derive(Debug, Default)]
struct Origin {
    epoch: u64,
    version: u64,
    rows: BTreeMap<EndpointId, LoadRow>,
    heard: Moment,
    ejected: Vec<EndpointId>,
}

/// What the others were last told of this replica's load.
#[derive(Debug, Default)]
pub(super) struct Told(BTreeMap<EndpointId, (LoadRow, Moment)>);

impl Told {
    /// Whether `row` says something that the others don't know, given that they let placed tokens decay by
    /// themselves.
    fn is_news(&self, row: &LoadRow, now: Moment) -> bool {
        let Some((told, at)) = self.0.get(&row.endpoint) else { return !is_nothing(row) };
        let expected = decayed(f64::from(told.placed_tokens), *at, now, PLACED_HALF_LIFE);
        (told.running, told.prefill_tokens, told.decode_tokens)
            != (row.running, row.prefill_tokens, row.decode_tokens)
            || (expected - f64::from(row.placed_tokens)).abs() > f64::from(PLACED_QUANTUM)
    }

    fn note(&mut self, row: LoadRow, now: Moment) {
        if is_nothing(&row) {
            self.0.remove(&row.endpoint);
        } else {
            self.0.insert(row.endpoint, (row, now));
        }
    }
}

fn is_nothing(row: &LoadRow) -> bool {
    (row.running, row.prefill_tokens, row.decode_tokens, row.placed_tokens) == (0, 0, 0, 0)
}

impl Router {
    /// Everything that this replica has to say of its load, absolute.
    pub fn pulse(&self, now: Moment) -> Pulse {
        let view = self.view();
        let mut told = self.told.lock();
        // The version is drawn under the same lock as the rows are read, so that of two pulses (or pushes)
        // the one with the higher version was read later.
        let version = self.next_version();
        let mut pulse = Pulse {
            epoch: self.epoch,
            version,
            ready: self.ready.load(Ordering::Relaxed),
            draining: self.draining.load(Ordering::Relaxed),
            ..Pulse::default()
        };
        for endpoint in &view.endpoints {
            let row = endpoint.own_row(now);
            told.note(row, now);
            if !is_nothing(&row) {
                pulse.load.push(row);
            }
            if matches!(endpoint.standing(), Standing::Ejected { .. }) {
                pulse.ejected.push(endpoint.id);
            }
        }
        pulse
    }

    /// The load rows that changed since they were last told, to be told at once; `None` if none did.
    pub fn take_load_push(&self, now: Moment) -> Option<LoadPush> {
        let view = self.view();
        let mut told = self.told.lock();
        let rows: Vec<LoadRow> = view
            .endpoints
            .iter()
            .map(|endpoint| endpoint.own_row(now))
            .filter(|row| told.is_news(row, now))
            .collect();
        if rows.is_empty() {
            return None;
        }
        for row in &rows {
            told.note(*row, now);
        }
        Some(LoadPush { epoch: self.epoch, version: self.next_version(), rows })
    }

    /// Takes in another replica's pulse, unless it is older than what is known.
    pub fn merge_pulse(&self, from: &ReplicaId, pulse: &Pulse, now: Moment) -> Merged {
        let mut merged = Merged::default();
        if *from == self.own {
            return merged;
        }
        let mut origins = self.origins.lock();
        let origin = origins.0.entry(from.clone()).or_default();
        if (pulse.epoch, pulse.version) <= (origin.epoch, origin.version) {
            merged.ignored = 1;
            return merged;
        }
        (origin.epoch, origin.version, origin.heard) = (pulse.epoch, pulse.version, now);
        let view = self.view();
        let rows: BTreeMap<EndpointId, LoadRow> = pulse.load.iter().map(|row| (row.endpoint, *row)).collect();
        for id in origin.rows.keys().filter(|id| !rows.contains_key(id)) {
            if let Some(endpoint) = view.get(*id) {
                endpoint.remove_row(from);
            }
        }
        for (id, row) in &rows {
            match view.get(*id) {
                Some(endpoint) => endpoint.set_row(from, *row, now),
                None => merged.ignored += 1,
            }
        }
        origin.rows = rows;
        for id in pulse.ejected.iter().filter(|id| !origin.ejected.contains(id)) {
            if let Some(endpoint) = view.get(*id) {
                endpoint.with_breaker(|breaker| breaker.report(Signal::EjectedElsewhere, true, now));
            }
        }
        origin.ejected.clone_from(&pulse.ejected);
        drop(origins);
        for row in &pulse.observed {
            self.take_observation(row, now, &mut merged);
        }
        merged
    }

    /// Takes in some of another replica's load rows, unless they are older than what is known.
    pub fn merge_load(&self, from: &ReplicaId, push: &LoadPush, now: Moment) -> Merged {
        let mut merged = Merged::default();
        if *from == self.own {
            return merged;
        }
        let mut origins = self.origins.lock();
        let origin = origins.0.entry(from.clone()).or_default();
        if (push.epoch, push.version) <= (origin.epoch, origin.version) {
            merged.ignored = push.rows.len();
            return merged;
        }
        let view = self.view();
        if push.epoch != origin.epoch {
            for id in std::mem::take(&mut origin.rows).into_keys() {
                if let Some(endpoint) = view.get(id) {
                    endpoint.remove_row(from);
                }
            }
        }
        (origin.epoch, origin.version, origin.heard) = (push.epoch, push.version, now);
        for row in &push.rows {
            if is_nothing(row) {
                origin.rows.remove(&row.endpoint);
            } else {
                origin.rows.insert(row.endpoint, *row);
            }
            match view.get(row.endpoint) {
                Some(endpoint) => endpoint.set_row(from, *row, now),
                None => merged.ignored += 1,
            }
        }
        merged
    }

    /// The replica is dead or gone: its load is no more. What it placed stays, for it describes the
    /// engines.
    pub fn replica_gone(&self, replica: &ReplicaId) {
        // Its epoch and version stay known, so that a late message of its last life can't bring rows back.
        let mut origins = self.origins.lock();
        if let Some(origin) = origins.0.get_mut(replica) {
            origin.rows.clear();
            origin.ejected.clear();
        }
        for endpoint in &self.view().endpoints {
            endpoint.remove_row(replica);
        }
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
        for (replica, origin) in &self.origins.lock().0 {
            for id in added {
                if let (Some(row), Some(endpoint)) = (origin.rows.get(id), view.get(*id)) {
                    endpoint.set_row(replica, *row, now);
                }
            }
        }
    }
}
