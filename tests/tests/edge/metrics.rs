//! Every metric is made to move, under the names and labels that dashboards are built on.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use actors::ActorKind;
use engine::{Config, Engine, Fault, Lies, Profile};
use grapevine::config::Sources;
use routing::facts::{AdminOperation, LedgerRecord};
use routing::{BlockHash, EndpointId, SessionKey};

use crate::rig::{
    Answer, Connection, Fake, Node, chat, eventually, get, piece, post_as, request, sources, until,
};

/// Name without `grapevine_`, labels in alphabetical order.
const METRICS: &[(&str, &[&str])] = &[
    ("requests_total", &["code", "model", "route"]),
    ("request_phase_seconds", &["phase", "role"]),
    ("ttft_seconds", &[]),
    ("e2e_seconds", &["priority"]),
    ("decode_tokens_per_second", &["endpoint"]),
    ("qoe_ratio", &["priority"]),
    ("slo_met_total", &["kind", "priority"]),
    ("slo_missed_total", &["kind", "priority"]),
    ("headers_ignored_total", &[]),
    ("word_awaited_total", &["outcome"]),
    ("decisions_total", &["policy", "reason"]),
    ("filter_reverted_total", &["filter"]),
    ("retries_total", &["reason"]),
    ("endpoint_running", &["endpoint", "role"]),
    ("endpoint_up", &["endpoint"]),
    ("gossip_age_seconds", &["replica"]),
    ("gossip_bytes_total", &[]),
    ("gossip_rejected_total", &["cause"]),
    ("index_bytes", &[]),
    ("index_evicted_total", &[]),
    ("sessions", &[]),
    ("sessions_evicted_total", &[]),
    ("session_actors", &[]),
    ("admin_facts", &[]),
    ("ledger_dropped_total", &[]),
    ("config_reloads_total", &["result"]),
    ("mailbox_overload_total", &["actor"]),
    ("actors_recreated_total", &["actor"]),
    ("requests_in_flight", &[]),
    ("body_bytes", &[]),
];

/// The values of one page, series by series, under the family's name; a histogram's value is its count.
#[derive(Debug, Default)]
struct Page(BTreeMap<String, BTreeMap<String, f64>>);

impl Page {
    async fn read(address: SocketAddr) -> Self {
        let reply = get(address, "/metrics").await;
        assert_eq!(reply.status, 200);
        let text = reply.text();
        let mut page = Self::default();
        for family in text.lines().filter_map(|line| line.strip_prefix("# TYPE grapevine_")) {
            let (name, kind) = family.split_once(' ').expect("a type");
            let sample = if kind == "histogram" { format!("{name}_count") } else { name.to_owned() };
            let series = page.0.entry(name.to_owned()).or_default();
            for line in text.lines() {
                let Some(rest) = line.strip_prefix(&format!("grapevine_{sample}")) else { continue };
                let Some((labels, value)) = rest.rsplit_once(' ') else { continue };
                if labels.is_empty() || labels.starts_with('{') {
                    series.insert(labels.to_owned(), value.parse().expect("a number"));
                }
            }
        }
        page
    }

    fn families(&self) -> BTreeSet<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn series(&self, name: &str) -> BTreeMap<String, f64> {
        self.0.get(name).cloned().unwrap_or_default()
    }

    /// The sum of the series whose labels hold all of these.
    fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let series = self.series(name);
        let wanted = series.iter().filter(|(own, _)| labels.iter().all(|label| own.contains(label)));
        wanted.map(|(_, value)| value).sum()
    }
}

/// The names of the labels in `{a="x",b="y"}`.
fn label_names(labels: &str) -> Vec<&str> {
    let inner = labels.trim_start_matches('{').trim_end_matches('}');
    inner.split("\",").filter_map(|pair| Some(pair.split_once('=')?.0)).collect()
}

