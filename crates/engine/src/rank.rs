//! One data-parallel rank: a scheduler behind a lock, a task that wakes when something is due, and the flights
//! through which waiting requests watch their progress.
//!
//! Nothing is queued between the scheduler and a request: the text of an answer follows from the prompt, so a
//! flight only counts how many tokens are ready, and a slow reader costs no memory.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use crate::config::Config;
use crate::flight::{Finish, Flight, Leg, Phase, Work};
use crate::kv::BlockHash;
use crate::measures::Measures;
use crate::scheduler::{Event, Gauges, Handoff, Job, JobId, Refused, Scheduler, Totals};
use crate::timing::Moment;
use crate::transfer::courier::{Errand, KnownEngines, Transferred};
use crate::transfer::pinned::{Pinned, Released};

/// A request's hold on its rank: dropping it ends what still runs and frees all of it.
pub(crate) struct Seat {
    rank: Arc<Rank>,
    pub(crate) flight: Arc<Flight>,
    first: JobId,
}

impl Seat {
    /// The name that a sequence's blocks are kept under.
    pub(crate) fn kept_as(&self, sequence: usize) -> Option<&str> {
        match self.flight.leg(sequence) {
            Leg::Prefill { kept_as } => Some(kept_as),
            Leg::Whole | Leg::Decode { .. } => None,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let under = |sequence: &usize| self.flight.progress(*sequence).0 == Phase::Under;
        if (0..self.flight.sequences()).any(|sequence| under(&sequence)) {
            self.rank.cancel(self.first, self.flight.sequences());
        }
    }
}

struct Live {
    flight: Arc<Flight>,
    sequence: usize,
    finish: Finish,
    /// Whether its KV has been asked for.
    fetching: bool,
    prompt_tokens: u32,
    generated: u32,
    arrived: Moment,
    started: Moment,
    last_token: Moment,
}

impl Live {
    fn leg(&self) -> &Leg {
        self.flight.leg(self.sequence)
    }

    fn end(&self, phase: Phase) {
        self.flight.end(self.sequence, phase);
    }
}

struct State {
    scheduler: Scheduler,
    live: HashMap<JobId, Live>,
    next_job: u64,
    events: Vec<Event>,
    measures: Measures,
    pinned: Pinned,
    known_engines: KnownEngines,
    engine_id: String,
    errands: UnboundedSender<Errand>,
    pin_max: Duration,
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
    /// A rank by this name, and the errands that a [courier](crate::transfer::courier) is to do for it.
    pub(crate) fn new(config: Arc<Config>, engine_id: String) -> (Self, UnboundedReceiver<Errand>) {
        // Bounded by the sequences under way: each sends two at most.
        let (errands, received) = unbounded_channel();
        let state = State {
            scheduler: Scheduler::new(config.scheduler, config.timing, config.limits),
            live: HashMap::new(),
            next_job: 0,
            events: Vec::new(),
            measures: Measures::new(config.model_tokens_max),
            pinned: Pinned::default(),
            known_engines: KnownEngines::new(),
            engine_id,
            errands,
            pin_max: config.transfer.pin_max,
            wakes_at: None,
        };
        (Self { began: Instant::now(), config, state: Mutex::new(state), changed: Notify::new() }, received)
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    fn now(&self) -> Moment {
        Moment::default().plus(self.began.elapsed())
    }

    /// Takes the sequences of one request, all or none.
    pub(crate) fn submit(self: &Arc<Self>, work: Vec<Work>) -> Result<Seat, Refused> {
        let now = self.now();
        let flight = Arc::new(Flight::new(work.iter().map(|work| &work.leg)));
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
                fetching: false,
                prompt_tokens: work.prompt.tokens,
                generated: 0,
                arrived: now,
                started: now,
                last_token: now,
            };
            let handoff = match work.leg {
                Leg::Whole => Handoff::None,
                Leg::Prefill { .. } => Handoff::Keep,
                Leg::Decode { .. } => Handoff::Fetch,
            };
            state.live.insert(id, live);
            let job = Job { id, prompt: work.prompt, output_tokens: work.output_tokens };
            if let Err(refused) = state.scheduler.submit_leg(now, job, handoff, &mut state.events) {
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
        let sooner = match (state.due_at(), state.wakes_at) {
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
                if let Leg::Decode { source } = live.leg() {
                    let errand = if live.fetching {
                        Errand::Drop { job: id }
                    } else {
                        Errand::Forgo { source: Arc::clone(source) }
                    };
                    state.send(errand);
                }
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
            live.end(phase);
        }
        state.events.clear();
    }

    /// Starts over as a new process would: nothing cached, nothing counted, what was under way ended in this phase.
    pub(crate) fn restart(&self, engine_id: String, phase: Phase) {
        self.end_all(phase);
        let mut state = self.state.lock();
        state.scheduler = Scheduler::new(self.config.scheduler, self.config.timing, self.config.limits);
        state.measures = Measures::new(self.config.model_tokens_max);
        state.pinned = Pinned::default();
        state.known_engines.clear();
        state.engine_id = engine_id;
        state.send(Errand::DropAll);
    }

    /// The name that decode engines know it by.
    pub(crate) fn engine_id(&self) -> String {
        self.state.lock().engine_id.clone()
    }

    /// Whether this is the name it has since it last started.
    pub(crate) fn is_engine(&self, id: &str) -> bool {
        self.state.lock().engine_id == id
    }

    /// Where an engine was met before.
    pub(crate) fn known_engine(&self, id: &str) -> Option<SocketAddr> {
        self.state.lock().known_engines.get(id).copied()
    }

    /// Remembers where an engine was met, for so many of them.
    pub(crate) fn know_engine(&self, id: &str, address: SocketAddr, max: usize) {
        let mut state = self.state.lock();
        if state.known_engines.len() >= max {
            state.known_engines.clear();
        }
        state.known_engines.insert(id.to_owned(), address);
    }

    /// What blocks hold, by their numbers.
    pub(crate) fn contents(&self, blocks: &[u32]) -> Vec<Option<BlockHash>> {
        self.advanced().scheduler.contents(blocks)
    }

    /// Frees the blocks that are kept under a name; whether there were any.
    pub(crate) fn release(&self, kept_as: &str, why: Released) -> bool {
        let now = self.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.advance(now);
        let Some(job) = state.pinned.remove(kept_as) else { return false };
        state.scheduler.release(now, job, &mut state.events);
        state.measures.kv.release(why);
        state.deliver();
        drop(guard);
        self.changed.notify_one();
        true
    }

    /// The KV of a job has come.
    pub(crate) fn fetched(&self, job: JobId, contents: &[Option<BlockHash>], transferred: Transferred) {
        let now = self.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.advance(now);
        state.measures.kv.transferred(&transferred, self.config.transfer.token_bytes);
        if let Some(live) = state.live.get(&job) {
            state.measures.kv.fetched_tokens += u64::from(transferred.tokens.min(live.prompt_tokens));
            state.scheduler.fetched(now, job, contents, &mut state.events);
            state.deliver();
        }
        drop(guard);
        self.changed.notify_one();
    }

    /// The KV of a job does not come: it ends.
    pub(crate) fn fetch_failed(&self, job: JobId) {
        let now = self.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.advance(now);
        state.measures.kv.transfers_failed += 1;
        if let Some(live) = state.live.remove(&job) {
            state.scheduler.cancel(now, job, &mut state.events);
            state.measures.failed(&live_record(&live), now);
            live.end(Phase::Failed);
            state.deliver();
        }
        drop(guard);
        self.changed.notify_one();
    }

    /// A prefill engine could not be told that its blocks are not needed.
    pub(crate) fn notification_failed(&self) {
        self.state.lock().measures.kv.notifications_failed += 1;
    }

    fn advanced(&self) -> MutexGuard<'_, State> {
        let now = self.now();
        let mut state = self.state.lock();
        state.advance(now);
        state
    }

