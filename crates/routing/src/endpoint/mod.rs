//! An endpoint: what was configured of it, where it stands, and the load it carries.

mod breaker;
mod head;
mod observed;
mod placed;
mod retention;
mod rows;
mod spec;
mod standing;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

pub use breaker::{Breaker, BreakerConfig, ProbeStart, Signal, StandingChange};
pub use observed::{Glance, OBSERVED_FRESH, OBSERVED_STALE, Observed, freshness};
pub use placed::PLACED_HALF_LIFE;
pub use retention::Inserted;
pub(crate) use retention::Retention;
pub use spec::{CONNECTOR_DEFAULT, EndpointSpec, Role, SpecError};
pub use standing::{Cause, Drained, Standing, Usable};

use crate::admission::{Places, QueuePace};
use crate::facts::{LoadRow, ObservedRow};
use crate::news::News;
use crate::prefix::Slot;
use crate::rates::{LearnedSpeed, Speed};
use crate::reserve::{Charges, PackedCharge};
use crate::{EndpointId, Moment, ReplicaId};

/// Placed tokens are told and compared in steps of this many: two replicas that differ by a few requests
/// still see the same.
pub const PLACED_QUANTUM: u32 = 256;

/// What an endpoint is known to serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Served {
    /// It has not said so yet.
    #[default]
    Unknown,
    /// It answers, but does not list models: taken to serve any.
    Any,
    /// These.
    Models(Vec<String>),
}

/// Whether an endpoint serves a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serves {
    /// It does.
    Yes,
    /// It does not.
    No,
    /// It has not said so yet.
    Unknown,
}

/// One addressable engine, with its load in atomics that every worker reads and writes.
///
/// A new configuration makes a new `Endpoint` around the same state, so charges survive it.
#[derive(Debug)]
pub struct Endpoint {
    /// The id, the same on every replica.
    pub id: EndpointId,
    /// What was configured.
    pub spec: EndpointSpec,
    /// Its number in this replica's prefix index.
    pub slot: Slot,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    news: News,
    charges: Charges,
    rows: rows::Rows,
    placed: placed::PlacedTokens,
    observation: observed::Observation,
    retention: Retention,
    queue_pace: QueuePace,
    places: Places,
    head: head::Head,
    breaker: Mutex<Breaker>,
    /// `Usable` of the breaker's standing, for readers in a hurry.
    usable: AtomicU8,
    /// Until when it asked to be left alone, in micros, for the same readers.
    paused_until: AtomicU64,
    /// The speed that decisions use, the same on every replica once they have heard each other: the bits of
    /// its figures.
    speed: [AtomicU32; 3],
    learned: Mutex<LearnedSpeed>,
    served: ArcSwap<Served>,
}

impl Endpoint {
    /// An endpoint that was just configured.
    pub(crate) fn new(
        spec: EndpointSpec,
        slot: Slot,
        breaker: BreakerConfig,
        speed: Speed,
        news: News,
        now: Moment,
    ) -> Self {
        let served =
            if spec.models.is_empty() { Served::Unknown } else { Served::Models(spec.models.clone()) };
        let endpoint = Self {
            id: spec.id(),
            slot,
            spec,
            state: Arc::new(State {
                news,
                charges: Charges::default(),
                rows: rows::Rows::default(),
                placed: placed::PlacedTokens::default(),
                observation: observed::Observation::default(),
                retention: Retention::default(),
                queue_pace: QueuePace::default(),
                places: Places::default(),
                head: head::Head::default(),
                breaker: Mutex::new(Breaker::new(breaker, now)),
                usable: AtomicU8::new(0),
                paused_until: AtomicU64::new(0),
                speed: Default::default(),
                learned: Mutex::new(LearnedSpeed::new(speed)),
                served: ArcSwap::from_pointee(served),
            }),
        };
        endpoint.set_speed(speed);
        endpoint.with_breaker(|_| ());
        endpoint
    }

    /// The same endpoint, configured otherwise.
    pub(crate) fn respecified(&self, spec: EndpointSpec) -> Self {
        if !spec.models.is_empty() {
            self.state.served.store(Arc::new(Served::Models(spec.models.clone())));
        }
        Self { id: self.id, slot: self.slot, spec, state: Arc::clone(&self.state) }
    }

    /// Rung when its load changed.
    pub(crate) fn news(&self) -> &News {
        &self.state.news
    }

