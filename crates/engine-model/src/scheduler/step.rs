//! Continuous batching as in vLLM's scheduler: every step spends a budget of tokens, first on the running jobs
//! in the order they were admitted, then on waiting ones as long as blocks and seats last. Long prompts are cut
//! into chunks over several steps. When a running job finds no block, the latest admitted one is preempted: it
//! loses its blocks and computes everything again later, but for what the cache then still has of its prompt.
//!
//! A step lasts as long as its prompt tokens take ([`Timing::prefill`], the fixed part once in a step in which
//! a prompt begins) plus, when anyone decodes, the time between tokens for that many ([`Timing::decode`]).
//! Tokens come out at the end of the step. A job that arrives during a step waits for its end.
//!
//! A job whose KV comes from elsewhere waits its turn, takes the blocks for its whole prompt, and fetches without a
//! seat; once fetched it is admitted before all that wait, and the prompt's last token is its first decode.

use std::collections::{HashMap, VecDeque};

use super::pins::Pins;
use super::{Event, Gauges, Handoff, Job, JobId, Limits, Refused, Totals};
use crate::kv::{BlockHash, BlockId, BlockPool};
use crate::timing::{Moment, Timing};

/// Where a sequence's prompt is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Here,
    /// Elsewhere, and not here yet.
    Elsewhere,
    /// Elsewhere, and all but the last token's KV is here.
    Fetched,
}

