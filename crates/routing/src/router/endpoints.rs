//! The endpoint list: what is configured, what operators changed, and what each endpoint is found to be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arc_swap::Guard;
use thiserror::Error;

use super::Router;
use crate::candidates::Scope;
use crate::decision::Refusal;
use crate::endpoint::{
    Drained, Endpoint, EndpointSpec, ProbeStart, Served, Signal, Standing, StandingChange, Usable,
};
use crate::facts::{AdminFact, AdminOperation, LedgerRecord};
use crate::prefix::Slot;
use crate::rates::Speed;
use crate::request::RequestShape;
use crate::roster::{RosterNumber, Rosters};
use crate::view::View;
use crate::{EndpointId, Moment};

/// The most operator changes that are kept, one an endpoint. Far above any fleet; it only bounds what a
/// script gone wild can do to memory.
const ADMIN_FACTS_MAX: usize = 16_384;

/// An operator's change was not taken: `ADMIN_FACTS_MAX` changes to other endpoints are kept already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("changes to {ADMIN_FACTS_MAX} endpoints are kept already, which is the most")]
pub struct AdminFactsFull;

/// What a change to the endpoint list did here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointChanges {
    /// Endpoints that are in the list now and were not before.
    pub added: Vec<EndpointId>,
    /// Endpoints that were and are no more.
    pub removed: Vec<EndpointId>,
    /// Endpoints that begin to drain.
    pub draining: Vec<EndpointId>,
}

impl EndpointChanges {
    /// Adds what another change did.
    pub fn extend(&mut self, other: Self) {
        self.added.extend(other.added);
        self.removed.extend(other.removed);
        self.draining.extend(other.draining);
    }
}

/// A model, and how many endpoints serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelEntry {
    /// Its name.
    pub id: String,
    /// Endpoints known to serve it.
    pub endpoints: usize,
    /// Those of them that are in use.
    pub usable: usize,
}

/// Everything that decides which endpoints there are.
#[derive(Debug, Default)]
pub(super) struct Membership {
    base: BTreeMap<EndpointId, EndpointSpec>,
    admin: BTreeMap<EndpointId, AdminFact>,
    /// This replica's own changes that another is known to keep.
    shared: BTreeMap<EndpointId, u64>,
    lamport: u64,
    /// Endpoints whose drain is over.
    drained: BTreeSet<EndpointId>,
    slots_free: Vec<u16>,
    slots_used: usize,
}

impl Membership {
    pub(super) fn admin_facts(&self) -> usize {
        self.admin.len()
    }

    fn slot(&mut self) -> Option<Slot> {
        if let Some(number) = self.slots_free.pop() {
            return Some(Slot::new(number));
        }
        let number = u16::try_from(self.slots_used).ok().filter(|_| self.slots_used < Slot::COUNT_MAX)?;
        self.slots_used += 1;
        Some(Slot::new(number))
    }

    /// The list: the configured base with the operators' changes on top.
    fn effective(&self) -> BTreeMap<EndpointId, EndpointSpec> {
        let mut specs = self.base.clone();
        for (id, fact) in &self.admin {
            match &fact.operation {
                AdminOperation::Add(spec) => {
                    specs.insert(*id, spec.clone());
                }
                AdminOperation::Remove => {
                    specs.remove(id);
                }
                AdminOperation::Drain { .. } => {
                    if self.drained.contains(id) {
                        specs.remove(id);
                    }
                }
            }
        }
        specs
    }
}

impl Router {
    /// Takes `specs` as the configured list; operators' changes stay on top of it.
    pub fn set_endpoints(&self, specs: Vec<EndpointSpec>, now: Moment) -> EndpointChanges {
        let mut membership = self.membership.lock();
        membership.base = specs.into_iter().map(|spec| (spec.id(), spec)).collect();
        self.rebuild(&mut membership, now)
    }

    /// An operator's change made at this replica: applies it and tells the others.
    ///
    /// # Errors
    /// When too many changes are kept; nothing has changed then and nobody is told.
    pub fn administer(
        &self,
        endpoint: EndpointId,
        operation: AdminOperation,
        now: Moment,
    ) -> Result<(AdminFact, EndpointChanges), AdminFactsFull> {
        let mut membership = self.membership.lock();
        let counter = membership.lamport + 1;
        let fact = AdminFact { endpoint, operation, counter, replica: self.own.clone() };
        let changes = self.apply_to(&mut membership, fact.clone(), now)?;
        drop(membership);
        self.tell(LedgerRecord::Admin(fact.clone()));
        Ok((fact, changes))
    }

