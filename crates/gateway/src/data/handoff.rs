//! The prefill leg of a split request, and what it leaves with the engine until another has taken it over.
//!
//! The leg runs as a task of its own: once an engine may have computed the prompt, only its reply tells how it can
//! be had to let go, so the leg is read to its end even when the client is long gone. What the reply says is kept
//! here, with the body that it belongs to, and nowhere else.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_web::http::Method;
use actors::lifecycle::Staged;
use bytes::{Bytes, BytesMut};
use routing::Moment;
use routing::endpoint::{Cause, Endpoint, Role, Usable};
use routing::lifecycle::{DecodeLeg, HANDOFF_AGE_MAX, LegOrder};
use routing::request::{Route, members};
use routing::retry::{LegFailure, LegFault};
use routing::staged::StagedTicket;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::attempt::Envelope;
use super::kept::Kept;
use crate::connector::Connector;
use crate::headers::BodyLength;
use crate::stream::Usage;
use crate::upstream::OutBody;
use crate::worker::Worker;

/// The longest reply to a prefill leg, in bytes. 16 MiB: the blocks of a million tokens, and log-probabilities of a
/// long prompt.
const REPLY_BYTES_MAX: usize = 16 << 20;
/// How long a prefill leg that nobody waits for may still take. 60 s: the longest prompts behind a full queue; the
/// engine lets go of a leg that is closed then.
const LEFT_ALONE_MAX: Duration = Duration::from_secs(60);
/// How long a decode leg that is sent for nobody is held. 10 s: an engine that is not overrun has taken everything over
/// and said its one token in far less, which is the surest way to have the other one let go; one that has no room for
/// it lets go when it is closed.
const RELEASE_HOLD: Duration = Duration::from_secs(10);
/// How long to see whether a prefill engine is still there. 1 s: one that is does not need a tenth of it.
const LOOK_MAX: Duration = Duration::from_secs(1);
/// Decode endpoints that are asked to take over what is to be let go. 3: as many as a request has tries.
const RELEASE_TRIES_MAX: usize = 3;

/// What a prefill leg has come to.
pub(super) enum Prefilled {
    /// The prompt is computed, and the decode leg is ready to go.
    Ready {
        /// What the engine counted.
        usage: Option<Usage>,
        /// How long it took, in ms.
        took_ms: f64,
    },
    /// The engine's answer is the client's.
    Answered(Box<Kept>),
    /// It failed; what the engine said in doing so is kept.
    Failed(LegFailure, Option<Box<Kept>>),
}

/// Where what the prefill leg brings is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The leg is out.
    Out,
    /// The leg is out, and what it brings is to be let go.
    Unwanted,
    /// It is at the prefill engine.
    Staged,
    /// There is nothing, or it is cared for.
    Over,
}

/// See the module.
pub(super) struct Handoff {
    worker: Rc<Worker>,
    envelope: Envelope,
    route: Route,
    connector: &'static dyn Connector,
    prefill: Arc<Endpoint>,
    decode: Arc<Endpoint>,
    /// What its legs are made of.
    body: Bytes,
    decode_leg: RefCell<Option<Bytes>>,
    /// When the prefill leg was done.
    staged_at: Cell<Option<Moment>>,
    stage: Cell<Stage>,
    /// Whether an engine has been given the decode leg and has not refused it: it lets go when the leg is closed.
    taken: Cell<bool>,
    task: RefCell<Option<AbortHandle>>,
    /// While the prefill engine keeps something: an heir is told, should this replica die.
    ticket: RefCell<Option<StagedTicket>>,
}

