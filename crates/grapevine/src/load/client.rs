//! One request over HTTP/1.1 and everything a client can tell about its reply.

use std::error::Error as _;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Method, StatusCode, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client as HyperClient, Error as ClientError};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use routing::qoe::{ClassTargets, Digestion, End, Fared, Seen};
use routing::request::{HeaderView, Slo};

use super::reply::{Answer, ErrorKind, Failure, StreamReader, Usage, read_whole};

/// The largest reply read in one piece.
pub(super) const REPLY_BYTES_MAX: usize = 16 << 20;

/// How long an idle connection is kept: shorter than what servers and balancers commonly allow, so that the
/// client rarely writes into a connection that is being closed.
const POOL_IDLE: Duration = Duration::from_secs(4);

/// How requests are sent.
#[derive(Debug, Clone)]
pub struct Wire {
    /// The time allowed for a connection.
    pub connect_timeout: Duration,
    /// The time allowed for a whole request, retries included.
    pub request_timeout: Duration,
    /// Whether each request opens a connection of its own.
    pub fresh_connections: bool,
    /// Headers sent with every request.
    pub headers: HeaderMap,
    /// The header that tells which conversation a request belongs to, if any.
    pub session_header: Option<HeaderName>,
    /// The reply header that names the endpoint which answered.
    pub endpoint_header: HeaderName,
}

impl Default for Wire {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(300),
            fresh_connections: false,
            headers: HeaderMap::new(),
            session_header: None,
            endpoint_header: HeaderName::from_static("x-grapevine-endpoint"),
        }
    }
}

impl Wire {
    /// What requests with these headers expect of their tokens.
    pub(super) fn slo(&self) -> Slo {
        struct Sent<'a>(&'a HeaderMap);
        impl HeaderView for Sent<'_> {
            fn get(&self, name: &str) -> Option<&[u8]> {
                self.0.get(name).map(HeaderValue::as_bytes)
            }
        }
        Slo::of_headers(&Sent(&self.headers), &ClassTargets::default())
    }
}

/// An OpenAI-style URL that takes the requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    uri: Uri,
}

impl Target {
    /// The target at `base` (`http://host:port`, maybe with a path in front of `path`).
    pub fn new(base: &str, path: &str) -> anyhow::Result<Self> {
        let joined = format!("{}{path}", base.trim_end_matches('/'));
        let uri: Uri = joined.parse().with_context(|| format!("{joined:?} is not a URL"))?;
        anyhow::ensure!(
            uri.scheme_str() == Some("http"),
            "{base:?} does not begin with http:// (TLS is not spoken)"
        );
        anyhow::ensure!(uri.host().is_some_and(|host| !host.is_empty()), "{base:?} names no host");
        Ok(Self { uri })
    }
}

/// What became of one request.
#[derive(Debug)]
pub struct Outcome {
    /// Whether it was answered in whole.
    pub verdict: Result<(), Failure>,
    /// The status of the reply's head, once there was one.
    pub status: Option<u16>,
    /// The headers of the reply's head; none until it came.
    pub headers: HeaderMap,
    /// The endpoint that the reply's head names.
    pub endpoint: Option<String>,
    /// From the start to the first content; streams only.
    pub ttft: Option<Duration>,
    /// From the start to the reply's end.
    pub e2e: Duration,
    /// The time from each content event to the next.
    pub gaps: Vec<Duration>,
    /// Tokens, if the engine told.
    pub usage: Option<Usage>,
    /// Events with content: the tokens of an engine that does not tell.
    pub content_events: u64,
    /// The answer's text.
    pub text: String,
}

