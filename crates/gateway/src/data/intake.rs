//! Taking in a request's body, bounded in bytes and in time.

use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header::{self, HeaderMap};
use bytes::Bytes;
use futures_util::StreamExt;

use super::room::BodyRoom;
use crate::errors::BodyFault;

/// Memory taken at once for a body on its sender's word, in bytes; more is taken as it comes.
const TRUSTED_BYTES: usize = 1 << 20;

/// How much body the client has announced, if it has.
pub(crate) fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// What a request's body may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Intake<'a> {
    /// Longest body, in bytes.
    pub(crate) bytes_max: u64,
    /// Longest silence between two parts.
    pub(crate) idle: Duration,
    /// From its first part to its end.
    pub(crate) within: Duration,
    /// Where the bodies of all requests are counted.
    pub(crate) room: &'a Arc<BodyRoom>,
    /// What they may take together, in bytes.
    pub(crate) room_max: u64,
}

impl Intake<'_> {
    /// The whole body. One that arrived in one piece is not copied.
    pub(crate) async fn read_whole(
        &self,
        payload: &mut Payload,
        announced: Option<u64>,
    ) -> Result<Bytes, BodyFault> {
        self.admits(announced)?;
        let first = next(payload, self.idle).await?;
        self.read_rest(first, payload, announced).await
    }

    /// The same for a body whose first part has been read.
    pub(crate) async fn read_rest(
        &self,
        first: Option<Bytes>,
        payload: &mut Payload,
        announced: Option<u64>,
    ) -> Result<Bytes, BodyFault> {
        let Some(first) = first else { return Ok(Bytes::new()) };
        let whole = self.collect(first, payload, announced);
        tokio::time::timeout(self.within, whole).await.unwrap_or(Err(BodyFault::TooSlow))
    }

    async fn collect(
        &self,
        first: Bytes,
        payload: &mut Payload,
        announced: Option<u64>,
    ) -> Result<Bytes, BodyFault> {
        let Some(second) = next(payload, self.idle).await? else {
            self.admits(Some(first.len() as u64))?;
            return Ok(first);
        };
        let expected = announced.and_then(|length| usize::try_from(length).ok()).unwrap_or(0);
        let mut body = self.room.open();
        body.reserve(expected.min(TRUSTED_BYTES).max(first.len() + second.len()));
        body.take_in(&first, self.room_max)?;
        let mut part = Some(second);
        while let Some(bytes) = part {
            self.admits(Some(body.len() + bytes.len() as u64))?;
            body.take_in(&bytes, self.room_max)?;
            part = next(payload, self.idle).await?;
        }
        Ok(body.into_bytes())
    }

    /// Whether a body may be as long as this; of one that nobody has measured it is not yet known.
    pub(crate) fn admits(&self, length: Option<u64>) -> Result<(), BodyFault> {
        match length {
            Some(length) if length > self.bytes_max => Err(BodyFault::TooLarge { max: self.bytes_max }),
            _ => Ok(()),
        }
    }
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
