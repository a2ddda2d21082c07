//! Chats of two kinds, long and short, whose users expect their tokens by a time; and how each request fared.
//!
//! The same seed gives the same chats, texts and arrivals whatever they go through, so that what differs between
//! two runs is what they went through.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use grapevine::load::{
    Api, ChatShape, Client, Conversation, Envelope, Poisson, Source, Target, Wire, Workload,
};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use routing::qoe;
use routing::request::{PRIORITY_HEADER, Slo, TPOT_HEADER, TTFT_HEADER};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

/// The first turn of a long chat may take this many times as long to its first token as others.
pub const LONG_FACTOR: f64 = 3.0;

/// Clients of a closed loop begin one after another over this time, so that a run is not ruled by its start.
const START: Duration = Duration::from_secs(2);

/// A request without an end after this time has failed.
const REQUEST_MAX: Duration = Duration::from_secs(60);

/// What chats are like.
#[derive(Clone, Debug, Serialize)]
pub struct Mix {
    /// Chats that begin long, 0 to 1.
    pub long_share: f64,
    /// Bytes of their first message.
    pub long_bytes: usize,
    /// Bytes of the first message of the others, and of each later one.
    pub short_bytes: usize,
    /// Requests in a chat.
    pub turns: u32,
    /// Tokens of each answer.
    pub output_tokens: u32,
    /// Between an answer and the next turn.
    pub think: Duration,
    /// The classes of chats, each as frequent as any other.
    pub classes: Vec<Class>,
}

/// A class of chats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Class {
    /// 1 high to 3 low.
    pub priority: u8,
    /// To the first token, in ms; [`LONG_FACTOR`] times as much where a long chat begins.
    pub ttft_ms: f64,
    /// Between tokens, in ms, the mean over a stream.
    pub tpot_ms: f64,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// Each client ends its chat before it begins another; so many chats in all.
    Closed {
        /// Clients.
        clients: usize,
        /// Chats.
        chats: u64,
    },
    /// Chats begin at random for a while.
    Open {
        /// Requests a second on average.
        requests_per_second: f64,
        /// How long chats begin.
        span: Duration,
    },
}

/// One request as its user saw it.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Whether a long chat began with it.
    pub long_start: bool,
    /// Its class.
    pub priority: u8,
    /// To the first token.
    pub ttft_ms: Option<f64>,
    /// Between tokens, the mean over the stream.
    pub tpot_ms: Option<f64>,
    /// Quality of experience, 0 to 1; 0 if it failed.
    pub qoe: f64,
    /// Whether both expectations were met.
    pub within: bool,
    /// When it ended, in s from the run's start.
    pub ended_s: f64,
    /// Why it failed.
    pub failure: Option<String>,
}

/// Sends the chats of `mix` to `target` and tells how each request fared.
///
/// # Errors
/// When the run can't be set up.
pub fn run(mix: &Mix, pace: Pace, seed: u64, target: SocketAddr) -> anyhow::Result<Vec<Sample>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let wire = Wire { request_timeout: REQUEST_MAX, ..Wire::default() };
    let run = Arc::new(Run {
        client: Client::new(wire, true, seed),
        target: Target::new(&format!("http://{target}"), Api::Chat.default_path())?,
        envelope: Envelope {
            model: Some("sim".to_owned()),
            stream: true,
            ignore_eos: true,
            ..Envelope::default()
        },
        think: mix.think,
        began: Instant::now(),
        samples: Mutex::new(Vec::new()),
    });
    let source = ChatSource::new(mix, seed);
    runtime.block_on(async {
        match pace {
            Pace::Closed { clients, chats } => closed(&run, source, clients, chats).await,
            Pace::Open { requests_per_second, span } => {
                let chats_per_second = requests_per_second / f64::from(mix.turns);
                open(&run, source, Poisson::new(chats_per_second, seed), span).await
            }
        }
    })?;
    let run = Arc::into_inner(run).context("a chat goes on after the end")?;
    Ok(run.samples.into_inner().unwrap_or_else(PoisonError::into_inner))
}

async fn closed(run: &Arc<Run>, source: ChatSource, clients: usize, chats: u64) -> anyhow::Result<()> {
    let chats = Arc::new(Mutex::new(source.take(usize::try_from(chats)?)));
    let mut tasks = JoinSet::new();
    for client in 0..clients {
        let (run, chats) = (Arc::clone(run), Arc::clone(&chats));
        tasks.spawn(async move {
            sleep(START.mul_f64(client as f64 / clients as f64)).await;
            loop {
                let next = chats.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(chat) = next else { return Ok(()) };
                run.hold(chat).await?;
                sleep(run.think).await;
            }
        });
    }
    all(&mut tasks).await
}