    /// Takes in an operator's change that was heard. Of two for one endpoint the later holds; one for which
    /// there is no room is counted.
    pub fn apply_admin(&self, fact: AdminFact, now: Moment) -> EndpointChanges {
        self.apply_to(&mut self.membership.lock(), fact, now).unwrap_or_default()
    }

    /// The same for one that was told as news: if it is, it is told on once. So it spreads though its origin
    /// dies, and its origin hears that it is kept elsewhere.
    pub(super) fn spread_admin(&self, fact: &AdminFact, now: Moment) -> EndpointChanges {
        let mut membership = self.membership.lock();
        if fact.replica == self.own {
            let is_held = membership.admin.get(&fact.endpoint) == Some(fact);
            if is_held {
                membership.shared.insert(fact.endpoint, fact.counter);
            }
            return EndpointChanges::default();
        }
        let before = membership.admin.get(&fact.endpoint).cloned();
        let changes = self.apply_to(&mut membership, fact.clone(), now).unwrap_or_default();
        let is_news = before.as_ref() != membership.admin.get(&fact.endpoint);
        drop(membership);
        if is_news {
            self.tell(LedgerRecord::Admin(fact.clone()));
        }
        changes
    }

    /// Whether another replica is known to keep this change, made here.
    pub fn is_shared(&self, fact: &AdminFact) -> bool {
        self.membership.lock().shared.get(&fact.endpoint).is_some_and(|counter| *counter >= fact.counter)
    }

    fn apply_to(
        &self,
        membership: &mut Membership,
        fact: AdminFact,
        now: Moment,
    ) -> Result<EndpointChanges, AdminFactsFull> {
        membership.lamport = membership.lamport.max(fact.counter);
        let held = membership.admin.get(&fact.endpoint);
        if held.is_none() && membership.admin.len() >= ADMIN_FACTS_MAX {
            self.counters.admin_facts_refused.fetch_add(1, Ordering::Relaxed);
            return Err(AdminFactsFull);
        }
        if held.is_some_and(|held| (held.counter, &held.replica) >= (fact.counter, &fact.replica)) {
            return Ok(EndpointChanges::default());
        }
        let endpoint = fact.endpoint;
        let operation = fact.operation.clone();
        membership.drained.remove(&endpoint);
        membership.admin.insert(endpoint, fact);
        if operation == AdminOperation::Remove && self.view.load().get(endpoint).is_none() {
            return Ok(EndpointChanges::default());
        }
        let mut changes = self.rebuild(membership, now);
        let view = self.view();
        let Some(endpoint) = view.get(endpoint) else { return Ok(changes) };
        match operation {
            AdminOperation::Drain { deadline_ms } => {
                let deadline = now.plus(Duration::from_millis(deadline_ms));
                endpoint.with_breaker(|breaker| breaker.drain(deadline));
                changes.draining.push(endpoint.id);
            }
            AdminOperation::Add(_) => endpoint.with_breaker(|breaker| breaker.undrain(now)),
            AdminOperation::Remove => {}
        }
        Ok(changes)
    }

    /// Every operator's change that is known, by endpoint.
    pub fn admin_facts(&self) -> Vec<AdminFact> {
        self.membership.lock().admin.values().cloned().collect()
    }

    /// Removes the draining endpoints that are idle or whose time is up.
    pub fn finish_drains(&self, now: Moment) -> EndpointChanges {
        let over: Vec<EndpointId> = self
            .view()
            .endpoints
            .iter()
            .filter(|endpoint| {
                let drained = endpoint.standing().drained(endpoint.running(now), now);
                matches!(drained, Drained::Idle | Drained::DeadlinePassed)
            })
            .map(|endpoint| endpoint.id)
            .collect();
        if over.is_empty() {
            return EndpointChanges::default();
        }
        let mut membership = self.membership.lock();
        membership.drained.extend(over);
        self.rebuild(&mut membership, now)
    }

