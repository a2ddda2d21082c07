//! A whole replica in this process, started from flags as an operator would give them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use grapevine::config::{Sources, read};
use grapevine::replica::Replica;
use routing::endpoint::{Endpoint, Standing};
use routing::{Moment, Router};

use super::{Reply, eventually, get, until};

/// Replicas of this process differ in name.
static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// The replica. Gone without a goodbye when dropped.
pub struct Node {
    pub replica: Replica,
    pub name: String,
}

impl Node {
    /// A replica with these flags, ready.
    pub async fn start(flags: &[(&'static str, &str)]) -> Self {
        let node = Self::start_unready(flags).await;
        node.ready().await;
        node
    }

    /// The same over these endpoints.
    pub async fn over(endpoints: &[String], flags: &[(&'static str, &str)]) -> Self {
        let mut flags = flags.to_vec();
        flags.extend(endpoints.iter().map(|endpoint| ("endpoint", endpoint.as_str())));
        let node = Self::start(&flags).await;
        node.all_in_use(endpoints.len()).await;
        node
    }

    /// A replica that may not be ready yet.
    pub async fn start_unready(flags: &[(&'static str, &str)]) -> Self {
        let (sources, name) = sources(flags);
        Self::of(&sources, name).await
    }

    /// A replica with this configuration file, not waited for.
    pub async fn of(sources: &Sources, name: String) -> Self {
        let config = read(sources).unwrap_or_else(|faults| panic!("{faults}"));
        Self { replica: Replica::start(config).await.expect("the replica starts"), name }
    }

    pub fn public(&self) -> SocketAddr {
        self.replica.public_address()
    }

    pub fn admin(&self) -> SocketAddr {
        self.replica.admin_address()
    }

    pub fn router(&self) -> &Arc<Router> {
        self.replica.router()
    }

    pub async fn ready(&self) {
        eventually("ready", async || (get(self.public(), "/readyz").await.status == 200).then_some(())).await;
    }

    /// Waits until as many endpoints are in use.
    pub async fn all_in_use(&self, endpoints: usize) {
        let ready = |endpoint: &Arc<Endpoint>| endpoint.standing() == Standing::Ready;
        until("all endpoints in use", || {
            self.router().view().endpoints.iter().filter(|each| ready(each)).count() == endpoints
        })
        .await;
    }

    /// The endpoint at `url`.
    pub fn endpoint(&self, url: &str) -> Arc<Endpoint> {
        let view = self.router().view();
        let found = view.endpoints.iter().find(|endpoint| endpoint.spec.url == url);
        Arc::clone(found.unwrap_or_else(|| panic!("{url} is no endpoint")))
    }

    /// All charges at all endpoints, this replica's and the others'.
    pub fn running(&self) -> u32 {
        let now = self.now();
        self.router().view().endpoints.iter().map(|endpoint| endpoint.running(now)).sum()
    }

    /// What is charged in tokens, as others would be told.
    pub fn charged_tokens(&self) -> u64 {
        let rows = self.router().load_rows(self.now());
        rows.iter().map(|row| u64::from(row.prefill_tokens) + u64::from(row.decode_tokens)).sum()
    }

    pub fn now(&self) -> Moment {
        self.replica.clock().now()
    }

    /// Requests that have not ended.
    pub fn in_flight(&self) -> usize {
        self.replica.lifecycles().table().in_flight()
    }

    /// Waits until nothing of any request is left: no row, no charge, no token.
    pub async fn at_rest(&self) {
        until("every request to be over and forgotten", || {
            self.in_flight() == 0 && self.running() == 0 && self.charged_tokens() == 0
        })
        .await;
    }

    pub async fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Reply {
        super::post(self.public(), path, body).await
    }

    pub async fn chat(&self, content: &str) -> Reply {
        self.post("/v1/chat/completions", super::chat(content, false)).await
    }
}

/// Flags with what every test wants: free ports, a name, no settle time.
pub fn sources(flags: &[(&'static str, &str)]) -> (Sources, String) {
    let name = format!("edge-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let mut all: Vec<(&'static str, Vec<String>)> = Vec::new();
    let own = [
        ("listen", "127.0.0.1:0"),
        ("admin", "127.0.0.1:0"),
        ("gossip", "127.0.0.1:0"),
        ("workers", "1"),
        ("drain_settle_ms", "0"),
        ("replica_id", name.as_str()),
    ];
    let given = |key: &str| flags.iter().any(|(name, _)| *name == key);
    for (key, value) in own.iter().filter(|(key, _)| !given(key)).chain(flags) {
        match all.iter_mut().find(|(name, _)| name == key) {
            Some((_, values)) => values.push((*value).to_owned()),
            None => all.push((key, vec![(*value).to_owned()])),
        }
    }
    (Sources { flags: all, ..Sources::default() }, name)
}
