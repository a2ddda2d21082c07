//! Every metric that the gateway can move is made to move.

use std::collections::BTreeMap;
use std::time::Duration;

use actors::PeerEvent;
use engine::timing::Timing;
use engine::{Config, Engine, Profile};
use routing::ReplicaId;

use crate::rig::{Connection, Fake, Rig, Step, chat, get, post, request};

async fn page(rig: &Rig) -> BTreeMap<String, f64> {
    let reply = get(rig.admin(), "/metrics").await;
    assert_eq!(reply.status, 200);
    reply
        .text()
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            line.rsplit_once(' ').map(|(key, value)| (key.to_owned(), value.parse().unwrap())).unwrap()
        })
        .collect()
}

fn check(page: &BTreeMap<String, f64>, name: &str, want: f64) {
    assert_eq!(page.get(name), Some(&want), "{name} in {page:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_move_their_counters_and_clients_can_t_make_labels() {
    // Tokens that all come at once would have no pace.
    let timing = Timing { inter_token: Duration::from_millis(2), ..Profile::Instant.timing() };
    let engine = Engine::start(Config { timing, ..Config::profile(Profile::Instant) }).await.unwrap();
    let rig = Rig::start(&[format!("{},model=sim", engine.url())]);
    let mut client = Connection::open(rig.address()).await;
    let class =
        "X-Request-Priority: 1\r\nX-SLO-TTFT-MS: 60000\r\nX-SLO-TPOT-MS: 60000\r\nX-SLA-Target-MS: 60000\r\n";
    client.send(request("POST", "/v1/chat/completions", class, chat(true))).await;
    assert_eq!(client.reply().await.status, 200);
    post(rig.address(), "/v1/chat/completions", chat(false)).await;
    post(rig.address(), "/v1/completions", r#"{"model":"made-up-by-a-client","prompt":"x"}"#).await;
    post(rig.address(), "/v1/chat/completions", "{").await;
    get(rig.address(), "/v1/no-such-path").await;
    rig.at_rest().await;

    let page = page(&rig).await;
    let count = |labels: &str| format!("grapevine_requests_total{{{labels}}}");
    check(&page, &count(r#"code="200",model="sim",route="chat_completions""#), 2.0);
    check(&page, &count(r#"code="404",model="unknown",route="completions""#), 1.0);
    check(&page, &count(r#"code="400",model="default",route="chat_completions""#), 1.0);
    check(&page, &count(r#"code="404",model="default",route="other""#), 1.0);
    assert!(!page.keys().any(|key| key.contains("made-up")));
    for phase in ["queued", "prefilling", "decoding"] {
        let name = format!(r#"grapevine_request_phase_seconds_count{{phase="{phase}",role="both"}}"#);
        assert!(page[&name] >= 2.0, "{name}");
    }
    check(&page, "grapevine_ttft_seconds_count", 1.0);
    check(&page, r#"grapevine_e2e_seconds_count{priority="1"}"#, 1.0);
    check(&page, &format!(r#"grapevine_decode_tokens_per_second_count{{endpoint="{}"}}"#, engine.url()), 1.0);
    for kind in ["ttft", "tpot", "e2e"] {
        check(&page, &format!(r#"grapevine_slo_met_total{{kind="{kind}",priority="1"}}"#), 1.0);
    }
    check(&page, r#"grapevine_qoe_ratio_count{priority="1"}"#, 1.0);
    check(&page, r#"grapevine_qoe_ratio_sum{priority="1"}"#, 1.0);
    let decisions: f64 = page
        .iter()
        .filter(|(key, _)| key.starts_with("grapevine_decisions_total"))
        .map(|(_, value)| value)
        .sum();
    assert_eq!(decisions, 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gauges_show_what_is_there_now() {
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let fake = Fake::start(vec![Step::stream_head(), Step::chunk(event), Step::AwaitClose]).await;
    let rig = Rig::start(&[format!("{},role=decode", fake.url)]);
    rig.gossip.send(PeerEvent::Heartbeat { replica: ReplicaId::new("other") }).await.unwrap();
    let mut client = Connection::open(rig.address()).await;
    client.send(request("POST", "/v1/chat/completions", "", chat(true))).await;
    client.read_until("content").await;
    let running = format!(r#"grapevine_endpoint_running{{endpoint="{}",role="decode"}}"#, fake.url);
    let up = format!(r#"grapevine_endpoint_up{{endpoint="{}"}}"#, fake.url);
    let busy = page(&rig).await;
    check(&busy, &running, 1.0);
    check(&busy, &up, 1.0);
    check(&busy, "grapevine_requests_in_flight", 1.0);
    check(&busy, "grapevine_gossip_bytes_total", 7.0);
    check(&busy, "grapevine_peer_events_delayed_total", 3.0);
    assert!(busy["grapevine_index_bytes"] >= 0.0);
    drop(client);
    rig.at_rest().await;
    let id = rig.router.view().endpoints[0].id;
    rig.router
        .administer(id, routing::facts::AdminOperation::Remove, rig.serving.state().clock.now())
        .unwrap();
    let idle = page(&rig).await;
    assert_eq!((idle.get(&running), idle.get(&up)), (None, None));
    check(&idle, "grapevine_requests_in_flight", 0.0);
    check(&idle, r#"grapevine_requests_total{code="200",model="unknown",route="chat_completions"}"#, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_is_counted_by_what_failed() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let good = Fake::start(vec![Step::reply(200, "application/json", "{}")]).await;
    let rig = Rig::start(&[nobody, good.url.clone()]);
    let retries = r#"grapevine_retries_total{reason="connect-refused"}"#;
    for prompt in 0..40 {
        post(rig.address(), "/v1/completions", format!(r#"{{"prompt":"{prompt}"}}"#)).await;
        rig.at_rest().await;
        if page(&rig).await.contains_key(retries) {
            return;
        }
    }
    panic!("no retry was counted");
}