    fn rebuild(&self, membership: &mut Membership, now: Moment) -> EndpointChanges {
        let active = self.active.load();
        let speed = Speed::from(active.settings.speed);
        let old = self.view();
        let wanted = membership.effective();
        let mut changes = EndpointChanges::default();
        let mut endpoints = Vec::with_capacity(wanted.len());
        for (id, spec) in &wanted {
            match old.get(*id) {
                Some(endpoint) if endpoint.spec == *spec => endpoints.push(Arc::clone(endpoint)),
                Some(endpoint) => endpoints.push(Arc::new(endpoint.respecified(spec.clone()))),
                None => {
                    let Some(slot) = membership.slot() else { continue };
                    let breaker = active.settings.breaker.clone();
                    endpoints.push(Arc::new(Endpoint::new(
                        spec.clone(),
                        slot,
                        breaker,
                        speed,
                        self.news.clone(),
                        now,
                    )));
                    changes.added.push(*id);
                }
            }
        }
        for endpoint in &old.endpoints {
            if !wanted.contains_key(&endpoint.id) {
                self.index.clear(endpoint.slot);
                membership.slots_free.push(endpoint.slot.number());
                changes.removed.push(endpoint.id);
            }
        }
        let view = Arc::new(View::new(endpoints));
        active.endpoints_changed(&view);
        self.view.store(view);
        self.reapply_rows(&changes.added, now);
        changes
    }

    /// Notes what an endpoint said it serves.
    pub fn set_served(&self, endpoint: EndpointId, served: Served) {
        if let Some(endpoint) = self.view().get(endpoint)
            && *endpoint.served() != served
        {
            endpoint.set_served(served);
            // After the change: a roster that was made before is known by its number to be too old.
            self.served_changes.fetch_add(1, Ordering::Release);
        }
    }

    /// The rosters with the one for the request, and where it is.
    ///
    /// # Errors
    /// If nobody serves it, or the model is not clear.
    pub(super) fn rosters(
        &self,
        view: &Arc<View>,
        shape: &RequestShape,
        scope: &Scope<'_>,
        now: Moment,
    ) -> Result<(Guard<Arc<Rosters>>, RosterNumber), Refusal> {
        let changes = self.served_changes.load(Ordering::Acquire);
        let rosters = self.rosters.load();
        if let Some(number) = rosters.find(view, changes, shape, scope) {
            return Ok((rosters, number));
        }
        let (next, number) = rosters.with(view, changes, shape, scope, now)?;
        let next = Arc::new(next);
        // Of two that are stored at once one is lost, and made again when it is wanted.
        self.rosters.store(Arc::clone(&next));
        Ok((Guard::from_inner(next), number))
    }

    /// Every model known, by name.
    pub fn models(&self) -> Vec<ModelEntry> {
        let view = self.view();
        let serving = |model: &str, wanted: fn(&Endpoint) -> bool| {
            view.endpoints.iter().filter(|each| wanted(each) && each.lists(model)).count()
        };
        view.models()
            .into_iter()
            .map(|id| ModelEntry {
                endpoints: serving(&id, |_| true),
                usable: serving(&id, |endpoint| endpoint.usable() != Usable::No),
                id,
            })
            .collect()
    }

    /// Takes in a sign of an endpoint's health and says what it changed. The last endpoint in use is not
    /// ejected by how requests fare there: a poor answer is better than none.
    pub fn report(&self, endpoint: EndpointId, signal: Signal, now: Moment) -> StandingChange {
        let view = self.view();
        let Some(endpoint) = view.get(endpoint) else { return StandingChange::Unchanged };
        let may_eject = matches!(signal, Signal::ProbeFailed(_)) || view.has_another_for(endpoint);
        let change = endpoint.with_breaker(|breaker| breaker.report(signal, may_eject, now));
        if change.clears_placements() {
            self.clear_placements(endpoint, 0);
        }
        change
    }

    /// Where an endpoint stands.
    pub fn standing(&self, endpoint: EndpointId) -> Option<Standing> {
        self.view().get(endpoint).map(|endpoint| endpoint.standing())
    }

    /// Begins a probe of an endpoint if one is due.
    pub fn begin_probe(&self, endpoint: EndpointId, now: Moment) -> ProbeStart {
        let view = self.view();
        view.get(endpoint)
            .map_or(ProbeStart::Never, |endpoint| endpoint.with_breaker(|breaker| breaker.begin_probe(now)))
    }

    /// The engine at `endpoint` began a new life (`engine_epoch`, 0 if unknown): forgets what was placed
    /// there and tells the others.
    pub(super) fn clear_placements(&self, endpoint: &Endpoint, engine_epoch: u64) {
        self.index.clear(endpoint.slot);
        endpoint.retention().forget();
        self.tell(LedgerRecord::Clear { endpoint: endpoint.id, engine_epoch });
    }

    /// A ledger record named an endpoint that is not in the list.
    pub(super) fn count_unknown_endpoint(&self) {
        self.counters.ledger_unknown_endpoint.fetch_add(1, Ordering::Relaxed);
    }
}
