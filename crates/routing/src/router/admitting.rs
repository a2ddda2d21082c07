//! Admitting requests: straight to an endpoint while there is room, else into the queue and out of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::choosing::{Asked, model_key};
use super::facts::Origins;
use super::{Active, Rng, Router};
use crate::Moment;
use crate::admission::{Claim, Entry, Full, Gate, Next, Patience, Queue, Service, Shed, Ticket, number_of};
use crate::candidates::Scope;
use crate::decision::{Chosen, Refusal};
use crate::facts::{FULL_MAX, FullRow, HEADS_MAX, HELD_MAX, QueueRow};
use crate::rates::Speed;
use crate::request::RequestShape;

/// What a request that is refused at once for want of a queue is told to wait, in ms.
const RETRY_AFTER_MS: u64 = 1_000;

/// How long it takes until the others have heard of a request that waits and this one of theirs: until then a session
/// that has something in flight is given nothing more. 8 ms: some pushes; queues are looked through every 10.
const HEARD_WITHIN: Duration = Duration::from_millis(8);

/// A request that wants to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Applicant<'a> {
    /// What it is.
    pub shape: &'a RequestShape,
    /// When it arrived.
    pub arrived: Moment,
    /// Bytes that are kept for it while it waits.
    pub bytes: u64,
}

/// What became of an applicant.
#[derive(Debug)]
pub enum Admission {
    /// It is sent.
    Chosen(Box<Chosen>),
    /// It waits. Its [`Call`] will be made, once, unless it [leaves](Router::leave) before.
    Waits {
        /// Its place.
        ticket: Ticket,
        /// What it is.
        shape: Arc<RequestShape>,
    },
    /// It is refused.
    Shed {
        /// Why.
        reason: Shed,
        /// What to tell it to wait, in ms.
        retry_after_ms: u64,
    },
}

/// What becomes of a request that has waited.
#[derive(Debug)]
pub enum Fate {
    /// It is sent.
    Chosen(Box<Chosen>),
    /// It is refused.
    Shed {
        /// Why.
        reason: Shed,
        /// What to tell it to wait, in ms.
        retry_after_ms: u64,
    },
    /// Nobody can serve it any more.
    Refused(Refusal),
}

/// How one that waits is told of its fate. Gives the fate back if nobody is there to hear it. It must return at once.
pub type Call = Box<dyn FnOnce(Fate) -> Result<(), Fate> + Send>;

/// Figures of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests that wait.
    pub requests: usize,
    /// Bytes that are kept for them.
    pub bytes: u64,
}

/// Those that wait at this replica, and what others have said of their queues.
#[derive(Default)]
pub(super) struct Line {
    waiting: Arc<AtomicUsize>,
    bytes: AtomicU64,
    places: Mutex<Places>,
    /// Requests that wait at other replicas.
    elsewhere: AtomicU32,
    /// What of that goes first.
    claims: ArcSwap<Vec<Claim>>,
}

#[derive(Default)]
struct Places {
    queue: Queue,
    held: HashMap<Ticket, (Arc<RequestShape>, Call)>,
    patience: Patience,
}

impl Places {
    /// Takes one out, to be told of its fate.
    fn take(&mut self, ticket: Ticket) -> Option<(Arc<RequestShape>, Call)> {
        self.queue.leave(ticket);
        self.held.remove(&ticket)
    }
}

/// Fates that are told once no lock is held.
type Fates = Vec<(Arc<RequestShape>, Call, Fate)>;

