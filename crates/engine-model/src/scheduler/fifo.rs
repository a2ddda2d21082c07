//! The simple engine: one prefill at a time in order of arrival, over an LRU cache of blocks in which running jobs
//! pin nothing. A job's time to first token is its queue plus its own uncached prefill. A prefill can slow the decodes
//! beside it ([`Timing::beside_prefill`]) and be slowed by those that there are when it begins
//! ([`Timing::prefill_beside`]). A job whose KV comes from elsewhere waits in no queue and decodes once it is there. A
//! finished prefill that is to be kept is not when too few blocks are free.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::pins::Pins;
use super::{Event, Gauges, Handoff, Job, JobId, Limits, Refused, Totals};
use crate::kv::{BlockHash, BlockPool};
use crate::timing::{Moment, Timing};

#[derive(Clone)]
struct Decoding {
    job: Job,
    handoff: Handoff,
    spoiled: bool,
    generated: u32,
    /// Tokens of its prompt that the cache did not have.
    uncached: u32,
}

#[derive(Clone)]
struct Prefilling {
    job: Job,
    handoff: Handoff,
    spoiled: bool,
    ends: Moment,
    /// Tokens it computes.
    uncached: u32,
}

/// See the module.
#[derive(Clone)]
pub struct Fifo {
    timing: Timing,
    limits: Limits,
    pool: BlockPool,
    totals: Totals,
    waiting: VecDeque<(Job, Handoff)>,
    prefilling: Option<Prefilling>,
    /// With the tokens that the cache had of each.
    fetching: HashMap<JobId, (Job, u32)>,
    decoding: HashMap<JobId, Decoding>,
    /// When each decoding job's next token is due; entries of cancelled jobs are skipped when they come up.
    due: BinaryHeap<Reverse<(Moment, JobId)>>,
    /// Tokens held by running jobs, for the usage gauge only; what several share counts for the first of them.
    running_tokens: u64,
    pins: Pins,
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
            fetching: HashMap::new(),
            decoding: HashMap::new(),
            due: BinaryHeap::new(),
            running_tokens: 0,
            pins: Pins::default(),
        }
    }

    pub(super) fn submit(
        &mut self,
        now: Moment,
        job: Job,
        handoff: Handoff,
        out: &mut Vec<Event>,
    ) -> Result<(), Refused> {
        if handoff == Handoff::Fetch {
            let cached_tokens = self.look_up(&job);
            self.totals.fetch_tokens += u64::from(job.prompt.tokens - cached_tokens);
            let block_tokens = self.limits.block_tokens;
            let blocks = job.prompt.block_count(block_tokens) - cached_tokens / block_tokens;
            out.push(Event::Fetch { job: job.id, at: now, cached_tokens, blocks });
            self.fetching.insert(job.id, (job, cached_tokens));
            return Ok(());
        }
        let waiting_max = self.limits.waiting_max.unwrap_or(u32::MAX) as usize;
        if self.prefilling.is_some() && self.waiting.len() >= waiting_max {
            return Err(Refused::QueueFull);
        }
        self.waiting.push_back((job, handoff));
        self.begin_prefill(now, out);
        Ok(())
    }

    pub(super) fn fetched(
        &mut self,
        now: Moment,
        id: JobId,
        contents: &[Option<BlockHash>],
        out: &mut Vec<Event>,
    ) {
        let Some((job, cached_tokens)) = self.fetching.remove(&id) else { return };
        let hits = (cached_tokens / self.limits.block_tokens) as usize;
        let spoiled = self.pool.spoiled(&job.prompt.blocks[..hits]) || job.prompt.spoiled_by(contents);
        self.pool.remember_as(&job.prompt.blocks, spoiled);
        let uncached = job.prompt.tokens - cached_tokens;
        self.running_tokens += u64::from(uncached);
        out.push(Event::Started { job: id, at: now, cached_tokens, spoiled });
        let batch = self.decoding.len() as u32 + 1;
        self.decoding.insert(id, Decoding { job, handoff: Handoff::None, spoiled, generated: 0, uncached });
        self.due.push(Reverse((now.plus(self.gap(batch)), id)));
    }

    pub(super) fn cancel(&mut self, now: Moment, id: JobId, out: &mut Vec<Event>) {
        self.waiting.retain(|(job, _)| job.id != id);
        self.fetching.remove(&id);
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
            if let Some(done) = self.prefilling.take_if(|prefilling| prefilling.ends == at) {
                let Prefilling { job, handoff, spoiled, uncached, .. } = done;
                self.pool.remember_as(&job.prompt.blocks, spoiled);
                let id = job.id;
                self.decoding.insert(id, Decoding { job, handoff, spoiled, generated: 0, uncached });
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

    /// As [`super::Scheduler::first_token_at`]. What leaves the cache meanwhile is not foreseen.
    pub(super) fn first_token_at(&self, now: Moment, job: &Job) -> Moment {
        let mut at = now;
        let mut coming: HashSet<BlockHash> = HashSet::new();
        if let Some(prefilling) = &self.prefilling {
            at = prefilling.ends.max(now);
            coming.extend(prefilling.job.prompt.blocks.iter());
        }
        for job in self.waiting.iter().map(|(job, _)| job).chain(std::iter::once(job)) {
            let cacheable = job.prompt.cacheable(self.limits.block_tokens);
            let cached = self.pool.cached_run(cacheable);
            let hits = cached + cacheable[cached..].iter().take_while(|block| coming.contains(block)).count();
            let uncached = job.prompt.tokens - hits as u32 * self.limits.block_tokens;
            at = at.plus(self.timing.prefill(uncached, true));
            coming.extend(job.prompt.blocks.iter());
        }
        at
    }

    pub(super) fn gauges(&self) -> Gauges {
        let block_tokens = u64::from(self.limits.block_tokens);
        let capacity = u64::from(self.limits.kv_blocks) * block_tokens;
        let used = self.running_tokens + u64::from(self.pins.blocks()) * block_tokens;
        let fetching = self.fetching.len() as u32;
        Gauges {
            running: self.decoding.len() as u32 + u32::from(self.prefilling.is_some()),
            waiting: self.waiting.len() as u32 + fetching,
            fetching,
            kv_ratio: (used as f64 / capacity as f64).min(1.0),
            pinned_jobs: self.pins.jobs(),
            pinned_blocks: self.pins.blocks(),
        }
    }

    pub(super) fn pins(&self) -> &Pins {
        &self.pins
    }

    pub(super) fn release(&mut self, job: JobId) -> bool {
        self.pins.release(job, &mut self.pool).is_some()
    }

    pub(super) fn contents(&self, blocks: &[u32]) -> Vec<Option<BlockHash>> {
        self.pool.contents(blocks)
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
        let Some((job, handoff)) = self.waiting.pop_front() else { return };
        let cached_tokens = self.look_up(&job);
        let hits = (cached_tokens / self.limits.block_tokens) as usize;
        let spoiled = self.pool.spoiled(&job.prompt.blocks[..hits]);
        let uncached = job.prompt.tokens - cached_tokens;
        self.running_tokens += u64::from(uncached);
        out.push(Event::Started { job: job.id, at: now, cached_tokens, spoiled });
        let ends = now.plus(self.timing.prefill_beside(uncached, self.decoding.len() as u32));
        self.prefilling = Some(Prefilling { job, handoff, spoiled, ends, uncached });
    }

    /// How many tokens of a prompt are cached; counted.
    fn look_up(&mut self, job: &Job) -> u32 {
        let hits = self.pool.cached_run(job.prompt.cacheable(self.limits.block_tokens)) as u32;
        let cached_tokens = hits * self.limits.block_tokens;
        self.totals.looked_up(job.prompt.tokens, cached_tokens);
        cached_tokens
    }

    fn token(&mut self, id: JobId, at: Moment, out: &mut Vec<Event>) {
        let batch = self.decoding.len() as u32;
        let Some(decoding) = self.decoding.get_mut(&id) else { return };
        decoding.generated += 1;
        self.running_tokens += 1;
        let last = decoding.generated >= decoding.job.output_tokens;
        out.push(Event::Tokens { job: id, at, count: 1, last });
        if !last {
            self.due.push(Reverse((at.plus(self.gap(batch)), id)));
        } else if let Some(decoding) = self.decoding.remove(&id) {
            self.leave(&decoding);
            if decoding.handoff == Handoff::Keep {
                let Decoding { job, spoiled, .. } = decoding;
                let (named, last) = (&job.prompt.blocks, job.prompt.partial_block());
                self.pins.keep_content(id, &mut self.pool, named, last, spoiled);
            }
        }
    }

    /// Time to the next token of one of so many, as it is now; a prompt that begins or ends meanwhile counts from
    /// the token after that.
    fn gap(&self, batch: u32) -> Duration {
        let alone = self.timing.decode(batch);
        if self.prefilling.is_some() { alone.mul_f64(self.timing.beside_prefill) } else { alone }
    }

    fn leave(&mut self, decoding: &Decoding) {
        self.running_tokens -= u64::from(decoding.uncached + decoding.generated);
        let Decoding { job, spoiled, generated, .. } = decoding;
        remember_answer(&mut self.pool, job, *generated, self.limits.block_tokens, *spoiled);
    }
}

/// Puts the blocks that `generated` tokens filled into the cache. The last token's KV is never computed.
pub(super) fn remember_answer(
    pool: &mut BlockPool,
    job: &Job,
    generated: u32,
    block_tokens: u32,
    spoiled: bool,
) {
    let Some(tail) = &job.prompt.tail else { return };
    let mut tokens = tail.tokens.clone();
    tokens.extend((0..generated.saturating_sub(1)).map(|i| tail.answer.token(i)));
    if tokens.len() >= block_tokens as usize {
        let mut blocks: Vec<BlockHash> = job.prompt.blocks.to_vec();
        blocks.extend(tail.parent.chain(&tokens, block_tokens as usize));
        pool.remember_as(&blocks, spoiled);
    }
}
