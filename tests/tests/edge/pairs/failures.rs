//! Legs that fail, and sides that are gone.

use engine::{Engine, Fault, Role};

use super::{Pairs, engines, instant, text};
use crate::rig::{Answer, Fake, Node, eventually};

fn failing(engine: &Engine, status: u16) {
    engine.fail(Fault::Status { status, retry_after_s: None }, None);
}

#[actix_web::test]
async fn a_prefill_that_fails_is_tried_elsewhere_and_never_twice_at_the_same_endpoint() {
    for status in [500, 503] {
        let pairs = Pairs::always(2, 2).await;
        failing(&pairs.prefill[0], status);
        for number in 0..6 {
            pairs.chat(&text(&format!("prompt {number}"), 200)).await;
        }
        pairs.node.at_rest().await;
        assert_eq!((pairs.staged(), pairs.taken(), pairs.pinned()), (6, 6, 0), "{status}");
        assert_eq!(Pairs::asked(&pairs.decode), 6, "no decode leg went out for a prefill that failed");
        let refused = Pairs::asked(&pairs.prefill[..1]);
        assert!(refused >= 1, "the failing one was tried");
        let metrics = pairs.metrics().await;
        let labels = ["leg=\"prefill\"", &format!("reason=\"status-{status}\"")];
        assert_eq!(metrics.sum("handoff_failures_total", &labels), refused as f64);
        assert_eq!(metrics.sum("pd_fallbacks_total", &[]), 0.0);
    }
}

#[actix_web::test]
async fn when_prefill_fails_everywhere_the_request_is_served_whole_and_that_is_counted() {
    let pairs = Pairs::always(2, 1).await;
    pairs.prefill.iter().for_each(|engine| failing(engine, 503));
    let reply = pairs.chat(&text("a prompt", 200)).await;
    assert_eq!(reply.header("x-grapevine-prefill-endpoint"), None);
    pairs.node.at_rest().await;
    assert_eq!((Pairs::asked(&pairs.prefill), Pairs::asked(&pairs.decode), pairs.taken()), (2, 1, 0));
    let metrics = pairs.metrics().await;
    assert_eq!(metrics.sum("pd_fallbacks_total", &["reason=\"prefill-failed\""]), 1.0);
    assert_eq!(metrics.sum("handoff_failures_total", &["leg=\"prefill\""]), 2.0);
}

#[actix_web::test]
async fn a_lost_pool_is_no_outage() {
    let mut pairs = Pairs::always(1, 1).await;
    pairs.chat(&text("before", 200)).await;
    pairs.prefill.remove(0).kill().await;
    // Nobody has noticed yet: the leg finds out by itself.
    pairs.chat(&text("after", 200)).await;
    assert_eq!(Pairs::asked(&pairs.decode), 2);
    eventually("it is known to be gone", async || {
        let explained = pairs.explain(crate::rig::chat(&text("later", 200), false)).await;
        (explained["split"]["reason"] == "no-prefill-endpoint").then_some(())
    })
    .await;
    pairs.chat(&text("later", 200)).await;
    pairs.node.at_rest().await;
}

#[actix_web::test]
async fn a_decode_that_fails_before_its_first_byte_goes_elsewhere_with_the_same_prefill() {
    let pairs = Pairs::always(1, 2).await;
    failing(&pairs.decode[0], 503);
    for number in 0..6 {
        pairs.chat(&text(&format!("prompt {number}"), 200)).await;
    }
    pairs.node.at_rest().await;
    assert!(Pairs::asked(&pairs.decode[..1]) >= 1, "the failing one was tried");
    assert_eq!((pairs.staged(), pairs.taken(), pairs.pinned(), pairs.spoiled()), (6, 6, 0, 0));
    let metrics = pairs.metrics().await;
    let failed = metrics.sum("handoff_failures_total", &["leg=\"decode\"", "reason=\"status-503\""]);
    assert_eq!(failed, Pairs::asked(&pairs.decode[..1]) as f64);
    assert_eq!(metrics.sum("pd_split_total", &["reason=\"prefilled\""]), failed);
}

#[actix_web::test]
async fn when_no_decode_is_left_the_prefill_endpoint_serves_the_request_whole() {
    let pairs = Pairs::always(1, 1).await;
    failing(&pairs.decode[0], 503);
    pairs.chat(&text("a prompt", 200)).await;
    pairs.node.at_rest().await;
    assert_eq!((Pairs::asked(&pairs.prefill), pairs.staged()), (2, 1));
    assert_eq!(pairs.metrics().await.sum("pd_fallbacks_total", &["reason=\"no-decode-endpoint\""]), 1.0);
    // The decode engine takes nothing, so nobody can be had to free what is kept, and that is said.
    eventually("it is counted as stranded", async || {
        (pairs.metrics().await.sum("kv_stranded", &[]) == 1.0).then_some(())
    })
    .await;
}

#[actix_web::test]
async fn only_the_guilty_side_is_charged() {
    let pairs = Pairs::with(
        engines(2, Role::Prefill, &instant()).await,
        1,
        &[("split", "always"), ("probe_every_ms", "600000")],
    )
    .await;
    pairs.prefill.iter().for_each(|engine| failing(engine, 500));
    for number in 0..8 {
        pairs.chat(&text(&format!("prompt {number}"), 200)).await;
    }
    for engine in &pairs.decode {
        assert_eq!(pairs.node.endpoint(&engine.url()).standing().as_str(), "ready");
    }
}

#[actix_web::test]
async fn a_prefill_engine_that_is_gone_before_its_kv_was_read_is_to_blame_and_the_decode_engine_serves_whole()
{
    // A port where nobody listens any more.
    let gone =
        std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port();
    let params = serde_json::json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "gone", "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": gone,
        "tp_size": 1, "remote_num_tokens": 40,
    });
    let staged = serde_json::json!({"id": "c", "choices": [], "kv_transfer_params": params}).to_string();
    let prefill = Fake::start(move |_| Answer::ok(&staged)).await;
    let decode = engines(1, Role::Decode, &instant()).await.remove(0);
    let endpoints = [format!("{},role=prefill", prefill.url()), format!("{},role=decode", decode.url())];
    let node = Node::over(&endpoints, &[("split", "always")]).await;
    let reply = node.chat(&text("a prompt", 20)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!((prefill.served(), decode.stats().transfers_failed), (1, 1));
    assert_eq!(node.endpoint(&decode.url()).standing().as_str(), "ready");
    node.at_rest().await;
}
