//! The decode side: brings KV from other engines to the jobs of one rank.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};

use super::Transfer;
use super::frames::{Ask, Told, gone, receive, send};
use super::params::Remote;
use crate::config::Config;
use crate::kv::BlockHash;
use crate::rank::Rank;
use crate::scheduler::JobId;

/// Prefill engines whose address is remembered by their id, as after vLLM's handshake; more than any cluster has.
const ENGINES_MAX: usize = 4_096;
/// Pause between attempts to reach a bootstrap server.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Where a prompt's KV comes from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Blocks that a prefill engine keeps.
    Blocks {
        remote: Remote,
        /// Handshakes tried before giving up: one, or two for a stream, as recorded.
        attempts: u32,
    },
    /// The prefill leg in this room.
    Room { host: String, port: u16, room: i64 },
}

impl Source {
    /// How much of the prompt was in the cache of the engine that computed it, if that is told.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        match self {
            Self::Blocks { remote, .. } => remote.remote_prefill_cached_tokens,
            Self::Room { .. } => None,
        }
    }
}

/// What a rank wants done.
#[derive(Debug)]
pub(crate) enum Errand {
    /// Bring the last `blocks` of a prompt, which hold `tokens`.
    Fetch { job: JobId, source: Arc<Source>, blocks: u32, tokens: u32 },
    /// The job is gone. Blocks are read to the end all the same, as vLLM does; a room is left.
    Drop { job: JobId },
    /// The job was gone before it fetched: tell whoever keeps its blocks.
    Forgo { source: Arc<Source> },
    /// The engine has started over: nothing of before is known.
    DropAll,
}

/// What of a transfer is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transferred {
    pub(crate) tokens: u32,
    pub(crate) took: Duration,
    /// Whether the other side was told.
    pub(crate) told: bool,
}

/// Why KV did not come; only logged, clients see an internal error as with vLLM.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the prefill engine cannot be reached")]
    Unreachable,
    #[error("the connection broke: {0}")]
    Broken(#[from] std::io::Error),
    #[error("the prefill engine refuses: {0}")]
    Refused(String),
    #[error("the prefill engine says nothing")]
    Silent,
    #[error("the parameters name {named} blocks, {wanted} are needed")]
    TooFew { named: usize, wanted: u32 },
}

/// Does the errands of a rank, for ever.
pub(crate) async fn carry(rank: Arc<Rank>, mut errands: UnboundedReceiver<Errand>) {
    let mut under_way = JoinSet::new();
    let mut rooms: HashMap<JobId, AbortHandle> = HashMap::new();
    loop {
        tokio::select! {
            errand = errands.recv() => match errand {
                Some(Errand::Fetch { job, source, blocks, tokens }) => {
                    let in_room = matches!(*source, Source::Room { .. });
                    let handle = under_way.spawn(fetch(Arc::clone(&rank), job, source, blocks, tokens));
                    if in_room {
                        rooms.insert(job, handle);
                    }
                }
                Some(Errand::Drop { job }) => {
                    if let Some(handle) = rooms.remove(&job) {
                        handle.abort();
                    }
                }
                Some(Errand::Forgo { source }) => {
                    under_way.spawn(forgo(Arc::clone(&rank), source));
                }
                Some(Errand::DropAll) => {
                    under_way.shutdown().await;
                    rooms.clear();
                }
                None => return,
            },
            Some(done) = under_way.join_next() => {
                if let Ok(Some(job)) = done {
                    rooms.remove(&job);
                }
            }
        }
    }
}

/// Brings one prompt's KV, or says that it does not come; the job when that is over.
async fn fetch(rank: Arc<Rank>, job: JobId, source: Arc<Source>, blocks: u32, tokens: u32) -> Option<JobId> {
    let began = Instant::now();
    let brought = match &*source {
        Source::Blocks { remote, attempts } => pull(&rank, remote, *attempts, blocks, tokens).await,
        Source::Room { host, port, room } => join(&rank, (host, *port), *room, blocks, tokens).await,
    };
    match brought {
        Ok((contents, told)) => {
            let transferred = Transferred { tokens, took: began.elapsed(), told };
            rank.fetched(job, &contents, transferred);
        }
        Err(failed) => {
            tracing::warn!(%failed, "KV did not come from the prefill engine");
            rank.fetch_failed(job);
        }
    }
    Some(job)
}

type Brought = Result<(Vec<Option<BlockHash>>, bool), Failed>;