impl Handoff {
    /// Sends the prefill leg.
    pub(super) fn begin(
        worker: &Rc<Worker>,
        (envelope, route): (&Envelope, Route),
        connector: &'static dyn Connector,
        body: Bytes,
        (prefill, decode): (&Arc<Endpoint>, &Arc<Endpoint>),
    ) -> (Rc<Self>, oneshot::Receiver<Prefilled>) {
        let handoff = Rc::new(Self {
            worker: Rc::clone(worker),
            envelope: envelope.clone(),
            route,
            connector,
            prefill: Arc::clone(prefill),
            decode: Arc::clone(decode),
            decode_leg: RefCell::new(match connector.order() {
                LegOrder::PrefillFirst => None,
                LegOrder::Together => connector.decode_leg(&body, b"").ok(),
            }),
            body,
            staged_at: Cell::new(None),
            stage: Cell::new(Stage::Out),
            taken: Cell::new(false),
            task: RefCell::default(),
            ticket: RefCell::default(),
        });
        let (told, prefilled) = oneshot::channel();
        let task = actix_web::rt::spawn(Rc::clone(&handoff).run(told));
        *handoff.task.borrow_mut() = Some(task.abort_handle());
        (handoff, prefilled)
    }

    /// The body of the decode leg, once the prefill leg is done where that goes first.
    pub(super) fn decode_leg(&self) -> Option<Bytes> {
        self.decode_leg.borrow().clone()
    }

    /// Turns true when an engine has been given the decode leg; to be made false when it has refused it.
    pub(super) const fn taken(&self) -> &Cell<bool> {
        &self.taken
    }

    async fn run(self: Rc<Self>, told: oneshot::Sender<Prefilled>) {
        let silent = LegFailure::new(LegFault::EndpointLost(Cause::Silent));
        let came = timeout(LEFT_ALONE_MAX, self.exchange()).await;
        let came = came.unwrap_or(Prefilled::Failed(silent, None));
        match (&came, self.stage.get()) {
            (Prefilled::Ready { .. }, Stage::Unwanted) => {
                self.stage.set(Stage::Over);
                self.let_go().await;
                Staged::taken(&*self);
            }
            (Prefilled::Ready { .. }, Stage::Out) => self.stage.set(Stage::Staged),
            _ => self.stage.set(Stage::Over),
        }
        // Nobody may be waiting for it; then the lifecycle will say what becomes of what is staged.
        let _ = told.send(came);
    }

    async fn exchange(&self) -> Prefilled {
        let failed = |fault| Prefilled::Failed(LegFailure::new(fault), None);
        let begun = self.worker.now();
        let upstream = &self.worker.upstream;
        let target = upstream.target(self.prefill.id, &self.prefill.spec);
        let leg = self.connector.prefill_leg(&self.body);
        let head = self.envelope.head(&target, self.route, BodyLength::Known(leg.len() as u64));
        let sent = upstream.send(&target, Method::POST, head, OutBody::Whole(leg), None).await;
        let (head, mut reply) = match sent {
            Ok(reply) => reply,
            Err(fault) => return failed(fault),
        };
        if LegFailure::is_retried_status(head.status) {
            let kept = Kept::read(head, reply).await;
            return Prefilled::Failed(kept.failure(), Some(Box::new(kept)));
        }
        if !(200..300).contains(&head.status) {
            return Prefilled::Answered(Box::new(Kept::read(head, reply).await));
        }
        let mut read = BytesMut::new();
        while let Some(data) = reply.data().await {
            match data {
                Ok(data) if read.len() + data.len() <= REPLY_BYTES_MAX => read.extend_from_slice(&data),
                Ok(_) => return failed(LegFault::Garbled),
                Err(fault) => return failed(fault),
            }
        }
        match self.connector.decode_leg(&self.body, &read) {
            Ok(leg) => *self.decode_leg.borrow_mut() = Some(leg),
            Err(fault) => return failed(fault),
        }
        if self.connector.pins() {
            *self.ticket.borrow_mut() =
                self.worker.state.router.stage(self.prefill.id, self.connector.token(&read));
        }
        let now = self.worker.now();
        self.staged_at.set(Some(now));
        Prefilled::Ready { usage: usage(&read), took_ms: now.millis_since(begun) }
    }

