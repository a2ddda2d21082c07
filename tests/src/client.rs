//! A client without memory: each request on a connection of its own, and nothing but what the API asks for.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use grapevine::load::{Client, Outcome, Target, Wire};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;

/// The longest that one request of a test may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(60);

/// Sends requests and says what came back.
#[derive(Clone, Debug)]
pub struct Talker {
    whole: Client,
    stream: Client,
}

/// An answer that came whole.
#[derive(Debug)]
pub struct Reply {
    /// The URL of the endpoint that answered.
    pub endpoint: String,
    /// The answer's text.
    pub text: String,
    /// Prompt tokens and how many of them were cached, where the engine says so.
    pub usage: Option<(u64, Option<u64>)>,
}

impl Default for Talker {
    fn default() -> Self {
        Self::with_headers(&[])
    }
}

impl Talker {
    /// A client that sends these headers with each request.
    ///
    /// # Panics
    /// If they are none.
    pub fn with_headers(headers: &[(&str, &str)]) -> Self {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: HeaderName = name.parse().expect("a header's name");
            map.insert(name, HeaderValue::from_str(value).expect("a header's value"));
        }
        let wire =
            Wire { fresh_connections: true, request_timeout: REQUEST_LIMIT, headers: map, ..Wire::default() };
        Self { whole: Client::new(wire.clone(), false, 0), stream: Client::new(wire, true, 0) }
    }

    /// Sends `body` to a path of a replica; whether to expect a stream is read from the body.
    pub async fn send(&self, to: SocketAddr, path: &str, body: &Value) -> Outcome {
        self.send_bytes(to, path, body.to_string().into(), body["stream"] == true).await
    }

    /// Sends these very bytes.
    ///
    /// # Panics
    /// If `path` is none.
    pub async fn send_bytes(&self, to: SocketAddr, path: &str, body: Bytes, streamed: bool) -> Outcome {
        let target = Target::new(&format!("http://{to}"), path).expect("a target");
        let client = if streamed { &self.stream } else { &self.whole };
        client.ask(&target, body, 0, Instant::now()).await
    }

    /// Sends a chat's body and expects an answer.
    pub async fn chat(&self, to: SocketAddr, body: &Value) -> Reply {
        reply(self.send(to, "/v1/chat/completions", body).await)
    }

    /// Sends a completion's body and expects an answer.
    pub async fn complete(&self, to: SocketAddr, body: &Value) -> Reply {
        reply(self.send(to, "/v1/completions", body).await)
    }
}

fn reply(outcome: Outcome) -> Reply {
    if let Err(failure) = &outcome.verdict {
        panic!("the request failed: {}: {}", failure.kind, failure.detail);
    }
    Reply {
        endpoint: outcome.endpoint.expect("replies name their endpoint"),
        text: outcome.text,
        usage: outcome.usage.map(|usage| (usage.prompt_tokens, usage.cached_tokens())),
    }
}
