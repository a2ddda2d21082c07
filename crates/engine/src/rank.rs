//! One data-parallel rank: a scheduler behind a lock, a task that wakes when something is due, and the flights
//! through which waiting requests watch their progress.
//!
//! Nothing is queued between the scheduler and a request: the text of an answer follows from the prompt, so a
//! flight only counts how many tokens are ready, and a slow reader costs no memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::Config;
use crate::measures::Measures;
use crate::scheduler::{Event, Gauges, Job, JobId, Prompt, Refused, Scheduler, Totals};
use crate::timing::Moment;

/// How a sequence ends when nothing goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Finish {
    /// The request's limit, or the model's.
    Length,
    /// The answer is over.
    Stop,
}

/// A sequence to compute.
pub(crate) struct Work {
    pub(crate) prompt: Prompt,
    pub(crate) output_tokens: u32,
    pub(crate) finish: Finish,
}

/// Where a sequence stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Phase {
    Under,
    Complete,
    /// The engine ended it, as on SIGTERM.
    Aborted,
    /// The engine's process is gone.
    Cut,
}

/// What is known of one sequence of a flight.
#[derive(Default)]
struct Progress {
    ready: AtomicU32,
    cached: AtomicU32,
    phase: AtomicU8,
}

/// The sequences of one request, as the connection sees them.
pub(crate) struct Flight {
    waker: AtomicWaker,
    sequences: Box<[Progress]>,
}

impl Flight {
    /// Wakes the task of `cx` at the next progress of any sequence.
    pub(crate) fn watch(&self, cx: &Context<'_>) {
        self.waker.register(cx.waker());
    }

    /// Tokens of a sequence that have come out, and where it stands. The phase is read first: tokens that came
    /// out before it ended are never missed.
    pub(crate) fn progress(&self, sequence: usize) -> (Phase, u32) {
        let progress = &self.sequences[sequence];
        let phase = match progress.phase.load(Ordering::Acquire) {
            phase if phase == Phase::Complete as u8 => Phase::Complete,
            phase if phase == Phase::Aborted as u8 => Phase::Aborted,
            phase if phase == Phase::Cut as u8 => Phase::Cut,
            _ => Phase::Under,
        };
        (phase, progress.ready.load(Ordering::Acquire))
    }

    /// Prompt tokens of a sequence found in the cache.
    pub(crate) fn cached_tokens(&self, sequence: usize) -> u32 {
        self.sequences[sequence].cached.load(Ordering::Acquire)
    }
}

/// A request's hold on its rank: dropping it ends what still runs and frees all of it.
pub(crate) struct Seat {
    rank: Arc<Rank>,
    pub(crate) flight: Arc<Flight>,
    first: JobId,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let under = |sequence: &usize| self.flight.progress(*sequence).0 == Phase::Under;
        if (0..self.flight.sequences.len()).any(|sequence| under(&sequence)) {
            self.rank.cancel(self.first, self.flight.sequences.len());
        }
    }
}

struct Live {
    flight: Arc<Flight>,
    sequence: usize,
    finish: Finish,
    prompt_tokens: u32,
    generated: u32,
    arrived: Moment,
    started: Moment,
    last_token: Moment,
}

struct State {
    scheduler: Scheduler,
    live: HashMap<JobId, Live>,
    next_job: u64,
    events: Vec<Event>,
    measures: Measures,
    /// When the driver means to wake; `None` while it waits to be told.
    wakes_at: Option<Moment>,
}

/// See the module.
pub(crate) struct Rank {
    began: Instant,
    config: Arc<Config>,
    state: Mutex<State>,
    changed: Notify,
}

/// What a rank shows of itself.
pub(crate) struct Snapshot {
    pub(crate) gauges: Gauges,
    pub(crate) totals: Totals,
    pub(crate) measures: Measures,
}

impl Rank {
    pub(crate) fn new(config: Arc<Config>) -> Self {
        let state = State {
            scheduler: Scheduler::new(config.scheduler, config.timing, config.limits),
            live: HashMap::new(),
            next_job: 0,
            events: Vec::new(),
            measures: Measures::new(config.model_tokens_max),
            wakes_at: None,
        };
        Self { began: Instant::now(), config, state: Mutex::new(state), changed: Notify::new() }
    }

    fn now(&self) -> Moment {
        Moment::default().plus(self.began.elapsed())
    }

