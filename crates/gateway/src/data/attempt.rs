//! One try at one endpoint, up to the first byte that says something.

use std::cell::Cell;
use std::future::poll_fn;

use actix_web::HttpRequest;
use actix_web::http::Method;
use actors::lifecycle::{LifecycleHandle, Order};
use bytes::{Bytes, BytesMut};
use routing::endpoint::Endpoint;
use routing::request::Route;
use routing::retry::{LegFailure, LegFault};

use super::kept::Kept;
use super::leg::{Leg, More, Reader};
use super::upload::Upload;
use crate::errors::EdgeError;
use crate::headers::{self, BodyLength, Outgoing};
use crate::request_id::RequestId;
use crate::stream::Ending;
use crate::upstream::{Head, OutBody, Target};
use crate::worker::Worker;

/// What goes to the engine as the request's body.
pub(crate) enum Outbound {
    /// The client's bytes: can be sent again.
    Whole(Bytes),
    /// The client's bytes as they come: can be sent once.
    Streamed(Option<Upload>),
}

/// What goes with a request's body to whichever engine: its line, its headers, its id.
#[derive(Clone)]
pub(crate) struct Envelope {
    pub(super) request: HttpRequest,
    pub(super) id: RequestId,
}

impl Envelope {
    /// The head of a leg.
    pub(super) fn head(&self, target: &Target, route: Route, length: BodyLength) -> BytesMut {
        let path = self.request.uri().path_and_query().map_or("/", |path| path.as_str());
        self.write(self.request.method(), path, target, route != Route::Other, length)
    }

    /// The head of another request on this one's behalf.
    pub(super) fn head_of(
        &self,
        method: &Method,
        path: &str,
        target: &Target,
        length: BodyLength,
    ) -> BytesMut {
        self.write(method, path, target, true, length)
    }

    fn write(
        &self,
        method: &Method,
        path: &str,
        target: &Target,
        plain_reply: bool,
        length: BodyLength,
    ) -> BytesMut {
        let outgoing = Outgoing {
            target,
            request_id: self.id.value(),
            peer: self.request.peer_addr().map(|peer| peer.ip()),
            plain_reply,
            length,
        };
        headers::to_engine(method, path, self.request.headers(), &outgoing)
    }
}

/// A reply that has begun.
pub(super) struct Begun {
    pub(super) head: Head,
    pub(super) leg: Leg,
}

/// A try that has brought nothing for the client.
pub(super) enum Unserved {
    /// It failed by itself; what an engine said in doing so is kept.
    Failed(LegFailure, Option<Box<Kept>>),
    /// The engine refused a leg of a split request: its answer is the client's, if that has not had one.
    Answered(Box<Kept>),
    /// The client's own body is at fault.
    Client(EdgeError),
    /// The lifecycle has ended it.
    Ordered(Order),
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

    pub(super) fn can_be_sent(&self) -> bool {
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
/// `sent` is there for the decode leg of a split request, and turns true when the engine has been given all of it.
pub(super) async fn attempt(
    worker: &Worker,
    envelope: &Envelope,
    handle: &LifecycleHandle,
    outbound: &mut Outbound,
    endpoint: &Endpoint,
    sent: Option<&Cell<bool>>,
) -> Result<Begun, Unserved> {
    let failed = |fault| Unserved::Failed(LegFailure::new(fault), None);
    let target = worker.upstream.target(endpoint.id, &endpoint.spec);
    let method = envelope.request.method();
    let route = handle.shape().route;
    let head = envelope.head(&target, route, outbound.length(method));
    let upload = match outbound {
        Outbound::Streamed(Some(upload)) => Some(upload.fault()),
        _ => None,
    };
    let body = outbound.take().unwrap_or(OutBody::Whole(Bytes::new()));
    let (head, reply) = match worker.upstream.send(&target, method.clone(), head, body, sent).await {
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
    if sent.is_some() && status >= 300 {
        return Err(Unserved::Answered(Box::new(Kept::read(head, reply).await)));
    }
    let mut leg = Leg::new(reply, Reader::of(route, &head));
    begin(&mut leg, handle, status).await.map_err(failed)?;
    Ok(Begun { head, leg })
}

/// Waits for the first byte that says something, or for all of a reply in one piece. Until then the client has
/// nothing, and another endpoint may still serve it.
async fn begin(leg: &mut Leg, handle: &LifecycleHandle, status: u16) -> Result<(), LegFault> {
    loop {
        if leg.is_over() && !matches!(leg.reader(), Reader::Events(_)) {
            break;
        }
        match poll_fn(|context| leg.poll_more(context)).await {
            More::Bytes { events: 0 } => {}
            More::Bytes { .. } if leg.is_held() => {}
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
