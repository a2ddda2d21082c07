//! Replicas of the product's core, and what each has told the others.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine_model::timing::Moment;
use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::facts::{LedgerRecord, LoadPush, LoadRow, Pulse};
use routing::settings::{Fault, Settings};
use routing::{EndpointId, ReplicaId, Router};

use crate::gossip::side;
use crate::workload::MODEL;

/// Each replica lives once.
const EPOCH: u64 = 1;

/// What is on its way between two replicas.
#[derive(Clone)]
pub(crate) enum Word {
    /// What changed.
    Push { ledger: Arc<[LedgerRecord]>, load: Arc<LoadPush> },
    /// What a lost push said of the ledger.
    Repair { ledger: Arc<[LedgerRecord]> },
    /// All of a replica's load.
    Pulse(Arc<Pulse>),
}

pub(crate) struct Replicas {
    pub(crate) routers: Vec<Router>,
    ids: Vec<ReplicaId>,
    told: Vec<BTreeMap<EndpointId, LoadRow>>,
    versions: Vec<u64>,
}

impl Replicas {
    /// All know these endpoints, which are ready and serve one model.
    pub(crate) fn new(count: usize, settings: &Settings, specs: &[EndpointSpec]) -> Result<Self, Vec<Fault>> {
        let ids: Vec<ReplicaId> = (0..count).map(|at| ReplicaId::new(&format!("replica-{at}"))).collect();
        let router = |id: &ReplicaId| {
            let router = Router::new(id.clone(), EPOCH, settings.clone())?;
            router.set_endpoints(specs.to_vec(), routing::Moment::default());
            for endpoint in specs.iter().map(EndpointSpec::id) {
                router.set_served(endpoint, Served::Models(vec![MODEL.to_owned()]));
                router.report(endpoint, Signal::ProbeOk, routing::Moment::default());
            }
            router.set_replicas(&ids);
            router.set_ready(true, false);
            Ok(router)
        };
        let routers = ids.iter().map(router).collect::<Result<_, Vec<Fault>>>()?;
        Ok(Self { routers, ids, told: vec![BTreeMap::new(); count], versions: vec![0; count] })
    }

    pub(crate) fn count(&self) -> usize {
        self.routers.len()
    }

    fn next_version(&mut self, from: usize) -> u64 {
        self.versions[from] += 1;
        self.versions[from]
    }

    /// What is new at a replica since it was last asked: ledger records, and the load rows that changed.
    pub(crate) fn news(&mut self, from: usize, now: Moment) -> Option<Word> {
        let ledger = self.routers[from].take_ledger(usize::MAX);
        let rows = self.changed_rows(from, now);
        if ledger.is_empty() && rows.is_empty() {
            return None;
        }
        let load = LoadPush { epoch: EPOCH, version: self.next_version(from), rows };
        Some(Word::Push { ledger: ledger.into(), load: load.into() })
    }

    fn changed_rows(&mut self, from: usize, now: Moment) -> Vec<LoadRow> {
        let rows = self.routers[from].load_rows(core_time(now));
        let now: BTreeMap<EndpointId, LoadRow> = rows.into_iter().map(|row| (row.endpoint, row)).collect();
        let told = &mut self.told[from];
        let nothing = |endpoint: &EndpointId| LoadRow {
            endpoint: *endpoint,
            running: 0,
            prefill_tokens: 0,
            decode_tokens: 0,
            placed_tokens: 0,
        };
        let gone = told.keys().filter(|id| !now.contains_key(id)).map(nothing);
        let news = now.values().filter(|row| told.get(&row.endpoint) != Some(row)).copied();
        let changed: Vec<LoadRow> = gone.chain(news).collect();
        *told = now;
        changed
    }

    /// A replica's pulse.
    pub(crate) fn pulse(&mut self, from: usize, now: Moment) -> Word {
        let pulse = self.routers[from].pulse(core_time(now));
        Word::Pulse(Arc::new(Pulse { version: self.next_version(from), ..pulse }))
    }

    /// A word of `from` arrives at `to`.
    pub(crate) fn hear(&self, from: usize, to: usize, word: &Word, now: Moment) {
        let (router, now) = (&self.routers[to], core_time(now));
        match word {
            Word::Push { ledger, load } => {
                router.merge_load(&self.ids[from], load, now);
                router.merge_ledger(ledger, now);
            }
            Word::Repair { ledger } => {
                router.merge_ledger(ledger, now);
            }
            Word::Pulse(pulse) => {
                router.merge_pulse(&self.ids[from], pulse, now);
            }
        }
    }

    /// The two sides of a cut take each other for dead.
    pub(crate) fn part(&self) {
        for (at, router) in self.routers.iter().enumerate() {
            let beside = |other: &usize| side(*other, self.count()) == side(at, self.count());
            let (live, gone): (Vec<usize>, Vec<usize>) = (0..self.count()).partition(beside);
            for other in gone {
                router.replica_gone(&self.ids[other]);
            }
            let live: Vec<ReplicaId> = live.into_iter().map(|other| self.ids[other].clone()).collect();
            router.set_replicas(&live);
        }
    }

    /// They hear each other again.
    pub(crate) fn meet(&self, now: Moment) {
        for router in &self.routers {
            for other in &self.ids {
                router.replica_back(other, core_time(now));
            }
            router.set_replicas(&self.ids);
        }
    }
}

/// The lab's time as the core counts it.
pub(crate) fn core_time(now: Moment) -> routing::Moment {
    routing::Moment::from_micros(now.0 / 1_000)
}
