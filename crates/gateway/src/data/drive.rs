//! Drives one request: choose, send, and again elsewhere while the lifecycle says so.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use actix_web::body::{BodySize, BoxBody};
use actix_web::http::{ConnectionType, Method, Version};
use actix_web::{HttpRequest, HttpResponse};
use actors::lifecycle::{LifecycleHandle, Order};
use bytes::Bytes;
use routing::lifecycle::GiveUp;
use routing::retry::{LegFailure, LegFault};
use routing::{Chosen, EndpointId};
use smallvec::SmallVec;

use super::kept::Kept;
use super::leg::{Leg, More, Reader};
use super::relay::{Relay, close};
use super::upload::Upload;
use crate::errors::EdgeError;
use crate::headers::{self, BodyLength, Outgoing};
use crate::request_id::RequestId;
use crate::stream::Ending;
use crate::upstream::{Head, OutBody};
use crate::worker::Worker;

/// Endpoints that a request must not go to.
pub(crate) type Shunned = SmallVec<[EndpointId; 3]>;

/// What goes to the engine as the request's body.
pub(crate) enum Outbound {
    /// The client's bytes: can be sent again.
    Whole(Bytes),
    /// The client's bytes as they come: can be sent once.
    Streamed(Option<Upload>),
}

/// One request on its way through.
pub(crate) struct Driver {
    worker: Rc<Worker>,
    request: HttpRequest,
    id: RequestId,
    handle: LifecycleHandle,
    outbound: Outbound,
}

/// A reply that has begun.
struct Begun {
    head: Head,
    leg: Leg,
}

/// A try that has brought nothing for the client.
enum Unserved {
    /// It failed by itself; what an engine said in doing so is kept.
    Failed(LegFailure, Option<Box<Kept>>),
    /// The client's own body is at fault.
    Client(EdgeError),
    /// The lifecycle has ended it.
    Ordered(Order),
}

impl Driver {
    pub(crate) fn new(
        worker: &Rc<Worker>,
        request: HttpRequest,
        id: RequestId,
        handle: LifecycleHandle,
        outbound: Outbound,
    ) -> Self {
        Self { worker: Rc::clone(worker), request, id, handle, outbound }
    }

    /// Sees the request through, up to a response whose body may still be coming.
    pub(crate) async fn run(mut self, shunned: Shunned) -> HttpResponse {
        let mut tried = shunned;
        let mut kept = None;
        let mut refusal = None;
        loop {
            let order = match self.worker.choose(self.handle.shape(), &tried, self.handle.id()) {
                Err(refused) => {
                    let error = EdgeError::from(refused);
                    self.handle.note(|account| account.status = error.status.as_u16());
                    refusal = Some(error);
                    self.handle.refused();
                    self.handle.order().await
                }
                Ok(chosen) => {
                    tried.push(chosen.endpoint.id);
                    match self.serve(chosen).await {
                        Ok(response) => return response,
                        Err((driver, unserved)) => {
                            self = driver;
                            match unserved {
                                Unserved::Client(error) => return self.refuse(&error),
                                Unserved::Ordered(order) => order,
                                Unserved::Failed(failure, said) => {
                                    kept = said;
                                    self.handle.leg_failed(failure);
                                    self.handle.order().await
                                }
                            }
                        }
                    }
                }
            };
            let Some(response) = self.obey(order, &mut kept, refusal.take()).await else { continue };
            return response;
        }
    }

