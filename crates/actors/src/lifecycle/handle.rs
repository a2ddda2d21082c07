//! What the driver of a request holds of its lifecycle.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use actix::{Actor, Addr};
use routing::decision::{Footing, PrefillLeg};
use routing::endpoint::{Cause, Endpoint, Standing, Usable};
use routing::lifecycle::{
    DecodeLeg, Effect, EndCause, Event, GiveUp, LegOrder, Lifecycle, NoResume, OnBreak, Phase,
};
use routing::qoe::Digestion;
use routing::request::RequestShape;
use routing::reserve::Reservation;
use routing::retry::LegFailure;
use routing::{EndpointId, Moment};

use super::actor::{LifecycleActor, Tell};
use super::table::Row;
use super::worker::{Ended, Inner};

/// What the driver is to do. Any order means that the leg it has out, if any, is to be dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// Choose again, not among those tried, and dispatch there.
    RetryElsewhere {
        /// What failed.
        after: LegFailure,
    },
    /// The stream broke: choose again, not among those tried, and dispatch what continues it there. The client hears
    /// nothing of it.
    ResumeElsewhere {
        /// What failed.
        after: LegFailure,
    },
    /// Choose another endpoint for the decode leg, and dispatch it there with what the prefill leg has brought.
    DecodeElsewhere {
        /// What failed.
        after: LegFailure,
    },
    /// Answer the client, who has no byte yet.
    GiveUp(GiveUp),
    /// End the client's stream with an error event, and never with `[DONE]`.
    EndWithErrorEvent(EndCause),
    /// Close the client's connection so that the reply can't be taken for complete.
    CutReply(EndCause),
}

/// The prefill leg of a split request and what it has brought, in the hands of its driver. The lifecycle says what
/// becomes of it, which may be after the driver itself is gone.
pub trait Staged {
    /// The leg is to be closed: nobody waits for it.
    fn close(&self);
    /// A decode leg has brought a byte: the engine has let go of it, or is about to.
    fn taken(&self);
    /// What it has brought, or will bring, is wanted by nobody: the engine is to let go of it. `leg` says whether
    /// the decode leg had been sent.
    fn release(self: Rc<Self>, leg: DecodeLeg);
}

/// What the driver saw of the reply, for whoever is told of the end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Account {
    /// The status that the client was sent; 0 if none was.
    pub status: u16,
    /// Bytes of the reply's body that were handed to the client's connection.
    pub bytes: u64,
    /// Events of a stream, comments not counted.
    pub events: u32,
    /// How the tokens of a stream came, once one has.
    pub digestion: Option<Digestion>,
    /// Tokens of the prompt, by the engine's count.
    pub prompt_tokens: Option<u32>,
    /// Tokens of the answer, by the engine's count.
    pub output_tokens: Option<u32>,
    /// Tokens that the engine found in its prefix cache.
    pub cached_tokens: Option<u32>,
}

/// The prefill side of a split request.
struct Prefill {
    endpoint: Arc<Endpoint>,
    charge: Option<Reservation>,
    footing: Footing,
    staged: Rc<dyn Staged>,
}

/// What actor, handle and watch share. All of it stays on one thread.
pub(super) struct Shared {
    inner: Rc<Inner>,
    pub(super) key: usize,
    row: Arc<Row>,
    shape: RequestShape,
    machine: RefCell<Lifecycle>,
    charge: RefCell<Option<Reservation>>,
    footing: Cell<Option<Footing>>,
    /// When the leg whose reply the client gets was sent.
    sent: Cell<Option<Moment>>,
    endpoint: RefCell<Option<Arc<Endpoint>>>,
    /// While the request is split.
    prefill: RefCell<Option<Prefill>>,
    account: RefCell<Account>,
    order: Cell<Option<Order>>,
    waker: RefCell<Option<Waker>>,
    progress: Cell<Option<Moment>>,
    client_behind: Cell<bool>,
    deadline: Cell<Option<Moment>>,
    driver_gone: Cell<bool>,
    /// The endpoints whose ejection the machine was told of, the latest first: as many as can be awaited at once.
    told_lost: Cell<[Option<EndpointId>; 2]>,
    address: RefCell<Option<Addr<LifecycleActor>>>,
}

