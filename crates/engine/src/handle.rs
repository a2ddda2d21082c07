//! Engines within another process: started, looked at, broken and stopped.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::config::{Config, ConfigError, Options};
use crate::fault::{Fault, Health, Lies};
use crate::flight::Phase;
use crate::record::{Recorded, Route};
use crate::server::{Closing, Server, serve_connections};
use crate::transfer::pinned::Released;
use crate::transfer::{Connector, Role, Transfer, courier, side};

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Flags that mean nothing together or alone.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address could not be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The part that computes died of a request, and the engine with it.
    #[error("the engine's core has died")]
    CoreDied,
}

/// A running engine. Dropping it is like killing its process: connections are reset and the port is free.
pub struct Engine {
    addr: SocketAddr,
    server: Arc<Server>,
    /// The loops that accept clients and other engines.
    accepting: Vec<JoinHandle<()>>,
    driving: Vec<JoinHandle<()>>,
}

/// What an engine has seen and holds, all ranks together.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Stats {
    /// Sequences being computed.
    pub running: u32,
    /// Sequences waiting to be.
    pub waiting: u32,
    /// Share of the KV cache in use, 0 to 1, the mean over ranks.
    pub kv_ratio: f64,
    /// Prompt tokens of all sequences that were started.
    pub prompt_tokens: u64,
    /// Of these, tokens found in the cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Sequences that ended at their limit or by themselves.
    pub finished: u64,
    /// Sequences that were ended early: client gone, engine stopped.
    pub aborted: u64,
    /// Jobs that lost their blocks to others.
    pub preemptions: u64,
    /// Requests refused because the queue was full.
    pub rejections: u64,
    /// Connections accepted.
    pub connections_opened: u64,
    /// Of these, still open.
    pub connections_open: u64,
    /// Requests whose client left before the end of the reply.
    pub requests_abandoned: u64,
    /// Finished prefills whose blocks are kept for other engines.
    pub pinned_requests: u32,
    /// The blocks they keep.
    pub pinned_blocks: u32,
    /// Sequences that wait for KV from other engines.
    pub fetching: u32,
    /// Finished prefills whose blocks were kept.
    pub staged: u64,
    /// Of these, given up because nobody came in time.
    pub expired: u64,
    /// Transfers that brought KV from other engines.
    pub transfers: u64,
    /// Transfers that failed.
    pub transfers_failed: u64,
    /// Prompt tokens that came from other engines.
    pub fetched_tokens: u64,
    /// Sequences answered from KV that was not their own.
    pub spoiled: u64,
    /// Bootstrap rooms in which a leg is.
    pub rooms: usize,
}

