//! The smallest engine that has what routing is about: one prompt at a time, and a prefix cache that forgets.

use std::collections::VecDeque;

use routing::BlockHash;

use crate::cache::Cache;

/// How an engine of the simulation performs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Profile {
    /// Microseconds per prompt token that is not cached.
    pub(crate) prefill_us_per_token: u64,
    /// Microseconds per prompt, cached or not.
    pub(crate) base_us: u64,
    /// Microseconds per output token of a request alone; each further request adds 1/32.
    pub(crate) itl_us: u64,
    /// Blocks that the cache holds.
    pub(crate) cache_blocks: usize,
}

/// One prompt in an engine.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) request: usize,
    /// Chained blocks at the engine's own size.
    pub(crate) blocks: Vec<BlockHash>,
    pub(crate) tokens: u64,
    pub(crate) output_tokens: u64,
}

/// A first-in-first-out prefill with a cache.
pub(crate) struct Engine {
    profile: Profile,
    queue: VecDeque<Job>,
    current: Option<(Job, u64, u64)>,
    pub(crate) decoding: usize,
    cache: Cache,
    pub(crate) served: usize,
    pub(crate) hit_tokens: u64,
    pub(crate) prompt_tokens: u64,
}

impl Engine {
    pub(crate) fn new(profile: Profile) -> Self {
        Self {
            profile,
            queue: VecDeque::new(),
            current: None,
            decoding: 0,
            cache: Cache::new(profile.cache_blocks),
            served: 0,
            hit_tokens: 0,
            prompt_tokens: 0,
        }
    }

    fn cached_tokens(&self, job: &Job) -> u64 {
        self.cache.cached_tokens(&job.blocks, job.tokens)
    }

    fn prefill_us(&self, job: &Job) -> u64 {
        self.profile.base_us + (job.tokens - self.cached_tokens(job)) * self.profile.prefill_us_per_token
    }

    /// Until a job that came now would have its first token: what an all-knowing router compares.
    pub(crate) fn first_token_us(&self, job: &Job, now: u64) -> u64 {
        let current = self.current.as_ref().map_or(0, |(_, end, _)| end.saturating_sub(now));
        let queued: u64 = self.queue.iter().map(|queued| self.prefill_us(queued)).sum();
        current + queued + self.prefill_us(job)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.queue.len() + usize::from(self.current.is_some()) + self.decoding
    }

    /// Takes a job in; the time at which its prompt is done if it begins at once.
    pub(crate) fn submit(&mut self, job: Job, now: u64) -> Option<u64> {
        self.served += 1;
        self.queue.push_back(job);
        if self.current.is_none() { self.begin(now) } else { None }
    }

    fn begin(&mut self, now: u64) -> Option<u64> {
        let job = self.queue.pop_front()?;
        let cached = self.cached_tokens(&job);
        self.hit_tokens += cached;
        self.prompt_tokens += job.tokens;
        let end = now + self.prefill_us(&job);
        self.cache.hold(&job.blocks);
        self.current = Some((job, end, cached));
        Some(end)
    }

    /// The current prompt is done: the job, what was cached of it, when its last token comes, and when the next prompt is done.
    pub(crate) fn prefilled(&mut self, now: u64) -> (Job, u64, u64, Option<u64>) {
        let (job, _, cached) = self.current.take().expect("a prompt was in work");
        let step = self.profile.itl_us + self.profile.itl_us * self.decoding as u64 / 32;
        self.decoding += 1;
        let end = now + job.output_tokens * step;
        (job, cached, end, self.begin(now))
    }
}
