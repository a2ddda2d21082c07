//! Taking in a request's body, bounded in bytes and in time.

use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header::{self, HeaderMap};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;

use crate::errors::BodyFault;

/// Memory taken at once for a body on its sender's word, in bytes; more is taken as it comes.
const TRUSTED_BYTES: usize = 1 << 20;

/// How much body the client has announced, if it has.
pub(crate) fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// The whole body, at most `max` bytes, with at most `idle` between two parts. A body that arrived in one
/// piece is not copied.
pub(crate) async fn read_whole(
    payload: &mut Payload,
    announced: Option<u64>,
    max: u64,
    idle: Duration,
) -> Result<Bytes, BodyFault> {
    if announced.is_some_and(|length| length > max) {
        return Err(BodyFault::TooLarge { max });
    }
    let first = next(payload, idle).await?;
    read_rest(first, payload, announced, max, idle).await
}

/// The same for a body whose first part has been read.
pub(crate) async fn read_rest(
    first: Option<Bytes>,
    payload: &mut Payload,
    announced: Option<u64>,
    max: u64,
    idle: Duration,
) -> Result<Bytes, BodyFault> {
    let Some(first) = first else { return Ok(Bytes::new()) };
    let Some(second) = next(payload, idle).await? else {
        return if first.len() as u64 > max { Err(BodyFault::TooLarge { max }) } else { Ok(first) };
    };
    let expected = announced.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
    let mut whole = BytesMut::with_capacity(expected.min(TRUSTED_BYTES).max(first.len() + second.len()));
    whole.extend_from_slice(&first);
    whole.extend_from_slice(&second);
    while whole.len() as u64 <= max {
        match next(payload, idle).await? {
            Some(chunk) => whole.extend_from_slice(&chunk),
            None => return Ok(whole.freeze()),
        }
    }
    Err(BodyFault::TooLarge { max })
}

/// The next part of a body, `None` at its end.
pub(crate) async fn next(payload: &mut Payload, idle: Duration) -> Result<Option<Bytes>, BodyFault> {
    match tokio::time::timeout(idle, payload.next()).await {
        Err(_) => Err(BodyFault::TooSlow),
        Ok(None) => Ok(None),
        Ok(Some(Ok(chunk))) => Ok(Some(chunk)),
        Ok(Some(Err(_))) => Err(BodyFault::BrokenOff),
    }
}
