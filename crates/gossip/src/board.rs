//! One instance of the gossip library: a board on which each replica posts under a few fixed keys, and
//! which the library carries to all others.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, ProtocolVersion, spawn_chitchat,
};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::hop::Hop;
use crate::stats::Counters;

/// Longest value that is posted. One of 65 KB would silently block everything behind it for ever.
const VALUE_BYTES_MAX: usize = 8 << 10;
/// The library's own detector only chooses whom to gossip with. At 8, its default, it flaps under CPU load.
const PHI_THRESHOLD: f64 = 30.0;
/// How long the library keeps a silent replica in its digest; it would be a day by default, and every
/// rollout would make the digest grow.
const GRACE: Duration = Duration::from_secs(120);

pub(crate) struct Board {
    hop: Hop,
    cluster_id: String,
    every: Duration,
    /// Posted by this replica, to be posted again by its next incarnation.
    posted: Mutex<BTreeMap<String, String>>,
    handle: Mutex<Arc<ChitchatHandle>>,
    counters: Arc<Counters>,
    wake: Arc<Notify>,
}

/// What is new about one incarnation of a replica.
pub(crate) struct News {
    pub(crate) id: ChitchatId,
    pub(crate) heartbeat: u64,
    /// Values posted since the last look.
    pub(crate) values: Vec<(String, String)>,
}

/// How far a reader has read, for each incarnation.
pub(crate) type Read = HashMap<ChitchatId, u64>;

impl Board {
    /// Opens the board as `id`; `wake` is notified when another replica's post arrives.
    pub(crate) async fn open(
        hop: Hop,
        id: ChitchatId,
        cluster_id: String,
        every: Duration,
        wake: Arc<Notify>,
    ) -> anyhow::Result<Self> {
        let posted = BTreeMap::new();
        let handle = spawn(&hop, id, &cluster_id, every, &posted, &wake).await?;
        let counters = Arc::clone(&hop.counters);
        let (posted, handle) = (Mutex::new(posted), Mutex::new(Arc::new(handle)));
        Ok(Self { hop, cluster_id, every, posted, handle, counters, wake })
    }

    /// Begins anew as another incarnation of this replica, with the same posts.
    pub(crate) async fn restart(&self, generation: u64) -> anyhow::Result<()> {
        let mut id = self.handle().chitchat_id().clone();
        id.generation_id = generation;
        // The old task ends by itself; it no longer receives, since the way in leads to the new one.
        let _ = self.handle().initiate_shutdown();
        let posted = self.posted.lock().clone();
        let handle = spawn(&self.hop, id, &self.cluster_id, self.every, &posted, &self.wake).await?;
        *self.handle.lock() = Arc::new(handle);
        Ok(())
    }

    /// Replaces the values under these keys. A value that is too large is left out and counted.
    pub(crate) async fn post(&self, values: Vec<(String, String)>) {
        let mut fitting = values;
        fitting.retain(|(key, value)| {
            let fits = value.len() <= VALUE_BYTES_MAX;
            if !fits {
                tracing::warn!(key, bytes = value.len(), "value too large to gossip");
                self.counters.values_oversized.up();
            }
            fits
        });
        if fitting.is_empty() {
            return;
        }
        self.posted.lock().extend(fitting.iter().cloned());
        let chitchat = self.handle().chitchat();
        let mut chitchat = chitchat.lock().await;
        for (key, value) in fitting {
            chitchat.self_node_state().set(key, value);
        }
    }

    /// All incarnations of all other replicas with what they posted since `read`.
    ///
    /// Read by version and not handed over one by one, so that nothing can be dropped on the way.
    pub(crate) async fn news(&self, read: &mut Read) -> Vec<News> {
        let chitchat = self.handle().chitchat();
        let chitchat = chitchat.lock().await;
        let own = chitchat.self_chitchat_id();
        let states = chitchat.node_states();
        read.retain(|id, _| states.contains_key(id));
        let news = states.iter().filter(|(id, _)| *id != own).map(|(id, state)| {
            let mut values = Vec::new();
            let upto = read.entry(id.clone()).or_default();
            if state.max_version() > *upto {
                let mut newest = *upto;
                for (key, value) in state.key_values_including_deleted() {
                    if value.version > *upto {
                        newest = newest.max(value.version);
                        values.push((key.to_owned(), value.value.clone()));
                    }
                }
                *upto = newest;
            }
            News { id: id.clone(), heartbeat: state.heartbeat().into(), values }
        });
        news.collect()
    }

    /// Gossips with whoever is at `address`, at once.
    pub(crate) fn greet(&self, address: SocketAddr) {
        // Fails only when the library has ended, which the watch over it sees to.
        let _ = self.handle().gossip(address);
    }

    /// Ends when the library's task does, which it should not.
    pub(crate) async fn ended(&self) -> anyhow::Result<()> {
        let watch = self.handle().termination_watcher();
        watch.await
    }

    /// Stops at once, without a word to anyone.
    pub(crate) fn close(&self) {
        self.handle().abort();
    }

    fn handle(&self) -> Arc<ChitchatHandle> {
        Arc::clone(&self.handle.lock())
    }
}

async fn spawn(
    hop: &Hop,
    id: ChitchatId,
    cluster_id: &str,
    every: Duration,
    posted: &BTreeMap<String, String>,
    wake: &Arc<Notify>,
) -> anyhow::Result<ChitchatHandle> {
    let config = ChitchatConfig {
        listen_addr: id.gossip_advertise_addr,
        chitchat_id: id.clone(),
        cluster_id: cluster_id.to_owned(),
        gossip_interval: every,
        // Our own task looks up and greets the seeds: the library's waits for them before it starts.
        seed_nodes: Vec::new(),
        failure_detector_config: FailureDetectorConfig {
            phi_threshold: PHI_THRESHOLD,
            initial_interval: every,
            dead_node_grace_period: GRACE,
            ..FailureDetectorConfig::default()
        },
        // Nothing is ever deleted.
        marked_for_deletion_grace_period: GRACE,
        catchup_callback: None,
        extra_liveness_predicate: None,
        protocol_version: ProtocolVersion::V1,
    };
    let initial = posted.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    let handle = spawn_chitchat(config, initial, hop).await?;
    let (wake, own) = (Arc::clone(wake), id);
    // Called under the library's lock: it only wakes the reader.
    let subscribe = |chitchat: &mut chitchat::Chitchat| {
        let (wake, own) = (Arc::clone(&wake), own.clone());
        let callback = move |event: chitchat::KeyChangeEvent<'_>| {
            if *event.node != own {
                wake.notify_one();
            }
        };
        chitchat.subscribe_event("", callback).forever();
    };
    handle.with_chitchat(subscribe).await;
    Ok(handle)
}