impl Shared {
    pub(super) fn new(
        inner: Rc<Inner>,
        key: usize,
        row: Arc<Row>,
        shape: RequestShape,
        machine: Lifecycle,
    ) -> Self {
        let deadline = next_turn(&machine);
        Self {
            inner,
            key,
            row,
            shape,
            machine: RefCell::new(machine),
            charge: RefCell::default(),
            footing: Cell::new(None),
            sent: Cell::new(None),
            endpoint: RefCell::default(),
            prefill: RefCell::default(),
            account: RefCell::default(),
            order: Cell::new(None),
            waker: RefCell::default(),
            progress: Cell::new(None),
            client_behind: Cell::new(false),
            deadline: Cell::new(deadline),
            driver_gone: Cell::new(false),
            told_lost: Cell::new([None; 2]),
            address: RefCell::default(),
        }
    }

    /// Starts the actor, or another in the place of one that died.
    pub(super) fn start(self: &Rc<Self>) {
        *self.address.borrow_mut() = Some(LifecycleActor::new(Rc::clone(self)).start());
    }

    pub(super) fn is_over(&self) -> bool {
        self.row.phase().is_terminal()
    }

    /// Whether the actor is gone before its request.
    pub(super) fn is_lost(&self) -> bool {
        !self.is_over() && self.address.borrow().as_ref().is_none_or(|address| !address.connected())
    }

    pub(super) fn driver_gone(&self) -> bool {
        self.driver_gone.get()
    }

    /// Who was ejected of those that the request waits for, and why, unless that was told.
    pub(super) fn endpoint_lost(&self) -> Option<(EndpointId, Cause)> {
        self.awaited().into_iter().flatten().find_map(|endpoint| {
            if endpoint.usable() != Usable::No || self.told_lost.get().contains(&Some(endpoint.id)) {
                return None;
            }
            match endpoint.standing() {
                Standing::Ejected { cause, .. } => Some((endpoint.id, cause)),
                _ => None,
            }
        })
    }

    /// The endpoint whose first byte, or whose prefill, is waited for; and the one that it may be fetching from.
    fn awaited(&self) -> [Option<Arc<Endpoint>>; 2] {
        let prefill = || self.prefill.borrow().as_ref().map(|prefill| Arc::clone(&prefill.endpoint));
        let endpoint = || self.endpoint.borrow().clone();
        match self.row.phase() {
            Phase::Prefilling => [prefill().or_else(endpoint), None],
            Phase::HandedOff => [endpoint(), prefill()],
            Phase::Resuming => [prefill(), endpoint()],
            _ => [None, None],
        }
    }

    pub(super) fn tell_lost(&self, endpoint: EndpointId, cause: Cause, now: Moment) {
        let [latest, _] = self.told_lost.get();
        self.told_lost.set([Some(endpoint), latest]);
        self.tell(Event::EndpointLost { endpoint, cause }, now);
    }

    pub(super) fn id(&self) -> &str {
        self.row.id()
    }

    /// Whether a limit may have passed by `now`; the driver's progress has still to be looked at.
    pub(super) fn has_deadline_by(&self, now: Moment) -> bool {
        self.deadline.get().is_some_and(|deadline| deadline <= now)
    }

    /// Tells the actor of the time, and before that of the progress that the driver has noted. Time in which
    /// the client does not take what is there is not the engine's silence.
    pub(super) fn tell_tick(&self, now: Moment) {
        self.tell_progress(now);
        self.tell(Event::Tick, now);
    }

    fn tell_progress(&self, now: Moment) {
        if self.client_behind.get() {
            self.tell(Event::Progress, now);
        } else if let Some(at) = self.progress.take() {
            self.tell(Event::Progress, at);
        }
    }

