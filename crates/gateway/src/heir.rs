//! Sees to what a dead replica has left at engines: has decode engines take over what it staged, and drop it.
//!
//! Of the requests themselves nothing is known any more but what their connectors say to release them with. So a leg
//! of the connector's own making is sent, and read to its end: an engine that answers it has taken over, which tells
//! the prefill engine that it can let go. What nobody answers for stays until the prefill engine's own limit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use actors::Heir;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream;
use http::{HeaderValue, Request, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use routing::ReplicaId;
use routing::Router;
use routing::endpoint::{Endpoint, Role, Usable};
use routing::staged::Orphan;

use crate::connector;
use crate::metrics::Metrics;

/// Decode engines that are asked for each. 3: as many as a request has tries.
const TAKERS_MAX: usize = 3;
/// How long one may take. 10 s: it may queue the leg behind others; a real engine needs 5 to say that the one it is to
/// fetch from is gone.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How many are seen to at a time. 16: a dead replica's share is done in moments, and no decode engine is flooded.
const AT_ONCE_MAX: usize = 16;

/// What became of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    /// A decode engine took it over.
    Released,
    /// It stays until the prefill engine's own limit.
    Left,
}

impl End {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Left => "left",
        }
    }
}

/// See the module. One serves a replica.
#[derive(Clone, Debug)]
pub struct Executor {
    client: Client<HttpConnector, Full<Bytes>>,
    router: Arc<Router>,
    metrics: Metrics,
}

impl Executor {
    /// One that sees to what falls to `router`'s replica, gives a connection `connect` to be made, and counts in
    /// `metrics`.
    pub fn new(router: Arc<Router>, connect: Duration, metrics: Metrics) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(connect));
        connector.set_nodelay(true);
        // Replicas die seldom: no connection is worth keeping.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { client, router, metrics }
    }

    async fn see_to(&self, orphan: &Orphan) -> End {
        let end = if self.release(orphan).await.is_some() { End::Released } else { End::Left };
        self.metrics.orphaned(end.as_str());
        end
    }

    /// Has it released; `None` if nobody could be had to.
    async fn release(&self, orphan: &Orphan) -> Option<()> {
        let view = self.router.view();
        let prefill = view.get(orphan.prefill)?;
        let connector = connector::named(prefill.spec.connector())?;
        let leg = connector.orphan_leg(orphan.token.as_ref()?)?;
        let can = |each: &&Arc<Endpoint>| {
            each.id != prefill.id
                && each.spec.role != Role::Prefill
                && each.usable() != Usable::No
                && prefill.spec.hands_over_to(&each.spec)
        };
        for endpoint in view.endpoints.iter().filter(can).take(TAKERS_MAX) {
            let answered = tokio::time::timeout(ANSWER_MAX, self.answered(endpoint, leg.clone())).await;
            if answered.is_ok_and(|answered| answered.is_some()) {
                return Some(());
            }
        }
        None
    }

    /// Sends a leg and reads the answer to its end; `None` if it is not one.
    async fn answered(&self, endpoint: &Endpoint, leg: Bytes) -> Option<()> {
        let uri: Uri = format!("{}/v1/completions", endpoint.spec.url).parse().ok()?;
        let mut request = Request::post(uri)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::USER_AGENT, "grapevine-heir");
        if let Some(rank) = endpoint.spec.rank {
            request = request.header("x-data-parallel-rank", HeaderValue::from(rank));
        }
        let reply = self.client.request(request.body(Full::new(leg)).ok()?).await.ok()?;
        let taken = reply.status().is_success();
        let mut body = reply.into_body();
        while let Some(frame) = body.frame().await {
            frame.ok()?;
        }
        taken.then_some(())
    }
}

impl Heir for Executor {
    fn inherit(&self, orphans: Vec<Orphan>) {
        let executor = self.clone();
        tokio::spawn(async move {
            let seen_to = stream::iter(orphans).map(|orphan| {
                let executor = executor.clone();
                async move { (executor.see_to(&orphan).await, orphan.origin) }
            });
            let mut ends: BTreeMap<(ReplicaId, End), u32> = BTreeMap::new();
            let mut seen_to = seen_to.buffer_unordered(AT_ONCE_MAX);
            while let Some((end, origin)) = seen_to.next().await {
                *ends.entry((origin, end)).or_default() += 1;
            }
            for ((origin, end), prompts) in ends {
                tracing::warn!(%origin, prompts, end = end.as_str(), "a dead replica's staged prompts were seen to");
            }
        });
    }
}
