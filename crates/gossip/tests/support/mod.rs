//! A replica's gossip with facts that a test sets and events that it reads.
#![allow(dead_code, clippy::allow_attributes, reason = "each test binary uses another part of it")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gossip::{Gossip, GossipConfig, GossipError, GossipEvent, Outcome};
use parking_lot::Mutex;
use routing::facts::{LedgerRecord, LoadRow, Pulse, StagedPush, StagedRow};
use routing::{BlockHash, EndpointId, ReplicaId};
use tokio::sync::mpsc;

/// Nothing that is waited for takes nearly as long, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn endpoint(n: u32) -> EndpointId {
    EndpointId::of(&format!("http://10.0.0.{n}:8000"), None)
}

pub(crate) fn load(n: u32, running: u32) -> LoadRow {
    LoadRow { endpoint: endpoint(n), running, prefill_tokens: running, decode_tokens: 7, placed_tokens: 0 }
}

/// A placement of `blocks` blocks that differs from that of any other `n`.
pub(crate) fn place(n: u64, blocks: u64) -> LedgerRecord {
    let blocks = (0..blocks).map(|block| BlockHash::from_raw((n << 32) | (1 << 31) | block)).collect();
    LedgerRecord::Place { endpoint: endpoint(1), blocks }
}

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What a replica would tell of itself.
#[derive(Default)]
pub(crate) struct Facts {
    pulse: Mutex<Pulse>,
    queue: Mutex<Vec<LedgerRecord>>,
    index: Mutex<Vec<LedgerRecord>>,
    staged: Mutex<(Vec<Arc<StagedRow>>, Vec<ReplicaId>)>,
}

impl Facts {
    pub(crate) fn set_load(&self, load: Vec<LoadRow>) {
        self.pulse.lock().load = load;
    }

    pub(crate) fn set_pulse(&self, pulse: Pulse) {
        *self.pulse.lock() = pulse;
    }

    pub(crate) fn set_staged(&self, rows: Vec<Arc<StagedRow>>, heirs: &[&str]) {
        *self.staged.lock() = (rows, heirs.iter().copied().map(ReplicaId::new).collect());
    }

    pub(crate) fn add_records(&self, records: Vec<LedgerRecord>) {
        self.queue.lock().extend(records);
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.queue.lock().is_empty()
    }

    pub(crate) fn set_index(&self, index: Vec<LedgerRecord>) {
        *self.index.lock() = index;
    }
}

impl gossip::Facts for Facts {
    fn pulse(&self) -> Pulse {
        self.pulse.lock().clone()
    }

    fn staged(&self) -> (Vec<Arc<StagedRow>>, Vec<ReplicaId>) {
        self.staged.lock().clone()
    }

    fn take_ledger(&self, max: usize) -> Vec<LedgerRecord> {
        let mut queue = self.queue.lock();
        let count = queue.len().min(max);
        queue.drain(..count).collect()
    }

    fn snapshot_page(&self, cursor: Option<u64>, limit: usize) -> (Vec<LedgerRecord>, Option<u64>) {
        let index = self.index.lock();
        let from = cursor.unwrap_or(0) as usize;
        let to = (from + limit).min(index.len());
        (index[from.min(to)..to].to_vec(), (to < index.len()).then_some(to as u64))
    }
}

/// The events that a replica was told, with pulses and pushes applied as a router would.
#[derive(Clone, Default)]
pub(crate) struct Heard(Arc<Mutex<Vec<GossipEvent>>>);

impl Heard {
    pub(crate) fn events(&self) -> Vec<GossipEvent> {
        self.0.lock().clone()
    }

    fn count(&self, is_it: impl Fn(&GossipEvent) -> bool) -> usize {
        self.0.lock().iter().filter(|event| is_it(event)).count()
    }

    pub(crate) fn beats_of(&self, name: &str) -> usize {
        self.count(|event| matches!(event, GossipEvent::Heartbeat { replica } if replica.as_str() == name))
    }

    pub(crate) fn goodbyes_of(&self, name: &str) -> usize {
        self.count(|event| matches!(event, GossipEvent::Goodbye { replica } if replica.as_str() == name))
    }

    pub(crate) fn refusals_of(&self, name: &str) -> usize {
        self.count(|event| matches!(event, GossipEvent::Refused { replica } if replica.as_str() == name))
    }

