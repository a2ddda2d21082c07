//! What a request's actor, its driver's handle and the watch share, and how what the machine orders is performed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use actix::{Actor, Addr};
use routing::decision::Footing;
use routing::endpoint::{Cause, Endpoint, Standing, Usable};
use routing::lifecycle::{Effect, Event, Lifecycle, Phase};
use routing::request::RequestShape;
use routing::reserve::Reservation;
use routing::{EndpointId, Moment};

use super::actor::{LifecycleActor, Tell};
use super::handle::{Account, Order, Staged};
use super::table::Row;
use super::worker::{Ended, Inner};

/// The prefill side of a split request.
pub(super) struct Prefill {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) charge: Option<Reservation>,
    pub(super) footing: Footing,
    pub(super) staged: Rc<dyn Staged>,
}

/// What actor, handle and watch share. All of it stays on one thread.
pub(super) struct Shared {
    pub(super) inner: Rc<Inner>,
    pub(super) key: usize,
    pub(super) row: Arc<Row>,
    pub(super) shape: RequestShape,
    pub(super) machine: RefCell<Lifecycle>,
    pub(super) charge: RefCell<Option<Reservation>>,
    pub(super) footing: Cell<Option<Footing>>,
    /// When the leg whose reply the client gets was sent.
    pub(super) sent: Cell<Option<Moment>>,
    pub(super) endpoint: RefCell<Option<Arc<Endpoint>>>,
    /// While the request is split.
    pub(super) prefill: RefCell<Option<Prefill>>,
    pub(super) account: RefCell<Account>,
    pub(super) order: Cell<Option<Order>>,
    pub(super) waker: RefCell<Option<Waker>>,
    pub(super) progress: Cell<Option<Moment>>,
    pub(super) client_behind: Cell<bool>,
    pub(super) deadline: Cell<Option<Moment>>,
    pub(super) driver_gone: Cell<bool>,
    /// The endpoints whose ejection the machine was told of, the latest first: as many as can be awaited at once.
    pub(super) told_lost: Cell<[Option<EndpointId>; 2]>,
    pub(super) address: RefCell<Option<Addr<LifecycleActor>>>,
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

    pub(super) fn tell_progress(&self, now: Moment) {
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
    pub(super) fn own_running(&self, now: Moment) -> u32 {
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
    pub(super) fn release(&self, at: Option<EndpointId>) {
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

    pub(super) fn release_prefill(&self) {
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