async fn stream(node: &Node, headers: &str, content: &str) {
    let reply = post_as(node.public(), "/v1/chat/completions", headers, chat(content, true)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// One replica's life with everything in it that a metric tells of; its page before, during and after.
async fn live() -> [Page; 3] {
    let config = Config { timing: slow(), ..Config::profile(Profile::Instant) };
    let one = Engine::start(config.clone()).await.expect("an engine");
    let two = Engine::start(config).await.expect("an engine");
    let (one_url, two_url) = (one.url(), two.url());
    let flags = [
        ("endpoint", one_url.as_str()),
        ("endpoint", two_url.as_str()),
        ("endpoint_filter", "kv-pressure"),
        ("scrape_every_ms", "20"),
        ("probe_every_ms", "20"),
        // The engines share this thread, which does not always answer at once.
        ("probe_timeout_ms", "60000"),
        ("index_bytes_max", "1048576"),
        ("session_table_max", "1000"),
    ];
    let (sources, name) = sources(&flags);
    let node = Node::of(&sources, name).await;
    node.ready().await;
    node.all_in_use(2).await;
    let before = Page::read(node.admin()).await;

    // Two streams in time, two late (one of which can't say of what class it is), one in one piece, one refused.
    let in_time =
        "X-Request-Priority: 1\r\nX-SLO-TTFT-MS: 60000\r\nX-SLO-TPOT-MS: 60000\r\nX-SLA-Target-MS: 60000\r\n";
    stream(&node, in_time, &"long enough for a block of prompt ".repeat(100)).await;
    stream(&node, in_time, "another").await;
    let late = "X-SLO-TTFT-MS: 0.001\r\nX-SLO-TPOT-MS: 0.001\r\nX-SLA-Target-MS: 0.001\r\n";
    stream(&node, &format!("X-Request-Priority: 3\r\n{late}"), "late").await;
    stream(&node, &format!("X-Request-Priority: urgent\r\n{late}"), "late too").await;
    assert_eq!(node.chat("in one piece").await.status, 200);
    assert_eq!(node.post("/v1/chat/completions", "{").await.status, 400);

    // A filter that would leave nobody.
    let full = Lies { kv_ratio: Some(0.99), ..Lies::default() };
    one.set_lies(full);
    two.set_lies(full);
    until("full caches to be seen", || {
        node.router().view().endpoints.iter().all(|endpoint| {
            endpoint.observed().and_then(|seen| seen.kv_ratio).is_some_and(|ratio| ratio > 0.98)
        })
    })
    .await;
    stream(&node, "", "though all are full").await;

    // A retry: whichever is asked first says that it can't. (A reset would not do: on a connection that was
    // kept it may only mean that the connection was old, and is answered by a new one.)
    let unable = Fault::Status { status: 503, retry_after_s: None };
    one.fail(unable, Some(1));
    two.fail(unable, Some(1));
    let _ = node.chat("a retry").await;
    one.clear_faults();
    two.clear_faults();

    // Another replica, and a stranger at the gossip port.
    let gossip = node.replica.gossip_address();
    let peer = Node::start_unready(&[("seed", &gossip.to_string())]).await;
    until("the other replica to be heard", || {
        node.replica.gossip().stats().peers.iter().any(|seen| seen.age.is_some())
    })
    .await;
    let stranger = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("a port");
    stranger.send_to(b"not gossip", gossip).await.expect("sent");
    until("the stranger to be noticed", || !node.replica.gossip().stats().rejected.is_empty()).await;

    // A chat that says it was answered before, of which no replica knows.
    let goes_on = r#"{"model":"sim","max_tokens":2,"messages":[{"role":"user","content":"Hello"},{"role":"assistant","content":"Hi"},{"role":"user","content":"Go on"}]}"#;
    assert_eq!(node.post("/v1/chat/completions", goes_on).await.status, 200);

    // Actors: a mailbox overflows, one panics.
    let actors = node.replica.actors();
    let session = SessionKey::of("x-session-id", b"flooded");
    for _ in 0..1_000 {
        if actors.counts().overloaded(ActorKind::Session) > 0 {
            break;
        }
        (0..10_000).for_each(|_| actors.sessions().began(session));
    }
    assert!(actors.inject_gossip_panic());
    until("the actor to be back", || actors.counts().recreated(ActorKind::Gossip) == 1).await;

    // The bounds of maps and queues bite.
    overfill(&node);
    assert_eq!(node.replica.reload(&sources), Ok(()));
    let faulty = Sources { flags: vec![("tries_max", vec!["none".to_owned()])], ..Sources::default() };
    assert!(node.replica.reload(&faulty).is_err());

    // A stream that is still open.
    let mut open = Connection::open(node.public()).await;
    let body = chat("open", true).replace("\"max_tokens\":8", "\"max_tokens\":5000");
    open.send(request("POST", "/v1/chat/completions", "", body)).await;
    open.read_until("data: ").await;

    // A body of which half is there.
    let mut halfway = Connection::open(node.public()).await;
    halfway.send("POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 400000\r\n\r\n").await;
    halfway.send(" ".repeat(200_000)).await;
    eventually("the body to be held", async || {
        (Page::read(node.admin()).await.sum("body_bytes", &[]) == 200_000.0).then_some(())
    })
    .await;
    let during = Page::read(node.admin()).await;

    // And an endpoint that is gone.
    drop((open, halfway));
    node.at_rest().await;
    one.kill().await;
    eventually("its loss to be seen", async || {
        (Page::read(node.admin()).await.sum("endpoint_up", &[]) == 1.0).then_some(())
    })
    .await;
    drop(peer);
    let after = Page::read(node.admin()).await;
    [before, during, after]
}

/// More sessions, placements and news than there is room for; and one change by an operator.
fn overfill(node: &Node) {
    let (router, now) = (node.router(), node.now());
    let endpoint = router.view().endpoints[0].id;
    // Nothing else runs on this thread meanwhile, so that nobody is told of anything until the queue is full.
    for number in 0..66_000_u64 {
        router.pin(SessionKey::of("x-session-id", &number.to_le_bytes()), endpoint, now);
    }
    // It has been full; telling it all is another matter.
    router.take_ledger(usize::MAX);
    for prompt in 0..50_u64 {
        let blocks = (0..1_000).map(|at| BlockHash::from_raw(prompt << 32 | at)).collect();
        router.merge_ledger(&[LedgerRecord::Place { endpoint, blocks }], now);
    }
    let nowhere = EndpointId::of("http://10.0.0.1:1", None);
    router.administer(nowhere, AdminOperation::Remove, now).expect("room");
}

fn slow() -> engine::timing::Timing {
    engine::timing::Timing { inter_token: Duration::from_millis(5), ..Profile::Instant.timing() }
}

#[actix_web::test]
async fn every_metric_moves_and_has_the_documented_labels() {
    let [before, during, after] = live().await;
    for (name, labels) in METRICS {
        let (then, meanwhile, at_last) = (before.series(name), during.series(name), after.series(name));
        assert!(then != meanwhile || meanwhile != at_last, "{name} has not moved: {at_last:?}");
        for own in meanwhile.keys().chain(at_last.keys()) {
            assert_eq!(label_names(own), *labels, "labels of {name}");
        }
    }
    // Of disagreement there has to be a second replica; the core's own tests make that figure move. Of lost lines
    // there has to be a process with a log, which `keys` has. The other two are bounds far off: `routing` and
    // `grapevine` have tests that reach them.
    let elsewhere = [
        "disagreement_ratio",
        "log_lines_dropped_total",
        "admin_facts_refused_total",
        "peer_events_delayed_total",
        // Where endpoints have roles: see `pairs`.
        "kv_released_total",
        "kv_stranded",
        // See `heirs` of the cluster's tests; the other is a bound that `routing` has a test of.
        "kv_staged_heard",
        "kv_staged_untold_total",
        // Where engines are busy: see `queue`.
        "queue_requests",
        "queue_bytes",
        "queue_requests_elsewhere",
    ];
    let known: BTreeSet<&str> = METRICS.iter().map(|(name, _)| *name).chain(elsewhere).collect();
    assert_eq!(after.families(), known, "metrics that nothing here makes move, or that are missing");
    // They tell what happened, not only that something did.
    let answered =
        during.sum("requests_total", &["code=\"200\"", "model=\"sim\"", "route=\"chat_completions\""]);
    assert!(answered >= 4.0, "{answered}");
    assert_eq!(during.sum("requests_total", &["code=\"400\""]), 1.0);
    for kind in ["ttft", "tpot", "e2e"] {
        let of = |name, priority| during.sum(name, &[&format!("kind=\"{kind}\""), priority]);
        assert_eq!(
            (of("slo_met_total", "priority=\"1\""), of("slo_missed_total", "priority=\"1\"")),
            (2.0, 0.0)
        );
        assert_eq!(
            (of("slo_met_total", "priority=\"3\""), of("slo_missed_total", "priority=\"3\"")),
            (0.0, 1.0)
        );
        assert_eq!(of("slo_missed_total", "priority=\"2\""), 1.0, "an unknown class is the middle one");
    }
    assert_eq!(during.sum("qoe_ratio", &["priority=\"1\""]), 2.0);
    assert_eq!(during.sum("headers_ignored_total", &[]), 1.0);
    assert_eq!(during.sum("word_awaited_total", &["outcome=\"in-vain\""]), 1.0);
    assert!(during.sum("filter_reverted_total", &["filter=\"kv-pressure\""]) >= 1.0);
    assert!(during.sum("retries_total", &["reason=\"status-503\""]) >= 1.0);
    assert_eq!(during.sum("sessions", &[]), 1_000.0);
    assert!(during.sum("sessions_evicted_total", &[]) >= 65_000.0);
    assert!(during.sum("session_actors", &[]) >= 1.0);
    assert!(during.sum("ledger_dropped_total", &[]) >= 66_000.0 - 65_536.0);
    assert!(during.sum("index_evicted_total", &[]) >= 1.0);
    assert_eq!(during.sum("admin_facts", &[]), 1.0);
    for result in ["taken", "refused"] {
        assert_eq!(during.sum("config_reloads_total", &[&format!("result=\"{result}\"")]), 1.0, "{result}");
    }
    assert!(during.sum("decisions_total", &["policy=\"cost\""]) >= 5.0);
    assert!(during.sum("gossip_rejected_total", &["cause=\"foreign\""]) >= 1.0);
    assert_eq!((before.sum("endpoint_running", &[]), during.sum("endpoint_running", &[])), (0.0, 1.0));
    assert_eq!((before.sum("requests_in_flight", &[]), during.sum("requests_in_flight", &[])), (0.0, 1.0));
    assert_eq!((during.sum("body_bytes", &[]), after.sum("body_bytes", &[])), (200_000.0, 0.0));
    assert_eq!((during.sum("endpoint_up", &[]), after.sum("endpoint_up", &[])), (2.0, 1.0));
    assert_eq!(after.sum("endpoint_running", &[]), 0.0);
}

#[actix_web::test]
async fn decisions_by_load_alone_are_counted() {
    let engine = async || Fake::start(|_| Answer::Stalled(vec![piece(0)])).await;
    let engines = [engine().await, engine().await];
    let flags = [("policy", "cache-aware,imbalance_abs=0,imbalance_ratio=1")];
    let node = Node::over(&engines.each_ref().map(Fake::url), &flags).await;
    let mut held = Vec::new();
    for content in ["the first", "the second"] {
        let mut open = Connection::open(node.public()).await;
        open.send(request("POST", "/v1/chat/completions", "", chat(content, true))).await;
        open.read_until("word0").await;
        held.push(open);
    }
    assert_eq!(Page::read(node.admin()).await.sum("load_imbalance_total", &["role=\"both\""]), 1.0);
}

/// Whatever path a client makes up, it is counted, and under no label of the client's making.
#[actix_web::test]
async fn an_unknown_path_is_counted_and_makes_no_label() {
    let engine = Engine::start(Config::profile(Profile::Instant)).await.expect("an engine");
    let node = Node::over(&[engine.url()], &[]).await;
    for path in ["/v1/made/up", "/v1/made-up?query=1", "/made-up"] {
        assert_eq!(node.post(path, "{}").await.status, 404, "{path}");
    }
    node.at_rest().await;
    let page = Page::read(node.admin()).await;
    assert_eq!(page.sum("requests_total", &["code=\"404\"", "route=\"other\""]), 3.0);
    assert!(!format!("{page:?}").contains("made"));
}
