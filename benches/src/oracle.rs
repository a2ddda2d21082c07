//! The router that knows everything: what the others are measured against.
//!
//! It holds a twin of each engine: the same scheduler and cache, fed with the same requests at the same time.
//! For each request it asks a copy of every twin when the first token would come out there, and sends it where
//! that is soonest. So it knows each engine's queue and cache exactly, answers not yet given included; no
//! router that learns from replies can know more. It is greedy: what a choice costs later requests does not
//! count.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use engine::Config;
use engine::answer::Answer;
use engine::kv::BlockHash;
use engine::scheduler::{Event, Job, JobId, Prompt, Scheduler};
use engine::timing::Moment;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// What an engine generates when a chat does not say how much.
const OUTPUT_TOKENS: u32 = 16;

/// One engine as the oracle sees it.
struct Twin {
    address: SocketAddr,
    config: Config,
    scheduler: Scheduler,
    next_job: u64,
}

impl Twin {
    fn new(address: SocketAddr, config: Config) -> Self {
        let scheduler = Scheduler::new(config.scheduler, config.timing, config.limits);
        Self { address, config, scheduler, next_job: 0 }
    }

    /// When the first token of `job` comes out if it is submitted at `now`; `None` if it is refused.
    fn first_token_at(&self, now: Moment, job: &Job) -> Option<Moment> {
        let mut ahead = self.scheduler.clone();
        let mut events = Vec::new();
        ahead.submit(now, job.clone(), &mut events).ok()?;
        loop {
            let first = events.iter().find_map(|event| match event {
                Event::Tokens { job: of, at, .. } if *of == job.id => Some(*at),
                _ => None,
            });
            if first.is_some() {
                return first;
            }
            events.clear();
            ahead.advance(ahead.next_at()?, &mut events);
        }
    }

    /// This chat as a job of this engine; `None` for a body that it would refuse.
    fn job(&self, body: &[u8]) -> Option<Job> {
        #[derive(Deserialize)]
        struct Asked {
            max_tokens: Option<u32>,
        }
        let asked: Asked = serde_json::from_slice(body).ok()?;
        let tokens = engine::chat_prompt(body)?;
        let root = BlockHash::root(&self.config.model, "");
        let prompt = Prompt::new(root, &tokens, self.config.limits.block_tokens, Answer::to(&tokens));
        let output_tokens = asked.max_tokens.unwrap_or(OUTPUT_TOKENS);
        Some(Job { id: JobId(self.next_job), prompt, output_tokens })
    }
}

/// What it knows, and what that led to.
struct Knowledge {
    began: Instant,
    twins: Vec<Twin>,
}

impl Knowledge {
    /// The engine where this chat is answered soonest, which is charged with it.
    fn choose(&mut self, body: &[u8]) -> Option<SocketAddr> {
        let now = Moment::default().plus(self.began.elapsed());
        let mut events = Vec::new();
        for twin in &mut self.twins {
            twin.scheduler.advance(now, &mut events);
        }
        let expected = self.twins.iter().enumerate().filter_map(|(at, twin)| {
            let job = twin.job(body)?;
            Some((twin.first_token_at(now, &job)?, at, job))
        });
        let (_, at, job) = expected.min_by_key(|(first_token, at, _)| (*first_token, *at))?;
        let twin = &mut self.twins[at];
        twin.next_job += 1;
        twin.scheduler.submit(now, job, &mut events).ok()?;
        Some(twin.address)
    }
}

/// A running oracle; gone when dropped.
pub struct Oracle {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Oracle {
    /// Routes to the engines at these addresses, which were started just now with these configurations.
    ///
    /// # Errors
    /// When it can't listen.
    pub fn start(engines: impl IntoIterator<Item = (SocketAddr, Config)>) -> anyhow::Result<Self> {
        let twins = engines.into_iter().map(|(address, config)| Twin::new(address, config)).collect();
        let relay = Arc::new(Relay {
            knowledge: Mutex::new(Knowledge { began: Instant::now(), twins }),
            client: client(),
        });
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("oracle".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    result = accept(relay, listener) => {
                        if let Err(error) = result {
                            eprintln!("the oracle ended: {error:#}");
                        }
                    }
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Oracle {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Relay {
    knowledge: Mutex<Knowledge>,
    client: Client<HttpConnector, Full<Bytes>>,
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).pool_idle_timeout(Duration::from_secs(30)).build(connector)
}

async fn accept(relay: Arc<Relay>, listener: std::net::TcpListener) -> anyhow::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let relay = Arc::clone(&relay);
        tokio::spawn(async move {
            let service = hyper::service::service_fn(|request| answer(&relay, request));
            // A client that leaves in mid-request ends its connection, nothing else.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

type Reply = Response<BoxBody<Bytes, hyper::Error>>;

async fn answer(relay: &Relay, request: Request<Incoming>) -> Result<Reply, Infallible> {
    Ok(forward(relay, request).await.unwrap_or_else(|error| {
        let text = Full::new(Bytes::from(format!("{error:#}"))).map_err(|never| match never {});
        let mut reply = Response::new(text.boxed());
        *reply.status_mut() = StatusCode::BAD_GATEWAY;
        reply
    }))
}

async fn forward(relay: &Relay, request: Request<Incoming>) -> anyhow::Result<Reply> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let address = {
        let mut knowledge = relay.knowledge.lock().unwrap_or_else(PoisonError::into_inner);
        knowledge.choose(&body).context("no engine takes this chat")?
    };
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    parts.uri = Uri::builder().scheme("http").authority(address.to_string()).path_and_query(path).build()?;
    let reply = relay.client.request(Request::from_parts(parts, Full::new(body))).await?;
    Ok(reply.map(BodyExt::boxed))
}

#[cfg(test)]
mod tests {
    use engine::Profile;

    use super::*;

    fn chat(words: &str) -> Vec<u8> {
        let content = words.repeat(400);
        format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}],"max_tokens":4}}"#).into_bytes()
    }

    fn knowledge(engines: u16) -> Knowledge {
        let twin = |port| {
            Twin::new(SocketAddr::from(([127, 0, 0, 1], port)), Config::fifo(Profile::Llama8bH100, 1.0))
        };
        Knowledge { began: Instant::now(), twins: (1..=engines).map(twin).collect() }
    }

    #[test]
    fn a_prompt_goes_where_it_is_cached_until_the_queue_there_is_dearer_than_computing_it_anew() {
        let mut knowledge = knowledge(2);
        let (first, other) = (chat("the cat "), chat("a dog is "));
        let home = knowledge.choose(&first).expect("taken");
        // Behind 830 tokens of prefill there, another prompt is better off at the idle engine.
        assert_ne!(knowledge.choose(&other), Some(home));
        // Both busy: waiting for the first prompt and finding it cached beats computing it behind the other.
        assert_eq!(knowledge.choose(&first), Some(home));
    }

    #[test]
    fn a_body_that_no_engine_takes_has_no_home() {
        assert_eq!(knowledge(2).choose(b"{}"), None);
    }
}
