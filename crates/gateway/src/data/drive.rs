//! Drives one request: choose, send, and again elsewhere while the lifecycle says so.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use actix_web::HttpResponse;
use actix_web::body::{BodySize, BoxBody};
use actix_web::http::{ConnectionType, Method, Version};
use actors::lifecycle::{LifecycleHandle, Order};
use bytes::Bytes;
use routing::endpoint::Endpoint;
use routing::lifecycle::GiveUp;
use routing::request::Route;
use routing::retry::{LegFailure, LegFault};
use routing::{Chosen, Decision, EndpointId, Refusal};
use smallvec::SmallVec;

use super::attempt::{Begun, Envelope, Outbound, Unserved, attempt};
use super::kept::Kept;
use super::leg::{Leg, Reader};
use super::queue::{Admitted, Waiting};
use super::relay::{Relay, close};
use super::resumption::Resumption;
use super::split::Pair;
use crate::connector;
use crate::errors::EdgeError;
use crate::headers;
use crate::worker::Worker;

/// Endpoints that a request must not go to.
pub(crate) type Shunned = SmallVec<[EndpointId; 3]>;

/// Why a request was sent nowhere.
enum Unplaced {
    /// No endpoint can be chosen for it.
    Refused(Refusal),
    /// The lifecycle has ended it while it waited.
    Ordered(Order),
}

/// A reply that has begun, and where.
pub(super) struct Reply {
    driver: Driver,
    begun: Begun,
    endpoint: Arc<Endpoint>,
    decision: Decision,
}

/// What sending the rest of a broken stream has come to.
pub(super) enum Continued {
    /// It comes.
    Comes { leg: Box<Leg>, handle: LifecycleHandle, envelope: Envelope },
    /// It does not; the order says how to end.
    Ended { order: Order, handle: LifecycleHandle },
}

/// One request on its way through.
pub(crate) struct Driver {
    pub(super) worker: Rc<Worker>,
    pub(super) envelope: Envelope,
    pub(super) handle: LifecycleHandle,
    outbound: Outbound,
    /// Endpoints not to go to: those that were shunned from the start, and then those that failed it.
    pub(super) tried: Shunned,
    shunned: usize,
    /// What the last engine that failed it has said.
    pub(super) kept: Option<Box<Kept>>,
    /// Whether it was split before, in vain.
    was_split: bool,
    /// Whether it is the rest of a stream of which the client has the beginning.
    pub(super) continues: bool,
}

impl Driver {
    pub(crate) fn new(
        worker: &Rc<Worker>,
        envelope: Envelope,
        handle: LifecycleHandle,
        outbound: Outbound,
        shunned: Shunned,
    ) -> Self {
        Self {
            worker: Rc::clone(worker),
            envelope,
            handle,
            outbound,
            shunned: shunned.len(),
            tried: shunned,
            kept: None,
            was_split: false,
            continues: false,
        }
    }

    /// A driver for the rest of a stream that broke, which `body` asks for.
    pub(super) fn continuing(
        worker: &Rc<Worker>,
        envelope: Envelope,
        handle: LifecycleHandle,
        body: Bytes,
    ) -> Self {
        let driver = Self::new(worker, envelope, handle, Outbound::Whole(body), Shunned::new());
        Self { continues: true, ..driver }
    }

    /// Sees the rest of a broken stream through, up to its first byte.
    pub(super) async fn go_on(mut self) -> Continued {
        loop {
            self.update_tried();
            let order = match self.worker.choose(self.handle.shape(), &self.tried, self.handle.id()) {
                Err(_) => {
                    self.handle.refused();
                    self.handle.order().await
                }
                Ok(chosen) => match self.send(chosen).await {
                    Ok(reply) => {
                        let Reply { driver, begun: Begun { head, leg }, .. } = *reply;
                        let fault = match (head.status, leg.reader()) {
                            (200..=299, Reader::Events(_)) => {
                                let Self { handle, envelope, .. } = driver;
                                return Continued::Comes { leg: Box::new(leg), handle, envelope };
                            }
                            (200..=299, _) => LegFault::Garbled,
                            (status, _) => LegFault::Status(status),
                        };
                        self = driver;
                        self.failed(LegFailure::new(fault), None).await
                    }
                    Err((driver, unserved)) => {
                        self = driver;
                        match unserved {
                            Unserved::Ordered(order) => order,
                            Unserved::Failed(failure, _) => self.failed(failure, None).await,
                            Unserved::Answered(kept) => self.failed(kept.failure(), None).await,
                            Unserved::Client(_) => self.failed(LegFailure::new(LegFault::Reset), None).await,
                        }
                    }
                },
            };
            if !matches!(order, Order::ResumeElsewhere { .. }) {
                return Continued::Ended { order, handle: self.handle };
            }
        }
    }

