//! Measures gossip on loopback, in one process: what it costs when nothing happens and when requests come
//! in, and how soon a change at one replica is known at the others.
//!
//! `cargo run --release -p gossip --example measure -- [REPLICAS] [ENDPOINTS] [SECONDS]`

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gossip::{Gossip, GossipConfig, GossipEvent};
use parking_lot::Mutex;
use routing::facts::{LedgerRecord, LoadRow, Pulse};
use routing::{BlockHash, EndpointId, ReplicaId};
use tokio::sync::mpsc;
use tokio::time::sleep;

#[derive(Default)]
struct Facts {
    pulse: Mutex<Pulse>,
    records: Mutex<Vec<LedgerRecord>>,
}

impl gossip::Facts for Facts {
    fn pulse(&self) -> Pulse {
        self.pulse.lock().clone()
    }

    fn load(&self) -> Vec<LoadRow> {
        self.pulse.lock().load.clone()
    }

    fn take_ledger(&self, max: usize) -> Vec<LedgerRecord> {
        let mut records = self.records.lock();
        let count = records.len().min(max);
        records.drain(..count).collect()
    }

    fn snapshot_page(&self, _: Option<u64>, _: usize) -> (Vec<LedgerRecord>, Option<u64>) {
        (Vec::new(), None)
    }
}

struct Replica {
    gossip: Arc<Gossip>,
    facts: Arc<Facts>,
    /// The highest `placed_tokens` of the first replica's first endpoint that was heard, and when.
    heard: Arc<Mutex<Vec<(u32, Instant)>>>,
    records: Arc<AtomicU64>,
}

fn endpoint(n: u32) -> EndpointId {
    EndpointId::of(&format!("http://10.0.0.{n}:8000"), None)
}

async fn start(n: usize, seed: Option<&Replica>) -> Replica {
    let address = ([127, 0, 0, 1], 0).into();
    let mut config = GossipConfig::new(ReplicaId::new(&format!("grapevine-{n}")), address);
    config.seeds = seed.iter().map(|seed| seed.gossip.address().to_string()).collect();
    config.keys = vec![gossip::ClusterKey::from_bytes([7; 32])];
    let facts = Arc::new(Facts::default());
    let (events, mut incoming) = mpsc::channel(1_024);
    let gossip = gossip::start(config, Arc::<Facts>::clone(&facts), events).await.expect("gossip starts");
    let heard: Arc<Mutex<Vec<_>>> = Arc::default();
    let records = Arc::new(AtomicU64::new(0));
    let (sink, count) = (Arc::clone(&heard), Arc::clone(&records));
    tokio::spawn(async move {
        while let Some(event) = incoming.recv().await {
            let (replica, rows) = match event {
                GossipEvent::Pulse { replica, pulse } => (replica, pulse.load),
                GossipEvent::Load { replica, push } => (replica, push.rows),
                GossipEvent::Ledger { records, .. } => {
                    count.fetch_add(records.len() as u64, Ordering::Relaxed);
                    continue;
                }
                _ => continue,
            };
            let mark = rows.iter().find(|row| row.endpoint == endpoint(0));
            if let Some(row) = mark.filter(|_| replica.as_str() == "grapevine-0") {
                let mut heard = sink.lock();
                if heard.last().is_none_or(|(last, _)| row.placed_tokens > *last) {
                    heard.push((row.placed_tokens, Instant::now()));
                }
            }
        }
    });
    Replica { gossip: Arc::new(gossip), facts, heard, records }
}