impl Engine {
    /// Starts an engine on the current tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be listened on.
    pub async fn start(config: Config) -> Result<Self, EngineError> {
        let address = config.listen;
        let listen = |source| EngineError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(listen)?;
        let addr = listener.local_addr().map_err(listen)?;
        let side = side_channel(&config.transfer, addr).await?;
        let (side, side_addr) = side.unzip();
        let (server, errands) = Server::new(config, side_addr);
        let server = Arc::new(server);
        let mut driving = Vec::new();
        for (rank, errands) in server.ranks.iter().zip(errands) {
            let driven = Arc::clone(rank);
            driving.push(tokio::spawn(async move { driven.drive().await }));
            driving.push(tokio::spawn(courier::carry(Arc::clone(rank), errands)));
        }
        let told = || server.closing.subscribe();
        let mut accepting = vec![tokio::spawn(serve_connections(Arc::clone(&server), listener, told()))];
        if let Some(side) = side {
            accepting.push(tokio::spawn(side::serve(Arc::clone(&server), side, told())));
        }
        Ok(Self { addr, server, accepting, driving })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its base URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Where other engines reach it: its NIXL side channel or bootstrap server, if it has one.
    pub fn side_addr(&self) -> Option<SocketAddr> {
        self.server.side
    }

    /// Whether the part that computes has died.
    pub fn core_is_dead(&self) -> bool {
        self.server.core_is_dead()
    }

    /// Waits until the engine is ending by itself, because its core has died.
    async fn ends(&self) {
        // The sender lives as long as the engine.
        let _ = self.server.closing.subscribe().wait_for(|now| *now != Closing::Not).await;
    }

    /// What it has seen and holds.
    pub fn stats(&self) -> Stats {
        let traffic = &self.server.traffic;
        let opened = traffic.connections_opened.load(Ordering::Relaxed);
        let mut stats = Stats {
            connections_opened: opened,
            connections_open: opened.saturating_sub(traffic.connections_closed.load(Ordering::Relaxed)),
            requests_abandoned: traffic.requests_abandoned.load(Ordering::Relaxed),
            rooms: self.server.rooms.count(),
            ..Stats::default()
        };
        for rank in &self.server.ranks {
            let seen = rank.snapshot();
            stats.running += seen.gauges.running;
            stats.waiting += seen.gauges.waiting;
            stats.kv_ratio += seen.gauges.kv_ratio / self.server.ranks.len() as f64;
            stats.prompt_tokens += seen.measures.prompt_tokens;
            stats.cached_tokens += seen.measures.cached_tokens;
            stats.generation_tokens += seen.measures.generation_tokens;
            stats.finished += seen.measures.finished_length + seen.measures.finished_stop;
            stats.aborted += seen.measures.finished_abort;
            stats.preemptions += seen.totals.preemptions;
            stats.rejections += seen.measures.rejections;
            stats.pinned_requests += seen.gauges.pinned_jobs;
            stats.pinned_blocks += seen.gauges.pinned_blocks;
            stats.fetching += seen.gauges.fetching;
            let kv = &seen.measures.kv;
            stats.staged += kv.staged;
            stats.expired += kv.released(Released::Expired);
            stats.transfers += kv.transfers();
            stats.transfers_failed += kv.transfers_failed;
            stats.fetched_tokens += kv.fetched_tokens;
            stats.spoiled += kv.spoiled;
        }
        stats
    }

    /// Requests that came in on a route.
    pub fn requests(&self, route: Route) -> u64 {
        self.server.traffic.requests(route)
    }

    /// The last requests, newest last, at most [`Config::recorded_max`].
    pub fn recorded(&self) -> Vec<Recorded> {
        self.server.recorder.last()
    }

    /// Plans a fault for the next `requests` generating requests, or for every one; plans are worked off in
    /// order.
    pub fn fail(&self, fault: Fault, requests: Option<u64>) {
        self.server.faults.plan(fault, requests);
    }

    /// Takes back every fault, lie and freeze.
    pub fn clear_faults(&self) {
        self.server.faults.clear();
    }

    /// Sets what `/health` says.
    pub fn set_health(&self, health: Health) {
        self.server.faults.set_health(health);
    }

    /// Sets what `/metrics` and `/load` say instead of the truth.
    pub fn set_lies(&self, lies: Lies) {
        self.server.faults.set_lies(lies);
    }

    /// Stops (or resumes) every answer, also those under way: connections are accepted, nothing is sent.
    pub fn freeze(&self, frozen: bool) {
        self.server.faults.freeze(frozen);
    }

    /// Starts over as a new process would on the same port: what is under way is reset, the cache is empty, the
    /// counters are zero, the start time is new.
    pub fn restart(&self) {
        self.server.restart();
    }

    /// Empties the prefix cache.
    pub fn clear_cache(&self) {
        for rank in &self.server.ranks {
            rank.clear_cache();
        }
    }

    /// Stops as on SIGTERM: what is under way ends with `finish_reason` `abort`, nothing new is accepted.
    pub async fn stop(mut self) {
        self.server.closing.send_replace(Closing::Politely);
        for rank in &self.server.ranks {
            rank.end_all(Phase::Aborted);
        }
        self.closed().await;
    }

    /// Stops as on SIGKILL: connections are reset, the port is free when this returns.
    pub async fn kill(mut self) {
        self.server.closing.send_replace(Closing::AtOnce);
        self.closed().await;
    }

    async fn closed(&mut self) {
        for accepting in self.accepting.drain(..) {
            if let Err(error) = accepting.await {
                tracing::error!(%error, "an accept loop failed");
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.server.closing.send_replace(Closing::AtOnce);
        for driving in &self.driving {
            driving.abort();
        }
    }
}

/// Runs an engine from its flags until `shutdown`, then stops it as on SIGTERM.
///
/// # Errors
/// A bad flag, with all others that are bad, or an address that cannot be listened on.
pub async fn serve(options: Options, shutdown: impl Future<Output = ()>) -> Result<(), EngineError> {
    let config = options.config()?;
    let model = config.model.clone();
    let engine = Engine::start(config).await?;
    tracing::info!(url = %engine.url(), %model, profile = ?options.profile, "engine is serving");
    tokio::select! {
        () = shutdown => {
            engine.stop().await;
            Ok(())
        }
        () = engine.ends() => {
            engine.stop().await;
            Err(EngineError::CoreDied)
        }
    }
}

/// The listener for other engines, when the connector has one: where prompts may be computed for others.
async fn side_channel(
    transfer: &Transfer,
    served_at: SocketAddr,
) -> Result<Option<(TcpListener, SocketAddr)>, EngineError> {
    let has_one = match transfer.connector {
        Connector::None => false,
        Connector::Nixl => transfer.role != Role::Decode,
        Connector::Bootstrap => transfer.role == Role::Prefill,
    };
    if !has_one {
        return Ok(None);
    }
    let address = SocketAddr::new(served_at.ip(), transfer.port);
    let listen = |source| EngineError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    Ok(Some((listener, address)))
}
