//! What an operator sees of a replica, over its admin listener.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use grapevine::fetch;
use serde_json::Value;

/// How long the admin listener may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// The admin listener of one replica.
#[derive(Clone, Debug)]
pub struct Admin {
    base: String,
}

/// `/cluster`, as far as tests ask for it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Whether the replica is ready.
    pub ready: bool,
    /// Requests in flight at this replica.
    pub in_flight: u64,
    /// Names of the live replicas, its own among them.
    pub live: Vec<String>,
    /// Requests in flight by endpoint, through all replicas.
    pub running: BTreeMap<String, u64>,
    /// The same by endpoint and by the replica they go through.
    pub by_replica: BTreeMap<String, BTreeMap<String, u64>>,
    /// All of it.
    pub json: Value,
}

impl Seen {
    /// Requests and tokens charged to all endpoints.
    pub fn charges(&self) -> u64 {
        let endpoints = self.json["endpoints"].as_array().into_iter().flatten();
        let parts = ["running", "prefill_tokens", "decode_tokens"];
        endpoints.map(|each| parts.iter().map(|part| each[*part].as_u64().unwrap_or(0)).sum::<u64>()).sum()
    }

    /// Where the endpoint at `url` stands.
    pub fn standing(&self, url: &str) -> String {
        let endpoints = self.json["endpoints"].as_array().into_iter().flatten();
        let mut found = endpoints.filter(|each| each["url"] == url);
        found.next().and_then(|each| each["standing"].as_str()).unwrap_or("unknown").to_owned()
    }
}

/// One candidate of `/explain`.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Expected cost, in ms.
    pub cost_ms: f64,
    /// Tokens believed warm there.
    pub warm_tokens: u64,
    /// The filter that left it out.
    pub dropped_by: Option<String>,
}

/// `/explain`.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The endpoint that would be chosen.
    pub chosen: String,
    /// Why.
    pub reason: String,
    /// Filters that were undone.
    pub reverted: Vec<String>,
    /// The candidates by URL.
    pub candidates: BTreeMap<String, Candidate>,
}

impl Explained {
    /// Tokens believed warm at `url`.
    pub fn warm_at(&self, url: &str) -> u64 {
        self.candidates.get(url).map_or(0, |candidate| candidate.warm_tokens)
    }
}

/// `/metrics`.
#[derive(Clone, Debug)]
pub struct Metrics(String);

impl Metrics {
    /// The sum of all series called `name` whose labels contain every one of `labels` (`key="value"`); `None`
    /// if there is no such series.
    pub fn sum(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let mut found = None;
        for line in self.0.lines() {
            let Some(rest) = line.strip_prefix(name) else { continue };
            let Some((series, value)) = rest.rsplit_once(' ') else { continue };
            let is_it = series.is_empty() || series.starts_with('{');
            if is_it && labels.iter().all(|label| series.contains(label)) {
                *found.get_or_insert(0.0) += value.parse::<f64>().unwrap_or(f64::NAN);
            }
        }
        found
    }
}

impl Admin {
    pub(crate) fn at(address: SocketAddr) -> Self {
        Self { base: format!("http://{address}") }
    }

    /// GETs a path; status and body.
    ///
    /// # Errors
    /// In words, if there is no answer.
    pub async fn get(&self, path: &str) -> Result<(u16, String), String> {
        let reply = fetch::get(&format!("{}{path}", self.base), None, ANSWER_LIMIT).await;
        reply
            .map(|reply| (reply.status, String::from_utf8_lossy(&reply.body).into_owned()))
            .map_err(|error| format!("{error:#}"))
    }

    /// `/sessions/{key}`.
    ///
    /// # Panics
    /// If there is no answer, or it is not JSON.
    pub async fn session(&self, key: &str) -> Value {
        let (_, body) = self.get(&format!("/sessions/{key}")).await.expect("an answer");
        serde_json::from_str(&body).expect("JSON")
    }

    /// Whether the process answers.
    pub async fn is_live(&self) -> bool {
        self.get("/livez").await.is_ok_and(|(status, _)| status == 200)
    }

    /// Whether it would have a balancer send requests.
    pub async fn is_ready(&self) -> bool {
        self.get("/readyz").await.is_ok_and(|(status, _)| status == 200)
    }

    /// `/cluster`.
    ///
    /// # Errors
    /// In words, if there is no answer.
    pub async fn cluster(&self) -> Result<Seen, String> {
        let (_, body) = self.get("/cluster").await?;
        let json: Value = serde_json::from_str(&body).map_err(|error| format!("{error}: {body}"))?;
        let list = |key: &str| json[key].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let live = list("replicas")
            .iter()
            .filter(|each| each["live"] == true)
            .map(|each| text(&each["id"]))
            .collect();
        let mut running = BTreeMap::new();
        let mut by_replica = BTreeMap::new();
        for endpoint in list("endpoints") {
            let url = text(&endpoint["url"]);
            running.insert(url.clone(), endpoint["running"].as_u64().unwrap_or(0));
            let rows = endpoint["by_replica"].as_object().cloned().unwrap_or_default();
            let rows = rows.into_iter().map(|(name, row)| (name, row["running"].as_u64().unwrap_or(0)));
            by_replica.insert(url, rows.collect());
        }
        Ok(Seen {
            ready: json["ready"] == true,
            in_flight: json["in_flight"].as_u64().unwrap_or(0),
            live,
            running,
            by_replica,
            json,
        })
    }

    /// `/explain` for a body that would go to `route`.
    ///
    /// # Panics
    /// If it is refused.
    pub async fn explain(&self, route: &str, body: &Value) -> Explained {
        let url = format!("{}/explain?route={route}", self.base);
        let reply = fetch::post(&url, body.to_string().into_bytes(), None, ANSWER_LIMIT).await;
        let reply = reply.expect("an explanation");
        let text = String::from_utf8_lossy(&reply.body);
        assert_eq!(reply.status, 200, "{text}");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let candidates = json["candidates"].as_array().cloned().unwrap_or_default();
        let candidates = candidates.iter().map(|each| {
            let candidate = Candidate {
                cost_ms: each["cost_ms"].as_f64().unwrap_or(f64::NAN),
                warm_tokens: each["warm_tokens"].as_u64().unwrap_or(0),
                dropped_by: each["dropped_by"].as_str().map(str::to_owned),
            };
            (text(&each["url"]), candidate)
        });
        Explained {
            chosen: text(&json["chosen"]),
            reason: text(&json["reason"]),
            reverted: json["reverted"].as_array().into_iter().flatten().map(text).collect(),
            candidates: candidates.collect(),
        }
    }

    /// `/explain` for a chat.
    ///
    /// # Panics
    /// If it is refused.
    pub async fn explain_chat(&self, body: &Value) -> Explained {
        self.explain("/v1/chat/completions", body).await
    }

    /// `/metrics`.
    ///
    /// # Panics
    /// If there is no answer.
    pub async fn metrics(&self) -> Metrics {
        Metrics(self.get("/metrics").await.expect("metrics").1)
    }
}
