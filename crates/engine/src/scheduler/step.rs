//! Continuous batching as in vLLM's scheduler: every step spends a budget of tokens, first on the running jobs
//! in the order they were admitted, then on waiting ones as long as blocks and seats last. Long prompts are cut
//! into chunks over several steps. When a running job finds no block, the latest admitted one is preempted: it
//! loses its blocks and computes everything again later, but for what the cache then still has of its prompt.
//!
//! A step lasts as long as its prompt tokens take ([`Timing::prefill`], the fixed part once in a step in which
//! a prompt begins) plus, when anyone decodes, the time between tokens for that many ([`Timing::decode`]).
//! Tokens come out at the end of the step. A job that arrives during a step waits for its end.

use std::collections::VecDeque;

use super::{Event, Gauges, Job, JobId, Limits, Refused, Totals};
use crate::kv::{BlockHash, BlockId, BlockPool};
use crate::timing::{Moment, Timing};

#[derive(Clone)]
struct Sequence {
    job: Job,
    generated: u32,
    /// Tokens whose KV is in `blocks`.
    computed: u32,
    /// Tokens that the step under way computes.
    scheduled: u32,
    blocks: Vec<BlockId>,
    /// How many of `blocks` have been named by their content, and the chain's last hash and pending tokens.
    named: u32,
    chained: Option<BlockHash>,
    started: bool,
}

impl Sequence {
    fn new(job: Job) -> Self {
        Self {
            job,
            generated: 0,
            computed: 0,
            scheduled: 0,
            blocks: Vec::new(),
            named: 0,
            chained: None,
            started: false,
        }
    }

    /// Tokens known so far: the prompt and what was generated.
    fn known(&self) -> u32 {
        self.job.prompt.tokens + self.generated
    }

    /// The content of the `index`-th block, once its tokens are known. Blocks are asked for in order.
    fn content(&mut self, index: u32, block_tokens: u32) -> Option<BlockHash> {
        let prompt = &self.job.prompt;
        if let Some(&hash) = prompt.blocks.get(index as usize) {
            return Some(hash);
        }
        let tail = prompt.tail.as_ref()?;
        let parent = self.chained.unwrap_or(tail.parent);
        let first = index * block_tokens;
        let tokens: Vec<_> = (first..first + block_tokens)
            .map(|at| match at.checked_sub(prompt.tokens) {
                Some(generated) => tail.answer.token(generated),
                None => tail.tokens[(at - prompt.blocks.len() as u32 * block_tokens) as usize],
            })
            .collect();
        let hash = parent.then(&tokens);
        self.chained = Some(hash);
        Some(hash)
    }
}

/// See the module.
#[derive(Clone)]
pub struct Step {
    timing: Timing,
    limits: Limits,
    pool: BlockPool,
    totals: Totals,
    waiting: VecDeque<Sequence>,
    /// In the order of admission.
    running: Vec<Sequence>,
    /// The end of the step under way.
    ends: Option<Moment>,
}

/// What a step has come to while it is put together.
#[derive(Default)]
struct Batch {
    prompt_tokens: u32,
    prompt_begins: bool,
    decodes: u32,
}

impl Step {
    pub(super) fn new(timing: Timing, limits: Limits) -> Self {
        Self {
            timing,
            limits,
            pool: BlockPool::new(limits.kv_blocks),
            totals: Totals::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            ends: None,
        }
    }

    pub(super) fn submit(&mut self, now: Moment, job: Job, out: &mut Vec<Event>) -> Result<(), Refused> {
        let waiting_max = self.limits.waiting_max.unwrap_or(u32::MAX) as usize;
        if self.ends.is_some() && self.waiting.len() >= waiting_max {
            return Err(Refused::QueueFull);
        }
        if job.blocks_max(self.limits.block_tokens) > self.limits.kv_blocks {
            return Err(Refused::TooLong);
        }
        self.waiting.push_back(Sequence::new(job));
        if self.ends.is_none() {
            self.begin_step(now, out);
        }
        Ok(())
    }

    pub(super) fn cancel(&mut self, id: JobId) {
        self.waiting.retain(|sequence| sequence.job.id != id);
        if let Some(at) = self.running.iter().position(|sequence| sequence.job.id == id) {
            let mut gone = self.running.remove(at);
            self.pool.release(&mut gone.blocks);
        }
    }

    pub(super) fn advance(&mut self, now: Moment, out: &mut Vec<Event>) {
        while let Some(ends) = self.ends.filter(|&ends| ends <= now) {
            self.finish_step(ends, out);
            self.begin_step(ends, out);
        }
    }

    pub(super) fn next_at(&self) -> Option<Moment> {
        self.ends
    }