impl Outcome {
    /// How the user of this stream fared who expected it by `slo`.
    pub fn fared(&self, slo: &Slo) -> Fared {
        let mut digestion = Digestion::new(slo, 1);
        if let Some(ttft) = self.ttft {
            let mut at = ttft;
            digestion.arrived(millis(at), 1);
            for gap in &self.gaps {
                at += *gap;
                digestion.arrived(millis(at), 1);
            }
        }
        let seen = Seen {
            end: if self.verdict.is_ok() { End::Answered } else { End::Failed },
            stream: true,
            digestion: Some(&digestion),
            first_byte_ms: None,
            output_tokens: self.usage.and_then(|usage| u32::try_from(usage.completion_tokens).ok()),
            samples: 1,
            total_ms: millis(self.e2e),
        };
        seen.judge(slo)
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

impl Outcome {
    /// Whether client libraries would send the request again by themselves: no reply had begun, or it was a
    /// refusal that may pass.
    pub fn retried_by_clients(&self) -> bool {
        match &self.verdict {
            Ok(()) => false,
            Err(failure) => match failure.kind {
                ErrorKind::Connect | ErrorKind::Reset => self.status.is_none(),
                ErrorKind::Status(status) => matches!(status, 408 | 409 | 429 | 500..),
                _ => false,
            },
        }
    }
}

/// Sends requests; keeps one pool of connections.
#[derive(Debug, Clone)]
pub struct Client {
    http: HyperClient<HttpConnector, Full<Bytes>>,
    wire: Wire,
    headers: HeaderMap,
    stream: bool,
    seed: u64,
}

impl Client {
    /// A client that asks for streams or not, as the bodies it will send do. `seed` keeps the session keys of
    /// one run apart from those of another.
    pub fn new(wire: Wire, stream: bool, seed: u64) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(wire.connect_timeout));
        let mut builder = HyperClient::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(POOL_IDLE);
        if wire.fresh_connections {
            builder.pool_max_idle_per_host(0);
        }
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let accepted = if stream { "text/event-stream" } else { "application/json" };
        headers.insert(ACCEPT, HeaderValue::from_static(accepted));
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("grapevine-load/", env!("CARGO_PKG_VERSION"))),
        );
        headers.extend(wire.headers.clone());
        Self { http: builder.build(connector), wire, headers, stream, seed }
    }

    /// Sends `body` for the conversation `session` and reads the reply to its end.
    ///
    /// Times count from `start`, and so does the time limit: a retry has what its forerunners left.
    pub async fn ask(&self, target: &Target, body: Bytes, session: u64, start: Instant) -> Outcome {
        self.ask_with(HeaderMap::new(), target, body, session, start).await
    }

    /// The same, with headers for this request alone.
    pub async fn ask_with(
        &self,
        headers: HeaderMap,
        target: &Target,
        body: Bytes,
        session: u64,
        start: Instant,
    ) -> Outcome {
        let mut request = hyper::Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = target.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().extend(headers);
        if let Some(name) = &self.wire.session_header
            && let Ok(value) = HeaderValue::from_str(&format!("load-{}-{session}", self.seed))
        {
            request.headers_mut().insert(name.clone(), value);
        }
        let mut reading = Reading::default();
        let left = self.wire.request_timeout.saturating_sub(start.elapsed());
        let asked = tokio::time::timeout(left, self.exchange(request, &mut reading)).await;
        let e2e = start.elapsed();
        // The connection's own task returns it to the pool: let it, before the next request opens another.
        tokio::task::yield_now().await;
        let (answer, verdict) = match asked {
            Ok(Ok(())) => reading.finish(),
            Ok(Err(failure)) => {
                let (answer, verdict) = reading.finish();
                // What the stream itself said (an error event) explains more than the cut after it.
                let told = verdict.err().filter(|told| told.kind != ErrorKind::Truncated);
                (answer, Err(told.unwrap_or(failure)))
            }
            Err(_) => {
                (reading.finish().0, Err(Failure::new(ErrorKind::Timeout, "no end within the time limit")))
            }
        };
        Outcome {
            verdict,
            status: reading.status,
            headers: reading.headers,
            endpoint: reading.endpoint,
            ttft: answer.first_content.map(|at| at.duration_since(start)),
            e2e,
            gaps: answer.gaps,
            usage: answer.usage,
            content_events: answer.content_events,
            text: answer.text,
        }
    }

    async fn exchange(
        &self,
        request: hyper::Request<Full<Bytes>>,
        reading: &mut Reading,
    ) -> Result<(), Failure> {
        let response = self.http.request(request).await.map_err(|error| before_head(&error))?;
        let (head, body) = response.into_parts();
        reading.status = Some(head.status.as_u16());
        let named = head.headers.get(&self.wire.endpoint_header);
        reading.endpoint = named.map(|name| String::from_utf8_lossy(name.as_bytes()).into_owned());
        reading.headers = head.headers;
        if !head.status.is_success() {
            return Err(refused(head.status, body).await);
        }
        if self.stream { read_stream(body, reading).await } else { read_body(body, reading).await }
    }
}

