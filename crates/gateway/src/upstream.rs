//! The client side: one pool of connections to the engines per worker, so that no lock is shared.

use std::cell::RefCell;
use std::collections::HashMap;
use std::error::Error as StdError;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use routing::EndpointId;
use routing::endpoint::EndpointSpec;
use routing::retry::LegFault;
use tokio::sync::mpsc;

/// How connections to the engines are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// For one connection to be made. 2 s: a lost SYN is sent again after one.
    pub connect: Duration,
    /// Idle connections kept per engine and worker. 64: a burst of so many leaves no handshakes behind.
    pub idle_per_endpoint_max: usize,
    /// How long a connection is kept idle. 4 s: uvicorn, which most engines run on, closes after 5.
    pub idle_for: Duration,
}

impl Default for UpstreamSettings {
    fn default() -> Self {
        Self { connect: Duration::from_secs(2), idle_per_endpoint_max: 64, idle_for: Duration::from_secs(4) }
    }
}

/// Targets kept prepared per worker. Endpoints come and go; beyond this all are prepared anew.
const TARGETS_MAX: usize = 4_096;

/// A request's body on its way to an engine.
#[derive(Debug)]
pub(crate) enum OutBody {
    /// The client's bytes, all of them.
    Whole(Bytes),
    /// The client's bytes as they come.
    Streamed {
        /// Where they come from; an error says that the client broke off.
        chunks: mpsc::Receiver<Result<Bytes, ClientBrokeOff>>,
        /// How many there will be, if the client has said so.
        length: Option<u64>,
    },
}

/// The client's body ended before its end: the engine must not take what came for all.
#[derive(Debug, thiserror::Error)]
#[error("the client's body broke off")]
pub(crate) struct ClientBrokeOff;

impl http_body::Body for OutBody {
    type Data = Bytes;
    type Error = ClientBrokeOff;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ClientBrokeOff>>> {
        match &mut *self {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Streamed { chunks, .. } => {
                chunks.poll_recv(context).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Streamed { length, .. } => length.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

/// An endpoint's address, taken apart once.
#[derive(Debug)]
pub(crate) struct Target {
    authority: Authority,
    /// The path before every path, without a slash at its end; mostly empty.
    base: String,
    /// The value of `Host`.
    pub(crate) host: HeaderValue,
    /// The value of `X-data-parallel-rank`.
    pub(crate) rank: Option<HeaderValue>,
}

impl Target {
    fn of(spec: &EndpointSpec) -> Result<Self, LegFault> {
        let rest = spec.url.strip_prefix("http://").unwrap_or(&spec.url);
        let (authority, base) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let host = HeaderValue::from_str(authority).map_err(|_| LegFault::ConnectTimeout)?;
        Ok(Self {
            authority: authority.parse().map_err(|_| LegFault::ConnectTimeout)?,
            base: base.to_owned(),
            host,
            rank: spec.rank.map(HeaderValue::from),
        })
    }

    /// The engine's URI for the client's path and query.
    pub(crate) fn uri(&self, path_and_query: &str) -> Result<Uri, http::Error> {
        let path = if self.base.is_empty() {
            PathAndQuery::try_from(path_and_query)?
        } else {
            PathAndQuery::try_from(format!("{}{path_and_query}", self.base))?
        };
        Uri::builder().scheme(Scheme::HTTP).authority(self.authority.clone()).path_and_query(path).build()
    }
}

/// One worker's connections.
#[derive(Debug)]
pub(crate) struct Upstream {
    client: Client<HttpConnector, OutBody>,
    targets: RefCell<HashMap<EndpointId, Rc<Target>>>,
}

impl Upstream {
    pub(crate) fn new(settings: &UpstreamSettings) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(settings.connect));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(settings.idle_for)
            .pool_max_idle_per_host(settings.idle_per_endpoint_max)
            .pool_timer(TokioTimer::new())
            .set_host(false)
            .build(connector);
        Self { client, targets: RefCell::default() }
    }

    /// The endpoint's address, prepared.
    ///
    /// # Errors
    /// When its URL can't be used after all; counts as unreachable.
    pub(crate) fn target(&self, spec: &EndpointSpec) -> Result<Rc<Target>, LegFault> {
        let id = spec.id();
        if let Some(target) = self.targets.borrow().get(&id) {
            return Ok(Rc::clone(target));
        }
        let target = Rc::new(Target::of(spec)?);
        let mut targets = self.targets.borrow_mut();
        if targets.len() >= TARGETS_MAX {
            targets.clear();
        }
        targets.insert(id, Rc::clone(&target));
        Ok(target)
    }

    /// Sends a request and waits for the reply's head. Dropping the future or the reply's body closes the
    /// connection, which is how an engine learns that nobody waits any more.
    ///
    /// # Errors
    /// How the leg failed, as the retry plan wants to know it.
    pub(crate) async fn send(
        &self,
        method: Method,
        uri: Uri,
        headers: HeaderMap,
        body: OutBody,
    ) -> Result<Response<Incoming>, LegFault> {
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        self.client.request(request).await.map_err(|error| fault_of(&error))
    }
}

/// The URI of a path at an endpoint.
///
/// # Errors
/// When its URL or the path can't be used.
pub(crate) fn target_uri(spec: &EndpointSpec, path: &str) -> Result<Uri, LegFault> {
    Target::of(spec)?.uri(path).map_err(|_| LegFault::ConnectTimeout)
}

/// How a leg failed before its reply's head.
pub(crate) fn fault_of(error: &ClientError) -> LegFault {
    if error.is_connect() {
        return match io_kind(error) {
            Some(std::io::ErrorKind::ConnectionRefused) => LegFault::ConnectRefused,
            Some(std::io::ErrorKind::ConnectionReset) => LegFault::Reset,
            _ => LegFault::ConnectTimeout,
        };
    }
    source::<hyper::Error>(error).map_or(LegFault::Reset, head_fault)
}

fn head_fault(error: &hyper::Error) -> LegFault {
    if error.is_parse() || error.is_parse_too_large() || error.is_parse_status() {
        LegFault::Garbled
    } else {
        LegFault::Reset
    }
}

/// How a reply's body failed.
pub(crate) fn body_fault(error: &hyper::Error) -> LegFault {
    let garbled = error.is_parse()
        || matches!(io_kind(error), Some(std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData));
    if garbled { LegFault::Garbled } else { LegFault::Truncated }
}

fn io_kind(error: &(dyn StdError + 'static)) -> Option<std::io::ErrorKind> {
    source::<std::io::Error>(error).map(std::io::Error::kind)
}

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
    use super::*;

    fn check(spec: &str, path: &str, want: &str, host: &str) {
        let spec = EndpointSpec::parse(spec).unwrap().remove(0);
        let target = Target::of(&spec).unwrap();
        assert_eq!(target.uri(path).unwrap().to_string(), want);
        assert_eq!(target.host, host);
    }

    #[test]
    fn a_path_goes_below_the_base_of_its_endpoint() {
        check("http://h:8000", "/v1/models?a=%2F", "http://h:8000/v1/models?a=%2F", "h:8000");
        check("http://h:1/base/", "/v1/x", "http://h:1/base/v1/x", "h:1");
        check("http://[::1]:9", "/", "http://[::1]:9/", "[::1]:9");
    }

    #[test]
    fn a_rank_is_told_to_its_engine() {
        let spec = EndpointSpec::parse("http://h:1,dp=2").unwrap().remove(1);
        assert_eq!(Target::of(&spec).unwrap().rank.unwrap(), "1");
    }
}
