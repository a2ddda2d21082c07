//! Who is computed when: three models of an engine, all pure. Time comes in as an argument, what happened
//! comes out as [`Event`]s, and [`Scheduler::next_at`] says when to look again; the same code runs behind a
//! socket in real time and in a simulator in virtual time.
//!
//! A prompt may be computed in one engine and decoded in another ([`Handoff`]). The scheduler moves nothing: it
//! keeps the blocks of a finished prefill until [`Scheduler::release`], and says with [`Event::Fetch`] that room
//! for a prompt's KV is there; whoever drives it brings the KV and calls [`Scheduler::fetched`].

mod fifo;
#[cfg(test)]
mod handoff_tests;
mod instant;
mod pins;
mod step;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::answer::Answer;
use crate::kv::BlockHash;
use crate::timing::{Moment, Timing};
use crate::tokens::TokenId;

pub use fifo::Fifo;
pub use instant::Instant;
pub use step::Step;

/// The name of one job within its scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct JobId(pub u64);

/// A prompt as the KV cache sees it.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Tokens in the prompt.
    pub tokens: u32,
    /// Hashes of its full blocks.
    pub blocks: Arc<[BlockHash]>,
    /// What lets blocks filled while decoding be hashed, too; without it they are not cached.
    pub tail: Option<Tail>,
}

/// The end of a prompt and what will be generated behind it.
#[derive(Clone, Debug)]
pub struct Tail {
    /// What the block after the prompt's last full one is chained to.
    pub parent: BlockHash,
    /// The prompt's tokens after its last full block.
    pub tokens: Vec<TokenId>,
    /// The tokens to come.
    pub answer: Answer,
}

impl Prompt {
    /// The prompt with these tokens, to be answered with `answer`.
    pub fn new(root: BlockHash, tokens: &[TokenId], block_tokens: u32, answer: Answer) -> Self {
        let blocks: Arc<[BlockHash]> = root.chain(tokens, block_tokens as usize).into();
        let full = blocks.len() * block_tokens as usize;
        let tail =
            Tail { parent: blocks.last().copied().unwrap_or(root), tokens: tokens[full..].to_vec(), answer };
        Self { tokens: tokens.len() as u32, blocks, tail: Some(tail) }
    }

    /// The prompt's leading blocks that a cache may serve: the last token is always computed, so a prompt
    /// that ends with a full block computes that block again.
    pub fn cacheable(&self, block_tokens: u32) -> &[BlockHash] {
        let most = self.tokens.saturating_sub(1) / block_tokens;
        &self.blocks[..self.blocks.len().min(most as usize)]
    }

    /// Blocks that the prompt fills, the last one perhaps in part.
    pub fn block_count(&self, block_tokens: u32) -> u32 {
        self.tokens.div_ceil(block_tokens)
    }

    /// What the block after the last full one holds; `None` when there is none, or without a tail.
    pub fn partial_block(&self) -> Option<BlockHash> {
        let tail = self.tail.as_ref().filter(|tail| !tail.tokens.is_empty())?;
        Some(tail.parent.then(&tail.tokens))
    }

    /// What the prompt's blocks hold, in order.
    fn contents(&self) -> impl DoubleEndedIterator<Item = BlockHash> {
        self.blocks.iter().copied().chain(self.partial_block())
    }

    /// Whether the last blocks of the prompt were filled with something else.
    fn spoiled_by(&self, contents: &[Option<BlockHash>]) -> bool {
        self.contents().rev().zip(contents.iter().rev()).any(|(own, got)| *got != Some(own))
    }
}

/// One sequence to be computed.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its name; never used twice.
    pub id: JobId,
    /// What is computed before the first token.
    pub prompt: Prompt,
    /// Tokens to generate, at least 1.
    pub output_tokens: u32,
}

/// Whether a prompt's KV is for, or from, another engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Handoff {
    /// Neither.
    #[default]
    None,
    /// Its blocks stay in use after the last token, until [`Scheduler::release`].
    Keep,
    /// What the cache does not have of it comes from elsewhere: [`Event::Fetch`], [`Scheduler::fetched`].
    Fetch,
}