    pub(super) fn tell(&self, event: Event, at: Moment) {
        let told = self.address.borrow().as_ref().map(|address| address.try_send(Tell(event, at)));
        match told {
            Some(Ok(())) => {}
            Some(Err(actix::prelude::SendError::Full(_))) => self.inner.count_overload(),
            // The watch will find it lost, and see from what is shared how far it had come.
            Some(Err(actix::prelude::SendError::Closed(_))) | None => self.inner.hurry(),
        }
    }

    /// Takes an event into the machine and performs what follows.
    pub(super) fn step(self: &Rc<Self>, event: Event, at: Moment) {
        let (effects, phase) = {
            let mut machine = self.machine.borrow_mut();
            if event == Event::FirstByte
                && let Some(endpoint) = self.endpoint.borrow().as_ref()
            {
                machine.pace(endpoint.token_ms(at));
            }
            let effects = machine.step(event, at);
            self.deadline.set(next_turn(&machine));
            (effects, machine.phase())
        };
        self.row.set_phase(phase);
        for effect in effects {
            self.perform(effect, at);
        }
    }

    fn perform(self: &Rc<Self>, effect: Effect, at: Moment) {
        let port = &self.inner.port;
        match effect {
            // The order that follows drops the leg, unless it is one that goes on without the driver.
            Effect::AbortUpstream { endpoint, .. } => {
                if let Some(staged) = self.staged_at(endpoint) {
                    staged.close();
                }
            }
            // The session is at the other endpoint.
            Effect::Release { endpoint } if self.staged_at(endpoint).is_some() => self.release_prefill(),
            Effect::Release { endpoint } => {
                self.release(Some(endpoint));
                let finished = self.row.phase() == Phase::Finished;
                port.leg_over(&self.shape, endpoint, &self.account.borrow(), finished);
            }
            Effect::FirstToken { endpoint } => {
                if let Some(charge) =
                    self.charge.borrow().as_ref().filter(|charge| charge.endpoint().id == endpoint)
                {
                    charge.first_token();
                }
                if let Some(prefill) = self.prefill.borrow().as_ref() {
                    prefill.staged.taken();
                }
                self.tell_first_byte(endpoint, at);
            }
            Effect::Withdraw { endpoint } => {
                let prefill = self.prefill.borrow().as_ref().map(|prefill| prefill.footing);
                let footings = [self.footing.get(), prefill].into_iter().flatten();
                for footing in footings.filter(|footing| footing.endpoint == endpoint) {
                    port.withdraw(&self.shape, &footing);
                }
            }
            Effect::Report { endpoint, signal } => port.report(endpoint, signal),
            Effect::RetryElsewhere { after } => self.give_order(Order::RetryElsewhere { after }),
            Effect::ResumeElsewhere { after } => {
                self.row.broke(&after);
                self.give_order(Order::ResumeElsewhere { after });
            }
            Effect::Look { endpoint } => self.look(endpoint),
            Effect::DecodeElsewhere { after } => self.give_order(Order::DecodeElsewhere { after }),
            Effect::ReleaseStaged { prefill, leg, .. } => {
                if let Some(staged) = self.staged_at(prefill) {
                    staged.release(leg);
                }
            }
            Effect::GiveUp(what) => self.give_order(Order::GiveUp(what)),
            Effect::EndWithErrorEvent(cause) => self.give_order(Order::EndWithErrorEvent(cause)),
            Effect::CutReply(cause) => self.give_order(Order::CutReply(cause)),
            Effect::Done(outcome) => {
                let fared = port.ended(&Ended {
                    id: self.row.id(),
                    shape: &self.shape,
                    outcome: &outcome,
                    account: &self.account.borrow(),
                    endpoint: self.endpoint.borrow().as_ref(),
                    prefill: self.prefill.borrow().as_ref().map(|prefill| &prefill.endpoint),
                    footing: self.footing.get().as_ref(),
                });
                self.row.set_fared(fared);
                self.inner.forget(self.key, &self.row, at);
            }
        }
    }