/// A reply as far as it has come: it outlives the exchange when the time limit ends that.
#[derive(Debug, Default)]
struct Reading {
    status: Option<u16>,
    headers: HeaderMap,
    endpoint: Option<String>,
    body: Option<Body>,
}

#[derive(Debug)]
enum Body {
    Stream(StreamReader),
    Whole(Bytes),
}

impl Reading {
    fn finish(&mut self) -> (Answer, Result<(), Failure>) {
        match self.body.take() {
            Some(Body::Stream(reader)) => reader.finish(),
            Some(Body::Whole(bytes)) => read_whole(&bytes),
            None => (Answer::default(), Err(Failure::new(ErrorKind::Truncated, "no body"))),
        }
    }
}

async fn read_stream(mut body: Incoming, reading: &mut Reading) -> Result<(), Failure> {
    let content_type = reading.headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if !content_type.starts_with(b"text/event-stream") {
        let found = String::from_utf8_lossy(content_type).into_owned();
        return Err(Failure::new(ErrorKind::BodyMismatch, format!("asked for a stream, got {found:?}")));
    }
    let Body::Stream(reader) = reading.body.insert(Body::Stream(StreamReader::default())) else {
        return Ok(());
    };
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| within_body(&error))?;
        if let Some(chunk) = frame.data_ref() {
            reader.push(chunk, Instant::now());
            if reader.is_hopeless() {
                break;
            }
        }
    }
    Ok(())
}

async fn read_body(body: Incoming, reading: &mut Reading) -> Result<(), Failure> {
    let body = Limited::new(body, REPLY_BYTES_MAX).collect().await;
    let body = body.map_err(|error| match error.downcast_ref::<hyper::Error>() {
        Some(error) => within_body(error),
        None => Failure::new(ErrorKind::BodyMismatch, error.to_string()),
    })?;
    reading.body = Some(Body::Whole(body.to_bytes()));
    Ok(())
}

/// A reply with an error status: its body is read so that the connection can be used again, up to a bound.
async fn refused(status: StatusCode, body: Incoming) -> Failure {
    const REFUSAL_BYTES_MAX: usize = 64 << 10;
    let kind = ErrorKind::Status(status.as_u16());
    match Limited::new(body, REFUSAL_BYTES_MAX).collect().await {
        Ok(body) => Failure::new(kind, String::from_utf8_lossy(&body.to_bytes())),
        Err(error) => Failure::new(kind, error.to_string()),
    }
}

fn before_head(error: &ClientError) -> Failure {
    let kind = if error.is_connect() { ErrorKind::Connect } else { ErrorKind::Reset };
    Failure::new(kind, causes(error))
}

fn within_body(error: &hyper::Error) -> Failure {
    let io = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    let kind = match io.map(std::io::Error::kind) {
        Some(std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe) => ErrorKind::Reset,
        _ => ErrorKind::Truncated,
    };
    Failure::new(kind, causes(error))
}

/// An error with its causes: the last one is the one that tells.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}