    pub(crate) fn charges(&self) -> &Charges {
        &self.state.charges
    }

    /// Requests in flight here through all replicas.
    pub fn running(&self, now: Moment) -> u32 {
        self.own_running(now).saturating_add(self.state.rows.charge().running())
    }

    /// Requests in flight here through this replica.
    pub fn own_running(&self, now: Moment) -> u32 {
        self.state.charges.read(now).running()
    }

    /// Who of the other replicas runs how many requests here, by name; those that run none are left out.
    pub fn running_by_replica(&self) -> Vec<(ReplicaId, u32)> {
        self.state.rows.running_by_replica()
    }

    /// Everything that a decision reads of the load, at one moment.
    pub fn load(&self, now: Moment) -> Load {
        let own = self.state.charges.read(now);
        let others = self.state.rows.charge();
        let prefill_tokens = own.prefill_tokens() + others.prefill_tokens();
        Load {
            own,
            head_ms: self.state.head.look(self.prompts_done(), prefill_tokens == 0, now),
            running: own.running().saturating_add(others.running()),
            prefill_tokens,
            decode_tokens: self.state.charges.decode_tokens() + self.state.rows.decode_tokens(),
            glance: self.state.observation.glance(now),
            speed: self.speed(),
        }
    }

    /// Notes whether a prompt was done since the last look.
    fn look_at_head(&self, now: Moment) {
        let prefill_tokens =
            self.state.charges.read(now).prefill_tokens() + self.state.rows.charge().prefill_tokens();
        self.state.head.look(self.prompts_done(), prefill_tokens == 0, now);
    }

    fn prompts_done(&self) -> u32 {
        self.state.charges.prompts_done().wrapping_add(self.state.rows.prompts_done())
    }

    /// Prompt tokens placed here lately through all replicas, decayed, in whole steps of
    /// [`PLACED_QUANTUM`].
    pub fn placed_tokens(&self, now: Moment) -> u32 {
        quantised(self.state.placed.read(now) + self.state.rows.placed_tokens(now))
    }

    pub(crate) fn add_placed(&self, tokens: f64, now: Moment) {
        self.state.placed.add(tokens, now);
    }

    /// How long its engine keeps what is not asked for.
    pub(crate) fn retention(&self) -> &Retention {
        &self.state.retention
    }

    /// How its own queue moves.
    pub(crate) fn queue_pace(&self) -> &QueuePace {
        &self.state.queue_pace
    }

    /// How many requests it runs at a time.
    pub(crate) fn places(&self) -> &Places {
        &self.state.places
    }

    /// This replica's own row.
    pub(crate) fn own_row(&self, now: Moment) -> LoadRow {
        let own = self.state.charges.read(now);
        self.look_at_head(now);
        LoadRow {
            endpoint: self.id,
            running: own.running(),
            prefill_tokens: u32::try_from(own.prefill_tokens()).unwrap_or(u32::MAX),
            decode_tokens: u32::try_from(self.state.charges.decode_tokens()).unwrap_or(u32::MAX),
            placed_tokens: quantised(self.state.placed.read(now)),
        }
    }

    pub(crate) fn set_row(&self, origin: &ReplicaId, row: LoadRow, now: Moment) {
        // Before, to see whether it was idle; and after, to see whether something was done.
        self.look_at_head(now);
        self.state.rows.set(origin, row, now);
        self.look_at_head(now);
    }

    pub(crate) fn remove_row(&self, origin: &ReplicaId) {
        self.state.rows.remove(origin);
    }

    /// The last look at the engine's own figures, however old.
    pub fn observed(&self) -> Option<Observed> {
        self.state.observation.last()
    }

    /// Takes in a look at the engine; the engine's epoch if it turns out to have begun a new life.
    pub(crate) fn observe(&self, row: &ObservedRow, now: Moment) -> Option<u64> {
        self.state.observation.take(row, self.running(now), now)
    }

    /// Where it stands.
    pub fn standing(&self) -> Standing {
        self.state.breaker.lock().standing()
    }

    /// Whether new requests may go there.
    pub fn usable(&self) -> Usable {
        match self.state.usable.load(Ordering::Acquire) {
            0 => Usable::No,
            1 => Usable::IfNobodyElse,
            _ => Usable::Yes,
        }
    }

