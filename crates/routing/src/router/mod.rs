//! The facade: one replica's core. Everything the edges do with routing goes through here.
//!
//! All methods take `&self`; what many threads share is in atomics, in values that are replaced whole, or
//! behind short locks. Time and randomness come in as arguments.

mod admitting;
mod agreement;
mod charging;
mod choosing;
mod endpoints;
mod facts;
mod learning;
mod ledger;
mod pairing;
mod sessions;
mod shortlist;
mod staged;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

pub use admitting::{Admission, Applicant, Call, Fate, QueueStats};
pub use endpoints::{AdminFactsFull, EndpointChanges, ModelEntry};
pub use facts::Merged;
pub use learning::Measurement;

use crate::ReplicaId;
use crate::admission::{Holdings, Mix};
use crate::decision::Part;
use crate::facts::LedgerRecord;
use crate::heard::Heard;
use crate::news::News;
use crate::pd::PdPlan;
use crate::policy::Plan;
use crate::prefix::PrefixIndex;
use crate::request::ShapeRules;
use crate::ring::SharedRing;
use crate::roster::Rosters;
use crate::session::SessionTable;
use crate::settings::{Fault, Settings};
use crate::share::PrefixShares;
use crate::staged::{Estates, OwnStaged};
use crate::view::{Lack, View};

/// The source of randomness that decisions draw from.
pub type Rng = rand::rngs::SmallRng;

/// One replica's core.
pub struct Router {
    own: ReplicaId,
    epoch: u64,
    active: ArcSwap<Active>,
    view: ArcSwap<View>,
    rosters: ArcSwap<Rosters>,
    /// How often what endpoints serve has changed.
    served_changes: AtomicU64,
    membership: Mutex<endpoints::Membership>,
    index: PrefixIndex,
    shares: PrefixShares,
    heard: Heard,
    sessions: SessionTable,
    token_sizes: learning::TokenSizes,
    transfers: learning::Transfers,
    replicas: SharedRing<ReplicaId>,
    origins: Mutex<facts::Origins>,
    staged: Arc<OwnStaged>,
    estates: Mutex<Estates>,
    outgoing: Mutex<Outgoing>,
    news: News,
    line: admitting::Line,
    holdings: Arc<Holdings>,
    mix: Mix,
    version: AtomicU64,
    ready: AtomicBool,
    draining: AtomicBool,
    counters: Counters,
}

/// The settings in force, with what is made of them.
struct Active {
    settings: Settings,
    rules: Arc<ShapeRules>,
    plan: Plan,
    pd: PdPlan,
}

/// Ledger records of this replica's own that nobody has been told of yet.
#[derive(Default)]
struct Outgoing {
    records: VecDeque<LedgerRecord>,
}

#[derive(Default)]
struct Counters {
    ledger_overflow: AtomicU64,
    admin_facts_refused: AtomicU64,
    ledger_unknown_endpoint: AtomicU64,
    reserve_conflicts: AtomicU64,
    reserve_forced: AtomicU64,
    chosen: AtomicU64,
    compared: AtomicU64,
    disagreed: AtomicU64,
}

/// Figures of a router for its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouterStats {
    /// Memory of the prefix index, in bytes.
    pub index_bytes: usize,
    /// Blocks in the prefix index.
    pub index_blocks: usize,
    /// Pairs of a block and a holder that left the index to make room.
    pub index_evicted: u64,
    /// Sessions in the table.
    pub sessions: usize,
    /// Sessions that left the table to make room.
    pub sessions_evicted: u64,
    /// Operators' changes that are kept.
    pub admin_facts: usize,
    /// Operators' changes, own and heard, that were not taken because too many are kept.
    pub admin_facts_refused: u64,
    /// Ledger records that were dropped because too many waited to be told.
    pub ledger_overflow: u64,
    /// Ledger records heard about endpoints that are not configured here.
    pub ledger_unknown_endpoint: u64,
    /// Choices made again because another request was charged in between.
    pub reserve_conflicts: u64,
    /// Choices charged in spite of that after too many attempts.
    pub reserve_forced: u64,
    /// Prompts that other replicas have staged and told this one of.
    pub staged_heard: usize,
    /// Prompts staged at prefill engines of which no heir was told because too many were.
    pub staged_untold: u64,
    /// Other replicas' choices that this one was asked about.
    pub decisions_compared: u64,
    /// Those of them for which it would have chosen another endpoint.
    pub decisions_disagreed: u64,
}

impl RouterStats {
    /// Share of other replicas' choices, 0 to 1, that this one would have made otherwise; `None` while it was
    /// asked about none.
    pub fn disagreement_ratio(&self) -> Option<f64> {
        let compared = (self.decisions_compared > 0).then_some(self.decisions_compared as f64)?;
        Some(self.decisions_disagreed as f64 / compared)
    }
}

