//! What the driver of a request holds of its lifecycle.

use std::cell::Cell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use routing::decision::{Footing, PrefillLeg};
use routing::endpoint::Endpoint;
use routing::lifecycle::{DecodeLeg, EndCause, Event, GiveUp, LegOrder, NoResume, OnBreak, Phase};
use routing::qoe::Digestion;
use routing::request::RequestShape;
use routing::reserve::Reservation;
use routing::retry::LegFailure;
use routing::{EndpointId, Moment};

use super::shared::{Prefill, Shared};

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
