//! Looks at what each replica says of the cluster, again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::ensure;
use grapevine::fetch;
use serde::Deserialize;
use tokio::time::Instant;

use crate::evidence::Sample;
use crate::scenario::{Kind, Name};

/// Between two looks at one replica.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a look may take: a frozen replica answers nothing.
const LOOK_WITHIN: Duration = Duration::from_millis(500);

/// What `/cluster` says, as far as rules ask.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    pub(crate) live: BTreeSet<String>,
    pub(crate) running_by_replica: BTreeMap<String, u64>,
    pub(crate) running: u64,
}

#[derive(Deserialize)]
struct Page {
    replicas: Vec<Replica>,
    endpoints: Vec<Endpoint>,
}

#[derive(Deserialize)]
struct Replica {
    id: String,
    live: bool,
}

#[derive(Deserialize)]
struct Endpoint {
    running: u64,
    by_replica: BTreeMap<String, Running>,
}

#[derive(Deserialize)]
struct Running {
    running: u64,
}

impl From<Page> for Seen {
    fn from(page: Page) -> Self {
        let mut seen = Self::default();
        seen.live.extend(page.replicas.into_iter().filter(|replica| replica.live).map(|replica| replica.id));
        for endpoint in page.endpoints {
            seen.running += endpoint.running;
            for (replica, Running { running }) in endpoint.by_replica {
                *seen.running_by_replica.entry(replica).or_default() += running;
            }
        }
        seen
    }
}

/// One look at the replica whose admin listener is at `admin`.
pub(crate) async fn look(admin: SocketAddr) -> anyhow::Result<Seen> {
    let reply = fetch::get(&format!("http://{admin}/cluster"), None, LOOK_WITHIN).await?;
    ensure!(reply.status == 200, "/cluster answered {}", reply.status);
    let page: Page = serde_json::from_slice(&reply.body)?;
    Ok(page.into())
}

/// Looks at one replica until it is aborted. Looks that bring nothing leave no sample.
pub(crate) async fn watch(
    number: usize,
    admin: SocketAddr,
    begun: Instant,
    samples: Arc<Mutex<Vec<Sample>>>,
) {
    let mut pace = tokio::time::interval(LOOK_EVERY);
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        pace.tick().await;
        let at = begun.elapsed();
        if let Ok(Seen { live, running_by_replica, running }) = look(admin).await {
            let replica = Name { kind: Kind::Replica, number };
            let sample = Sample { at, replica, live, running_by_replica, running };
            samples.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_added_up_over_the_endpoints() {
        let page = r#"{"replica":"a","replicas":[{"id":"a","live":true,"age_ms":0.0},{"id":"b","live":false,"age_ms":9}],
            "endpoints":[{"url":"x","role":"both","standing":"ready","running":3,
                          "by_replica":{"a":{"running":1},"b":{"running":2}}},
                         {"url":"y","role":"both","standing":"ready","running":4,"by_replica":{"b":{"running":4}}}]}"#;
        let seen = Seen::from(serde_json::from_str::<Page>(page).unwrap());
        assert_eq!(seen.running, 7);
        assert_eq!(seen.running_by_replica, BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 6)]));
        assert_eq!(seen.live, BTreeSet::from(["a".to_owned()]));
    }
}