    /// Empties the prefix cache.
    pub(crate) fn clear_cache(&self) {
        self.state.lock().scheduler.clear_cache();
    }

    /// Waiting and running sequences now.
    pub(crate) fn gauges(&self) -> Gauges {
        self.advanced().scheduler.gauges()
    }

    /// Everything that is measured.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let state = self.advanced();
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
                state.wakes_at = state.due_at();
                state.wakes_at
            };
            match next {
                Some(at) => {
                    let at = self.began + Duration::from_nanos(at.0);
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
        while self.pinned.next_at().is_some_and(|at| at <= now) {
            let Some(job) = self.pinned.expire(now) else { continue };
            self.scheduler.release(now, job, &mut self.events);
            self.measures.kv.release(Released::Expired);
            self.deliver();
        }
    }

    /// When something is due next.
    fn due_at(&self) -> Option<Moment> {
        [self.scheduler.next_at(), self.pinned.next_at()].into_iter().flatten().min()
    }

    fn send(&self, errand: Errand) {
        // Without a courier the engine is being dropped.
        let _ = self.errands.send(errand);
    }

    /// Hands what happened to the flights and the measures.
    fn deliver(&mut self) {
        for event in self.events.drain(..) {
            match event {
                Event::Fetch { job, blocks, cached_tokens, .. } => {
                    let Some(live) = self.live.get_mut(&job) else { continue };
                    live.fetching = true;
                    let Leg::Decode { source } = live.leg() else { continue };
                    let (source, tokens) = (Arc::clone(source), live.prompt_tokens - cached_tokens);
                    // Without a courier the engine is being dropped.
                    let _ = self.errands.send(Errand::Fetch { job, source, blocks, tokens });
                }
                Event::Started { job, at, cached_tokens, spoiled } => {
                    let Some(live) = self.live.get_mut(&job) else { continue };
                    live.started = at;
                    live.flight.started(live.sequence, cached_tokens, spoiled);
                    self.measures.kv.spoiled += u64::from(spoiled);
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
                    if last
                        && let Leg::Prefill { kept_as } = live.leg()
                        && let Some(blocks) = self.scheduler.kept(job)
                    {
                        self.pinned.insert(Arc::clone(kept_as), job, at.plus(self.pin_max));
                        self.measures.kv.staged += 1;
                        live.flight.keep(live.sequence, blocks);
                    }
                    let phase = if last { Phase::Complete } else { Phase::Under };
                    live.flight.said(live.sequence, live.generated, phase);
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