async fn open(
    run: &Arc<Run>,
    source: ChatSource,
    mut arrivals: Poisson,
    span: Duration,
) -> anyhow::Result<()> {
    let mut tasks = JoinSet::new();
    for chat in source {
        let after = arrivals.next_arrival();
        if after > span {
            break;
        }
        sleep_until((run.began + after).into()).await;
        let run = Arc::clone(run);
        tasks.spawn(async move { run.hold(chat).await });
    }
    all(&mut tasks).await
}

async fn all(tasks: &mut JoinSet<anyhow::Result<()>>) -> anyhow::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended.context("a chat panicked")??;
    }
    Ok(())
}

/// A chat to be held.
struct Chat {
    conversation: Conversation,
    is_long: bool,
    class: Class,
}

/// Endless chats.
struct ChatSource {
    rng: SmallRng,
    long_share: f64,
    long: Workload,
    short: Workload,
    classes: Vec<Class>,
}

impl ChatSource {
    fn new(mix: &Mix, seed: u64) -> Self {
        let of = |first_bytes, seed| {
            let shape = ChatShape {
                sessions: None,
                turns: mix.turns,
                tenants: 1,
                common_bytes: 0,
                tenant_bytes: 0,
                first_bytes,
                turn_bytes: mix.short_bytes,
                max_tokens: mix.output_tokens,
                think: mix.think,
            };
            Workload::new(Source::Chat(Arc::new(shape)), Api::Chat, seed)
        };
        Self {
            rng: SmallRng::seed_from_u64(seed),
            long_share: mix.long_share,
            // Texts of their own: no chat finds another's prompt cached.
            long: of(mix.long_bytes, 2 * seed),
            short: of(mix.short_bytes, 2 * seed + 1),
            classes: mix.classes.clone(),
        }
    }
}

impl Iterator for ChatSource {
    type Item = Chat;

    fn next(&mut self) -> Option<Chat> {
        let is_long = self.rng.random_bool(self.long_share);
        let class = *self.classes.get(self.rng.random_range(0..self.classes.len()))?;
        let conversation = if is_long { self.long.next()? } else { self.short.next()? };
        Some(Chat { conversation, is_long, class })
    }
}

/// What the chats of one run share.
struct Run {
    client: Client,
    target: Target,
    envelope: Envelope,
    think: Duration,
    began: Instant,
    samples: Mutex<Vec<Sample>>,
}

impl Run {
    /// Asks turn after turn until the end or a failure.
    async fn hold(&self, mut chat: Chat) -> anyhow::Result<()> {
        let number = chat.conversation.id();
        while let Some(request) = chat.conversation.next_request(&self.envelope) {
            let long_start = chat.is_long && request.turn == 0;
            let (slo, headers) = expected(&chat.class, long_start)?;
            let start = Instant::now();
            let outcome = self.client.ask_with(headers, &self.target, request.body, number, start).await;
            let fared = outcome.fared(&slo);
            let met = |target: Option<qoe::Target>| target != Some(qoe::Target::Missed);
            let tokens_after_first = outcome.gaps.len();
            let span: Duration = outcome.gaps.iter().sum();
            let failure = outcome.verdict.as_ref().err();
            let failure = failure.map(|failure| format!("{}: {}", failure.kind, failure.detail));
            let sample = Sample {
                long_start,
                priority: chat.class.priority,
                ttft_ms: outcome.ttft.filter(|_| failure.is_none()).map(ms),
                tpot_ms: (tokens_after_first > 0).then(|| ms(span) / tokens_after_first as f64),
                qoe: if failure.is_none() { fared.qoe.unwrap_or(0.0) } else { 0.0 },
                within: failure.is_none() && met(fared.ttft) && met(fared.tpot),
                ended_s: self.began.elapsed().as_secs_f64(),
                failure,
            };
            let failed = sample.failure.is_some();
            self.samples.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
            if failed {
                break;
            }
            chat.conversation.answered(&outcome.text);
            if !chat.conversation.is_over() {
                sleep(self.think).await;
            }
        }
        Ok(())
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

/// What a request expects, and the headers that say so.
fn expected(class: &Class, long_start: bool) -> anyhow::Result<(Slo, HeaderMap)> {
    let ttft_ms = class.ttft_ms * if long_start { LONG_FACTOR } else { 1.0 };
    let mut headers = HeaderMap::new();
    for (name, value) in [
        (TTFT_HEADER, ttft_ms.to_string()),
        (TPOT_HEADER, class.tpot_ms.to_string()),
        (PRIORITY_HEADER, class.priority.to_string()),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_str(&value)?);
    }
    Ok((Slo { ttft_ms, tpot_ms: class.tpot_ms, total_ms: None }, headers))
}