#[derive(Clone)]
struct Sequence {
    job: Job,
    source: Source,
    /// Whether its blocks stay in use after its last token.
    kept: bool,
    /// Whether it builds on KV that does not belong to it.
    spoiled: bool,
    /// Prompt tokens found in the cache when its blocks were taken.
    cached_tokens: u32,
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
    fn new(job: Job, handoff: Handoff) -> Self {
        Self {
            job,
            source: if handoff == Handoff::Fetch { Source::Elsewhere } else { Source::Here },
            kept: handoff == Handoff::Keep,
            spoiled: false,
            cached_tokens: 0,
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

    /// Says that it starts; whether this was the first time.
    fn start(&mut self, now: Moment, out: &mut Vec<Event>) -> bool {
        let first = !std::mem::replace(&mut self.started, true);
        if first {
            let Self { job, cached_tokens, spoiled, .. } = self;
            out.push(Event::Started {
                job: job.id,
                at: now,
                cached_tokens: *cached_tokens,
                spoiled: *spoiled,
            });
        }
        first
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
    fetching: HashMap<JobId, Sequence>,
    /// Fetched, with their blocks, to be admitted before those that wait.
    fetched: VecDeque<Sequence>,
    pins: Pins,
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
            fetching: HashMap::new(),
            fetched: VecDeque::new(),
            pins: Pins::default(),
            running: Vec::new(),
            ends: None,
        }
    }

    pub(super) fn submit(
        &mut self,
        now: Moment,
        job: Job,
        handoff: Handoff,
        out: &mut Vec<Event>,
    ) -> Result<(), Refused> {
        let waiting_max = self.limits.waiting_max.unwrap_or(u32::MAX) as usize;
        if self.ends.is_some() && self.waiting.len() >= waiting_max {
            return Err(Refused::QueueFull);
        }
        if job.blocks_max(self.limits.block_tokens) > self.limits.kv_blocks {
            return Err(Refused::TooLong);
        }
        self.waiting.push_back(Sequence::new(job, handoff));
        self.wake(now, out);
        Ok(())
    }

    pub(super) fn fetched(
        &mut self,
        now: Moment,
        id: JobId,
        contents: &[Option<BlockHash>],
        out: &mut Vec<Event>,
    ) {
        let Some(mut sequence) = self.fetching.remove(&id) else { return };
        let own = sequence.named as usize;
        sequence.spoiled |= sequence.job.prompt.spoiled_by(contents);
        for (index, &id) in sequence.blocks.iter().enumerate().skip(own) {
            let content = contents.get(index - own).copied().flatten();
            match sequence.job.prompt.blocks.get(index) {
                Some(&hash) => self.pool.name(id, hash, Some(content.unwrap_or(hash.spoiled()))),
                None => self.pool.fill(id, content),
            }
        }
        sequence.named = sequence.job.prompt.blocks.len() as u32;
        sequence.computed = sequence.job.prompt.tokens - 1;
        sequence.source = Source::Fetched;
        self.fetched.push_back(sequence);
        self.wake(now, out);
    }

    pub(super) fn release(&mut self, now: Moment, id: JobId, out: &mut Vec<Event>) -> bool {
        let kept = self.pins.release(id, &mut self.pool).is_some();
        self.wake(now, out);
        kept
    }

    pub(super) fn pins(&self) -> &Pins {
        &self.pins
    }

    pub(super) fn contents(&self, blocks: &[u32]) -> Vec<Option<BlockHash>> {
        self.pool.contents(blocks)
    }

    pub(super) fn cancel(&mut self, now: Moment, id: JobId, out: &mut Vec<Event>) {
        self.waiting.retain(|sequence| sequence.job.id != id);
        let gone = self.fetching.remove(&id);
        let at = |queue: &VecDeque<Sequence>| queue.iter().position(|sequence| sequence.job.id == id);
        let gone = gone.or_else(|| at(&self.fetched).and_then(|at| self.fetched.remove(at)));
        let running = self.running.iter().position(|sequence| sequence.job.id == id);
        let gone = gone.or_else(|| running.map(|at| self.running.remove(at)));
        if let Some(mut gone) = gone {
            self.pool.release(&mut gone.blocks);
        }
        self.wake(now, out);
    }

    /// Begins a step if none is under way: blocks or work have come.
    fn wake(&mut self, now: Moment, out: &mut Vec<Event>) {
        if self.ends.is_none() {
            self.begin_step(now, out);
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
            waiting: (self.waiting.len() + self.fetching.len() + self.fetched.len()) as u32,
            fetching: self.fetching.len() as u32,
            kv_ratio: f64::from(used) / f64::from(self.pool.total().max(1)),
            pinned_jobs: self.pins.jobs(),
            pinned_blocks: self.pins.blocks(),
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    pub(super) fn clear_cache(&mut self) {
        self.pool.clear();
    }

    fn finish_step(&mut self, at: Moment, out: &mut Vec<Event>) {
        let (pool, pins) = (&mut self.pool, &mut self.pins);
        self.running.retain_mut(|sequence| {
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if sequence.computed < sequence.known() {
                return true;
            }
            sequence.generated += 1;
            let last = sequence.generated >= sequence.job.output_tokens;
            out.push(Event::Tokens { job: sequence.job.id, at, count: 1, last });
            if last && sequence.kept {
                pins.keep(sequence.job.id, std::mem::take(&mut sequence.blocks));
            } else if last {
                pool.release(&mut sequence.blocks);
            }
            !last
        });
    }

    fn begin_step(&mut self, now: Moment, out: &mut Vec<Event>) {
        let mut batch = Batch::default();
        let mut budget = self.limits.step_tokens_max;
        let preempted = self.schedule_running(&mut budget, &mut batch);
        // Blocks that others keep can leave the last running job without: then something else may still run.
        if !preempted || self.running.is_empty() {
            self.admit_fetched(now, &mut budget, &mut batch, out);
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
        latest.source = Source::Here;
        self.totals.preemptions += 1;
        self.waiting.push_front(latest);
    }

    fn admit_fetched(&mut self, now: Moment, budget: &mut u32, batch: &mut Batch, out: &mut Vec<Event>) {
        while *budget > 0 && self.running.len() < self.limits.running_max as usize {
            let Some(mut sequence) = self.fetched.pop_front() else { return };
            *budget -= 1;
            count(batch, &mut sequence, 1);
            sequence.start(now, out);
            self.running.push(sequence);
        }
    }

    fn admit_waiting(&mut self, now: Moment, budget: &mut u32, batch: &mut Batch, out: &mut Vec<Event>) {
        let block_tokens = self.limits.block_tokens;
        while *budget > 0 && self.running.len() < self.limits.running_max as usize {
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            let prompt = &sequence.job.prompt;
            let hits = self.pool.cached_run(prompt.cacheable(block_tokens));
            let hit = &prompt.cacheable(block_tokens)[..hits];
            let cached_tokens = hits as u32 * block_tokens;
            let fetches = sequence.source == Source::Elsewhere;
            let tokens = (sequence.known() - cached_tokens).min(if fetches { u32::MAX } else { *budget });
            let blocks = (cached_tokens + tokens).div_ceil(block_tokens) - hits as u32;
            if !self.pool.acquire(hit, blocks, &mut sequence.blocks) {
                self.waiting.push_front(sequence);
                return;
            }
            sequence.spoiled |= self.pool.spoiled(hit);
            sequence.computed = cached_tokens;
            sequence.named = hits as u32;
            if !sequence.started {
                sequence.cached_tokens = cached_tokens;
                self.totals.looked_up(sequence.job.prompt.tokens, cached_tokens);
            }
            if fetches {
                let job = sequence.job.id;
                self.totals.fetch_tokens += u64::from(tokens);
                out.push(Event::Fetch { job, at: now, cached_tokens, blocks });
                self.fetching.insert(job, sequence);
                continue;
            }
            name_full_blocks(&mut self.pool, &mut sequence, tokens, block_tokens);
            batch.prompt_begins |= sequence.start(now, out);
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
    let computed = sequence.computed + tokens;
    let spoiled = sequence.spoiled;
    while sequence.named < computed / block_tokens {
        let index = sequence.named;
        if let Some(hash) = sequence.content(index, block_tokens) {
            pool.name(sequence.blocks[index as usize], hash, spoiled.then(|| hash.spoiled()));
        }
        sequence.named += 1;
    }
    let prompt = &sequence.job.prompt;
    if let Some(hash) = prompt.partial_block().filter(|_| sequence.kept && computed == prompt.tokens) {
        let content = if spoiled { hash.spoiled() } else { hash };
        pool.fill(sequence.blocks[prompt.blocks.len()], Some(content));
    }
}

fn count(batch: &mut Batch, sequence: &mut Sequence, tokens: u32) {
    sequence.scheduled = tokens;
    let later = sequence.generated > 0 || sequence.source == Source::Fetched;
    if later && tokens == 1 && sequence.computed + 1 == sequence.known() {
        batch.decodes += 1;
    } else {
        batch.prompt_tokens += tokens;
    }
}