/// What happened to a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// Its prefill began (the first time: a preempted job does not start again).
    Started {
        /// The job.
        job: JobId,
        /// When.
        at: Moment,
        /// Prompt tokens found in the cache; those that were fetched do not count.
        cached_tokens: u32,
        /// Whether it builds on KV that does not belong to its prompt: its answer will be wrong.
        spoiled: bool,
    },
    /// It has room for KV that is computed elsewhere, and waits for it.
    Fetch {
        /// The job.
        job: JobId,
        /// When.
        at: Moment,
        /// Prompt tokens found in the cache.
        cached_tokens: u32,
        /// The prompt's last blocks, as many as are to be fetched.
        blocks: u32,
    },
    /// It generated tokens.
    Tokens {
        /// The job.
        job: JobId,
        /// When.
        at: Moment,
        /// How many tokens came out at this moment.
        count: u32,
        /// Whether these were the last: the job has left the scheduler.
        last: bool,
    },
}

/// Why a job was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refused {
    /// As many jobs as allowed are waiting already.
    #[error("the waiting queue is full")]
    QueueFull,
    /// The job would need more KV blocks than there are.
    #[error("the job does not fit into the KV cache")]
    TooLong,
    /// The job has no prompt or nothing to generate.
    #[error("the job is empty")]
    Empty,
}

impl Job {
    /// KV blocks held when the last token comes out; that token's own KV is never computed.
    fn blocks_max(&self, block_tokens: u32) -> u32 {
        (self.prompt.tokens.saturating_add(self.output_tokens) - 1).div_ceil(block_tokens)
    }
}

/// What a scheduler holds at a moment.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Gauges {
    /// Jobs whose prefill or decode is under way.
    pub running: u32,
    /// Jobs that have not started, or were preempted; with [`Self::fetching`].
    pub waiting: u32,
    /// Jobs that wait for KV from elsewhere.
    pub fetching: u32,
    /// Share of the KV cache in use by running jobs, and kept behind finished ones, 0 to 1.
    pub kv_ratio: f64,
    /// Finished jobs whose blocks are kept.
    pub pinned_jobs: u32,
    /// The blocks they keep.
    pub pinned_blocks: u32,
}

/// What a scheduler has done since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Prompt tokens looked up in the prefix cache.
    pub cache_query_tokens: u64,
    /// Of these, tokens found.
    pub cache_hit_tokens: u64,
    /// Prompt tokens that were asked for from elsewhere.
    pub fetch_tokens: u64,
    /// Jobs that lost their blocks to others.
    pub preemptions: u64,
}

impl Totals {
    fn looked_up(&mut self, prompt_tokens: u32, cached_tokens: u32) {
        self.cache_query_tokens += u64::from(prompt_tokens);
        self.cache_hit_tokens += u64::from(cached_tokens);
    }
}

/// The sizes that bound a scheduler.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limits {
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// KV blocks.
    pub kv_blocks: u32,
    /// Tokens computed in one step.
    pub step_tokens_max: u32,
    /// Jobs running at once.
    pub running_max: u32,
    /// Jobs waiting at once; `None` for no bound, as vLLM has it. A job that arrives while the engine works on a
    /// step (or a prefill) waits for its end and counts, whether or not it could run then.
    pub waiting_max: Option<u32>,
}

/// A model of how an engine orders its work. A clone goes its own way from there: it shows what would happen.
#[derive(Clone)]
pub enum Scheduler {
    /// Continuous batching with chunked prefill, as in vLLM.
    Step(Step),
    /// Prefill one at a time in order of arrival, decode beside it.
    Fifo(Fifo),
    /// Everything at once.
    Instant(Instant),
}

/// Which [`Scheduler`] to build.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum SchedulerKind {
    /// Continuous batching: a token budget per step, chunked prefill, preemption.
    #[default]
    Step,
    /// Prefill one at a time in order of arrival, not slowed by decodes; LRU cache of blocks.
    Fifo,
}

impl Scheduler {
    /// A scheduler of this kind; an engine whose times are all zero is [`Instant`] whatever the kind.
    pub fn new(kind: SchedulerKind, timing: Timing, limits: Limits) -> Self {
        let costs = [timing.prefill_base, timing.prefill_per_token, timing.inter_token];
        match kind {
            _ if costs.iter().all(std::time::Duration::is_zero) => Self::Instant(Instant::new(limits)),
            SchedulerKind::Step => Self::Step(Step::new(timing, limits)),
            SchedulerKind::Fifo => Self::Fifo(Fifo::new(timing, limits)),
        }
    }

    /// Takes a job at `now`, after all that was due by then.
    ///
    /// # Errors
    /// [`Refused::QueueFull`] when [`Limits::waiting_max`] jobs wait already; [`Refused::TooLong`] from
    /// [`Step`] when the job could not run even alone; [`Refused::Empty`] when there is nothing to compute.
    pub fn submit(&mut self, now: Moment, job: Job, out: &mut Vec<Event>) -> Result<(), Refused> {
        self.submit_leg(now, job, Handoff::None, out)
    }

