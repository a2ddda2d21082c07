//! An engine whose prompts and decodes slow each other down.

use std::collections::VecDeque;

use routing::BlockHash;

use crate::cache::Cache;

/// How an engine performs; times in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    /// Per prompt token that is not cached.
    pub(crate) prefill_us_per_token: f64,
    /// Per prompt, cached or not.
    pub(crate) base_us: f64,
    /// Per output token of a request alone.
    pub(crate) itl_us: f64,
    /// How many times longer that is while a prompt is computed.
    pub(crate) slowdown: f64,
    /// What each further request adds to prompts and tokens, as a share.
    pub(crate) each_running: f64,
    /// Of a handoff, and of each of its tokens.
    pub(crate) transfer_base_us: f64,
    pub(crate) transfer_us_per_token: f64,
    pub(crate) cache_blocks: usize,
}

/// One prompt in an engine.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) request: usize,
    pub(crate) blocks: Vec<BlockHash>,
    pub(crate) tokens: u64,
    /// To decode here after the first; none of a prompt that another engine decodes.
    pub(crate) output_tokens: Option<u64>,
}

/// What happened in an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happened {
    /// A prompt is done; `cached` of its tokens were held.
    Prefilled { request: usize, cached: u64 },
    /// A request that came by handoff has its first token.
    FirstToken { request: usize },
    /// A request has its last one.
    Ended { request: usize },
}

struct Stream {
    request: usize,
    /// Tokens to come, the one in work by the part that is left of it.
    left: f64,
    /// Tokens to come when the first is there; of those that came by handoff.
    first_at: Option<f64>,
}

pub(crate) struct Engine {
    profile: Profile,
    queue: VecDeque<Job>,
    /// The prompt in work, what of it was cached, and how long it takes yet, alone.
    current: Option<(Job, u64, f64)>,
    streams: Vec<Stream>,
    cache: Cache,
    at: u64,
    /// Grows with every change of what runs.
    pub(crate) version: u64,
}

/// What counts as nothing, in microseconds and in tokens.
const NOTHING: f64 = 1e-6;

impl Engine {
    pub(crate) fn new(profile: Profile) -> Self {
        let cache = Cache::new(profile.cache_blocks);
        Self { profile, queue: VecDeque::new(), current: None, streams: Vec::new(), cache, at: 0, version: 0 }
    }

    fn prompt_us(&self, job: &Job) -> f64 {
        let uncached = job.tokens - self.cached_tokens(job);
        self.profile.base_us + uncached as f64 * self.profile.prefill_us_per_token
    }

    pub(crate) fn cached_tokens(&self, job: &Job) -> u64 {
        self.cache.cached_tokens(&job.blocks, job.tokens)
    }

    /// Until a job that came now would be prefilled, if nothing else came.
    pub(crate) fn prefilled_in_us(&self, job: &Job) -> f64 {
        let queued: f64 = self.queue.iter().map(|queued| self.prompt_us(queued)).sum();
        let current = self.current.as_ref().map_or(0.0, |(.., left)| *left);
        (current + queued + self.prompt_us(job)) * self.stretch_of_prompts()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.queue.len() + usize::from(self.current.is_some()) + self.streams.len()
    }

    pub(crate) fn decoding(&self) -> usize {
        self.streams.len()
    }

    fn stretch_of_prompts(&self) -> f64 {
        1.0 + self.profile.each_running * self.streams.len() as f64
    }

    fn token_us(&self) -> f64 {
        let others = self.streams.len() + usize::from(self.current.is_some());
        let slowdown = if self.current.is_some() { self.profile.slowdown } else { 1.0 };
        let crowd = 1.0 + self.profile.each_running * others.saturating_sub(1) as f64;
        self.profile.itl_us * slowdown * crowd
    }

    pub(crate) fn submit(&mut self, job: Job) {
        self.queue.push_back(job);
        self.begin();
    }

    /// A request whose prompt was computed elsewhere.
    pub(crate) fn join(&mut self, request: usize, blocks: &[BlockHash], output_tokens: u64) {
        self.cache.hold(blocks);
        let left = output_tokens as f64;
        self.streams.push(Stream { request, left, first_at: Some(left - 1.0) });
        self.version += 1;
    }

    fn begin(&mut self) {
        self.version += 1;
        if self.current.is_some() {
            return;
        }
        if let Some(job) = self.queue.pop_front() {
            let (cached, left) = (self.cached_tokens(&job), self.prompt_us(&job));
            self.cache.hold(&job.blocks);
            self.current = Some((job, cached, left));
        }
    }

    /// When something happens next, if nothing comes before.
    pub(crate) fn next(&self) -> Option<u64> {
        let prompt = self.current.as_ref().map(|(.., left)| left * self.stretch_of_prompts());
        let token_us = self.token_us();
        let marks = self.streams.iter().map(|stream| stream.left - stream.first_at.unwrap_or(0.0));
        let tokens = marks.map(|left| left * token_us);
        let soonest = prompt.into_iter().chain(tokens).fold(f64::INFINITY, f64::min);
        soonest.is_finite().then(|| self.at + soonest.max(0.0).ceil() as u64)
    }

    /// Goes on to `now`, which is not after [`Engine::next`].
    pub(crate) fn advance(&mut self, now: u64) -> Vec<Happened> {
        let span = (now - self.at) as f64;
        let (stretch, token_us) = (self.stretch_of_prompts(), self.token_us());
        self.at = now;
        let mut happened = Vec::new();
        for stream in &mut self.streams {
            stream.left -= span / token_us;
            if stream.first_at.is_some_and(|first| stream.left <= first + NOTHING) {
                stream.first_at = None;
                happened.push(Happened::FirstToken { request: stream.request });
            }
            if stream.left <= NOTHING {
                happened.push(Happened::Ended { request: stream.request });
            }
        }
        self.streams.retain(|stream| stream.left > NOTHING);
        if let Some((.., left)) = &mut self.current {
            *left -= span / stretch;
        }
        if let Some((job, cached, _)) = self.current.take_if(|(.., left)| *left <= NOTHING) {
            happened.push(Happened::Prefilled { request: job.request, cached });
            if let Some(output_tokens) = job.output_tokens {
                let left = output_tokens as f64 - 1.0;
                self.streams.push(Stream { request: job.request, left, first_at: None });
            }
            self.begin();
        }
        if !happened.is_empty() {
            self.version += 1;
        }
        happened
    }
}
