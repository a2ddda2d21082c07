//! An engine that takes no time: it caches and counts, and every job ends as it is submitted.

use super::{Event, Job, Limits, Totals};
use crate::kv::BlockPool;
use crate::timing::Moment;

/// See the module.
#[derive(Clone)]
pub struct Instant {
    limits: Limits,
    pool: BlockPool,
    totals: Totals,
}

impl Instant {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, pool: BlockPool::new(limits.kv_blocks), totals: Totals::default() }
    }

    pub(super) fn submit(&mut self, now: Moment, job: &Job, out: &mut Vec<Event>) {
        let hits = self.pool.cached_run(job.prompt.cacheable(self.limits.block_tokens)) as u32;
        let cached_tokens = hits * self.limits.block_tokens;
        self.totals.looked_up(job.prompt.tokens, cached_tokens);
        self.pool.remember(&job.prompt.blocks);
        super::fifo::remember_answer(&mut self.pool, job, job.output_tokens, self.limits.block_tokens);
        out.push(Event::Started { job: job.id, at: now, cached_tokens });
        out.push(Event::Tokens { job: job.id, at: now, count: job.output_tokens, last: true });
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn clear_cache(&mut self) {
        self.pool.clear();
    }
}