    /// Has the engine let go of what it holds: a decode engine is sent a leg for nobody. The prefill engine then hears
    /// that nobody needs it any more. What is too old it has let go of by itself.
    async fn let_go(&self) {
        let Some(leg) = self.decode_leg().filter(|_| self.connector.pins()) else { return };
        let leg = self.connector.release_leg(&leg);
        for endpoint in self.takers() {
            if self.is_too_old() {
                return;
            }
            let upstream = &self.worker.upstream;
            let target = upstream.target(endpoint.id, &endpoint.spec);
            let head = self.envelope.head(&target, self.route, BodyLength::Known(leg.len() as u64));
            let sent = Cell::new(false);
            let body = OutBody::Whole(leg.clone());
            let taken = timeout(RELEASE_HOLD, async {
                let (head, mut reply) =
                    upstream.send(&target, Method::POST, head, body, Some(&sent)).await.ok()?;
                let taken = (200..300).contains(&head.status);
                reply.data().await;
                taken.then_some(())
            });
            let taken = taken.await.map_or_else(|_| sent.get(), |taken| taken.is_some());
            if taken {
                self.worker.kv_released();
                return;
            }
        }
        if !self.is_gone().await {
            self.worker.kv_stranded(&self.prefill);
        }
    }

    fn is_too_old(&self) -> bool {
        self.staged_at.get().is_some_and(|at| self.worker.now().since(at) > HANDOFF_AGE_MAX)
    }

    /// Whether nobody listens any more where the prompt was computed, so that nothing can be held there.
    async fn is_gone(&self) -> bool {
        let upstream = &self.worker.upstream;
        let target = upstream.target(self.prefill.id, &self.prefill.spec);
        let head = self.envelope.head(&target, self.route, BodyLength::Known(0));
        let look = upstream.send(&target, Method::GET, head, OutBody::Whole(Bytes::new()), None);
        matches!(timeout(LOOK_MAX, look).await, Ok(Err(LegFault::ConnectRefused)))
    }

    /// Who can take over what the prefill engine holds, first the one that was to.
    fn takers(&self) -> Vec<Arc<Endpoint>> {
        let view = self.worker.state.router.view();
        let can = |each: &&Arc<Endpoint>| {
            each.id != self.decode.id
                && each.id != self.prefill.id
                && each.spec.role != Role::Prefill
                && each.usable() != Usable::No
                && self.prefill.spec.hands_over_to(&each.spec)
        };
        let others = view.endpoints.iter().filter(can).cloned();
        std::iter::once(Arc::clone(&self.decode)).chain(others).take(RELEASE_TRIES_MAX).collect()
    }
}

impl Staged for Handoff {
    fn close(&self) {
        if let Some(task) = self.task.borrow_mut().take() {
            task.abort();
        }
        self.stage.set(Stage::Over);
    }

    fn taken(&self) {
        self.ticket.borrow_mut().take();
    }

    fn release(self: Rc<Self>, leg: DecodeLeg) {
        match self.stage.get() {
            Stage::Out => self.stage.set(Stage::Unwanted),
            Stage::Staged => {
                self.stage.set(Stage::Over);
                if leg == DecodeLeg::Out && self.taken.get() {
                    if self.connector.pins() {
                        self.worker.kv_released();
                    }
                    Staged::taken(&*self);
                } else {
                    actix_web::rt::spawn(async move {
                        self.let_go().await;
                        Staged::taken(&*self);
                    });
                }
            }
            Stage::Unwanted | Stage::Over => {}
        }
    }
}

/// What the engine says that the prompt was.
fn usage(reply: &[u8]) -> Option<Usage> {
    let mut found = None;
    members(reply, |key, member, _| {
        if key == b"usage" {
            found = Usage::find_last(&reply[member]);
        }
    });
    found
}
