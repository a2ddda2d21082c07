//! Requests that are split over a prefill and a decode engine, with simulated engines over real sockets.

mod bytes;
mod failures;
mod leaving;
pub(crate) mod limits;
mod rooms;
pub(crate) mod when;

use engine::{Config, Connector, Engine, Profile, Role, Route};
use serde_json::{Value, json};

use crate::rig::{Node, Reply, get, post_as};

const CHAT: &str = "/v1/chat/completions";

/// Engines with roles, and a replica in front of them.
struct Pairs {
    prefill: Vec<Engine>,
    decode: Vec<Engine>,
    node: Node,
}

/// An engine that answers at once, keeps what it is sent, and takes KV over as vLLM does.
fn instant() -> Config {
    Config { model: "sim".to_owned(), recorded_max: 64, ..Config::profile(Profile::Instant) }
}

async fn engines(count: usize, role: Role, config: &Config) -> Vec<Engine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        let config = config.clone().with_role(role, Connector::Nixl);
        engines.push(Engine::start(config).await.expect("an engine starts"));
    }
    engines
}

impl Pairs {
    /// So many of each role, every prompt split.
    async fn always(prefill: usize, decode: usize) -> Self {
        Self::with(engines(prefill, Role::Prefill, &instant()).await, decode, &[("split", "always")]).await
    }

    async fn with(prefill: Vec<Engine>, decode: usize, flags: &[(&'static str, &str)]) -> Self {
        Self::of(prefill, engines(decode, Role::Decode, &instant()).await, flags).await
    }

    async fn of(prefill: Vec<Engine>, decode: Vec<Engine>, flags: &[(&'static str, &str)]) -> Self {
        let urls = |engines: &[Engine], role: &str| -> Vec<String> {
            engines.iter().map(|engine| format!("{},role={role}", engine.url())).collect()
        };
        let endpoints = [urls(&prefill, "prefill"), urls(&decode, "decode")].concat();
        let flags = [flags, &[("explain_headers", "true")]].concat();
        let node = Node::over(&endpoints, &flags).await;
        Self { prefill, decode, node }
    }

    /// Asks for a chat; the reply must be one.
    async fn chat(&self, content: &str) -> Reply {
        let reply = self.node.chat(content).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply
    }

    /// Generating requests at all engines of a side.
    fn asked(engines: &[Engine]) -> u64 {
        let routes = [Route::Chat, Route::Completions];
        engines.iter().map(|engine| routes.map(|route| engine.requests(route)).iter().sum::<u64>()).sum()
    }

    /// Prompts that were computed for others.
    fn staged(&self) -> u64 {
        self.prefill.iter().map(|engine| engine.stats().staged).sum()
    }

    /// Prompts that were taken over.
    fn taken(&self) -> u64 {
        self.decode.iter().map(|engine| engine.stats().transfers).sum()
    }

    /// Blocks that prefill engines keep for others.
    fn pinned(&self) -> u32 {
        self.prefill.iter().map(|engine| engine.stats().pinned_blocks).sum()
    }

    /// Answers made of KV that was not their own.
    fn spoiled(&self) -> u64 {
        self.prefill.iter().chain(&self.decode).map(|engine| engine.stats().spoiled).sum()
    }

    async fn metrics(&self) -> Metrics {
        Metrics(get(self.node.admin(), "/metrics").await.text().to_owned())
    }

    async fn explain(&self, body: impl AsRef<[u8]>) -> Value {
        post_as(self.node.admin(), "/explain", "", body).await.json()
    }
}

struct Metrics(String);

impl Metrics {
    /// The sum of a metric's series that have all of these labels; 0 if there is none.
    fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let lines = self.0.lines().filter_map(|line| line.strip_prefix(&format!("grapevine_{name}")));
        let series = lines.filter_map(|rest| rest.rsplit_once(' '));
        let wanted = series.filter(|(series, _)| {
            (series.is_empty() || series.starts_with('{'))
                && labels.iter().all(|label| series.contains(label))
        });
        wanted.map(|(_, value)| value.parse::<f64>().expect("a number")).sum()
    }
}

/// About `tokens` tokens of text that begins unlike that of any other name.
fn text(name: &str, tokens: usize) -> String {
    let words = (0..).flat_map(|number| format!("{name}-{number:x} ").into_bytes());
    words.take(tokens * 4).map(char::from).collect()
}

/// What an engine that does all by itself answers.
async fn alone(path: &str, body: &Value, id: &str) -> Reply {
    let engine = Engine::start(instant()).await.expect("an engine starts");
    post_as(engine.addr(), path, &format!("X-Request-Id: {id}\r\n"), body.to_string()).await
}

/// A streamed reply's events, or the reply in one piece, without what no two replies share.
fn said(reply: &Reply) -> Vec<Value> {
    let timeless = |text: &str| {
        let mut json: Value = serde_json::from_str(text).unwrap_or_else(|_| json!(text));
        if let Some(object) = json.as_object_mut() {
            object.remove("created");
        }
        json
    };
    match reply.header("content-type") {
        Some(kind) if kind.starts_with("text/event-stream") => {
            let events = reply.text().split("\n\n").filter(|event| !event.is_empty());
            events.map(|event| timeless(event.strip_prefix("data: ").expect("an event"))).collect()
        }
        _ => vec![timeless(reply.text())],
    }
}