    /// Follows an order; `None` means that another endpoint is to be tried.
    async fn obey(
        &mut self,
        order: Order,
        kept: &mut Option<Box<Kept>>,
        refusal: Option<EdgeError>,
    ) -> Option<HttpResponse> {
        let what = match order {
            Order::RetryElsewhere { .. } if self.outbound.can_be_sent() => return None,
            Order::RetryElsewhere { after } => {
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
        Some(match (what, refusal, kept.take()) {
            (GiveUp::Refusal, Some(error), _) => self.respond(&error),
            (GiveUp::PassOn { .. }, _, Some(kept)) => kept.response(&self.id),
            _ => self.respond(&EdgeError::of_give_up(&what)),
        })
    }

    fn respond(&self, error: &EdgeError) -> HttpResponse {
        let mut response = error.response();
        response.headers_mut().insert(headers::X_REQUEST_ID, self.id.value().clone());
        response
    }

    /// The client's own fault, found while its body was on its way: nobody else is to blame.
    fn refuse(&self, error: &EdgeError) -> HttpResponse {
        self.handle.note(|account| account.status = error.status.as_u16());
        self.respond(error)
    }

    /// Sends the request to the chosen endpoint and makes a response of what comes.
    async fn serve(mut self, chosen: Chosen) -> Result<HttpResponse, (Self, Unserved)> {
        let Chosen { decision, endpoint, reservation, footing, .. } = chosen;
        self.handle.dispatched(&endpoint, reservation, footing);
        let begun = {
            let mut attempt = pin!(attempt(
                &self.worker,
                &self.request,
                &self.id,
                &self.handle,
                &mut self.outbound,
                &endpoint,
            ));
            poll_fn(|context| {
                if let Poll::Ready(order) = self.handle.poll_order(context) {
                    return Poll::Ready(Err(Unserved::Ordered(order)));
                }
                attempt.as_mut().poll(context)
            })
            .await
        };
        let Begun { head, mut leg } = match begun {
            Ok(begun) => begun,
            Err(unserved) => return Err((self, unserved)),
        };
        let mut response = super::kept::head(&head, &self.id);
        if self.worker.settings().explain_headers {
            headers::explain(
                response.headers_mut(),
                self.worker.state.router.own(),
                &endpoint.spec,
                &decision,
            );
        }
        if let Some(whole) = leg.take_whole() {
            self.handle.note(|account| account.bytes = whole.len() as u64);
            self.handle.first_byte();
            close(&self.worker, &self.handle, leg.reader());
            return Ok(if self.request.method() == Method::HEAD {
                response.set_body(BoxBody::new(super::kept::HeadOnly::of(&head)))
            } else {
                response.set_body(BoxBody::new(whole))
            });
        }
        let size = match leg.reader() {
            Reader::Events(_) => BodySize::Stream,
            _ => head.content_length().map_or(BodySize::Stream, BodySize::Sized),
        };
        if size == BodySize::Stream && self.request.version() < Version::HTTP_11 {
            // Such a client knows no chunks: for it the reply ends with the connection.
            response.head_mut().no_chunking(true);
            response.head_mut().set_connection_type(ConnectionType::Close);
        }
        let relay = Relay::new(self.worker, self.handle, leg, size);
        Ok(response.set_body(BoxBody::new(relay)))
    }
}

impl Outbound {
    /// How the body's length is told. A method that has no use for a body has none, unless there is one.
    fn length(&self, method: &Method) -> BodyLength {
        match self {
            Self::Whole(bytes) if bytes.is_empty() && matches!(*method, Method::GET | Method::HEAD) => {
                BodyLength::Absent
            }
            Self::Whole(bytes) => BodyLength::Known(bytes.len() as u64),
            Self::Streamed(upload) => {
                upload.as_ref().and_then(Upload::announced).map_or(BodyLength::Chunked, BodyLength::Known)
            }
        }
    }

    fn can_be_sent(&self) -> bool {
        !matches!(self, Self::Streamed(None))
    }

    fn take(&mut self) -> Option<OutBody> {
        match self {
            Self::Whole(bytes) => Some(OutBody::Whole(bytes.clone())),
            Self::Streamed(upload) => upload.take().map(Upload::into_body),
        }
    }
}

/// One try: the request out, the head in, and the body up to its first byte that says something.
async fn attempt(
    worker: &Worker,
    request: &HttpRequest,
    id: &RequestId,
    handle: &LifecycleHandle,
    outbound: &mut Outbound,
    endpoint: &routing::endpoint::Endpoint,
) -> Result<Begun, Unserved> {
    let failed = |fault| Unserved::Failed(LegFailure::new(fault), None);
    let target = worker.upstream.target(endpoint.id, &endpoint.spec);
    let method = request.method();
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let route = handle.shape().route;
    let outgoing = Outgoing {
        target: &target,
        request_id: id.value(),
        peer: request.peer_addr().map(|peer| peer.ip()),
        plain_reply: route != routing::request::Route::Other,
        length: outbound.length(method),
    };
    let head = headers::to_engine(method, path, request.headers(), &outgoing);
    let upload = match outbound {
        Outbound::Streamed(Some(upload)) => Some(upload.fault()),
        _ => None,
    };
    let body = outbound.take().unwrap_or(OutBody::Whole(Bytes::new()));
    let (head, reply) = match worker.upstream.send(&target, method.clone(), head, body).await {
        Ok(reply) => reply,
        Err(fault) => {
            let clients = upload.and_then(|upload| upload.get());
            return Err(clients.map_or_else(|| failed(fault), |fault| Unserved::Client(fault.into())));
        }
    };
    let status = head.status;
    if LegFailure::is_retried_status(status) {
        let kept = Kept::read(head, reply).await;
        return Err(Unserved::Failed(kept.failure(), Some(Box::new(kept))));
    }
    handle.head_arrived(status);
    let mut leg = Leg::new(reply, Reader::of(route, &head));
    begin(&mut leg, handle, status).await.map_err(failed)?;
    Ok(Begun { head, leg })
}

/// Waits for the first byte that says something. Until then the client has nothing, and another endpoint
/// may still serve it.
async fn begin(leg: &mut Leg, handle: &LifecycleHandle, status: u16) -> Result<(), LegFault> {
    loop {
        if leg.is_over() && !matches!(leg.reader(), Reader::Events(_)) {
            break;
        }
        match poll_fn(|context| leg.poll_more(context)).await {
            More::Bytes { events: 0 } => {}
            More::Bytes { .. } => break,
            More::Whole => break,
            More::Failed(fault) => return Err(fault),
        }
    }
    match leg.reader() {
        Reader::Events(scanner) if scanner.ending() == Ending::Failed && !scanner.error_is_clients() => {
            Err(LegFault::ErrorEvent)
        }
        // A stream that was promised and brought nothing is not one.
        Reader::Events(scanner) if scanner.events() == 0 => Err(LegFault::Truncated),
        _ if leg.is_empty() && handle.shape().stream && status < 300 => Err(LegFault::Truncated),
        _ => Ok(()),
    }
}