    /// Sees the request through, up to a response whose body may still be coming.
    pub(crate) async fn run(mut self) -> HttpResponse {
        let mut refusal = None;
        // What is tried elsewhere has had its turn.
        let mut newcomer = self.shunned == 0 && self.handle.shape().route != Route::Other;
        loop {
            let chosen = if std::mem::take(&mut newcomer) {
                self.admit().await
            } else {
                let chosen = self.worker.choose(self.handle.shape(), &self.tried, self.handle.id());
                chosen.map_err(Unplaced::Refused)
            };
            let order = match chosen {
                Err(Unplaced::Ordered(order)) => order,
                Err(Unplaced::Refused(refused)) => {
                    let error = EdgeError::from(refused);
                    self.handle.note(|account| account.status = error.status.as_u16());
                    refusal = Some(error);
                    self.handle.refused();
                    self.handle.order().await
                }
                Ok(chosen) => match self.send(chosen).await {
                    Ok(reply) => return reply.response(),
                    Err((driver, unserved)) => {
                        self = driver;
                        match unserved {
                            Unserved::Client(error) => return self.refuse(&error),
                            Unserved::Answered(kept) => return kept.response(&self.envelope.id),
                            Unserved::Ordered(order) => order,
                            Unserved::Failed(failure, said) => self.failed(failure, said).await,
                        }
                    }
                },
            };
            let Some(response) = self.obey(order, refusal.take()).await else { continue };
            return response;
        }
    }

    /// Has an endpoint chosen for the request, or waits for one.
    async fn admit(&self) -> Result<Chosen, Unplaced> {
        let bytes = match &self.outbound {
            Outbound::Whole(body) => body.len() as u64,
            Outbound::Streamed(_) => 0,
        };
        match self.worker.admit(&self.handle, bytes).map_err(Unplaced::Refused)? {
            Admitted::Chosen(chosen) => Ok(*chosen),
            Admitted::Shed(refusal) => Err(Unplaced::Refused(refusal)),
            // Kept apart, so that requests which do not wait don't have to make room for it.
            Admitted::Waits(waiting) => Box::pin(self.wait(waiting)).await,
        }
    }

    async fn wait(&self, mut waiting: Waiting) -> Result<Chosen, Unplaced> {
        self.handle.queued();
        let fate = unless_ordered(&self.handle, waiting.fate()).await.map_err(Unplaced::Ordered)?;
        self.worker.called(&self.handle, fate).map_err(Unplaced::Refused)
    }

    /// Tells the lifecycle of a failed leg; the order that follows.
    pub(super) async fn failed(&mut self, failure: LegFailure, said: Option<Box<Kept>>) -> Order {
        self.kept = said;
        self.handle.leg_failed(failure);
        self.handle.order().await
    }

    /// Learns which endpoints have failed it.
    pub(super) fn update_tried(&mut self) {
        self.tried.truncate(self.shunned);
        self.handle.add_tried(&mut self.tried);
    }

    /// Sends the request to whom it was chosen for.
    async fn send(mut self, mut chosen: Chosen) -> Result<Box<Reply>, (Self, Unserved)> {
        let prefill = chosen.prefill.take().map(|prefill| {
            let connector = connector::named(prefill.endpoint.spec.connector());
            (prefill, connector)
        });
        if let (Some((prefill, Some(connector))), Outbound::Whole(body)) = (prefill, &self.outbound) {
            let pair = Pair { connector, body: body.clone(), prefill, decode: chosen.into() };
            self.was_split = true;
            // Kept apart, so that requests which are not split don't have to make room for it.
            return Box::pin(self.serve_split(pair)).await;
        }
        if self.was_split {
            self.worker.fell_back(&chosen.decision);
        }
        self.serve(chosen).await
    }

