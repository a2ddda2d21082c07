//! Looks at engines for the actors: a GET with a limit, over connections of its own.

use std::error::Error as StdError;
use std::time::Duration;

use actors::{EngineProbe, PROBE_BYTES_MAX, ProbeError, ProbeReply};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use routing::endpoint::EndpointSpec;

/// Idle connections kept per engine: probes and scrapes of one engine do not overlap much.
const IDLE_PER_ENDPOINT_MAX: usize = 2;

/// A client for probes and scrapes. One serves all endpoints.
#[derive(Debug)]
pub struct Probe {
    client: Client<HttpConnector, Empty<Bytes>>,
}

impl Probe {
    /// A probe that gives a connection this long to be made.
    pub fn new(connect: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(connect));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_PER_ENDPOINT_MAX)
            .pool_idle_timeout(crate::UpstreamSettings::default().idle_for)
            .pool_timer(TokioTimer::new())
            .build(connector);
        Self { client }
    }

    async fn answer(&self, endpoint: &EndpointSpec, path: &str) -> Result<ProbeReply, ProbeError> {
        let uri: Uri = format!("{}{path}", endpoint.url).parse().map_err(|_| ProbeError::ConnectTimeout)?;
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = uri;
        request.headers_mut().insert(header::USER_AGENT, HeaderValue::from_static("grapevine-probe"));
        let reply = self.client.request(request).await.map_err(|error| error_of(&error))?;
        let status = reply.status().as_u16();
        let mut body = reply.into_body();
        let mut read = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| ProbeError::Reset)?;
            let Some(data) = frame.data_ref() else { continue };
            if read.len() + data.len() > PROBE_BYTES_MAX {
                return Err(ProbeError::Garbled);
            }
            read.extend_from_slice(data);
        }
        Ok(ProbeReply { status, body: read.freeze() })
    }
}

#[async_trait]
impl EngineProbe for Probe {
    async fn get(
        &self,
        endpoint: &EndpointSpec,
        path: &str,
        limit: Duration,
    ) -> Result<ProbeReply, ProbeError> {
        tokio::time::timeout(limit, self.answer(endpoint, path)).await.unwrap_or(Err(ProbeError::Silent))
    }
}

fn error_of(error: &ClientError) -> ProbeError {
    let io = source::<std::io::Error>(error).map(std::io::Error::kind);
    match (error.is_connect(), io) {
        (true, Some(std::io::ErrorKind::ConnectionRefused)) => ProbeError::Refused,
        (true, Some(std::io::ErrorKind::ConnectionReset)) => ProbeError::Reset,
        (true, _) => ProbeError::ConnectTimeout,
        (false, _) if source::<hyper::Error>(error).is_some_and(hyper::Error::is_parse) => {
            ProbeError::Garbled
        }
        (false, _) => ProbeError::Reset,
    }
}

/// The first error of this type behind another.
fn source<'a, E: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    let mut cause = error.source();
    while let Some(inner) = cause {
        if let Some(found) = inner.downcast_ref() {
            return Some(found);
        }
        cause = inner.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn check(reply: Option<&'static str>, want: Result<(u16, &str), ProbeError>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = EndpointSpec::at(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = [0; 1024];
            let _ = stream.read(&mut head).await;
            if let Some(reply) = reply {
                stream.write_all(reply.as_bytes()).await.unwrap();
            } else {
                std::future::pending::<()>().await;
            }
        });
        let got =
            Probe::new(Duration::from_secs(1)).get(&endpoint, "/health", Duration::from_millis(300)).await;
        match (got, want) {
            (Ok(got), Ok((status, body))) => assert_eq!((got.status, &*got.body), (status, body.as_bytes())),
            (Err(got), Err(want)) => assert_eq!(got, want),
            (got, want) => panic!("{got:?}, want {want:?}"),
        }
    }

    #[tokio::test]
    async fn answers_and_failures_are_told_apart() {
        check(Some("HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy"), Ok((503, "busy"))).await;
        check(Some("SSH-2.0-x\r\n\r\n"), Err(ProbeError::Garbled)).await;
        check(Some(""), Err(ProbeError::Reset)).await;
        check(None, Err(ProbeError::Silent)).await;
        let nobody = EndpointSpec::at("http://127.0.0.1:1").unwrap();
        let got = Probe::new(Duration::from_secs(1)).get(&nobody, "/", Duration::from_secs(1)).await;
        assert_eq!(got.unwrap_err(), ProbeError::Refused);
    }
}