impl Router {
    /// The core of the replica `own`. `epoch` is a number that grows with each restart of the replica.
    ///
    /// # Errors
    /// All faults in `settings`.
    pub fn new(own: ReplicaId, epoch: u64, settings: Settings) -> Result<Self, Vec<Fault>> {
        let index = PrefixIndex::new(settings.index_bytes_max);
        let sessions = SessionTable::new(settings.session_table_max);
        let replicas = SharedRing::default();
        replicas.set_members(std::slice::from_ref(&own));
        Ok(Self {
            active: ArcSwap::from_pointee(Active::new(settings, &own)?),
            own,
            epoch,
            view: ArcSwap::default(),
            rosters: ArcSwap::default(),
            served_changes: AtomicU64::new(0),
            membership: Mutex::default(),
            index,
            shares: PrefixShares::default(),
            heard: Heard::default(),
            sessions,
            token_sizes: learning::TokenSizes::default(),
            transfers: learning::Transfers::default(),
            replicas,
            origins: Mutex::default(),
            staged: Arc::default(),
            estates: Mutex::default(),
            outgoing: Mutex::default(),
            news: News::default(),
            line: admitting::Line::default(),
            holdings: Arc::default(),
            mix: Mix::default(),
            version: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    /// Takes other settings, all or none. Index, sessions, counters and reservations stay.
    ///
    /// # Errors
    /// All faults in `settings`; nothing has changed then.
    pub fn reconfigure(&self, settings: Settings) -> Result<(), Vec<Fault>> {
        let active = Active::new(settings, &self.own)?;
        // One change of endpoints or settings at a time, so that no plan misses an endpoint.
        let _membership = self.membership.lock();
        let view = self.view();
        active.endpoints_changed(&view);
        let prior = active.settings.speed.into();
        for endpoint in &view.endpoints {
            endpoint.with_breaker(|breaker| breaker.reconfigure(active.settings.breaker.clone()));
            endpoint.with_learned(|learned| learned.set_prior(prior));
        }
        self.sessions.set_max(active.settings.session_table_max);
        self.active.store(Arc::new(active));
        Ok(())
    }

    /// The settings in force.
    pub fn settings(&self) -> Settings {
        self.active.load().settings.clone()
    }

    /// How requests are to be read under the settings in force.
    pub fn rules(&self) -> Arc<ShapeRules> {
        Arc::clone(&self.active.load().rules)
    }

    /// This replica.
    pub fn own(&self) -> &ReplicaId {
        &self.own
    }

    /// The endpoints as they are known now.
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// Tells others whether this replica takes requests and whether it is on its way out.
    pub fn set_ready(&self, ready: bool, draining: bool) {
        self.ready.store(ready, Ordering::Relaxed);
        self.draining.store(draining, Ordering::Relaxed);
        self.news.ring();
    }

    /// Calls `listener` whenever other replicas would want to know something at once: a charge or its
    /// return, a placement, an operator's change. It is called on the request path and must return at once.
    pub fn on_news(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.news.listen(listener);
    }

    /// Figures for metrics.
    pub fn stats(&self) -> RouterStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RouterStats {
            index_bytes: self.index.bytes(),
            index_blocks: self.index.blocks(),
            index_evicted: self.index.evicted(),
            sessions: self.sessions.len(),
            sessions_evicted: self.sessions.left(),
            admin_facts: self.membership.lock().admin_facts(),
            admin_facts_refused: count(&self.counters.admin_facts_refused),
            ledger_overflow: count(&self.counters.ledger_overflow),
            ledger_unknown_endpoint: count(&self.counters.ledger_unknown_endpoint),
            reserve_conflicts: count(&self.counters.reserve_conflicts),
            reserve_forced: count(&self.counters.reserve_forced),
            staged_heard: self.estates.lock().rows(),
            staged_untold: self.staged.untold(),
            decisions_compared: count(&self.counters.compared),
            decisions_disagreed: count(&self.counters.disagreed),
        }
    }

    /// What is missing so that requests can be served.
    pub fn lacks(&self) -> Option<Lack> {
        self.view.load().lacks()
    }

    fn tell(&self, record: LedgerRecord) {
        self.tell_later(record);
        self.news.ring();
    }

    /// Queues a record without ringing: whoever has more to tell rings once, at the end.
    fn tell_later(&self, record: LedgerRecord) {
        let queue_max = self.active.load().settings.ledger_queue_max;
        let mut outgoing = self.outgoing.lock();
        if outgoing.records.len() >= queue_max {
            outgoing.records.pop_front();
            self.counters.ledger_overflow.fetch_add(1, Ordering::Relaxed);
        }
        outgoing.records.push_back(record);
    }
}

#[cfg(test)]
mod tests;

impl Active {
    fn new(settings: Settings, own: &ReplicaId) -> Result<Self, Vec<Fault>> {
        let faults = settings.faults();
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Self {
            rules: Arc::new(settings.rules()),
            plan: Plan::new(settings.policy, Part::Whole, &settings, own),
            pd: PdPlan::new(&settings, own),
            settings,
        })
    }

    fn endpoints_changed(&self, view: &View) {
        self.plan.endpoints_changed(view);
        self.pd.endpoints_changed(view);
    }

    /// The plan by which whole requests are placed where `view` is in force.
    fn plan(&self, view: &View) -> &Plan {
        if view.pools.is_some() { &self.pd.decode } else { &self.plan }
    }
}

impl std::fmt::Debug for Router {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Router").field("own", &self.own).field("stats", &self.stats()).finish_non_exhaustive()
    }
}