    pub(crate) fn clashes(&self) -> usize {
        self.count(|event| matches!(event, GossipEvent::NameClash { .. }))
    }

    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.0.lock().iter().find_map(|event| match event {
            GossipEvent::SnapshotDone(outcome) => Some(outcome.clone()),
            _ => None,
        })
    }

    pub(crate) fn generation_of(&self, name: &str) -> u64 {
        let events = self.0.lock();
        let epochs = events.iter().filter_map(|event| match event {
            GossipEvent::Pulse { replica, pulse } if replica.as_str() == name => Some(pulse.epoch),
            _ => None,
        });
        epochs.max().unwrap_or(0)
    }

    pub(crate) fn pulse_of(&self, name: &str) -> Option<Pulse> {
        self.0.lock().iter().rev().find_map(|event| match event {
            GossipEvent::Pulse { replica, pulse } if replica.as_str() == name => Some(pulse.clone()),
            _ => None,
        })
    }

    /// The replica's load, sorted by endpoint.
    pub(crate) fn load_of(&self, name: &str) -> Vec<LoadRow> {
        let mut rows: Vec<LoadRow> = Vec::new();
        for event in self.0.lock().iter() {
            match event {
                GossipEvent::Pulse { replica, pulse } if replica.as_str() == name => {
                    rows = pulse.load.clone();
                }
                GossipEvent::Load { replica, push } if replica.as_str() == name => {
                    for row in &push.rows {
                        rows.retain(|known| known.endpoint != row.endpoint);
                        if row.running > 0 {
                            rows.push(*row);
                        }
                    }
                }
                _ => {}
            }
        }
        rows.sort_unstable_by_key(|row| row.endpoint);
        rows
    }

    /// What the replica last said that it has staged, and the rows that came of it, each once.
    pub(crate) fn staged_of(&self, name: &str) -> (Vec<u64>, Vec<StagedRow>) {
        let events = self.0.lock();
        let told: Vec<&StagedPush> = events
            .iter()
            .filter_map(|event| match event {
                GossipEvent::Staged { replica, push } if replica.as_str() == name => Some(push),
                _ => None,
            })
            .collect();
        let held =
            told.iter().max_by_key(|push| push.version).map_or_else(Vec::new, |push| push.held.clone());
        let mut rows: Vec<StagedRow> = told.iter().flat_map(|push| push.rows.clone()).collect();
        rows.retain(|row| held.contains(&row.number));
        rows.sort_unstable_by_key(|row| row.number);
        rows.dedup();
        (held, rows)
    }

    pub(crate) fn ledger_of(&self, name: &str) -> Vec<LedgerRecord> {
        let events = self.0.lock();
        let records = events.iter().filter_map(|event| match event {
            GossipEvent::Ledger { replica, records } if replica.as_str() == name => Some(records.clone()),
            _ => None,
        });
        records.flatten().collect()
    }
}

pub(crate) struct Replica {
    name: String,
    gossip: Option<Gossip>,
    pub(crate) facts: Arc<Facts>,
    pub(crate) heard: Heard,
}

impl Replica {
    pub(crate) async fn start(name: &str, seeds: &[&Self], change: impl Fn(&mut GossipConfig)) -> Self {
        let seeds = seeds.iter().map(|seed| seed.gossip().address().to_string()).collect();
        Self::try_start(name, seeds, ([127, 0, 0, 1], 0).into(), &change).await.expect("gossip starts")
    }

    /// Starts at an address that another has just given up.
    pub(crate) async fn start_again(
        name: &str,
        seeds: &[&Self],
        at: SocketAddr,
        change: impl Fn(&mut GossipConfig),
    ) -> Self {
        let seeds: Vec<_> = seeds.iter().map(|seed| seed.gossip().address().to_string()).collect();
        let start = Instant::now();
        loop {
            match Self::try_start(name, seeds.clone(), at, &change).await {
                Ok(replica) => return replica,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn try_start(
        name: &str,
        seeds: Vec<String>,
        at: SocketAddr,
        change: &impl Fn(&mut GossipConfig),
    ) -> Result<Self, GossipError> {
        let mut config = GossipConfig::new(ReplicaId::new(name), at);
        config.seeds = seeds;
        change(&mut config);
        let facts = Arc::new(Facts::default());
        let (events, mut incoming) = mpsc::channel(256);
        let gossip = gossip::start(config, Arc::<Facts>::clone(&facts), events).await?;
        let heard = Heard::default();
        let sink = heard.clone();
        tokio::spawn(async move {
            while let Some(event) = incoming.recv().await {
                sink.0.lock().push(event);
            }
        });
        Ok(Self { name: name.to_owned(), gossip: Some(gossip), facts, heard })
    }

    pub(crate) fn name(&self) -> String {
        self.name.clone()
    }

    /// 0 for "a", 1 for "b" and so on.
    pub(crate) fn number(&self) -> u32 {
        u32::from(self.name.as_bytes()[0] - b'a')
    }

    pub(crate) fn gossip(&self) -> &Gossip {
        self.gossip.as_ref().expect("it runs until it is taken")
    }

    pub(crate) async fn goodbye(mut self) {
        self.gossip().goodbye().await;
        drop(self.gossip.take());
    }

    /// Ends it as a crash would.
    pub(crate) async fn kill(mut self) {
        let address = self.gossip().address();
        drop(self.gossip.take());
        let start = Instant::now();
        while std::net::TcpStream::connect(address).is_ok() {
            assert!(start.elapsed() < PATIENCE, "it still listens");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Replicas "a", "b", ... that know each other and are done joining.
pub(crate) async fn cluster(count: u8) -> Vec<Replica> {
    let mut cluster: Vec<Replica> = Vec::new();
    for n in 0..count {
        let name = char::from(b'a' + n).to_string();
        let seeds: Vec<_> = cluster.first().into_iter().collect();
        let replica = Replica::start(&name, &seeds, |_| ()).await;
        cluster.push(replica);
    }
    acquaint(&cluster.iter().collect::<Vec<_>>()).await;
    cluster
}

/// Waits until these have heard each other and are done joining.
pub(crate) async fn acquaint(replicas: &[&Replica]) {
    for replica in replicas {
        for other in replicas.iter().filter(|other| other.name != replica.name) {
            until("they know each other", || replica.heard.beats_of(&other.name) > 0).await;
        }
        until("they are done joining", || replica.heard.outcome().is_some()).await;
    }
}
