//! Answers pulls on TCP P: a small HTTP server for one path. It only reads. With a key, only a holder of it
//! can ask and read; a request played again costs a look into memory and shows nobody anything.

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::ledger::Range;
use crate::pull::{PATH, REQUEST_CONTEXT, reply_context};
use crate::shared::Shared;
use crate::wire::{Position, PullReply, PullRequest, Wanted};
use crate::{FrameKind, Rejection, codec};

/// Connections at a time: a whole cluster's worth after a restart. More wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 64;
/// A snapshot of a full index takes seconds; who holds a connection for longer is not pulling.
const CONNECTION_SPAN_MAX: Duration = Duration::from_secs(60);
/// How long a stranger may keep a connection without having asked. 5 s: a request is one packet, and a
/// replica that pulls a snapshot asks for the next page when it has applied one.
const REQUEST_WITHIN: Duration = Duration::from_secs(5);
/// A request names a replica and a cursor.
const REQUEST_BYTES_MAX: usize = 1_024;
/// Records asked of the index for one page of a snapshot. With paths of 100 blocks a page is under 400 KB.
const PAGE_RECORDS_MAX: usize = 400;
/// Requests remembered, to notice one that is played again.
const NONCES_MAX: usize = 4_096;
/// After an error of the listener itself (out of descriptors), so that it does not spin.
const ERROR_PAUSE: Duration = Duration::from_millis(50);

pub(crate) async fn run(shared: Arc<Shared>, listener: TcpListener) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let nonces = Arc::new(Mutex::new(Nonces::default()));
    // Its connections end with it.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        // The semaphore is never closed.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(ERROR_PAUSE).await;
            continue;
        };
        let (shared, nonces) = (Arc::clone(&shared), Arc::clone(&nonces));
        connections.spawn(async move {
            let answer = service_fn(|request| answer(&shared, &nonces, request));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(REQUEST_WITHIN)
                .serve_connection(TokioIo::new(stream), answer);
            let _ = tokio::time::timeout(CONNECTION_SPAN_MAX, connection).await;
            drop(slot);
        });
    }
}

async fn answer(
    shared: &Shared,
    nonces: &Mutex<Nonces>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let reply = match read(shared, nonces, request).await {
        Ok(request) => reply(shared, &request),
        Err((status, cause)) => {
            shared.counters.reject(cause);
            Err(status)
        }
    };
    let mut response = Response::new(Full::default());
    match reply {
        Ok(body) => *response.body_mut() = Full::new(Bytes::from(body)),
        Err(status) => *response.status_mut() = status,
    }
    Ok(response)
}

async fn read(
    shared: &Shared,
    nonces: &Mutex<Nonces>,
    request: Request<Incoming>,
) -> Result<PullRequest, (StatusCode, Rejection)> {
    if request.method() != Method::POST || request.uri().path() != PATH {
        return Err((StatusCode::NOT_FOUND, Rejection::Foreign));
    }
    let body = Limited::new(request.into_body(), REQUEST_BYTES_MAX).collect();
    let body = tokio::time::timeout(REQUEST_WITHIN, body).await;
    let body = body.map_err(|_| (StatusCode::REQUEST_TIMEOUT, Rejection::Truncated))?;
    let body = body.map_err(|_| (StatusCode::PAYLOAD_TOO_LARGE, Rejection::Oversized))?.to_bytes();
    let opened = shared.sealer.unseal(REQUEST_CONTEXT, &body);
    let opened = opened.map_err(|cause| (StatusCode::FORBIDDEN, cause))?;
    let request: PullRequest =
        codec::decode(&opened).map_err(|_| (StatusCode::BAD_REQUEST, Rejection::Malformed))?;
    if !nonces.lock().admit(request.nonce) {
        return Err((StatusCode::FORBIDDEN, Rejection::Replayed));
    }
    shared.counters.received(FrameKind::Pull, body.len());
    Ok(request)
}

fn reply(shared: &Shared, request: &PullRequest) -> Result<Vec<u8>, StatusCode> {
    let own = &shared.config.replica;
    let generation = shared.generation();
    let reply = if request.replica != *own || request.generation != generation {
        PullReply::NotMe
    } else {
        match request.wanted {
            Wanted::Range { from } => match shared.log.lock().range(from) {
                Range::Kept(run, head) => PullReply::Range { run, head },
                Range::Gone => PullReply::Gone,
            },
            Wanted::Snapshot { cursor } => {
                // Before the page is read: what comes in between is then in both.
                let mut positions = Vec::new();
                if cursor.is_none() {
                    positions = shared.directory.positions();
                    let head = shared.log.lock().head();
                    positions.push(Position { replica: own.clone(), generation, head });
                }
                let (records, cursor) = shared.facts.snapshot_page(cursor, PAGE_RECORDS_MAX);
                let joined = shared.joined.load(Ordering::Relaxed);
                PullReply::Snapshot { records, cursor, positions, joined }
            }
        }
    };
    let body = codec::encode(&reply).ok_or(StatusCode::INTERNAL_SERVER_ERROR)?;
    let body = shared.sealer.seal(&reply_context(&request.nonce), &body);
    shared.counters.pulls_served.up();
    shared.counters.sent(FrameKind::Pull, body.len());
    Ok(body)
}

/// The last requests' nonces.
#[derive(Default)]
struct Nonces {
    seen: HashSet<[u8; 16]>,
    order: VecDeque<[u8; 16]>,
}

impl Nonces {
    /// Whether the nonce is new; from now on it is not.
    fn admit(&mut self, nonce: [u8; 16]) -> bool {
        if !self.seen.insert(nonce) {
            return false;
        }
        self.order.push_back(nonce);
        if self.order.len() > NONCES_MAX {
            self.order.pop_front().map(|oldest| self.seen.remove(&oldest));
        }
        true
    }
}
