//! The clients: chats in a closed loop, each request on a connection of its own, each remembered.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use grapevine::load::{
    Api, ChatShape, Client, Conversation, Envelope, ErrorKind, Outcome, Request, Source, Target, Wire,
    Workload,
};
use hyper::header::{HeaderMap, HeaderValue};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::evidence::Exchange;
use crate::fleet::MODEL;
use crate::scenario::{Kind, Load, Name};

/// The longest that a client waits for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// The pause before a failed request is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
const PATH: &str = "/v1/chat/completions";

/// Whom the clients ask.
#[derive(Clone, Debug)]
pub(crate) enum Front {
    /// A balancer.
    Balancer(SocketAddr),
    /// The replicas in turn; one that refuses the connection is passed over, as a balancer would.
    Replicas(Vec<SocketAddr>),
}

struct Clients {
    front: Vec<Target>,
    is_direct: bool,
    client: Client,
    envelope: Envelope,
    chats: Mutex<Workload>,
    exchanges: Mutex<Vec<Exchange>>,
    turn: AtomicU64,
    asked: AtomicU64,
    retries: u32,
    seed: u64,
    begun: Instant,
    until: Instant,
}

/// Runs the load to its end and returns every request in the order in which they ended.
pub(crate) async fn run(
    load: &Load,
    front: &Front,
    seed: u64,
    begun: Instant,
) -> anyhow::Result<Vec<Exchange>> {
    let (addresses, is_direct) = match front {
        Front::Balancer(address) => (std::slice::from_ref(address), false),
        Front::Replicas(addresses) => (&addresses[..], true),
    };
    let targets = addresses.iter().map(|address| Target::new(&format!("http://{address}"), PATH));
    let chats = ChatShape {
        sessions: None,
        turns: load.turns,
        tenants: load.tenants,
        tenant_bytes: 1_500,
        first_bytes: load.first_bytes,
        turn_bytes: load.turn_bytes,
        max_tokens: load.answer_tokens,
        ..ChatShape::default()
    };
    let wire = Wire { request_timeout: ANSWER_WITHIN, fresh_connections: true, ..Wire::default() };
    let clients = Arc::new(Clients {
        front: targets.collect::<anyhow::Result<_>>()?,
        is_direct,
        client: Client::new(wire, true, seed),
        envelope: Envelope { model: Some(MODEL.to_owned()), stream: true, ..Envelope::default() },
        chats: Mutex::new(Workload::new(Source::Chat(Arc::new(chats)), Api::Chat, seed)),
        exchanges: Mutex::default(),
        turn: AtomicU64::new(0),
        asked: AtomicU64::new(0),
        retries: load.retries,
        seed,
        begun,
        until: begun + Duration::from_millis(load.for_ms),
    });
    let mut tasks = JoinSet::new();
    for _ in 0..load.clients {
        let clients = Arc::clone(&clients);
        tasks.spawn(async move { clients.chat_on().await });
    }
    while let Some(ended) = tasks.join_next().await {
        ended?;
    }
    let exchanges = std::mem::take(&mut *lock(&clients.exchanges));
    Ok(exchanges)
}

impl Clients {
    /// One client: chat after chat until the time is up.
    async fn chat_on(&self) {
        loop {
            let Some(mut chat) = lock(&self.chats).next() else { return };
            let mut home = None;
            while let Some(request) = self.next_request(&mut chat) {
                let Some(answer) = self.ask_until_answered(&chat, &request, home.as_ref()).await else {
                    break;
                };
                if request.turn == 0 {
                    home = answer.endpoint;
                }
                chat.answered(&answer.text);
            }
            if Instant::now() >= self.until {
                return;
            }
        }
    }

    fn next_request(&self, chat: &mut Conversation) -> Option<Request> {
        if Instant::now() < self.until { chat.next_request(&self.envelope) } else { None }
    }

    async fn ask_until_answered(
        &self,
        chat: &Conversation,
        request: &Request,
        home: Option<&String>,
    ) -> Option<Outcome> {
        for attempt in 0..=self.retries {
            if attempt > 0 {
                sleep(RETRY_PAUSE).await;
            }
            let outcome = self.ask(chat, request, home).await;
            if outcome.verdict.is_ok() {
                return Some(outcome);
            }
        }
        None
    }

    async fn ask(&self, chat: &Conversation, request: &Request, home: Option<&String>) -> Outcome {
        let id = format!("chaos-{}-{}", self.seed, self.asked.fetch_add(1, Ordering::Relaxed));
        let mut headers = HeaderMap::new();
        if let Ok(value) = HeaderValue::from_str(&id) {
            headers.insert("x-request-id", value);
        }
        let began = Instant::now();
        let first = self.turn.fetch_add(1, Ordering::Relaxed) as usize;
        let mut tried = 0;
        let (outcome, at) = loop {
            let at = (first + tried) % self.front.len();
            let (body, start) = (request.body.clone(), began.into_std());
            let outcome =
                self.client.ask_with(headers.clone(), &self.front[at], body, chat.id(), start).await;
            tried += 1;
            let refused = outcome.verdict.as_ref().is_err_and(|failure| failure.kind == ErrorKind::Connect);
            if !refused || tried >= self.front.len() {
                break (outcome, at);
            }
        };
        let began = began - self.begun;
        let named = outcome.headers.get("x-grapevine-replica").and_then(|name| name.to_str().ok());
        let direct = self.is_direct.then_some(Name { kind: Kind::Replica, number: at });
        lock(&self.exchanges).push(Exchange {
            id,
            turn: request.turn,
            began,
            first_content: outcome.ttft.map(|ttft| began + ttft),
            ended: began + outcome.e2e,
            failure: outcome.verdict.as_ref().err().map(|failure| (failure.kind, failure.detail.clone())),
            replica: named.and_then(replica_named).or(direct),
            endpoint: outcome.endpoint.clone(),
            home: home.cloned(),
        });
        outcome
    }
}

/// The replica that calls itself so.
fn replica_named(id: &str) -> Option<Name> {
    let number = id.strip_prefix("replica-")?.parse().ok()?;
    Some(Name { kind: Kind::Replica, number })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