    /// The same at one moment: while it wants to be left alone, only when nobody else is left.
    pub fn usable_at(&self, now: Moment) -> Usable {
        let paused = now.micros() < self.state.paused_until.load(Ordering::Acquire);
        let usable = self.usable();
        if paused { usable.min(Usable::IfNobodyElse) } else { usable }
    }

    /// Runs `step` on its breaker and publishes where it stands after that.
    pub(crate) fn with_breaker<T>(&self, step: impl FnOnce(&mut Breaker) -> T) -> T {
        let mut breaker = self.state.breaker.lock();
        let result = step(&mut breaker);
        let usable = match breaker.standing().usable() {
            Usable::No => 0,
            Usable::IfNobodyElse => 1,
            Usable::Yes => 2,
        };
        self.state.usable.store(usable, Ordering::Release);
        self.state.paused_until.store(breaker.paused_until().micros(), Ordering::Release);
        result
    }

    /// Its speed as all replicas together have learned it, or the prior while nothing is known.
    pub fn speed(&self) -> Speed {
        let figure = |at: usize| f32::from_bits(self.state.speed[at].load(Ordering::Relaxed));
        Speed { prefill_us_per_token: figure(0), itl_us: figure(1), base_us: figure(2) }
    }

    /// How long a token takes it with what runs there now, in ms, as far as is known.
    pub fn token_ms(&self, now: Moment) -> f64 {
        let crowding = f64::from(self.running(now)) / crate::cost::DECODE_BATCH_DOUBLES;
        f64::from(self.speed().itl_us) / 1_000.0 * (1.0 + crowding)
    }

    pub(crate) fn set_speed(&self, speed: Speed) {
        let figures = [speed.prefill_us_per_token, speed.itl_us, speed.base_us];
        for (held, figure) in self.state.speed.iter().zip(figures) {
            held.store(figure.to_bits(), Ordering::Relaxed);
        }
    }

    /// Runs `step` on what this replica itself has learned of its speed.
    pub(crate) fn with_learned<T>(&self, step: impl FnOnce(&mut LearnedSpeed) -> T) -> T {
        step(&mut self.state.learned.lock())
    }

    /// What it serves, as configured or as it said itself.
    pub fn served(&self) -> Arc<Served> {
        self.state.served.load_full()
    }

    pub(crate) fn set_served(&self, served: Served) {
        self.state.served.store(Arc::new(served));
    }

    /// Whether it said by name that it serves `model`.
    pub fn lists(&self, model: &str) -> bool {
        matches!(&**self.state.served.load(), Served::Models(models) if models.iter().any(|each| each == model))
    }

    /// Whether it serves `model`.
    pub fn serves(&self, model: &str) -> Serves {
        match &**self.state.served.load() {
            Served::Unknown => Serves::Unknown,
            Served::Any => Serves::Yes,
            Served::Models(models) if models.iter().any(|served| served == model) => Serves::Yes,
            Served::Models(_) => Serves::No,
        }
    }
}

fn quantised(tokens: f64) -> u32 {
    let steps = (tokens / f64::from(PLACED_QUANTUM) + 0.5).min(f64::from(u32::MAX / PLACED_QUANTUM));
    steps as u32 * PLACED_QUANTUM
}

/// The load of an endpoint at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// This replica's own charge: what a reservation must find unchanged.
    pub own: PackedCharge,
    /// Requests in flight through all replicas.
    pub running: u32,
    /// Uncached prompt tokens of the requests without a first token, through all replicas.
    pub prefill_tokens: u64,
    /// Output tokens expected of the requests that decode, through all replicas.
    pub decode_tokens: u64,
    /// For how long the engine is known to be at the first of those prompts, in ms.
    pub head_ms: f64,
    /// What the engine last said of itself.
    pub glance: Glance,
    /// How fast it is.
    pub speed: Speed,
}

impl Load {
    /// What is in flight through all replicas.
    pub(crate) const fn in_flight(&self) -> PackedCharge {
        PackedCharge::new(self.running, self.prefill_tokens)
    }

    /// Leaves out a request of another replica that is known to be over, with at most these tokens.
    pub(crate) fn without_one(&mut self, prefill_tokens: u32, output_tokens: u32) {
        let own = (self.own.running(), self.own.prefill_tokens());
        self.running = self.running.saturating_sub(1).max(own.0);
        self.prefill_tokens = self.prefill_tokens.saturating_sub(u64::from(prefill_tokens)).max(own.1);
        self.decode_tokens = self.decode_tokens.saturating_sub(u64::from(output_tokens));
    }
}