impl Router {
    /// Sends a request to an endpoint as [`Router::choose`] does, if nobody waits before it and an endpoint has room;
    /// else it waits, with `call` to be told of what becomes of it, or is refused.
    ///
    /// # Errors
    /// Why no endpoint can be chosen however long it waits.
    pub fn admit(
        &self,
        applicant: Applicant<'_>,
        now: Moment,
        rng: &mut Rng,
        call: impl FnOnce() -> Call,
    ) -> Result<Admission, Refusal> {
        let Applicant { shape, arrived, bytes } = applicant;
        let active = self.active.load();
        let settings = active.settings.admission;
        self.mix.seen(shape.priority, now);
        let nobody_waits = self.line.waiting.load(Ordering::Acquire) == 0
            && self.line.elsewhere.load(Ordering::Relaxed) == 0;
        if nobody_waits || settings.queue_requests_max == 0 {
            let mut gate = Gate::of_newcomer(settings.running_max, self.ttft_ms(&active, now));
            if settings.queue_requests_max == 0 {
                gate.wait_ms_max = f64::INFINITY;
            }
            match self.choose_through(shape, gate, now, rng) {
                Ok(chosen) => return Ok(Admission::Chosen(Box::new(chosen))),
                Err(Refusal::Overloaded { .. }) if settings.queue_requests_max == 0 => {
                    return Ok(Admission::Shed { reason: Shed::QueueFull, retry_after_ms: RETRY_AFTER_MS });
                }
                Err(Refusal::Overloaded { .. }) => {}
                Err(refusal) => return Err(refusal),
            }
        }
        let entry = Entry {
            arrived,
            priority: shape.priority,
            slo: shape.slo,
            output_tokens: shape.output_tokens,
            service: self.service(shape, &active),
            session: shape.session,
            bytes,
            pool: self.pool(shape, now),
        };
        let mut fates = Fates::new();
        let joined = {
            let places = &mut *self.line.places.lock();
            let retry_after_ms = places.queue.retry_after_ms(now);
            match places.queue.join(entry, &settings, now) {
                Err(reason) => Err(Admission::Shed { reason, retry_after_ms }),
                Ok((ticket, pushed_out)) => {
                    for out in pushed_out {
                        let told = places.held.remove(&out);
                        let shed = Fate::Shed { reason: Shed::PushedOut, retry_after_ms };
                        fates.extend(told.map(|(shape, call)| (shape, call, shed)));
                    }
                    let shape = Arc::new(shape.clone());
                    places.held.insert(ticket, (Arc::clone(&shape), call()));
                    self.line.publish(&places.queue);
                    Ok((ticket, shape))
                }
            }
        };
        self.tell_fates(fates);
        match joined {
            Err(shed) => Ok(shed),
            Ok((ticket, shape)) => {
                // It may well be the only one of its kind.
                self.serve_queue(now, rng);
                self.news.ring();
                Ok(Admission::Waits { ticket, shape })
            }
        }
    }

    /// One that waited is gone; whether it waited still.
    pub fn leave(&self, ticket: Ticket) -> bool {
        let places = &mut *self.line.places.lock();
        let waited = places.take(ticket).is_some();
        self.line.publish(&places.queue);
        if waited {
            self.news.ring();
        }
        waited
    }

    /// Sends those that wait to endpoints, as far as there is room, and refuses those whose time is up. To be called
    /// when there may be room, and at the latest at the moment that it returns, if it does.
    pub fn serve_queue(&self, now: Moment, rng: &mut Rng) -> Option<Moment> {
        if self.line.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let settings = self.active.load().settings.admission;
        let mut fates = Fates::new();
        let next = {
            let places = &mut *self.line.places.lock();
            let retry_after_ms = places.queue.retry_after_ms(now);
            for ticket in places.queue.expire(settings.queue_wait_max, now) {
                let told = places.held.remove(&ticket);
                let shed = Fate::Shed { reason: Shed::WaitedTooLong, retry_after_ms };
                fates.extend(told.map(|(shape, call)| (shape, call, shed)));
            }
            self.fill(places, &mut fates, now, rng);
            self.line.publish(&places.queue);
            places.queue.next_expiry(settings.queue_wait_max)
        };
        self.tell_fates(fates);
        next
    }