    /// As [`Self::submit`], for a job whose KV is for or from another engine.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_leg(
        &mut self,
        now: Moment,
        job: Job,
        handoff: Handoff,
        out: &mut Vec<Event>,
    ) -> Result<(), Refused> {
        self.advance(now, out);
        if job.prompt.tokens == 0 || job.output_tokens == 0 {
            return Err(Refused::Empty);
        }
        match self {
            Self::Step(step) => step.submit(now, job, handoff, out),
            Self::Fifo(fifo) => fifo.submit(now, job, handoff, out),
            Self::Instant(instant) => {
                instant.submit(now, job, handoff, out);
                Ok(())
            }
        }
    }

    /// When a job that came now would have its first token, if no other came after it: what somebody who knows
    /// everything compares. `None` for one that would be refused, or has to wait for blocks that others keep.
    pub fn first_token_at(&self, now: Moment, job: &Job) -> Option<Moment> {
        if let Self::Fifo(fifo) = self {
            return Some(fifo.first_token_at(now, job));
        }
        let mut ahead = self.clone();
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

    /// The KV that [`Event::Fetch`] asked for is here: what its blocks held where it came from, in order. A job
    /// that is gone meanwhile is not an error.
    pub fn fetched(&mut self, now: Moment, job: JobId, contents: &[Option<BlockHash>], out: &mut Vec<Event>) {
        self.advance(now, out);
        match self {
            Self::Step(step) => step.fetched(now, job, contents, out),
            Self::Fifo(fifo) => fifo.fetched(now, job, contents, out),
            Self::Instant(instant) => instant.fetched(now, job, contents, out),
        }
    }

    /// The numbers of the blocks that a finished job keeps; `None` when it keeps none.
    pub fn kept(&self, job: JobId) -> Option<Vec<u32>> {
        match self {
            Self::Step(step) => step.pins().told(job),
            Self::Fifo(fifo) => fifo.pins().told(job),
            Self::Instant(instant) => instant.pins().told(job),
        }
    }

    /// Frees the blocks that a finished job keeps; whether it kept any.
    pub fn release(&mut self, now: Moment, job: JobId, out: &mut Vec<Event>) -> bool {
        self.advance(now, out);
        match self {
            Self::Step(step) => step.release(now, job, out),
            Self::Fifo(fifo) => fifo.release(job),
            Self::Instant(instant) => instant.release(job),
        }
    }

    /// What blocks hold, by their numbers, in use or not.
    pub fn contents(&self, blocks: &[u32]) -> Vec<Option<BlockHash>> {
        match self {
            Self::Step(step) => step.contents(blocks),
            Self::Fifo(fifo) => fifo.contents(blocks),
            Self::Instant(instant) => instant.contents(blocks),
        }
    }

    /// Forgets a job and frees what it holds, in whatever phase it is; an unknown one is not an error.
    pub fn cancel(&mut self, now: Moment, job: JobId, out: &mut Vec<Event>) {
        self.advance(now, out);
        match self {
            Self::Step(step) => step.cancel(now, job, out),
            Self::Fifo(fifo) => fifo.cancel(now, job, out),
            Self::Instant(instant) => instant.cancel(job),
        }
    }

    /// Does all that is due by `now`, in order.
    pub fn advance(&mut self, now: Moment, out: &mut Vec<Event>) {
        match self {
            Self::Step(step) => step.advance(now, out),
            Self::Fifo(fifo) => fifo.advance(now, out),
            Self::Instant(_) => {}
        }
    }

    /// When something is due next; `None` while there is nothing to do.
    pub fn next_at(&self) -> Option<Moment> {
        match self {
            Self::Step(step) => step.next_at(),
            Self::Fifo(fifo) => fifo.next_at(),
            Self::Instant(_) => None,
        }
    }

    /// What it holds now.
    pub fn gauges(&self) -> Gauges {
        match self {
            Self::Step(step) => step.gauges(),
            Self::Fifo(fifo) => fifo.gauges(),
            Self::Instant(instant) => instant.gauges(),
        }
    }

    /// What it has done.
    pub fn totals(&self) -> Totals {
        match self {
            Self::Step(step) => step.totals(),
            Self::Fifo(fifo) => fifo.totals(),
            Self::Instant(instant) => instant.totals(),
        }
    }

    /// Empties the prefix cache of all that no running job holds.
    pub fn clear_cache(&mut self) {
        match self {
            Self::Step(step) => step.clear_cache(),
            Self::Fifo(fifo) => fifo.clear_cache(),
            Self::Instant(instant) => instant.clear_cache(),
        }
    }
}