/// Reads the last `blocks` of those that are kept.
async fn pull(rank: &Rank, remote: &Remote, attempts: u32, blocks: u32, tokens: u32) -> Brought {
    let ids: Vec<u32> = remote.remote_block_ids.concat();
    let first = ids.len().checked_sub(blocks as usize);
    let first = first.ok_or(Failed::TooFew { named: ids.len(), wanted: blocks })?;
    let Config { model, limits, transfer, .. } = rank.config();
    let patience = transfer.handshake_max * attempts;
    let met = rank.known_engine(&remote.remote_engine_id).is_some();
    let mut line = reach(rank, remote, patience).await?;
    let ask = Ask::Read {
        engine_id: remote.remote_engine_id.clone(),
        model: model.clone(),
        block_tokens: limits.block_tokens,
        blocks: ids[first..].to_vec(),
    };
    send(&mut line, &ask).await?;
    // Only the handshake has a limit in vLLM: an engine that froze since then is waited for.
    let patience = if met { Duration::MAX } else { patience };
    let told = timeout(patience, receive(&mut line)).await.map_err(|_| Failed::Silent)??;
    let contents = contents(told)?;
    transfer_time(&mut line, transfer, tokens).await?;
    let done = done(remote, true);
    let told = async {
        send(&mut line, &done).await?;
        receive::<Told>(&mut line).await
    };
    Ok((contents, told.await.is_ok()))
}

/// Meets the prefill leg in its room, waits for what it computes and takes the last `blocks` of it.
async fn join(rank: &Rank, (host, port): (&str, u16), room: i64, blocks: u32, tokens: u32) -> Brought {
    let Config { model, limits, transfer, .. } = rank.config();
    let give_up = Instant::now() + transfer.handshake_max;
    let mut line = loop {
        match TcpStream::connect((host, port)).await {
            Ok(line) => break line,
            Err(_) if Instant::now() < give_up => sleep(RETRY_PAUSE).await,
            Err(_) => return Err(Failed::Unreachable),
        }
    };
    let ask = Ask::Join { room, model: model.clone(), block_tokens: limits.block_tokens };
    send(&mut line, &ask).await?;
    let told = timeout(transfer.join_max, receive(&mut line)).await.map_err(|_| Failed::Silent)??;
    let mut contents = contents(told)?;
    let first = contents.len().checked_sub(blocks as usize);
    contents.drain(..first.ok_or(Failed::TooFew { named: contents.len(), wanted: blocks })?);
    transfer_time(&mut line, transfer, tokens).await?;
    send(&mut line, &Ask::Received).await?;
    receive::<Told>(&mut line).await?;
    Ok((contents, true))
}

/// Tells a prefill engine that blocks are not needed. A room needs no telling: nobody has joined it.
async fn forgo(rank: Arc<Rank>, source: Arc<Source>) -> Option<JobId> {
    let Source::Blocks { remote, attempts } = &*source else { return None };
    let told = async {
        let mut line = reach(&rank, remote, rank.config().transfer.handshake_max * *attempts).await?;
        send(&mut line, &done(remote, false)).await?;
        Ok::<_, Failed>(receive::<Told>(&mut line).await?)
    };
    if let Err(failed) = told.await {
        tracing::warn!(%failed, "the prefill engine does not know that its blocks are not needed");
        rank.notification_failed();
    }
    None
}

/// A connection to the side channel of an engine, where it was met before or where it is said to be. As with vLLM, an
/// engine that was met and is gone is noticed at once (NIXL's connection to it broke), one that was never met only by
/// its silence (ZMQ goes on trying).
async fn reach(rank: &Rank, remote: &Remote, patience: Duration) -> Result<TcpStream, Failed> {
    let began = Instant::now();
    let known = rank.known_engine(&remote.remote_engine_id);
    let line = match known {
        Some(known) => timeout(patience, TcpStream::connect(known)).await,
        None => timeout(patience, TcpStream::connect((&*remote.remote_host, remote.remote_port))).await,
    };
    match line {
        Ok(Ok(line)) => {
            line.set_nodelay(true)?;
            rank.know_engine(&remote.remote_engine_id, line.peer_addr()?, ENGINES_MAX);
            Ok(line)
        }
        Ok(Err(_)) if known.is_some() => Err(Failed::Unreachable),
        _ => {
            sleep(patience.saturating_sub(began.elapsed())).await;
            Err(Failed::Unreachable)
        }
    }
}

/// Lets the time of a transfer pass, unless the other side goes away.
async fn transfer_time(line: &mut TcpStream, transfer: &Transfer, tokens: u32) -> Result<(), Failed> {
    let time = transfer.time(tokens);
    if time.is_zero() {
        return Ok(());
    }
    tokio::select! {
        () = sleep(time) => Ok(()),
        () = gone(line) => Err(Failed::Broken(std::io::ErrorKind::UnexpectedEof.into())),
    }
}

fn done(remote: &Remote, pulled: bool) -> Ask {
    Ask::Done { request_id: remote.remote_request_id.clone(), pulled }
}

fn contents(told: Told) -> Result<Vec<Option<BlockHash>>, Failed> {
    match told {
        Told::Contents(contents) => Ok(contents.into_iter().map(|hash| hash.map(BlockHash)).collect()),
        Told::Refused(why) => Err(Failed::Refused(why)),
        Told::Noted => Err(Failed::Refused("an answer to another question".to_owned())),
    }
}

/// Addresses of engines by their ids.
pub(crate) type KnownEngines = HashMap<String, SocketAddr>;
