//! What went through a server, for tests to look at: counts always, whole requests when asked for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method};
use parking_lot::Mutex;

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Its method.
    pub method: Method,
    /// Its path and query.
    pub path: String,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body, byte for byte.
    pub body: Bytes,
}

/// The last requests, newest last.
pub(crate) struct Recorder {
    max: usize,
    last: Mutex<VecDeque<Recorded>>,
}

impl Recorder {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, last: Mutex::default() }
    }

    pub(crate) fn record(&self, parts: &Parts, body: &Bytes) {
        if self.max == 0 {
            return;
        }
        let mut last = self.last.lock();
        if last.len() == self.max {
            last.pop_front();
        }
        last.push_back(Recorded {
            method: parts.method.clone(),
            path: parts.uri.path_and_query().map_or_else(String::new, ToString::to_string),
            headers: parts.headers.clone(),
            body: body.clone(),
        });
    }

    pub(crate) fn last(&self) -> Vec<Recorded> {
        self.last.lock().iter().cloned().collect()
    }
}

/// Declares the routes of an engine and their paths.
macro_rules! routes {
    ($($(#[$doc:meta])* $name:ident = $path:literal,)*) => {
        /// The paths an engine knows, and how it counts the others.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Route {
            $($(#[$doc])* $name,)*
        }

        impl Route {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The path, or the common part of several.
            pub fn path(self) -> &'static str {
                match self { $(Self::$name => $path,)* }
            }
        }
    };
}

routes! {
    /// Chat completions.
    Chat = "/v1/chat/completions",
    /// Text completions.
    Completions = "/v1/completions",
    /// Embeddings.
    Embeddings = "/v1/embeddings",
    /// Responses, with those below them.
    Responses = "/v1/responses",
    /// Served models.
    Models = "/v1/models",
    /// Text to tokens.
    Tokenize = "/tokenize",
    /// Tokens to text.
    Detokenize = "/detokenize",
    /// Health.
    Health = "/health",
    /// Health, as SageMaker asks for it.
    Ping = "/ping",
    /// Version.
    Version = "/version",
    /// Requests under way.
    Load = "/load",
    /// Prometheus metrics.
    Metrics = "/metrics",
    /// Faults on demand.
    Fault = "/fault",
    /// Requests sent back, here and under /v1.
    Echo = "/echo",
    /// Everything else.
    Unknown = "(unknown)",
}

/// Counts of what came in.
#[derive(Default)]
pub(crate) struct Traffic {
    requests: [AtomicU64; Route::ALL.len()],
    pub(crate) connections_opened: AtomicU64,
    pub(crate) connections_closed: AtomicU64,
    pub(crate) requests_abandoned: AtomicU64,
}

impl Traffic {
    pub(crate) fn count(&self, route: Route) {
        self.requests[route as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn requests(&self, route: Route) -> u64 {
        self.requests[route as usize].load(Ordering::Relaxed)
    }
}
