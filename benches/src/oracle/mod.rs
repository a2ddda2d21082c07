//! The router that knows everything: what the others are measured against.
//!
//! It holds a twin of each engine: the same scheduler and cache, fed with the same requests at the same time.
//! For each request it asks a copy of every twin when the first token would come out there, and sends it where
//! that is soonest. So it knows each engine's queue and cache exactly, answers not yet given included; no
//! router that learns from replies can know more. It is greedy: what a choice costs later requests does not
//! count.
//!
//! Where engines have roles it splits a request over two of them when that is sooner. The time that a prompt takes
//! from those who decode beside it counts as its own.

mod legs;
mod twin;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use engine::scheduler::{Handoff, JobId};
use engine::timing::Moment;
use engine::{Config, Role};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::CONTENT_LENGTH;
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use self::twin::Twin;

/// Where a chat goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// To one engine.
    Whole(SocketAddr),
    /// To two, one after the other.
    Split(Split),
}

/// A chat that one engine prefills and another decodes; both by their positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    prefill: usize,
    decode: usize,
    kept: JobId,
}

/// What it knows, and what that led to.
struct Knowledge {
    twins: Vec<Twin>,
}

impl Knowledge {
    /// Where this chat is answered soonest, with what it takes from others; those engines are charged with it.
    fn choose(&mut self, now: Moment, body: &[u8]) -> Option<Course> {
        self.advance(now);
        let whole = self.of_role(|role| role != Role::Prefill).filter_map(|at| {
            let twin = &self.twins[at];
            let ahead = twin.ahead(now, &twin.job(body)?)?;
            let others = f64::from(twin.decodes() + 1);
            let taken = ahead.prompt.mul_f64(twin.slowdown() * others);
            Some((ahead.first_token + taken, at, None))
        });
        let this = &*self;
        let split = this.of_role(|role| role == Role::Prefill).flat_map(|from| {
            this.of_role(|role| role == Role::Decode).filter_map(move |to| {
                let (prefill, decode) = (&this.twins[from], &this.twins[to]);
                let prompt = prefill.ahead(now, &prefill.job(body)?)?.first_token;
                Some((prompt + decode.fetched_ahead(now, &decode.job(body)?)?, to, Some(from)))
            })
        });
        let (_, at, from) = whole.chain(split).min_by_key(|(cost, at, from)| (*cost, *from, *at))?;
        let handoff = if from.is_some() { Handoff::Keep } else { Handoff::None };
        let first = &mut self.twins[from.unwrap_or(at)];
        let job = first.job(body)?;
        let kept = first.take(now, job, handoff)?;
        Some(match from {
            None => Course::Whole(self.twins[at].address),
            Some(prefill) => {
                self.twins[at].expected += 1;
                Course::Split(Split { prefill, decode: at, kept })
            }
        })
    }

    /// Notes that the prompt of a split chat is computed and its decode leg about to be sent.
    fn handed_over(&mut self, now: Moment, split: Split, body: &[u8]) -> Option<()> {
        self.advance(now);
        let decode = &mut self.twins[split.decode];
        decode.expected -= 1;
        let job = decode.job(body)?;
        let transfer = decode.fetch(now, &job)?;
        self.twins[split.prefill].release(now.plus(transfer), split.kept);
        Some(())
    }

    fn advance(&mut self, now: Moment) {
        for twin in &mut self.twins {
            twin.advance(now);
        }
    }