    /// Has the endpoint looked at, and the machine told of what is seen: the progress that the driver has noted first.
    fn look(self: &Rc<Self>, at: EndpointId) {
        let endpoint = self.endpoint.borrow().as_ref().filter(|endpoint| endpoint.id == at).map(Arc::clone);
        let Some(endpoint) = endpoint else { return };
        let shared = Rc::downgrade(self);
        let port = &self.inner.port;
        let told = Box::new(move |seen| {
            let Some(shared) = shared.upgrade() else { return };
            let now = shared.inner.port.now();
            shared.tell_progress(now);
            let in_flight = shared.own_running(now);
            shared.tell(Event::Looked { endpoint: at, seen, in_flight }, now);
        });
        port.look(&endpoint, told);
    }

    /// Requests of this replica at the endpoint of the leg whose reply the client gets.
    fn own_running(&self, now: Moment) -> u32 {
        self.endpoint.borrow().as_ref().map_or(1, |endpoint| endpoint.own_running(now))
    }

    /// Tells how long a stream's first byte took from `endpoint`.
    fn tell_first_byte(&self, endpoint: EndpointId, at: Moment) {
        let footing = self.footing.get().filter(|footing| footing.endpoint == endpoint && self.shape.stream);
        if let (Some(footing), Some(sent)) = (footing, self.sent.take()) {
            self.inner.port.first_byte(&footing, at.millis_since(sent));
        }
    }

    #[cfg(any(test, feature = "panic-injection"))]
    pub(super) fn inject_panic(&self) {
        if let Some(address) = self.address.borrow().as_ref() {
            let _ = address.try_send(super::actor::Panic);
        }
    }

    /// Gives the charge back (at this endpoint only, if one is named).
    fn release(&self, at: Option<EndpointId>) {
        let mut charge = self.charge.borrow_mut();
        if charge.as_ref().is_some_and(|charge| at.is_none_or(|at| charge.endpoint().id == at)) {
            *charge = None;
        }
    }

    /// What the prefill leg at `endpoint` holds, if it is there.
    fn staged_at(&self, endpoint: EndpointId) -> Option<Rc<dyn Staged>> {
        let prefill = self.prefill.borrow();
        let prefill = prefill.as_ref().filter(|prefill| prefill.endpoint.id == endpoint)?;
        Some(Rc::clone(&prefill.staged))
    }

    fn release_prefill(&self) {
        if let Some(prefill) = &mut *self.prefill.borrow_mut() {
            prefill.charge = None;
        }
    }

    fn give_order(&self, order: Order) {
        self.order.set(Some(order));
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }
}

/// When a machine wants to be told of the time.
fn next_turn(machine: &Lifecycle) -> Option<Moment> {
    let (limit, look) = (machine.next_deadline().map(|(at, _)| at), machine.next_look());
    limit.into_iter().chain(look).min()
}

/// The driver's end of one request's lifecycle. Dropping it before [`LifecycleHandle::ended`] means that the
/// client is gone.
pub struct LifecycleHandle {
    shared: Rc<Shared>,
    told_end: Cell<bool>,
}

impl std::fmt::Debug for LifecycleHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LifecycleHandle")
            .field("id", &self.shared.row.id())
            .field("phase", &self.shared.row.phase())
            .finish_non_exhaustive()
    }
}

impl LifecycleHandle {
    pub(super) const fn new(shared: Rc<Shared>) -> Self {
        Self { shared, told_end: Cell::new(false) }
    }

    /// The request's id.
    pub fn id(&self) -> &str {
        self.shared.row.id()
    }

    /// What the request is to routing.
    pub fn shape(&self) -> &RequestShape {
        &self.shared.shape
    }

    /// When it arrived.
    pub fn arrived(&self) -> Moment {
        self.shared.row.arrived()
    }

    /// The endpoint that it was sent to last.
    pub fn endpoint(&self) -> Option<EndpointId> {
        self.shared.endpoint.borrow().as_ref().map(|endpoint| endpoint.id)
    }

