//! The HTTP surface of one engine, over hyper.

pub(crate) mod body;
mod embeddings;
pub(crate) mod error;
mod generate;
mod legs;
mod line;
mod reply;
mod responses;
mod routes;
mod script;
mod stream;
mod template;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::VARY;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use crate::config::Config;
use crate::fault::{Faults, Order};
use crate::flight::Phase;
use crate::rank::Rank;
use crate::record::{Recorder, Traffic};
use crate::scheduler::Gauges;
use crate::transfer::courier::Errand;
use crate::transfer::rooms::Rooms;

use body::Body;
use error::ApiError;
use reply::{Failure, Reply, ReplyBody};
use script::Api;

pub use generate::chat_prompt;
pub(crate) use line::{ACCEPT_PAUSE, Closing, other_than, serve_connections};

/// The longest body that is read; vLLM has no limit, this one keeps a mistake from eating the machine.
const BODY_BYTES_MAX: usize = 256 << 20;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");
/// How much a waiting request weighs against a running one when a rank is picked, as in vLLM.
const WAITING_WEIGHT: u32 = 4;

/// Everything the connections of one engine share.
pub(crate) struct Server {
    pub(crate) config: Arc<Config>,
    pub(crate) ranks: Vec<Arc<Rank>>,
    pub(crate) faults: Faults,
    pub(crate) recorder: Recorder,
    pub(crate) traffic: Traffic,
    pub(crate) ids: Ids,
    /// Where other engines reach it.
    pub(crate) side: Option<SocketAddr>,
    pub(crate) rooms: Rooms,
    pub(crate) closing: watch::Sender<Closing>,
    core_dead: AtomicBool,
    responses: responses::Store,
    process_start_unix_s: Mutex<f64>,
    next_rank: AtomicU64,
}

impl Server {
    /// An engine that others reach at `side`, and what each of its ranks wants done.
    pub(crate) fn new(config: Config, side: Option<SocketAddr>) -> (Self, Vec<UnboundedReceiver<Errand>>) {
        let config = Arc::new(config);
        let ids = Ids::new();
        let rank = |name: String| {
            let (rank, errands) = Rank::new(Arc::clone(&config), name);
            (Arc::new(rank), errands)
        };
        let (ranks, errands) = engine_ids(&ids, config.ranks).map(rank).unzip();
        let server = Self {
            ranks,
            faults: Faults::default(),
            recorder: Recorder::new(config.recorded_max),
            traffic: Traffic::default(),
            ids,
            side,
            rooms: Rooms::default(),
            closing: watch::Sender::new(Closing::Not),
            core_dead: AtomicBool::new(false),
            responses: responses::Store::default(),
            process_start_unix_s: Mutex::new(unix_time_s()),
            next_rank: AtomicU64::new(0),
            config,
        };
        (server, errands)
    }

    /// The part that computes dies: all that is under way fails and nothing can be asked for any more. The engine
    /// ends, or goes on saying so.
    pub(crate) fn die(&self) {
        tracing::error!("the engine's core has died");
        self.core_dead.store(true, Ordering::Release);
        self.start_over(Phase::CoreDied);
        if !self.config.keep_alive_on_core_death {
            self.closing.send_replace(Closing::Politely);
        }
    }

    /// Whether the part that computes is gone.
    pub(crate) fn core_is_dead(&self) -> bool {
        self.core_dead.load(Ordering::Acquire)
    }

    fn start_over(&self, phase: Phase) {
        for (rank, name) in self.ranks.iter().zip(engine_ids(&self.ids, self.config.ranks)) {
            rank.restart(name, phase);
        }
    }

    fn unix_s(&self) -> u64 {
        unix_time_s() as u64
    }

    fn process_start_unix_s(&self) -> f64 {
        *self.process_start_unix_s.lock()
    }

    /// The gauges as they are shown: the truth, but for planned lies.
    fn told(&self, mut gauges: Gauges) -> Gauges {
        self.faults.lies().tell(&mut gauges);
        gauges
    }

    /// Starts over as a new process would, on the same port.
    pub(crate) fn restart(&self) {
        self.start_over(Phase::Cut);
        self.core_dead.store(false, Ordering::Release);
        self.responses.clear();
        *self.process_start_unix_s.lock() = unix_time_s();
    }

    fn obey(&self, order: &Order) {
        if order.clear {
            self.faults.clear();
        }
        if order.restart {
            self.restart();
        }
        if let Some(fault) = order.fault {
            self.faults.plan(fault, order.requests);
        }
        if let Some(health) = order.health {
            self.faults.set_health(health);
        }
        if let Some(lies) = order.lies {
            self.faults.set_lies(lies);
        }
        if let Some(frozen) = order.frozen {
            self.faults.freeze(frozen);
        }
    }

