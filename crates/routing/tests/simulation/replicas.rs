//! Replicas of the product's core, and what they tell each other: pushes of what changed, and pulses.

use std::collections::BTreeMap;

use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::facts::{LedgerRecord, LoadPush, LoadRow, Pulse, QueuePush, QueueRow};
use routing::settings::Settings;
use routing::{EndpointId, Moment, ReplicaId, Router};

/// Between two pulses of a replica, in microseconds.
pub(crate) const PULSE_US: u64 = 100_000;
/// From a pulse until others have heard it.
const PULSE_HEARD_US: u64 = 50_000;

/// What is on its way between two replicas.
pub(crate) enum Word {
    Push { ledger: Vec<LedgerRecord>, load: LoadPush, queue: Option<QueuePush> },
    Pulse(Box<Pulse>),
}

/// A word, and when it arrives.
pub(crate) struct Posted {
    pub(crate) at: u64,
    pub(crate) to: usize,
    pub(crate) from: usize,
    pub(crate) word: Word,
}

pub(crate) struct Replicas {
    pub(crate) routers: Vec<Router>,
    ids: Vec<ReplicaId>,
    told: Vec<BTreeMap<EndpointId, LoadRow>>,
    told_queues: Vec<QueueRow>,
    versions: u64,
    /// From a change until other replicas know it by a push, in microseconds.
    push_us: u64,
}

impl Replicas {
    /// All know these endpoints, which are ready and serve the model `m`.
    pub(crate) fn new(count: usize, settings: &Settings, specs: &[EndpointSpec], push_us: u64) -> Self {
        let ids: Vec<ReplicaId> = (0..count).map(|at| ReplicaId::new(&format!("replica-{at}"))).collect();
        let router = |id: &ReplicaId| {
            let router = Router::new(id.clone(), 1, settings.clone()).unwrap();
            router.set_endpoints(specs.to_vec(), Moment::default());
            for endpoint in specs.iter().map(EndpointSpec::id) {
                router.set_served(endpoint, Served::Models(vec!["m".to_owned()]));
                router.report(endpoint, Signal::ProbeOk, Moment::default());
            }
            router.set_replicas(&ids);
            router
        };
        let routers = ids.iter().map(router).collect();
        Self {
            routers,
            ids,
            told: vec![BTreeMap::new(); count],
            told_queues: vec![QueueRow::default(); count],
            versions: 0,
            push_us,
        }
    }

    /// What is new at `from`, as the product's gossip pushes it: records, and the rows that changed.
    pub(crate) fn push_from(&mut self, from: usize, now: u64) -> Vec<Posted> {
        let Some(router) = self.routers.get(from) else { return Vec::new() };
        let ledger = router.take_ledger(usize::MAX);
        let rows = self.changed_rows(from, now);
        let queue = self.routers[from].queue_row(Moment::from_micros(now));
        let is_news = !self.told_queues[from].says(&queue);
        if ledger.is_empty() && rows.is_empty() && !is_news {
            return Vec::new();
        }
        self.versions += 1;
        self.told_queues[from].clone_from(&queue);
        let queue = is_news.then_some(QueuePush { epoch: 1, version: self.versions, queue });
        let load = LoadPush { epoch: 1, version: self.versions, rows };
        let word = |_| Word::Push { ledger: ledger.clone(), load: load.clone(), queue: queue.clone() };
        self.to_others(from, now + self.push_us, word)
    }

    fn changed_rows(&mut self, from: usize, now: u64) -> Vec<LoadRow> {
        let rows = self.routers[from].load_rows(Moment::from_micros(now));
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

    /// A pulse of each.
    pub(crate) fn pulses(&mut self, now: u64) -> Vec<Posted> {
        let mut posted = Vec::new();
        for from in 0..self.routers.len() {
            self.versions += 1;
            let pulse =
                Pulse { version: self.versions, ..self.routers[from].pulse(Moment::from_micros(now)) };
            posted
                .extend(self.to_others(from, now + PULSE_HEARD_US, |_| Word::Pulse(Box::new(pulse.clone()))));
        }
        posted
    }

    pub(crate) fn id(&self, replica: usize) -> &ReplicaId {
        &self.ids[replica]
    }

    fn to_others(&self, from: usize, at: u64, word: impl Fn(usize) -> Word) -> Vec<Posted> {
        let others = (0..self.routers.len()).filter(|to| *to != from);
        others.map(|to| Posted { at, to, from, word: word(to) }).collect()
    }

    pub(crate) fn hear(&self, posted: &Posted) {
        let (router, now) = (&self.routers[posted.to], Moment::from_micros(posted.at));
        match &posted.word {
            Word::Push { ledger, load, queue } => {
                router.merge_load(&self.ids[posted.from], load, now);
                router.merge_ledger(ledger, now);
                if let Some(queue) = queue {
                    router.merge_queue(&self.ids[posted.from], queue, now);
                }
            }
            Word::Pulse(pulse) => {
                router.merge_pulse(&self.ids[posted.from], pulse, now);
            }
        }
    }
}
