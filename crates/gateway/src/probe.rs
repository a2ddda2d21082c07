//! How engines are looked at: short GETs on connections of their own, apart from the requests' pools, so that a
//! probe also shows whether new connections can be made.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use actors::{EngineProbe, PROBE_BYTES_MAX, ProbeError, ProbeReply};
use async_trait::async_trait;
use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use routing::endpoint::EndpointSpec;

/// Idle connections kept per engine. 2: a probe and a scrape at once.
const IDLE_PER_ENDPOINT_MAX: usize = 2;
/// How long they are kept. Below the 5 s after which uvicorn closes.
const IDLE_FOR: Duration = Duration::from_secs(4);

/// Probes over HTTP/1.1.
#[derive(Debug)]
pub struct Probe {
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl Probe {
    /// Probes whose connections have to be there within `connect_timeout`.
    pub fn new(connect_timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(connect_timeout));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .pool_max_idle_per_host(IDLE_PER_ENDPOINT_MAX)
            .pool_idle_timeout(IDLE_FOR)
            .build(connector);
        Self { client }
    }

    async fn ask(&self, url: String) -> Result<ProbeReply, ProbeError> {
        let request = Request::get(url).header(header::USER_AGENT, "grapevine-probe").body(Empty::new());
        let request = request.map_err(|_| ProbeError::Garbled)?;
        let reply = self.client.request(request).await.map_err(|error| cause(&error, error.is_connect()))?;
        let status = reply.status().as_u16();
        let body = Limited::new(reply.into_body(), PROBE_BYTES_MAX).collect().await;
        let body = body.map_err(|error| cause(error.as_ref(), false))?.to_bytes();
        Ok(ProbeReply { status, body })
    }
}

#[async_trait]
impl EngineProbe for Probe {
    async fn get(&self, endpoint: &EndpointSpec, path: &str, limit: Duration) -> Result<ProbeReply, ProbeError> {
        let url = format!("{}{path}", endpoint.url);
        tokio::time::timeout(limit, self.ask(url)).await.unwrap_or(Err(ProbeError::Silent))
    }
}

/// What is behind an error of the client: the kind of the I/O error, if there is one in its chain.
fn cause(error: &(dyn StdError + 'static), connecting: bool) -> ProbeError {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return match io.kind() {
                io::ErrorKind::ConnectionRefused => ProbeError::Refused,
                io::ErrorKind::TimedOut if connecting => ProbeError::ConnectTimeout,
                _ => ProbeError::Reset,
            };
        }
        next = error.source();
    }
    if connecting { ProbeError::Reset } else { ProbeError::Garbled }
}
