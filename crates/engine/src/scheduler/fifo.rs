//! The simple engine: one prefill at a time in order of arrival, never slowed by decodes, over an LRU cache of
//! blocks in which nothing is pinned. A job's time to first token is its queue plus its own uncached prefill.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use super::{Event, Gauges, Job, JobId, Limits, Refused, Totals};
use crate::kv::{BlockHash, BlockPool};
use crate::timing::{Moment, Timing};

#[derive(Clone)]
struct Prefilling {
    job: Job,
    ends: Moment,
    /// Tokens that nobody had computed before it.
    uncached: u32,
}

#[derive(Clone)]
struct Decoding {
    job: Job,
    generated: u32,
    uncached: u32,
}

/// See the module.
#[derive(Clone)]
pub struct Fifo {
    timing: Timing,
    limits: Limits,
    pool: BlockPool,
    totals: Totals,
    waiting: VecDeque<Job>,
    prefilling: Option<Prefilling>,
    decoding: HashMap<JobId, Decoding>,
    /// When each decoding job's next token is due; entries of cancelled jobs are skipped when they come up.
    due: BinaryHeap<Reverse<(Moment, JobId)>>,
    /// Tokens held by running jobs, for the usage gauge only; what several share counts for the first of them.
    running_tokens: u64,
}

impl Fifo {
    pub(super) fn new(timing: Timing, limits: Limits) -> Self {
        Self {
            timing,
            limits,
            pool: BlockPool::new(limits.kv_blocks),
            totals: Totals::default(),
            waiting: VecDeque::new(),
            prefilling: None,
            decoding: HashMap::new(),
            due: BinaryHeap::new(),
            running_tokens: 0,
        }
    }

    pub(super) fn submit(&mut self, now: Moment, job: Job, out: &mut Vec<Event>) -> Result<(), Refused> {
        let waiting_max = self.limits.waiting_max.unwrap_or(u32::MAX) as usize;
        if self.prefilling.is_some() && self.waiting.len() >= waiting_max {
            return Err(Refused::QueueFull);
        }
        self.waiting.push_back(job);
        self.begin_prefill(now, out);
        Ok(())
    }

    pub(super) fn cancel(&mut self, now: Moment, id: JobId, out: &mut Vec<Event>) {
        self.waiting.retain(|job| job.id != id);
        if let Some(prefilling) = self.prefilling.take_if(|prefilling| prefilling.job.id == id) {
            self.running_tokens -= u64::from(prefilling.uncached);
            self.begin_prefill(now, out);
        }
        if let Some(decoding) = self.decoding.remove(&id) {
            self.leave(&decoding);
        }
    }

    pub(super) fn advance(&mut self, now: Moment, out: &mut Vec<Event>) {
        while let Some(at) = self.next_at().filter(|&at| at <= now) {
            if let Some(prefilled) = self.prefilling.take_if(|prefilling| prefilling.ends == at) {
                let Prefilling { job, uncached, .. } = prefilled;
                let id = job.id;
                self.pool.remember(&job.prompt.blocks);
                self.decoding.insert(id, Decoding { job, generated: 0, uncached });
                self.token(id, at, out);
                self.begin_prefill(at, out);
            } else if let Some(Reverse((at, id))) = self.due.pop() {
                self.token(id, at, out);
            }
        }
    }

    pub(super) fn next_at(&self) -> Option<Moment> {
        let prefilled = self.prefilling.as_ref().map(|prefilling| prefilling.ends);
        let due = self.due.peek().map(|Reverse((at, _))| *at);
        [prefilled, due].into_iter().flatten().min()
    }

    pub(super) fn gauges(&self) -> Gauges {
        let capacity = u64::from(self.limits.kv_blocks) * u64::from(self.limits.block_tokens);
        Gauges {
            running: self.decoding.len() as u32 + u32::from(self.prefilling.is_some()),
            waiting: self.waiting.len() as u32,
            kv_ratio: (self.running_tokens as f64 / capacity as f64).min(1.0),
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn clear_cache(&mut self) {
        self.pool.clear();
    }

    fn begin_prefill(&mut self, now: Moment, out: &mut Vec<Event>) {
        if self.prefilling.is_some() {
            return;
        }
        let Some(job) = self.waiting.pop_front() else { return };
        let hits = self.pool.cached_run(job.prompt.cacheable(self.limits.block_tokens)) as u32;
        let cached_tokens = hits * self.limits.block_tokens;
        self.totals.looked_up(job.prompt.tokens, cached_tokens);
        let uncached = job.prompt.tokens - cached_tokens;
        self.running_tokens += u64::from(uncached);
        out.push(Event::Started { job: job.id, at: now, cached_tokens });
        let ends = now.plus(self.timing.prefill(uncached, true));
        self.prefilling = Some(Prefilling { job, ends, uncached });
    }

    fn token(&mut self, id: JobId, at: Moment, out: &mut Vec<Event>) {
        let batch = self.decoding.len() as u32;
        let Some(decoding) = self.decoding.get_mut(&id) else { return };
        decoding.generated += 1;
        self.running_tokens += 1;
        let last = decoding.generated >= decoding.job.output_tokens;
        out.push(Event::Tokens { job: id, at, count: 1, last });
        if !last {
            self.due.push(Reverse((at.plus(self.timing.decode(batch)), id)));
        } else if let Some(decoding) = self.decoding.remove(&id) {
            self.leave(&decoding);
        }
    }

    fn leave(&mut self, decoding: &Decoding) {
        self.running_tokens -= u64::from(decoding.uncached + decoding.generated);
        remember_answer(&mut self.pool, &decoding.job, decoding.generated, self.limits.block_tokens);
    }
}

/// Puts the blocks that `generated` tokens filled into the cache. The last token's KV is never computed.
pub(super) fn remember_answer(pool: &mut BlockPool, job: &Job, generated: u32, block_tokens: u32) {
    let Some(tail) = &job.prompt.tail else { return };
    let mut tokens = tail.tokens.clone();
    tokens.extend((0..generated.saturating_sub(1)).map(|i| tail.answer.token(i)));
    if tokens.len() >= block_tokens as usize {
        let mut blocks: Vec<BlockHash> = job.prompt.blocks.to_vec();
        blocks.extend(tail.parent.chain(&tokens, block_tokens as usize));
        pool.remember(&blocks);
    }
}