    /// Sends as many as there is room for, each in its turn.
    fn fill(&self, places: &mut Places, fates: &mut Fates, now: Moment, rng: &mut Rng) {
        let active = self.active.load();
        let running_max = active.settings.admission.running_max;
        let ttft_ms = self.ttft_ms(&active, now);
        let mut claims = self.line.claims.load().to_vec();
        places.patience.hear(&claims);
        claims.retain(|claim| places.patience.counts(claim));
        let mut without_room: Vec<u64> = Vec::new();
        let own = number_of(&self.own);
        let alone = self.replicas.load().members().len() < 2;
        while let Some(next) = places.queue.next(&self.holdings, &without_room, &claims, own, now) {
            let Next { ticket, pool, before, .. } = next;
            if next.is_another && !alone && now.since(next.since) < HEARD_WITHIN {
                // Another replica may be about to give its session the same place.
                without_room.push(pool);
                continue;
            }
            let Some(shape) = places.held.get(&ticket).map(|(shape, _)| Arc::clone(shape)) else {
                places.queue.leave(ticket);
                continue;
            };
            let gate = Gate { before, ..Gate::of_waiting(running_max, ttft_ms) };
            let fate = match self.choose_through(&shape, gate, now, rng) {
                Ok(chosen) => Fate::Chosen(Box::new(chosen)),
                Err(Refusal::Overloaded { .. }) if self.is_left_unused(&shape, next, places, now, rng) => {
                    claims.retain(|claim| places.patience.counts(claim));
                    continue;
                }
                Err(Refusal::Overloaded { .. }) => {
                    without_room.push(pool);
                    continue;
                }
                Err(refusal) => Fate::Refused(refusal),
            };
            places.patience.reset(pool);
            let told = places.take(ticket);
            fates.extend(told.map(|(shape, call)| (shape, call, fate)));
        }
    }

    /// Whether there is room that the first of those who go before has left unused for too long.
    fn is_left_unused(
        &self,
        shape: &RequestShape,
        next: Next,
        places: &mut Places,
        now: Moment,
        rng: &mut Rng,
    ) -> bool {
        let Some(first) = next.first else { return false };
        let active = self.active.load();
        let gate = Gate::of_waiting(active.settings.admission.running_max, self.ttft_ms(&active, now));
        if self.decide(&Asked { shape, tried: &[], charged: None, gate: Some(gate) }, now, rng).is_err() {
            places.patience.reset(next.pool);
            return false;
        }
        places.patience.is_over(next.pool, first, now)
    }

    /// Calls `waiter` whenever there may be room while something waits. It is called on the request path and must
    /// return at once.
    pub fn on_room(&self, waiter: impl Fn() + Send + Sync + 'static) {
        let waiting = Arc::clone(&self.line.waiting);
        self.news.wait(move || {
            if waiting.load(Ordering::Relaxed) > 0 {
                waiter();
            }
        });
    }

    /// Figures of the queue.
    pub fn queue_stats(&self) -> QueueStats {
        QueueStats {
            requests: self.line.waiting.load(Ordering::Relaxed),
            bytes: self.line.bytes.load(Ordering::Relaxed),
        }
    }

    /// Requests that wait at other replicas, as they last said.
    pub fn queued_elsewhere(&self) -> u32 {
        self.line.elsewhere.load(Ordering::Relaxed)
    }

    /// Whether a request like this would have to wait now.
    pub fn would_wait(&self, shape: &RequestShape, now: Moment, rng: &mut Rng) -> bool {
        let active = self.active.load();
        let settings = active.settings.admission;
        if settings.queue_requests_max == 0 {
            return false;
        }
        let gate = Gate::of_newcomer(settings.running_max, self.ttft_ms(&active, now));
        let asked = Asked { shape, tried: &[], charged: None, gate: Some(gate) };
        self.line.waiting.load(Ordering::Relaxed) > 0
            || matches!(self.decide(&asked, now, rng), Err(Refusal::Overloaded { .. }))
    }

    fn choose_through(
        &self,
        shape: &RequestShape,
        gate: Gate,
        now: Moment,
        rng: &mut Rng,
    ) -> Result<Chosen, Refusal> {
        let asked = Asked { shape, tried: &[], charged: None, gate: Some(gate) };
        self.charge(shape, now, || self.decide(&asked, now, rng))
    }

    fn ttft_ms(&self, active: &Active, now: Moment) -> f64 {
        self.mix.ttft_ms(&active.settings.rules.targets, now)
    }

    /// Stands for the endpoints that serve what a request wants, so that all replicas know who waits for the same.
    fn pool(&self, shape: &RequestShape, now: Moment) -> u64 {
        let view = self.view.load();
        let active = self.active.load();
        let bound = shape.previous_response.map_or(0, crate::SessionKey::raw);
        let scope = Scope { default_model: active.rules.default_model.as_deref(), ..Scope::default() };
        let Ok((rosters, number)) = self.rosters(&view, shape, &scope, now) else {
            return model_key(shape) ^ bound;
        };
        let endpoints = rosters.get(number).endpoints();
        let ids: Vec<u8> = endpoints.iter().flat_map(|endpoint| endpoint.id.raw().to_le_bytes()).collect();
        xxh3_64(&ids) ^ bound
    }

