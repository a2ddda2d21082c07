//! An engine's reply as the client's: its head, and replies that were kept whole.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::body::{BodySize, MessageBody};
use actix_web::http::StatusCode;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use routing::retry::{LegFailure, LegFault};

use crate::headers;
use crate::request_id::RequestId;

/// The most of a failed try's reply that is kept to be passed on, in bytes; error replies are short.
const KEPT_BYTES_MAX: usize = 64 << 10;
/// How long such a reply may take to arrive. 1 s: it is short, and another endpoint may be waiting.
const KEPT_WITHIN: Duration = Duration::from_secs(1);
/// `Retry-After` values beyond this are taken for this, in s: an hour.
const RETRY_AFTER_MAX_S: u64 = 3_600;

/// A failed try's reply, kept for the case that no other endpoint does better.
#[derive(Debug)]
pub(crate) struct Kept {
    parts: http::response::Parts,
    body: Bytes,
}

impl Kept {
    /// Reads what there is of a reply that is not passed on at once.
    pub(crate) async fn read(reply: http::Response<Incoming>) -> Self {
        let (parts, mut body) = reply.into_parts();
        let mut read = BytesMut::new();
        let reading = async {
            while let Some(Ok(frame)) = body.frame().await {
                let Some(data) = frame.data_ref() else { continue };
                let room = KEPT_BYTES_MAX - read.len();
                read.extend_from_slice(&data[..data.len().min(room)]);
                if read.len() == KEPT_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(KEPT_WITHIN, reading).await;
        Self { parts, body: read.freeze() }
    }

    /// How the leg failed.
    pub(crate) fn failure(&self) -> LegFailure {
        let seconds = self
            .parts
            .headers
            .get(http::header::RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.trim().parse::<u64>().ok());
        LegFailure {
            fault: LegFault::Status(self.parts.status.as_u16()),
            retry_after: seconds.map(|seconds| Duration::from_secs(seconds.min(RETRY_AFTER_MAX_S))),
        }
    }

    /// The response that passes it on as it was.
    pub(crate) fn response(self, id: &RequestId) -> HttpResponse {
        head(&self.parts, id).set_body(actix_web::body::BoxBody::new(self.body))
    }
}

/// The head of a response that passes on an engine's.
pub(crate) fn head(parts: &http::response::Parts, id: &RequestId) -> HttpResponse {
    let status = StatusCode::from_u16(parts.status.as_u16()).unwrap_or(StatusCode::BAD_GATEWAY);
    let mut response = HttpResponse::new(status);
    let to = response.headers_mut();
    headers::to_client(&parts.headers, to);
    to.insert(headers::X_REQUEST_ID, id.value().clone());
    response
}

/// The body of an answer to HEAD: none, but its length is told.
#[derive(Debug)]
pub(crate) struct HeadOnly(BodySize);

impl HeadOnly {
    /// For an engine's reply with these headers.
    pub(crate) fn of(from: &http::HeaderMap) -> Self {
        Self(headers::content_length(from).map_or(BodySize::None, BodySize::Sized))
    }
}

impl MessageBody for HeadOnly {
    type Error = std::convert::Infallible;

    fn size(&self) -> BodySize {
        self.0
    }

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Poll::Ready(None)
    }
}
