//! Admitting requests: straight to an endpoint while there is room, else into the queue and out of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::choosing::{Asked, model_key};
use super::facts::Origins;
use super::{Active, Rng, Router};
use crate::Moment;
use crate::admission::{Entry, Gate, Queue, Rival, Service, Shed, Ticket, Turn, Yielding};
use crate::decision::{Chosen, Refusal};
use crate::facts::{HELD_MAX, QueueRow};
use crate::rates::Speed;
use crate::request::{Priority, RequestShape};

/// What a request that is refused at once for want of a queue is told to wait, in ms.
const RETRY_AFTER_MS: u64 = 1_000;

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
    rivals: ArcSwap<Vec<Rival>>,
}

#[derive(Default)]
struct Places {
    queue: Queue,
    held: HashMap<Ticket, (Arc<RequestShape>, Call)>,
    yielding: Yielding,
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
            pool: model_key(shape) ^ shape.previous_response.map_or(0, crate::SessionKey::raw),
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
                self.news.ring_here();
                Ok(Admission::Waits { ticket, shape })
            }
        }
    }

    /// One that waited is gone; whether it waited still.
    pub fn leave(&self, ticket: Ticket) -> bool {
        let places = &mut *self.line.places.lock();
        let waited = places.take(ticket).is_some();
        self.line.publish(&places.queue);
        waited
    }

    /// Sends those that wait to endpoints, as far as there is room, and refuses those whose time is up. To be called
    /// when there may be room, and at the latest at the moment that it returns, if it does.
    pub fn serve_queue(&self, now: Moment, rng: &mut Rng) -> Option<Moment> {
        if self.line.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let active = self.active.load();
        let settings = active.settings.admission;
        let ttft_ms = self.ttft_ms(&active, now);
        let mut fates = Fates::new();
        let next = {
            let places = &mut *self.line.places.lock();
            let retry_after_ms = places.queue.retry_after_ms(now);
            for ticket in places.queue.expire(settings.queue_wait_max, now) {
                let told = places.held.remove(&ticket);
                let shed = Fate::Shed { reason: Shed::WaitedTooLong, retry_after_ms };
                fates.extend(told.map(|(shape, call)| (shape, call, shed)));
            }
            let mut turn = self.line.turn(self, &places.queue);
            let mut without_room: Vec<u64> = Vec::new();
            while let Some(ticket) = places.queue.next(&self.holdings, &without_room, now) {
                let Some(shape) = places.held.get(&ticket).map(|(shape, _)| Arc::clone(shape)) else {
                    places.queue.leave(ticket);
                    continue;
                };
                if let Some(turn) = &mut turn {
                    turn.set_class(shape.priority);
                }
                let gate = Gate { turn: turn.as_ref(), ..Gate::of_waiting(settings.running_max, ttft_ms) };
                let mut chosen = self.choose_through(&shape, gate, now, rng);
                if chosen.is_err() && turn.is_some() {
                    let in_stead = self.choose_in_stead(&shape, gate, &mut places.yielding, now, rng);
                    chosen = in_stead.unwrap_or(chosen);
                }
                let fate = match chosen {
                    Ok(chosen) => Fate::Chosen(Box::new(chosen)),
                    Err(Refusal::Overloaded { .. }) => {
                        without_room.extend(places.queue.pool(ticket));
                        continue;
                    }
                    Err(refusal) => Fate::Refused(refusal),
                };
                places.yielding.over();
                let told = places.take(ticket);
                fates.extend(told.map(|(shape, call)| (shape, call, fate)));
            }
            self.line.publish(&places.queue);
            places.queue.next_expiry(settings.queue_wait_max)
        };
        self.tell_fates(fates);
        next
    }

    /// Takes room that is another replica's, if it has left it for too long; `None` if there is none, or it may still
    /// take it.
    fn choose_in_stead(
        &self,
        shape: &RequestShape,
        gate: Gate<'_>,
        yielding: &mut Yielding,
        now: Moment,
        rng: &mut Rng,
    ) -> Option<Result<Chosen, Refusal>> {
        let gate = Gate { turn: None, ..gate };
        if self.decide(&Asked { shape, tried: &[], charged: None, gate: Some(gate) }, now, rng).is_err() {
            yielding.over();
            return None;
        }
        yielding.yielded(now).then(|| self.choose_through(shape, gate, now, rng))
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
        gate: Gate<'_>,
        now: Moment,
        rng: &mut Rng,
    ) -> Result<Chosen, Refusal> {
        let asked = Asked { shape, tried: &[], charged: None, gate: Some(gate) };
        self.charge(shape, now, || self.decide(&asked, now, rng))
    }

    fn ttft_ms(&self, active: &Active, now: Moment) -> f64 {
        self.mix.ttft_ms(&active.settings.rules.targets, now)
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

    /// What others are to know of the queue. While nobody waits anywhere, nothing.
    pub(super) fn queue_row(&self) -> QueueRow {
        let nobody_waits = self.line.waiting.load(Ordering::Relaxed) == 0;
        if nobody_waits && self.line.elsewhere.load(Ordering::Relaxed) == 0 {
            return QueueRow::default();
        }
        QueueRow {
            requests: if nobody_waits { [0; 3] } else { self.line.places.lock().queue.by_class() },
            running: self.holdings.running(),
            held: self.holdings.told(HELD_MAX),
        }
    }

    /// Takes in what the others have said of their queues.
    pub(super) fn hear_queues(&self, origins: &Origins) {
        let waiting = origins.queues().map(|(_, row)| row.len()).fold(0, u32::saturating_add);
        let before = self.line.elsewhere.swap(waiting, Ordering::Relaxed);
        let running = origins.queues().map(|(_, row)| row.running).fold(0, u32::saturating_add);
        self.holdings.set_elsewhere(running, origins.queues().flat_map(|(_, row)| row.held.iter().copied()));
        if waiting == 0 && before == 0 {
            return;
        }
        let queues = origins.queues().filter(|(_, row)| !row.is_empty());
        let rivals = queues.map(|(replica, row)| Rival::new(replica, row.requests)).collect();
        self.line.rivals.store(Arc::new(rivals));
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

    /// Whose turn it is, if others wait as well.
    fn turn(&self, router: &Router, queue: &Queue) -> Option<Turn> {
        let rivals = self.rivals.load();
        if rivals.is_empty() {
            return None;
        }
        let own = Rival::new(&router.own, queue.by_class());
        Some(Turn::new(own, rivals.to_vec(), Priority::Low))
    }
}
