//! One engine: the model's scheduler, with what the simulation counts of it.

use engine_model::scheduler::{Event, Gauges, Job, JobId, Refused, Scheduler};
use engine_model::timing::Moment;

use crate::scenario::EngineSpec;
use crate::workload::Asked;

pub(crate) struct Engine {
    scheduler: Scheduler,
    /// When it is to be looked at next.
    wakes_at: Option<Moment>,
    /// Requests that have not had their last token.
    pub(crate) in_flight: usize,
    /// Requests it was sent, and prompt tokens that it computed, of those that figures are of.
    pub(crate) served: usize,
    pub(crate) computed_tokens: u64,
}

impl Engine {
    pub(crate) fn new(spec: &EngineSpec) -> Self {
        Self {
            scheduler: Scheduler::new(spec.scheduler, spec.timing, spec.limits),
            wakes_at: None,
            in_flight: 0,
            served: 0,
            computed_tokens: 0,
        }
    }

    fn job(number: usize, asked: &Asked) -> Job {
        Job { id: JobId(number as u64), prompt: asked.prompt.clone(), output_tokens: asked.output_tokens }
    }

    pub(crate) fn submit(
        &mut self,
        number: usize,
        asked: &Asked,
        now: Moment,
        out: &mut Vec<Event>,
    ) -> Result<(), Refused> {
        self.scheduler.submit(now, Self::job(number, asked), out)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Does what is due at `now`, unless it was put off since.
    pub(crate) fn wake(&mut self, now: Moment, out: &mut Vec<Event>) {
        if self.wakes_at == Some(now) {
            self.wakes_at = None;
            self.scheduler.advance(now, out);
        }
    }

    /// When to wake it, if that has changed.
    pub(crate) fn next_wake(&mut self) -> Option<Moment> {
        let next = self.scheduler.next_at();
        if next == self.wakes_at {
            return None;
        }
        self.wakes_at = next;
        next
    }

    pub(crate) fn gauges(&self) -> Gauges {
        self.scheduler.gauges()
    }

    /// When a request that came now would have its first token: what an all-knowing router compares. `None` if it
    /// would be refused.
    pub(crate) fn first_token_at(&self, number: usize, asked: &Asked, now: Moment) -> Option<Moment> {
        self.scheduler.first_token_at(now, &Self::job(number, asked))
    }
}
