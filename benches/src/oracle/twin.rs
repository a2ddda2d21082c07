//! A twin of one engine: the same scheduler and cache, fed with the same requests at the same time.

use std::net::SocketAddr;
use std::time::Duration;

use engine::answer::Answer;
use engine::kv::BlockHash;
use engine::scheduler::{Event, Handoff, Job, JobId, Prompt, Scheduler};
use engine::timing::Moment;
use engine::{Config, Role};
use serde::Deserialize;

/// What an engine generates when a chat does not say how much.
const OUTPUT_TOKENS: u32 = 16;

/// One engine as the oracle sees it.
pub(super) struct Twin {
    pub(super) address: SocketAddr,
    config: Config,
    scheduler: Scheduler,
    next_job: u64,
    /// What the transfers under way will do here, and when.
    due: Vec<(Moment, Due)>,
    /// Requests whose prompt is being computed elsewhere, to be decoded here.
    pub(super) expected: u32,
}

/// What the end of a transfer does at one of its engines.
enum Due {
    /// The KV of a prompt is there.
    Fetched { job: JobId, contents: Vec<Option<BlockHash>> },
    /// What was kept of a prompt may go.
    Release { job: JobId },
}

/// What would become of a job.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Until its first token.
    pub(super) first_token: Duration,
    /// Until then, what its own prompt takes.
    pub(super) prompt: Duration,
}

impl Twin {
    pub(super) fn new(address: SocketAddr, config: Config) -> Self {
        let scheduler = Scheduler::new(config.scheduler, config.timing, config.limits);
        Self { address, config, scheduler, next_job: 0, due: Vec::new(), expected: 0 }
    }

    pub(super) fn role(&self) -> Role {
        self.config.transfer.role
    }

    /// Does all that is due by `now`.
    pub(super) fn advance(&mut self, now: Moment) {
        self.due.sort_by_key(|(at, _)| *at);
        let later = self.due.partition_point(|(at, _)| *at <= now);
        let mut events = Vec::new();
        for (at, due) in self.due.drain(..later) {
            match due {
                Due::Fetched { job, contents } => self.scheduler.fetched(at, job, &contents, &mut events),
                Due::Release { job } => drop(self.scheduler.release(at, job, &mut events)),
            }
        }
        self.scheduler.advance(now, &mut events);
    }

    /// This chat as a job of this engine; `None` for a body that it would refuse.
    pub(super) fn job(&self, body: &[u8]) -> Option<Job> {
        #[derive(Deserialize)]
        struct Asked {
            max_tokens: Option<u32>,
        }
        let asked: Asked = serde_json::from_slice(body).ok()?;
        let tokens = engine::chat_prompt(body)?;
        let root = BlockHash::root(&self.config.model, "");
        let prompt = Prompt::new(root, &tokens, self.config.limits.block_tokens, Answer::to(&tokens));
        let output_tokens = asked.max_tokens.unwrap_or(OUTPUT_TOKENS);
        Some(Job { id: JobId(self.next_job), prompt, output_tokens })
    }

    /// What becomes of `job` if it is submitted at `now`, which the twin has advanced to; `None` if it is refused.
    pub(super) fn ahead(&self, now: Moment, job: &Job) -> Option<Ahead> {
        let mut ahead = self.scheduler.clone();
        let mut events = Vec::new();
        let mut started = now;
        ahead.submit(now, job.clone(), &mut events).ok()?;
        loop {
            for event in events.drain(..) {
                match event {
                    Event::Started { job: of, at, .. } if of == job.id => started = at,
                    Event::Tokens { job: of, at, .. } if of == job.id => {
                        return Some(Ahead { first_token: at.since(now), prompt: at.since(started) });
                    }
                    _ => {}
                }
            }
            ahead.advance(ahead.next_at()?, &mut events);
        }
    }

    /// From the arrival of a decode leg here until its first token; `None` if it is refused.
    pub(super) fn fetched_ahead(&self, now: Moment, job: &Job) -> Option<Duration> {
        let transfer = transfer(&mut self.scheduler.clone(), &self.config, now, job)?;
        Some(transfer + self.config.timing.decode(self.decodes() + 1))
    }

    /// Requests that decode here or are about to.
    pub(super) fn decodes(&self) -> u32 {
        self.scheduler.gauges().running + self.expected
    }

    /// The share of their time, 0 to 1, that those who decode here lose while a prompt is computed.
    pub(super) fn slowdown(&self) -> f64 {
        1.0 - 1.0 / self.config.timing.beside_prefill
    }

    /// Takes a job, to be decoded here or elsewhere; its name.
    pub(super) fn take(&mut self, now: Moment, job: Job, handoff: Handoff) -> Option<JobId> {
        let (id, mut job) = (job.id, job);
        self.next_job += 1;
        if handoff == Handoff::Keep {
            job.output_tokens = 1;
        }
        self.scheduler.submit_leg(now, job, handoff, &mut Vec::new()).ok()?;
        Some(id)
    }

    /// Takes a job whose prompt was computed elsewhere; how long its transfer takes.
    pub(super) fn fetch(&mut self, now: Moment, job: &Job) -> Option<Duration> {
        self.next_job += 1;
        let transfer = transfer(&mut self.scheduler, &self.config, now, job)?;
        let contents =
            job.prompt.blocks.iter().copied().chain(job.prompt.partial_block()).map(Some).collect();
        self.due.push((now.plus(transfer), Due::Fetched { job: job.id, contents }));
        Some(transfer)
    }

    /// Lets go of what was kept of a finished job.
    pub(super) fn release(&mut self, at: Moment, job: JobId) {
        self.due.push((at, Due::Release { job }));
    }
}

/// Submits a job to be fetched; how long its transfer takes.
fn transfer(scheduler: &mut Scheduler, config: &Config, now: Moment, job: &Job) -> Option<Duration> {
    let mut events = Vec::new();
    scheduler.submit_leg(now, job.clone(), Handoff::Fetch, &mut events).ok()?;
    let cached_tokens = events.iter().find_map(|event| match event {
        Event::Fetch { job: of, cached_tokens, .. } if *of == job.id => Some(*cached_tokens),
        _ => None,
    })?;
    Some(config.transfer.time(job.prompt.tokens - cached_tokens))
}