    /// Takes the sequences of one request, all or none.
    pub(crate) fn submit(self: &Arc<Self>, work: Vec<Work>) -> Result<Seat, Refused> {
        let now = self.now();
        let flight = Arc::new(Flight {
            waker: AtomicWaker::new(),
            sequences: work.iter().map(|_| Progress::default()).collect(),
        });
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let first = JobId(state.next_job);
        for (sequence, work) in work.into_iter().enumerate() {
            let id = JobId(state.next_job);
            state.next_job += 1;
            let live = Live {
                flight: Arc::clone(&flight),
                sequence,
                finish: work.finish,
                prompt_tokens: work.prompt.tokens,
                generated: 0,
                arrived: now,
                started: now,
                last_token: now,
            };
            state.live.insert(id, live);
            let job = Job { id, prompt: work.prompt, output_tokens: work.output_tokens };
            if let Err(refused) = state.scheduler.submit(now, job, &mut state.events) {
                state.live.remove(&id);
                for taken in first.0..id.0 {
                    state.live.remove(&JobId(taken));
                    state.scheduler.cancel(now, JobId(taken), &mut state.events);
                }
                state.measures.rejections += u64::from(refused == Refused::QueueFull);
                state.deliver();
                return Err(refused);
            }
        }
        state.deliver();
        let sooner = match (state.scheduler.next_at(), state.wakes_at) {
            (Some(next), Some(wakes)) => next < wakes,
            (Some(_), None) => true,
            (None, _) => false,
        };
        drop(guard);
        if sooner {
            self.changed.notify_one();
        }
        Ok(Seat { rank: Arc::clone(self), flight, first })
    }

    fn cancel(&self, first: JobId, count: usize) {
        let now = self.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        for id in (first.0..).take(count).map(JobId) {
            if let Some(live) = state.live.remove(&id) {
                state.measures.aborted(&live_record(&live), now);
                state.scheduler.cancel(now, id, &mut state.events);
            }
        }
        state.deliver();
        drop(guard);
        // A cancelled prefill lets the next one begin now, sooner than the driver expects.
        self.changed.notify_one();
    }

    /// Ends everything under way in this phase.
    pub(crate) fn end_all(&self, phase: Phase) {
        let now = self.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        for (id, live) in std::mem::take(&mut state.live) {
            state.scheduler.cancel(now, id, &mut state.events);
            state.measures.aborted(&live_record(&live), now);
            live.flight.sequences[live.sequence].phase.store(phase as u8, Ordering::Release);
            live.flight.waker.wake();
        }
        state.events.clear();
    }

    /// Starts over as a new process would: nothing cached, nothing counted, what was under way cut.
    pub(crate) fn restart(&self) {
        self.end_all(Phase::Cut);
        let mut state = self.state.lock();
        state.scheduler = Scheduler::new(self.config.scheduler, self.config.timing, self.config.limits);
        state.measures = Measures::new(self.config.model_tokens_max);
    }

    /// Empties the prefix cache.
    pub(crate) fn clear_cache(&self) {
        self.state.lock().scheduler.clear_cache();
    }

    /// Waiting and running sequences now.
    pub(crate) fn gauges(&self) -> Gauges {
        let now = self.now();
        let mut guard = self.state.lock();
        guard.advance(now);
        guard.scheduler.gauges()
    }

    /// Everything that is measured.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let now = self.now();
        let mut state = self.state.lock();
        state.advance(now);
        Snapshot {
            gauges: state.scheduler.gauges(),
            totals: state.scheduler.totals(),
            measures: state.measures.clone(),
        }
    }

    /// Advances the scheduler whenever something is due, for ever.
    pub(crate) async fn drive(&self) {
        loop {
            let next = {
                let now = self.now();
                let mut state = self.state.lock();
                state.advance(now);
                state.wakes_at = state.scheduler.next_at();
                state.wakes_at
            };
            match next {
                Some(at) => {
                    let at = self.began + std::time::Duration::from_nanos(at.0);
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = self.changed.notified() => {}
                    }
                }
                None => self.changed.notified().await,
            }
        }
    }
}

impl State {
    fn advance(&mut self, now: Moment) {
        self.scheduler.advance(now, &mut self.events);
        self.deliver();
    }

    /// Hands what happened to the flights and the measures.
    fn deliver(&mut self) {
        for event in self.events.drain(..) {
            match event {
                Event::Started { job, at, cached_tokens } => {
                    let Some(live) = self.live.get_mut(&job) else { continue };
                    live.started = at;
                    live.flight.sequences[live.sequence].cached.store(cached_tokens, Ordering::Release);
                    self.measures.started(live.prompt_tokens, cached_tokens, at.since(live.arrived));
                }
                Event::Tokens { job, at, count, last } => {
                    let Some(live) = self.live.get_mut(&job) else { continue };
                    if live.generated == 0 {
                        self.measures.first_token(at.since(live.arrived), at.since(live.started));
                    } else {
                        self.measures.inter_token(at.since(live.last_token));
                    }
                    live.generated += count;
                    live.last_token = at;
                    self.measures.generated(count);
                    let progress = &live.flight.sequences[live.sequence];
                    progress.ready.store(live.generated, Ordering::Release);
                    if last {
                        progress.phase.store(Phase::Complete as u8, Ordering::Release);
                    }
                    live.flight.waker.wake();
                    if last && let Some(live) = self.live.remove(&job) {
                        self.measures.finished(&live_record(&live), live.finish, at);
                    }
                }
            }
        }
    }
}

/// What is measured of a sequence at its end.
pub(crate) struct Ended {
    pub(crate) prompt_tokens: u32,
    pub(crate) generated: u32,
    pub(crate) arrived: Moment,
    pub(crate) started: Moment,
}

fn live_record(live: &Live) -> Ended {
    Ended {
        prompt_tokens: live.prompt_tokens,
        generated: live.generated,
        arrived: live.arrived,
        started: live.started,
    }
}
