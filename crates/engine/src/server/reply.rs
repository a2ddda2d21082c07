//! Replies on their way out: head, body, and the ways a body can go wrong.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER, SERVER, VARY};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

use crate::scheduler::Gauges;

use super::error::ApiError;
use super::stream::EventStream;

/// Why a request gets no reply, or a body no end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An error that is told.
    #[error("refused with {}", .0.status)]
    Refused(ApiError),
    /// The connection is reset.
    #[error("connection reset on purpose")]
    Reset,
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Refused(error)
    }
}

impl From<Infallible> for Failure {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

/// A reply before the headers that all have.
pub(crate) struct Reply {
    response: Response<ReplyBody>,
}

impl Reply {
    /// An empty body.
    pub(crate) fn empty(status: StatusCode) -> Self {
        Self::with_body(status, None, ReplyBody::Whole(None))
    }

    /// A JSON body.
    pub(crate) fn json(status: StatusCode, json: Bytes) -> Self {
        Self::bytes(status, HeaderValue::from_static("application/json"), json)
    }

    /// A body of any type.
    pub(crate) fn bytes(status: StatusCode, content_type: HeaderValue, body: Bytes) -> Self {
        Self::with_body(status, Some(content_type), ReplyBody::Whole(Some(body)))
    }

    /// A stream of events.
    pub(crate) fn events(stream: EventStream) -> Self {
        let content_type = HeaderValue::from_static("text/event-stream; charset=utf-8");
        Self::with_body(StatusCode::OK, Some(content_type), ReplyBody::Events(Box::new(stream)))
    }

    fn with_body(status: StatusCode, content_type: Option<HeaderValue>, body: ReplyBody) -> Self {
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(SERVER, HeaderValue::from_static("uvicorn"));
        headers.insert(VARY, HeaderValue::from_static("Origin"));
        if let Some(content_type) = content_type {
            headers.insert(CONTENT_TYPE, content_type);
        }
        Self { response }
    }

    pub(crate) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.response.headers_mut().insert(name, value);
        self
    }

    pub(crate) fn with_allow(self, method: &'static str) -> Self {
        self.with_header(ALLOW, HeaderValue::from_static(method))
    }

    pub(crate) fn with_retry_after(self, seconds: Option<u32>) -> Self {
        match seconds {
            Some(seconds) => self.with_header(RETRY_AFTER, seconds.into()),
            None => self,
        }
    }

    /// The ORCA header, when the request asked for the one format that vLLM and this engine both speak.
    pub(crate) fn with_load(self, format: &[u8], gauges: Gauges) -> Self {
        if !format.eq_ignore_ascii_case(b"json") {
            return self;
        }
        let load = format!(
            "JSON {{\"named_metrics\": {{\"num_requests_waiting\": {:?}, \"kv_cache_usage_perc\": {:?}}}}}",
            f64::from(gauges.waiting),
            gauges.kv_ratio
        );
        match HeaderValue::from_str(&load) {
            Ok(value) => self.with_header(HeaderName::from_static("endpoint-load-metrics"), value),
            Err(_) => self,
        }
    }

    /// The same body in pieces of some bytes with a pause before each.
    pub(crate) fn dripped(mut self, (bytes, every): (usize, Duration)) -> Self {
        if let ReplyBody::Whole(body) = self.response.body_mut() {
            let drip = Drip { rest: body.take().unwrap_or_default(), bytes, every, pause: None };
            *self.response.body_mut() = ReplyBody::Drip(Box::new(drip));
        }
        self
    }

    pub(crate) fn into_response(self) -> Response<ReplyBody> {
        self.response
    }
}

impl From<ApiError> for Reply {
    fn from(error: ApiError) -> Self {
        Self::json(error.status, error.body)
    }
}

/// The bodies of all replies.
pub(crate) enum ReplyBody {
    Whole(Option<Bytes>),
    Drip(Box<Drip>),
    Events(Box<EventStream>),
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let bytes = match &mut *self {
            Self::Whole(body) => Poll::Ready(body.take().map(Ok)),
            Self::Drip(drip) => drip.poll(cx).map(|piece| piece.map(Ok)),
            Self::Events(stream) => stream.poll(cx),
        };
        bytes.map(|item| item.map(|bytes| bytes.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, Bytes::len) as u64),
            Self::Drip(drip) => SizeHint::with_exact(drip.rest.len() as u64),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

/// Bytes that come piece by piece.
pub(crate) struct Drip {
    pub(crate) rest: Bytes,
    pub(crate) bytes: usize,
    pub(crate) every: Duration,
    pub(crate) pause: Option<Pin<Box<Sleep>>>,
}

impl Drip {
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let every = self.every;
        let pause = self.pause.get_or_insert_with(|| Box::pin(sleep(every)));
        if pause.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.pause = None;
        let piece = self.rest.split_to(self.bytes.min(self.rest.len()));
        Poll::Ready(Some(piece))
    }
}
