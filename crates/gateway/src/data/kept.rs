//! An engine's reply as the client's: its head, and replies that were kept whole.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::body::{BodySize, MessageBody};
use actix_web::http::StatusCode;
use bytes::{Bytes, BytesMut};
use routing::retry::{LegFailure, LegFault};

use crate::headers;
use crate::request_id::RequestId;
use crate::upstream::{Head, ReplyBody};

/// The most of a failed try's reply that is kept to be passed on, in bytes; error replies are short.
const KEPT_BYTES_MAX: usize = 64 << 10;
/// How long such a reply may take to arrive. 1 s: it is short, and another endpoint may be waiting.
const KEPT_WITHIN: Duration = Duration::from_secs(1);
/// `Retry-After` values beyond this are taken for this, in s: an hour.
const RETRY_AFTER_MAX_S: u64 = 3_600;

/// A failed try's reply, kept for the case that no other endpoint does better.
#[derive(Debug)]
pub(crate) struct Kept {
    head: Head,
    body: Bytes,
}

impl Kept {
    /// Reads what there is of a reply that is not passed on at once.
    pub(crate) async fn read(head: Head, mut body: ReplyBody) -> Self {
        let mut read = BytesMut::new();
        let reading = async {
            while let Some(Ok(data)) = body.data().await {
                let room = KEPT_BYTES_MAX - read.len();
                read.extend_from_slice(&data[..data.len().min(room)]);
                if read.len() == KEPT_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(KEPT_WITHIN, reading).await;
        Self { head, body: read.freeze() }
    }

    /// Its status.
    pub(crate) const fn status(&self) -> u16 {
        self.head.status
    }

    /// How the leg failed.
    pub(crate) fn failure(&self) -> LegFailure {
        let told = self.head.get("retry-after").and_then(|value| std::str::from_utf8(value).ok());
        let seconds = told.and_then(|text| text.trim().parse::<u64>().ok());
        LegFailure {
            fault: LegFault::Status(self.head.status),
            retry_after: seconds.map(|seconds| Duration::from_secs(seconds.min(RETRY_AFTER_MAX_S))),
        }
    }

    /// The response that passes it on as it was.
    pub(crate) fn response(self, id: &RequestId) -> HttpResponse {
        head(&self.head, id).set_body(actix_web::body::BoxBody::new(self.body))
    }
}

/// The head of a response that passes on an engine's.
pub(crate) fn head(from: &Head, id: &RequestId) -> HttpResponse {
    let status = StatusCode::from_u16(from.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let mut response = HttpResponse::new(status);
    let to = response.headers_mut();
    headers::to_client(from, to);
    to.insert(headers::X_REQUEST_ID, id.value().clone());
    response
}

/// The body of an answer to HEAD: none, but its length is told.
#[derive(Debug)]
pub(crate) struct HeadOnly(BodySize);

impl HeadOnly {
    /// For an engine's reply with these headers.
    pub(crate) fn of(from: &Head) -> Self {
        Self(from.content_length().map_or(BodySize::None, BodySize::Sized))
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