    fn check_model(&self, body: &Body<'_>) -> Result<(), ApiError> {
        match &body.model {
            Some(model) if model.0 != self.config.model => {
                Err(ApiError::unknown_model(&model.0, &self.config.model))
            }
            _ => Ok(()),
        }
    }

    /// The rank that a header names, else the least loaded, ties in turn.
    fn rank(&self, headers: &HeaderMap) -> Result<Arc<Rank>, ApiError> {
        if let Some(asked) = headers.get(RANK_HEADER) {
            let asked = asked.to_str().unwrap_or("").trim();
            return match asked.parse::<usize>().ok().and_then(|rank| self.ranks.get(rank)) {
                Some(rank) => Ok(Arc::clone(rank)),
                None => {
                    let message =
                        format!("data_parallel_rank {asked} is out of range [0, {}).", self.ranks.len());
                    Err(ApiError::bad_request(None, &message))
                }
            };
        }
        if let [only] = &*self.ranks {
            return Ok(Arc::clone(only));
        }
        let first = self.next_rank.fetch_add(1, Ordering::Relaxed) as usize;
        let in_turn = (0..self.ranks.len()).map(|i| &self.ranks[(first + i) % self.ranks.len()]);
        let load = |rank: &&Arc<Rank>| {
            let gauges = rank.gauges();
            gauges.waiting * WAITING_WEIGHT + gauges.running
        };
        in_turn.min_by_key(load).map(Arc::clone).ok_or_else(ApiError::internal)
    }

    fn completion_id(&self, api: Api, request_id: &str) -> String {
        let prefix = match api {
            Api::Chat => "chatcmpl",
            Api::Text => "cmpl",
        };
        if request_id.is_empty() {
            format!("{prefix}-{:016x}", self.ids.next())
        } else {
            format!("{prefix}-{request_id}")
        }
    }
}

/// Answers one request; an error resets its connection.
pub(crate) async fn answer(
    server: &Arc<Server>,
    request: Request<Incoming>,
) -> Result<Response<ReplyBody>, Failure> {
    let (parts, incoming) = request.into_parts();
    if server.faults.frozen() {
        server.faults.thawed().await;
    }
    let route = routes::route(parts.uri.path(), server.config.faults);
    server.traffic.count(route);
    let given = parts.headers.get(REQUEST_ID);
    let request_id = given.and_then(|id| id.to_str().ok()).unwrap_or("");
    let reply = match read(incoming).await {
        Ok(body) => {
            server.recorder.record(&parts, &body);
            routes::handle(server, route, &parts, &body, request_id).await
        }
        Err(error) => Err(error.into()),
    };
    let reply = match reply {
        Ok(reply) => reply,
        Err(Failure::Refused(error)) => Reply::from(error),
        Err(Failure::Reset) => return Err(Failure::Reset),
    };
    let mut response = reply.into_response();
    let status = response.status();
    let headers = response.headers_mut();
    match given {
        // What vLLM refuses before its outer layers does not pass through them on the way out.
        _ if status == StatusCode::UNAUTHORIZED => {
            headers.remove(VARY);
        }
        _ if status == StatusCode::SERVICE_UNAVAILABLE => {}
        Some(id) => {
            headers.insert(REQUEST_ID, id.clone());
        }
        None => {
            let id = format!("{:016x}{:016x}", server.ids.next(), server.ids.next());
            if let Ok(id) = HeaderValue::from_str(&id) {
                headers.insert(REQUEST_ID, id);
            }
        }
    }
    Ok(response)
}

async fn read(incoming: Incoming) -> Result<Bytes, ApiError> {
    match Limited::new(incoming, BODY_BYTES_MAX).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            Err(ApiError::detail(StatusCode::PAYLOAD_TOO_LARGE))
        }
        Err(_) => Err(ApiError::bad_request(None, "The body could not be read.")),
    }
}

/// Names of engines, new ones each time, in vLLM's form: an UUID and, for all ranks but the first, which it is.
fn engine_ids(ids: &Ids, ranks: u32) -> impl Iterator<Item = String> {
    let (high, low) = (ids.next(), ids.next());
    let uuid = format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        high >> 32,
        high >> 16 & 0xffff,
        high & 0xffff,
        low >> 48,
        low & 0xffff_ffff_ffff
    );
    (0..ranks).map(move |rank| if rank == 0 { uuid.clone() } else { format!("{uuid}_dp{rank}") })
}

/// Seconds since the Unix epoch; 0 before it.
fn unix_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Names that differ within an engine and, by its start, between engines.
pub(crate) struct Ids {
    next: AtomicU64,
}

impl Ids {
    fn new() -> Self {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        Self { next: AtomicU64::new(nanos ^ u64::from(std::process::id()).rotate_left(40)) }
    }

    fn next(&self) -> u64 {
        // splitmix64: a full-period walk that looks random.
        let mut z = self.next.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