    /// Where the request stands, as far as the actor has heard.
    pub fn phase(&self) -> Phase {
        self.shared.row.phase()
    }

    /// The endpoint that computes its prompt for another, or has.
    pub fn prefill_endpoint(&self) -> Option<Arc<Endpoint>> {
        self.shared.prefill.borrow().as_ref().map(|prefill| Arc::clone(&prefill.endpoint))
    }

    /// Adds the endpoints that have failed it, as far as the actor has heard, which is everything that an order
    /// answers.
    pub fn add_tried(&self, to: &mut impl Extend<EndpointId>) {
        to.extend(self.shared.machine.borrow().tried().iter().copied());
    }

    /// No endpoint has room: it waits for its turn.
    pub fn queued(&self) {
        self.tell(Event::Queued);
    }

    /// A leg was sent to `endpoint`; the charge for it is kept until the leg is over.
    pub fn dispatched(&self, endpoint: &Arc<Endpoint>, charge: Reservation, footing: Footing) {
        self.shared.prefill.borrow_mut().take();
        self.shared.row.set_endpoint(endpoint);
        self.take_seat(endpoint, charge, footing);
        self.tell(Event::Dispatched { endpoint: endpoint.id });
    }

    /// The request is split: its prefill leg was sent, and its decode leg with it or will be, as `order` says. Both
    /// charges are kept until their legs are over.
    pub fn split(
        &self,
        prefill: PrefillLeg,
        staged: Rc<dyn Staged>,
        order: LegOrder,
        (decode, charge, footing): (&Arc<Endpoint>, Reservation, Footing),
    ) {
        let event = Event::Split { prefill: prefill.endpoint.id, decode: decode.id, order };
        self.shared.row.set_pair(&prefill.endpoint, decode);
        let PrefillLeg { endpoint, reservation, footing: prefill_footing } = prefill;
        *self.shared.prefill.borrow_mut() =
            Some(Prefill { endpoint, charge: Some(reservation), footing: prefill_footing, staged });
        self.take_seat(decode, charge, footing);
        self.tell(event);
    }

    /// The prefill leg is done and has brought what the decode leg needs.
    pub fn handed_off(&self) {
        self.shared.release_prefill();
        self.tell(Event::HandedOff);
    }

    /// The prefill leg was answered with a status that is not tried elsewhere, which the client is sent.
    pub fn prefill_answered(&self, status: u16) {
        self.told_end.set(true);
        self.shared.account.borrow_mut().status = status;
        self.shared.release_prefill();
        self.shared.release(None);
        self.tell(Event::PrefillAnswered { status });
    }

    /// The prefill leg failed. An order follows.
    pub fn prefill_failed(&self, failure: LegFailure) {
        let now = self.shared.inner.port.now();
        let in_flight = self.prefill_endpoint().map_or(1, |endpoint| endpoint.own_running(now));
        self.shared.release_prefill();
        self.tell(Event::PrefillFailed { failure, in_flight });
    }

    /// The decode leg of the pair was sent after the handoff.
    pub fn decode_dispatched(&self) {
        if let Some(endpoint) = self.endpoint() {
            self.tell(Event::DecodeDispatched { endpoint });
        }
    }

    /// The decode leg was sent to another endpoint, with what the same prefill leg has brought.
    pub fn decode_moved(&self, endpoint: &Arc<Endpoint>, charge: Reservation, footing: Footing) {
        if let Some(prefill) = self.prefill_endpoint() {
            self.shared.row.set_pair(&prefill, endpoint);
        }
        self.take_seat(endpoint, charge, footing);
        self.tell(Event::DecodeDispatched { endpoint: endpoint.id });
    }

