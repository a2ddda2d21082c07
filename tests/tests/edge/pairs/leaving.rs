//! Clients that leave: what was computed for them is let go of, whatever was going on.

use std::time::Duration;

use engine::{Config, Profile, Role, SchedulerKind};
use serde_json::{Value, json};

use super::{CHAT, Pairs, engines, instant, text};
use crate::rig::{Connection, chat, eventually, request, until};

async fn asks(pairs: &Pairs, name: &str, stream: bool) -> Connection {
    let mut client = Connection::open(pairs.node.public()).await;
    client.send(request("POST", "/v1/chat/completions", "", chat(&text(name, 400), stream))).await;
    client
}

/// Nothing of a request is left: no charge, no sequence, no block, and what was kept was let go of.
async fn assert_gone(pairs: &Pairs, released: f64) {
    pairs.node.at_rest().await;
    until("nothing is left at the engines", || {
        let idle = pairs.prefill.iter().chain(&pairs.decode).all(|engine| {
            let stats = engine.stats();
            (stats.running, stats.waiting, stats.fetching) == (0, 0, 0)
        });
        idle && pairs.pinned() == 0
    })
    .await;
    eventually("it is counted", async || {
        let metrics = pairs.metrics().await;
        let counted = (metrics.sum("kv_released_total", &[]), metrics.sum("kv_stranded", &[]));
        (counted == (released, 0.0)).then_some(())
    })
    .await;
    assert_eq!(pairs.spoiled(), 0);
}

fn slow_prefill() -> Config {
    let mut config = instant();
    config.timing.prefill_base = Duration::from_millis(300);
    config.scheduler = SchedulerKind::Fifo;
    config
}

#[actix_web::test]
async fn during_the_prefill() {
    for stream in [false, true] {
        let prefill = engines(1, Role::Prefill, &slow_prefill()).await;
        let pairs = Pairs::with(prefill, 1, &[("split", "always")]).await;
        let client = asks(&pairs, "leaves early", stream).await;
        until("it computes", || pairs.prefill[0].stats().running == 1).await;
        drop(client);
        until("it was computed", || pairs.staged() == 1).await;
        assert_gone(&pairs, 1.0).await;
        assert_eq!(pairs.metrics().await.sum("requests_total", &["code=\"499\""]), 1.0);
    }
}

#[actix_web::test]
async fn during_the_handoff() {
    for stream in [false, true] {
        let mut slow = instant();
        slow.transfer.base = Duration::from_millis(300);
        slow.scheduler = SchedulerKind::Fifo;
        let prefill = engines(1, Role::Prefill, &instant()).await;
        let pairs = Pairs::of(prefill, engines(1, Role::Decode, &slow).await, &[("split", "always")]).await;
        let client = asks(&pairs, "leaves between", stream).await;
        until("it is taken over", || pairs.decode[0].stats().fetching == 1).await;
        drop(client);
        assert_gone(&pairs, 1.0).await;
    }
}

#[actix_web::test]
async fn while_it_decodes() {
    let mut slow = instant();
    slow.timing.inter_token = Duration::from_millis(500);
    slow.scheduler = SchedulerKind::Fifo;
    let prefill = engines(1, Role::Prefill, &instant()).await;
    let pairs = Pairs::of(prefill, engines(1, Role::Decode, &slow).await, &[("split", "always")]).await;
    let mut client = asks(&pairs, "leaves late", true).await;
    client.read_until("data: ").await;
    assert_eq!((pairs.decode[0].stats().running, pairs.pinned()), (1, 0));
    drop(client);
    assert_gone(&pairs, 0.0).await;
    assert_eq!(pairs.decode[0].stats().aborted, 1);
}

#[actix_web::test]
async fn with_an_answer_that_only_the_decode_engine_refused_to_give() {
    let pairs = Pairs::always(1, 1).await;
    // The prefill leg goes without these options, so that it is not refused.
    let mut body: Value = serde_json::from_str(&chat(&text("refused", 400), false)).expect("JSON");
    body["stream_options"] = json!({"include_usage": true});
    let reply = pairs.node.post(CHAT, body.to_string()).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(pairs.staged(), 1);
    assert_gone(&pairs, 1.0).await;
}

#[actix_web::test]
async fn twenty_at_once_in_whatever_phase_they_are() {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.model = "sim".to_owned();
    config.timing = config.timing.sped_up(4.0);
    let pairs = Pairs::of(
        engines(2, Role::Prefill, &config).await,
        engines(2, Role::Decode, &config).await,
        &[("split", "always")],
    )
    .await;
    let mut clients = Vec::new();
    for number in 0..20 {
        clients.push(asks(&pairs, &format!("client {number}"), number % 2 == 0).await);
    }
    until("some were handed over", || pairs.taken() >= 4).await;
    drop(clients);
    pairs.node.at_rest().await;
    until("no block is kept", || pairs.pinned() == 0).await;
    assert_eq!(pairs.metrics().await.sum("kv_stranded", &[]), 0.0);
    assert_eq!(pairs.spoiled(), 0);
}