    /// Follows an order; `None` means that another endpoint is to be tried.
    async fn obey(&mut self, order: Order, refusal: Option<EdgeError>) -> Option<HttpResponse> {
        let what = match order {
            Order::RetryElsewhere { .. } if self.outbound.can_be_sent() => {
                self.update_tried();
                return None;
            }
            Order::RetryElsewhere { after }
            | Order::DecodeElsewhere { after }
            | Order::ResumeElsewhere { after } => {
                // The body has gone to the failed endpoint and can't be had again.
                self.handle.refused();
                match self.handle.order().await {
                    Order::GiveUp(what) => what,
                    _ => GiveUp::BadGateway { failure: after },
                }
            }
            Order::GiveUp(what) => what,
            Order::EndWithErrorEvent(cause) | Order::CutReply(cause) => {
                return Some(self.respond(&EdgeError::of_end(&cause)));
            }
        };
        Some(match (what, refusal, self.kept.take()) {
            (GiveUp::Refusal, Some(error), _) => self.respond(&error),
            (GiveUp::PassOn { .. }, _, Some(kept)) => kept.response(&self.envelope.id),
            _ => self.respond(&EdgeError::of_give_up(&what)),
        })
    }

    fn respond(&self, error: &EdgeError) -> HttpResponse {
        let mut response = error.response();
        response.headers_mut().insert(headers::X_REQUEST_ID, self.envelope.id.value().clone());
        response
    }

    /// The client's own fault, found while its body was on its way: nobody else is to blame.
    fn refuse(&self, error: &EdgeError) -> HttpResponse {
        self.handle.note(|account| account.status = error.status.as_u16());
        self.respond(error)
    }

    /// Sends the request to the chosen endpoint and makes a response of what comes.
    async fn serve(mut self, chosen: Chosen) -> Result<Box<Reply>, (Self, Unserved)> {
        let Chosen { decision, endpoint, reservation, footing, .. } = chosen;
        self.handle.dispatched(&endpoint, reservation, footing);
        let begun = unless_ordered(
            &self.handle,
            attempt(&self.worker, &self.envelope, &self.handle, &mut self.outbound, &endpoint, None),
        );
        match begun.await.unwrap_or_else(|order| Err(Unserved::Ordered(order))) {
            Ok(begun) => Ok(self.reply(begun, endpoint, decision)),
            Err(unserved) => Err((self, unserved)),
        }
    }

    pub(super) fn reply(self, begun: Begun, endpoint: Arc<Endpoint>, decision: Decision) -> Box<Reply> {
        Box::new(Reply { driver: self, begun, endpoint, decision })
    }
}

impl Reply {
    /// The response that it becomes.
    fn response(self) -> HttpResponse {
        let Self { driver, begun: Begun { head, mut leg }, endpoint, decision } = self;
        let Driver { worker, envelope, handle, outbound, .. } = driver;
        let mut response = super::kept::head(&head, &envelope.id);
        if worker.settings().explain_headers {
            let prefill = handle.prefill_endpoint();
            headers::explain(
                response.headers_mut(),
                worker.state.router.own(),
                &endpoint.spec,
                prefill.as_ref().map(|prefill| &prefill.spec),
                &decision,
            );
        }
        if let Some(whole) = leg.take_whole() {
            handle.note(|account| account.bytes = whole.len() as u64);
            handle.first_byte();
            close(&worker, &handle, &leg);
            return if envelope.request.method() == Method::HEAD {
                response.set_body(BoxBody::new(super::kept::HeadOnly::of(&head)))
            } else {
                response.set_body(BoxBody::new(whole))
            };
        }
        let size = match leg.reader() {
            Reader::Events(_) => BodySize::Stream,
            _ => head.content_length().map_or(BodySize::Stream, BodySize::Sized),
        };
        if size == BodySize::Stream && envelope.request.version() < Version::HTTP_11 {
            // Such a client knows no chunks: for it the reply ends with the connection.
            response.head_mut().no_chunking(true);
            response.head_mut().set_connection_type(ConnectionType::Close);
        }
        let resumption = match (outbound, leg.reader()) {
            (Outbound::Whole(body), Reader::Events(_)) if handle.resumes() => {
                let bytes_max = worker.settings().resume_bytes_max;
                Resumption::of(handle.shape().route, body, envelope, bytes_max)
            }
            _ => None,
        };
        let relay = Relay::new(worker, handle, leg, size, resumption);
        response.set_body(BoxBody::new(relay))
    }
}

/// What `leg` comes to, unless the lifecycle gives an order before.
pub(super) async fn unless_ordered<T>(
    handle: &LifecycleHandle,
    leg: impl Future<Output = T>,
) -> Result<T, Order> {
    let mut leg = pin!(leg);
    poll_fn(|context| {
        if let Poll::Ready(order) = handle.poll_order(context) {
            return Poll::Ready(Err(order));
        }
        leg.as_mut().poll(context).map(Ok)
    })
    .await
}