    fn of_role(&self, wanted: impl Fn(Role) -> bool) -> impl Iterator<Item = usize> {
        (0..self.twins.len()).filter(move |at| wanted(self.twins[*at].role()))
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
            began: Instant::now(),
            knowledge: Mutex::new(Knowledge { twins }),
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
    /// When the engines' time began.
    began: Instant,
    knowledge: Mutex<Knowledge>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Relay {
    fn knowledge(&self) -> MutexGuard<'_, Knowledge> {
        self.knowledge.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Moment {
        Moment::default().plus(self.began.elapsed())
    }

    /// Sends a body to an engine with the client's method, path and headers.
    async fn send(&self, parts: &Parts, to: SocketAddr, body: Bytes) -> anyhow::Result<Response<Incoming>> {
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = parts.method.clone();
        *request.uri_mut() =
            Uri::builder().scheme("http").authority(to.to_string()).path_and_query(path).build()?;
        *request.headers_mut() = parts.headers.clone();
        // The legs of a split chat have lengths of their own.
        request.headers_mut().remove(CONTENT_LENGTH);
        Ok(self.client.request(request).await?)
    }
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
    let (parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let course = relay.knowledge().choose(relay.now(), &body).context("no engine takes this chat")?;
    let (address, body) = match course {
        Course::Whole(address) => (address, body),
        Course::Split(split) => {
            let (prefill, decode) = {
                let knowledge = relay.knowledge();
                (knowledge.twins[split.prefill].address, knowledge.twins[split.decode].address)
            };
            let leg = relay.send(&parts, prefill, legs::prefill(&body)?).await?;
            ensure!(leg.status().is_success(), "the prefill leg is answered with {}", leg.status());
            let told = leg.into_body().collect().await?.to_bytes();
            let second = legs::decode(&body, &told)?;
            relay
                .knowledge()
                .handed_over(relay.now(), split, &body)
                .context("the decode engine refuses this chat")?;
            (decode, second)
        }
    };
    Ok(relay.send(&parts, address, body).await?.map(BodyExt::boxed))
}

#[cfg(test)]
mod tests {
    use engine::{Connector, Profile};

    use super::*;

    const START: Moment = Moment(0);

    fn chat(words: &str) -> Vec<u8> {
        let content = words.repeat(400);
        format!(r#"{{"messages":[{{"role":"user","content":"{content}"}}],"max_tokens":4}}"#).into_bytes()
    }

    fn knowledge(roles: &[Role]) -> Knowledge {
        let twin = |(port, role): (u16, &Role)| {
            let mut config = Config::fifo(Profile::Llama8bH100, 1.0).with_role(*role, Connector::Nixl);
            if *role != Role::Both {
                config.timing.beside_prefill = 4.0;
                config.timing.prefill_base = Duration::ZERO;
            }
            Twin::new(SocketAddr::from(([127, 0, 0, 1], port)), config)
        };
        Knowledge { twins: (1..).zip(roles).map(twin).collect() }
    }

    #[test]
    fn a_prompt_goes_where_it_is_cached_until_the_queue_there_is_dearer_than_computing_it_anew() {
        let mut knowledge = knowledge(&[Role::Both, Role::Both]);
        let (first, other) = (chat("the cat "), chat("a dog is "));
        let home = knowledge.choose(START, &first).expect("taken");
        // Behind 830 tokens of prefill there, another prompt is better off at the idle engine.
        assert_ne!(knowledge.choose(START, &other), Some(home));
        // Both busy: waiting for the first prompt and finding it cached beats computing it behind the other.
        assert_eq!(knowledge.choose(START, &first), Some(home));
    }

    #[test]
    fn a_long_prompt_is_split_so_that_nobody_decodes_beside_it_and_a_warm_one_is_not() {
        let mut knowledge = knowledge(&[Role::Prefill, Role::Decode]);
        let prompt = chat("the cat ");
        let Some(Course::Split(split)) = knowledge.choose(START, &prompt) else { panic!("not split") };
        assert_eq!((split.prefill, split.decode, knowledge.twins[1].expected), (0, 1, 1));
        knowledge.handed_over(START, split, &prompt).expect("taken");
        assert_eq!(knowledge.twins[1].expected, 0);
        let home = knowledge.twins[1].address;
        let later = START.plus(Duration::from_secs(60));
        assert_eq!(knowledge.choose(later, &prompt), Some(Course::Whole(home)));
    }

    #[test]
    fn a_body_that_no_engine_takes_has_no_home() {
        assert_eq!(knowledge(&[Role::Both]).choose(START, b"{}"), None);
    }
}