    /// How a request will fare at the fastest endpoint, once it is sent.
    fn service(&self, shape: &RequestShape, active: &Active) -> Service {
        let view = self.view.load();
        let speeds = view.endpoints.iter().map(|endpoint| endpoint.speed());
        let speed = speeds
            .min_by(|a, b| a.prefill_us_per_token.total_cmp(&b.prefill_us_per_token))
            .unwrap_or_else(|| Speed::from(active.settings.speed));
        let tokens = self.token_sizes.prompt_tokens(model_key(shape), shape, &active.rules);
        let prompt_us = f64::from(tokens) * f64::from(speed.prefill_us_per_token);
        Service {
            first_token_ms: (f64::from(speed.base_us) + prompt_us) / 1_000.0,
            tpot_ms: f64::from(speed.itl_us) / 1_000.0,
        }
    }

    /// What others are to know of the queue now. While nobody waits anywhere, nothing.
    pub fn queue_row(&self, now: Moment) -> QueueRow {
        let nobody_waits = self.line.waiting.load(Ordering::Relaxed) == 0;
        if nobody_waits && self.line.elsewhere.load(Ordering::Relaxed) == 0 {
            return QueueRow::default();
        }
        let row = QueueRow {
            running: self.holdings.running(),
            held: self.holdings.told(HELD_MAX),
            full: self.full_rows(now),
            ..QueueRow::default()
        };
        if nobody_waits {
            return row;
        }
        let queue = &self.line.places.lock().queue;
        let heads = queue.told(&self.holdings, &self.line.claims.load(), HEADS_MAX, now);
        QueueRow { requests: queue.by_class(), heads, ..row }
    }

    /// The engines that this replica has lately seen to be full.
    fn full_rows(&self, now: Moment) -> Vec<FullRow> {
        let view = self.view.load();
        let full = view.endpoints.iter().filter_map(|endpoint| {
            let Full { filled_by, seen } = endpoint.places().seen_here(now)?;
            Some(FullRow { endpoint: endpoint.id, filled_by, age_ms: now.millis_since(seen) as u32 })
        });
        full.take(FULL_MAX).collect()
    }

    /// Takes in which engines another replica has seen to be full.
    pub(super) fn hear_full(&self, queue: &QueueRow, heard: Moment) {
        let view = self.view.load();
        for row in &queue.full {
            if let Some(endpoint) = view.get(row.endpoint) {
                let seen = heard.minus(Duration::from_millis(u64::from(row.age_ms)));
                endpoint.places().hear(Full { filled_by: row.filled_by, seen });
            }
        }
    }

    /// Takes in what the others have said of their queues.
    pub(super) fn hear_queues(&self, origins: &Origins) {
        let waiting = origins.queues().map(|queue| queue.row.len()).fold(0, u32::saturating_add);
        let before = self.line.elsewhere.swap(waiting, Ordering::Relaxed);
        let running = origins.queues().map(|queue| queue.row.running).fold(0, u32::saturating_add);
        let held = origins.queues().flat_map(|queue| queue.row.held.iter().copied());
        self.holdings.set_elsewhere(running, held);
        if waiting > 0 || before > 0 {
            self.line.claims.store(Arc::new(origins.claims().collect()));
        }
    }

    /// Tells those that waited. What was charged for one that is gone is given back.
    fn tell_fates(&self, fates: Fates) {
        for (shape, call, fate) in fates {
            if let Err(Fate::Chosen(chosen)) = call(fate) {
                self.give_back(&shape, *chosen);
            }
        }
    }

    /// A choice that nobody wants any more: its charges go back, and its placements are void.
    #[expect(clippy::needless_pass_by_value, reason = "its charges go back with it")]
    pub fn give_back(&self, shape: &RequestShape, chosen: Chosen) {
        self.withdraw(shape, &chosen.footing);
        if let Some(prefill) = &chosen.prefill {
            self.withdraw(shape, &prefill.footing);
        }
    }
}

impl Line {
    fn publish(&self, queue: &Queue) {
        self.bytes.store(queue.bytes(), Ordering::Relaxed);
        self.waiting.store(queue.len(), Ordering::Release);
    }
}