    pub(super) fn gauges(&self) -> Gauges {
        let used = self.pool.total() - self.pool.free();
        Gauges {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            kv_ratio: f64::from(used) / f64::from(self.pool.total().max(1)),
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn clear_cache(&mut self) {
        self.pool.clear();
    }

    fn finish_step(&mut self, at: Moment, out: &mut Vec<Event>) {
        let pool = &mut self.pool;
        self.running.retain_mut(|sequence| {
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if sequence.computed < sequence.known() {
                return true;
            }
            sequence.generated += 1;
            let last = sequence.generated >= sequence.job.output_tokens;
            out.push(Event::Tokens { job: sequence.job.id, at, count: 1, last });
            if last {
                pool.release(&mut sequence.blocks);
            }
            !last
        });
    }

    fn begin_step(&mut self, now: Moment, out: &mut Vec<Event>) {
        let mut batch = Batch::default();
        let mut budget = self.limits.step_tokens_max;
        let preempted = self.schedule_running(&mut budget, &mut batch);
        if !preempted {
            self.admit_waiting(now, &mut budget, &mut batch, out);
        }
        let prefill = self.timing.prefill(batch.prompt_tokens, batch.prompt_begins);
        let decode =
            if batch.decodes == 0 { std::time::Duration::ZERO } else { self.timing.decode(batch.decodes) };
        let works = batch.prompt_tokens > 0 || batch.decodes > 0;
        self.ends = works.then(|| now.plus(prefill + decode));
    }

    /// Gives every running job its tokens of this step; whether any was preempted for it.
    fn schedule_running(&mut self, budget: &mut u32, batch: &mut Batch) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[index];
            let tokens = (sequence.known() - sequence.computed).min(*budget);
            if !grow(&mut self.pool, sequence, tokens, self.limits.block_tokens) {
                // The latest admitted job has not been scheduled in this step: it is at `index` or behind.
                preempted = true;
                self.preempt_latest();
                continue;
            }
            *budget -= tokens;
            count(batch, sequence, tokens);
            index += 1;
        }
        preempted
    }

    fn preempt_latest(&mut self) {
        let Some(mut latest) = self.running.pop() else { return };
        self.pool.release(&mut latest.blocks);
        (latest.computed, latest.scheduled, latest.named, latest.chained) = (0, 0, 0, None);
        self.totals.preemptions += 1;
        self.waiting.push_front(latest);
    }

    fn admit_waiting(&mut self, now: Moment, budget: &mut u32, batch: &mut Batch, out: &mut Vec<Event>) {
        let block_tokens = self.limits.block_tokens;
        while *budget > 0 && self.running.len() < self.limits.running_max as usize {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let cacheable = sequence.job.prompt.cacheable(block_tokens);
            let hits = self.pool.cached_run(cacheable);
            let cached_tokens = hits as u32 * block_tokens;
            let tokens = (sequence.known() - cached_tokens).min(*budget);
            let blocks = (cached_tokens + tokens).div_ceil(block_tokens) - hits as u32;
            if !self.pool.acquire(&cacheable[..hits], blocks, &mut sequence.blocks) {
                self.waiting.push_front(sequence);
                return;
            }
            sequence.computed = cached_tokens;
            sequence.named = hits as u32;
            name_full_blocks(&mut self.pool, &mut sequence, tokens, block_tokens);
            if !sequence.started {
                sequence.started = true;
                batch.prompt_begins = true;
                self.totals.looked_up(sequence.job.prompt.tokens, cached_tokens);
                out.push(Event::Started { job: sequence.job.id, at: now, cached_tokens });
            }
            *budget -= tokens;
            count(batch, &mut sequence, tokens);
            self.running.push(sequence);
        }
    }
}

/// Makes room for `tokens` more; `false`, and nothing changed, when there are too few blocks.
fn grow(pool: &mut BlockPool, sequence: &mut Sequence, tokens: u32, block_tokens: u32) -> bool {
    let needed = (sequence.computed + tokens).div_ceil(block_tokens);
    let more = needed.saturating_sub(sequence.blocks.len() as u32);
    if more > 0 && !pool.acquire(&[], more, &mut sequence.blocks) {
        return false;
    }
    name_full_blocks(pool, sequence, tokens, block_tokens);
    true
}

/// Names the blocks that are full once `tokens` more are computed. As in vLLM this happens when they are
/// scheduled, so that another job of the same step can already share them.
fn name_full_blocks(pool: &mut BlockPool, sequence: &mut Sequence, tokens: u32, block_tokens: u32) {
    let full = (sequence.computed + tokens) / block_tokens;
    while sequence.named < full {
        let index = sequence.named;
        if let Some(hash) = sequence.content(index, block_tokens) {
            pool.name(sequence.blocks[index as usize], hash);
        }
        sequence.named += 1;
    }
}

fn count(batch: &mut Batch, sequence: &mut Sequence, tokens: u32) {
    sequence.scheduled = tokens;
    let decodes = sequence.generated > 0 && tokens == 1 && sequence.computed + 1 == sequence.known();
    if decodes {
        batch.decodes += 1;
    } else {
        batch.prompt_tokens += tokens;
    }
}