/// Bytes/s sent by one replica on average, by kind, and CPU time of one replica as a share of a core.
async fn traffic(replicas: &[Replica], span: Duration, what: &str) {
    let look = || replicas.iter().map(|r| r.gossip.stats()).collect::<Vec<_>>();
    let (before, cpu, start) = (look(), cpu_seconds(), Instant::now());
    sleep(span).await;
    let (after, seconds) = (look(), start.elapsed().as_secs_f64());
    let share = (cpu_seconds() - cpu) / seconds / replicas.len() as f64;
    let count = replicas.len() as f64;
    let mut text = String::new();
    let mut total = 0.0;
    for (i, traffic) in after[0].traffic.iter().enumerate() {
        let sent = |stats: &[gossip::GossipStats]| stats.iter().map(|s| s.traffic[i].sent_bytes).sum::<u64>();
        let rate = (sent(&after) - sent(&before)) as f64 / seconds / count;
        total += rate;
        text += &format!("  {} {:.1}", traffic.kind.as_str(), rate / 1_000.0);
    }
    let pushes = after.iter().map(|s| s.pushes).sum::<u64>() - before.iter().map(|s| s.pushes).sum::<u64>();
    println!(
        "{what}: {:.1} KB/s sent each ({} KB/s), {:.1} bursts/s, {:.2}% of a core each",
        total / 1_000.0,
        text.trim(),
        pushes as f64 / seconds / count,
        share * 100.0
    );
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted.get(((sorted.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(f64::NAN)
}

#[tokio::main]
async fn main() {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<u64>().expect("a number"));
    let replicas = arguments.next().unwrap_or(3) as usize;
    let endpoints = arguments.next().unwrap_or(64) as u32;
    let span = Duration::from_secs(arguments.next().unwrap_or(10));
    println!("{replicas} replicas, {endpoints} endpoints, sealed");
    let mut cluster: Vec<Replica> = Vec::new();
    for n in 0..replicas {
        let replica = start(n, cluster.first()).await;
        cluster.push(replica);
    }
    for replica in &cluster {
        while replica.gossip.peers().len() < replicas - 1 {
            sleep(Duration::from_millis(20)).await;
        }
    }
    sleep(Duration::from_secs(2)).await;
    traffic(&cluster, span, "nothing in flight").await;

    let row = |n, running| LoadRow {
        endpoint: endpoint(n),
        running,
        prefill_tokens: running * 1_500,
        decode_tokens: running * 400,
        placed_tokens: 0,
    };
    for replica in &cluster {
        replica.facts.pulse.lock().load = (0..endpoints).map(|n| row(n, 1 + n % 5)).collect();
    }
    sleep(Duration::from_secs(1)).await;
    traffic(&cluster, span, "requests in flight everywhere, none begins or ends").await;

    // A mark that grows every 20 to 40 ms at the first replica.
    let mut told = Vec::new();
    for mark in 1..=100 {
        cluster[0].facts.pulse.lock().load[0].placed_tokens = mark;
        told.push(Instant::now());
        cluster[0].gossip.nudge();
        sleep(Duration::from_millis(20 + u64::from(mark % 21))).await;
    }
    sleep(Duration::from_millis(500)).await;
    let mut delays = Vec::new();
    let mut missed = 0;
    for replica in &cluster[1..] {
        let heard = replica.heard.lock();
        for (mark, told) in (1..).zip(&told) {
            match heard.iter().find(|(m, _)| *m >= mark) {
                Some((m, at)) => {
                    missed += usize::from(*m > mark);
                    delays.push(at.duration_since(*told).as_secs_f64() * 1_000.0);
                }
                None => missed += 1,
            }
        }
    }
    delays.sort_by(f64::total_cmp);
    println!(
        "a pushed row is known after {:.2} ms p50, {:.2} ms p99, {:.2} ms at most; {missed} of {} came late",
        percentile(&delays, 0.5),
        percentile(&delays, 0.99),
        percentile(&delays, 1.0),
        delays.len()
    );

    let stop = Arc::new(AtomicBool::new(false));
    let made = Arc::new(AtomicU64::new(0));
    for (n, replica) in cluster.iter().enumerate() {
        let pause = Duration::from_secs_f64(replicas as f64 / REQUESTS_PER_SECOND / 3.0);
        let (gossip, facts) = (Arc::clone(&replica.gossip), Arc::clone(&replica.facts));
        tokio::spawn(serve(n as u64, gossip, facts, pause, Arc::clone(&stop), Arc::clone(&made)));
    }
    sleep(Duration::from_secs(1)).await;
    traffic(&cluster, span, "200 requests/s in all, of new 12,000-token prompts").await;
    stop.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(1)).await;
    let heard: u64 = cluster.iter().map(|replica| replica.records.load(Ordering::Relaxed)).sum();
    let pulls: u64 = cluster.iter().map(|replica| replica.gossip.stats().pulls).sum();
    let made = made.load(Ordering::Relaxed);
    println!("{made} records made, {heard} heard ({} expected), {pulls} pulls", made * (replicas as u64 - 1));
}

/// Requests in all; each is a new prompt of 12,000 tokens, 94 blocks of 512 bytes, and changes the row of its
/// endpoint three times.
const REQUESTS_PER_SECOND: f64 = 200.0;

async fn serve(
    own: u64,
    gossip: Arc<Gossip>,
    facts: Arc<Facts>,
    pause: Duration,
    stop: Arc<AtomicBool>,
    made: Arc<AtomicU64>,
) {
    let mut tick = tokio::time::interval(pause);
    for step in 0_u64.. {
        tick.tick().await;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let endpoint = {
            let mut pulse = facts.pulse.lock();
            let at = (step / 3 * 7 + own) as usize % pulse.load.len();
            let row = &mut pulse.load[at];
            match step % 3 {
                0 => (row.running, row.prefill_tokens) = (row.running + 1, row.prefill_tokens + 12_000),
                1 => (row.prefill_tokens, row.decode_tokens) = (1_500, row.decode_tokens + 300),
                _ => (row.running, row.decode_tokens) = (1, 400),
            }
            row.endpoint
        };
        if step % 3 == 0 {
            let block =
                |n: u64| BlockHash::from_raw((step << 20 | own << 8 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            facts.records.lock().push(LedgerRecord::Place { endpoint, blocks: (0..94).map(block).collect() });
            made.fetch_add(1, Ordering::Relaxed);
        }
        gossip.nudge();
    }
}