    /// Keeps the charge of the leg whose reply the client gets.
    fn take_seat(&self, endpoint: &Arc<Endpoint>, charge: Reservation, footing: Footing) {
        self.shared.footing.set(Some(footing));
        // What a continuation's prompt was is not known well enough to learn from.
        let learns = self.phase() != Phase::Resuming;
        self.shared.sent.set(learns.then(|| self.shared.inner.port.now()));
        *self.shared.charge.borrow_mut() = Some(charge);
        *self.shared.endpoint.borrow_mut() = Some(Arc::clone(endpoint));
    }

    /// No endpoint can be chosen. An order follows.
    pub fn refused(&self) {
        self.tell(Event::Refused);
    }

    /// Whether its stream is to go on elsewhere should it break.
    pub fn resumes(&self) -> bool {
        self.shared.machine.borrow().on_a_break() == OnBreak::Resume
    }

    /// What would continue it can't be said. An order follows.
    pub fn unresumable(&self, why: NoResume) {
        self.tell(Event::Unresumable(why));
    }

    /// The reply's head is there, with a status that is not tried elsewhere.
    pub fn head_arrived(&self, status: u16) {
        if self.phase() != Phase::Resuming {
            self.shared.account.borrow_mut().status = status;
        }
        self.tell(Event::HeadArrived { status });
    }

    /// The first byte that says something is there. The charge turns from prefill to decode at once.
    pub fn first_byte(&self) {
        if let Some(charge) = self.shared.charge.borrow().as_ref() {
            charge.first_token();
        }
        self.tell(Event::FirstByte);
    }

    /// More of the reply is there. No message: the next sweep reads it.
    pub fn progress(&self, now: Moment) {
        self.shared.progress.set(Some(now));
    }

    /// Tokens of the answer are there, in a stream of which they can be told.
    pub fn tokens(&self, tokens: u32, now: Moment) {
        let shared = &self.shared;
        let at_ms = now.millis_since(shared.row.arrived());
        let mut account = shared.account.borrow_mut();
        let begin = || Digestion::new(&shared.shape.slo, shared.shape.samples_streamed());
        account.digestion.get_or_insert_with(begin).arrived(at_ms, tokens);
    }

    /// Whether bytes wait for the client to take them, rather than the client for bytes.
    pub fn client_behind(&self, behind: bool) {
        self.shared.client_behind.set(behind);
    }

    /// The leg failed. An order follows.
    pub fn leg_failed(&self, failure: LegFailure) {
        let now = self.shared.inner.port.now();
        let in_flight = self.shared.own_running(now);
        self.shared.release(None);
        self.shared.tell(Event::LegFailed { failure, in_flight }, now);
    }

    /// The reply is there to its last byte. The charge goes back at once, so that the client's next request
    /// finds it gone.
    pub fn ended(&self) {
        self.told_end.set(true);
        self.shared.release(None);
        self.shared.release_prefill();
        self.tell(Event::Ended);
    }

    /// Changes what is known of the reply.
    pub fn note(&self, change: impl FnOnce(&mut Account)) {
        change(&mut self.shared.account.borrow_mut());
    }

    /// The next order.
    pub async fn order(&self) -> Order {
        poll_fn(|context| self.poll_order(context)).await
    }

    /// The next order, if there is one; else the task is woken by it.
    pub fn poll_order(&self, context: &Context<'_>) -> Poll<Order> {
        if let Some(order) = self.shared.order.take() {
            return Poll::Ready(order);
        }
        let mut waker = self.shared.waker.borrow_mut();
        if waker.as_ref().is_none_or(|waker| !waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// Makes the actor panic, to show that it is recreated.
    #[cfg(any(test, feature = "panic-injection"))]
    pub fn inject_panic(&self) {
        self.shared.inject_panic();
    }

    fn tell(&self, event: Event) {
        self.shared.tell(event, self.shared.inner.port.now());
    }
}

impl Drop for LifecycleHandle {
    fn drop(&mut self) {
        self.shared.driver_gone.set(true);
        self.shared.release(None);
        self.shared.release_prefill();
        if !self.told_end.get() && !self.shared.is_over() {
            self.tell(Event::ClientGone);
        }
    }
}
