//! An engine that takes no time: it caches and counts, and every job ends as it is submitted, or as its KV comes.

use std::collections::HashMap;

use super::pins::Pins;
use super::{Event, Gauges, Handoff, Job, JobId, Limits, Totals};
use crate::kv::{BlockHash, BlockPool};
use crate::timing::Moment;

/// See the module.
#[derive(Clone)]
pub struct Instant {
    limits: Limits,
    pool: BlockPool,
    totals: Totals,
    /// With the tokens that the cache had of each.
    fetching: HashMap<JobId, (Job, u32)>,
    pins: Pins,
}

impl Instant {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            pool: BlockPool::new(limits.kv_blocks),
            totals: Totals::default(),
            fetching: HashMap::new(),
            pins: Pins::default(),
        }
    }

    pub(super) fn submit(&mut self, now: Moment, job: Job, handoff: Handoff, out: &mut Vec<Event>) {
        let block_tokens = self.limits.block_tokens;
        let cacheable = job.prompt.cacheable(block_tokens);
        let hits = self.pool.cached_run(cacheable);
        let cached_tokens = hits as u32 * block_tokens;
        self.totals.looked_up(job.prompt.tokens, cached_tokens);
        if handoff == Handoff::Fetch {
            self.totals.fetch_tokens += u64::from(job.prompt.tokens - cached_tokens);
            let blocks = job.prompt.block_count(block_tokens) - hits as u32;
            out.push(Event::Fetch { job: job.id, at: now, cached_tokens, blocks });
            self.fetching.insert(job.id, (job, cached_tokens));
            return;
        }
        let spoiled = self.pool.spoiled(&cacheable[..hits]);
        self.answer(now, &job, cached_tokens, spoiled, out);
        if handoff == Handoff::Keep {
            self.pins.keep_content(
                job.id,
                &mut self.pool,
                &job.prompt.blocks,
                job.prompt.partial_block(),
                spoiled,
            );
        }
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
        self.answer(now, &job, cached_tokens, spoiled, out);
    }

    fn answer(&mut self, now: Moment, job: &Job, cached_tokens: u32, spoiled: bool, out: &mut Vec<Event>) {
        self.pool.remember_as(&job.prompt.blocks, spoiled);
        let block_tokens = self.limits.block_tokens;
        super::fifo::remember_answer(&mut self.pool, job, job.output_tokens, block_tokens, spoiled);
        out.push(Event::Started { job: job.id, at: now, cached_tokens, spoiled });
        out.push(Event::Tokens { job: job.id, at: now, count: job.output_tokens, last: true });
    }

    pub(super) fn cancel(&mut self, job: JobId) {
        self.fetching.remove(&job);
    }

    pub(super) fn gauges(&self) -> Gauges {
        let fetching = self.fetching.len() as u32;
        let used = self.pool.total() - self.pool.free();
        Gauges {
            running: 0,
            waiting: fetching,
            fetching,
            kv_ratio: f64::from(used) / f64::from(self.pool.total().max(1)),
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
}
