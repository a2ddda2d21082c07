//! How an engine is looked at: a port that the HTTP edge fills, and what its answers mean.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use routing::endpoint::{Cause, EndpointSpec, Served};
use serde::Deserialize;
use thiserror::Error;

/// The largest probe or scrape answer that is read; a vLLM's metrics page is about 60 KB.
pub const PROBE_BYTES_MAX: usize = 4 << 20;
/// The most models that one engine may list; more are left out.
pub(crate) const MODELS_MAX: usize = 1_024;

/// Sends a GET to an engine.
#[async_trait]
pub trait EngineProbe: Send + Sync + 'static {
    /// The answer to `GET path`, at most [`PROBE_BYTES_MAX`] of it.
    ///
    /// # Errors
    /// When there is none within `limit`.
    async fn get(
        &self,
        endpoint: &EndpointSpec,
        path: &str,
        limit: Duration,
    ) -> Result<ProbeReply, ProbeError>;
}

/// What an engine answered.
#[derive(Clone, Debug)]
pub struct ProbeReply {
    /// HTTP status.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

/// Why an engine did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProbeError {
    /// Nobody listens.
    #[error("connection refused")]
    Refused,
    /// No connection within the limit.
    #[error("no connection within the limit")]
    ConnectTimeout,
    /// The connection broke.
    #[error("connection reset")]
    Reset,
    /// Connected, but no whole answer within the limit.
    #[error("no answer within the limit")]
    Silent,
    /// An answer that is not HTTP, or too long.
    #[error("answer can't be read")]
    Garbled,
}

impl ProbeError {
    /// The same in the breaker's words.
    pub const fn cause(self) -> Cause {
        match self {
            Self::Refused => Cause::Refused,
            Self::ConnectTimeout => Cause::ConnectTimeout,
            Self::Reset => Cause::Reset,
            Self::Silent => Cause::Silent,
            Self::Garbled => Cause::Garbled,
        }
    }
}

/// What the answer to `GET /health` says: an engine that has no such page, or asks for a key, is alive.
pub(crate) fn health(reply: &Result<ProbeReply, ProbeError>) -> Result<(), Cause> {
    match reply {
        Ok(reply) if reply.status < 500 || reply.status == 501 => Ok(()),
        Ok(reply) if reply.status == 503 => Err(Cause::Unavailable),
        Ok(_) => Err(Cause::ServerError),
        Err(error) => Err(error.cause()),
    }
}

/// What the answer to `GET /v1/models` says; `None` where it says nothing (a key is asked for, it fails).
pub(crate) fn served(reply: &ProbeReply) -> Option<Served> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Entry>,
    }
    #[derive(Deserialize)]
    struct Entry {
        id: String,
    }
    match reply.status {
        200 => Some(match serde_json::from_slice::<List>(&reply.body) {
            Ok(list) if !list.data.is_empty() => {
                Served::Models(list.data.into_iter().take(MODELS_MAX).map(|entry| entry.id).collect())
            }
            _ => Served::Any,
        }),
        404 | 405 | 501 => Some(Served::Any),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, body: &'static str) -> ProbeReply {
        ProbeReply { status, body: Bytes::from_static(body.as_bytes()) }
    }

    #[test]
    fn only_a_5xx_or_no_answer_is_bad_health() {
        for status in [200, 204, 301, 401, 404, 405, 501] {
            assert_eq!(health(&Ok(reply(status, ""))), Ok(()), "{status}");
        }
        assert_eq!(health(&Ok(reply(503, ""))), Err(Cause::Unavailable));
        assert_eq!(health(&Ok(reply(500, ""))), Err(Cause::ServerError));
        assert_eq!(health(&Err(ProbeError::Refused)), Err(Cause::Refused));
    }

    #[test]
    fn an_engine_that_lists_no_models_is_taken_to_serve_any() {
        let listed =
            served(&reply(200, r#"{"object":"list","data":[{"id":"a","object":"model"},{"id":"b"}]}"#));
        assert_eq!(listed, Some(Served::Models(vec!["a".to_owned(), "b".to_owned()])));
        assert_eq!(served(&reply(404, "{}")), Some(Served::Any));
        assert_eq!(served(&reply(200, "hello")), Some(Served::Any));
        assert_eq!(served(&reply(401, "")), None);
        assert_eq!(served(&reply(503, "")), None);
    }
}
