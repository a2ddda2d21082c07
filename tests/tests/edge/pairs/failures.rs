//! Legs that fail, and sides that are gone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use engine::{Engine, Fault, Role};
use serde_json::{Value, json};

use super::{CHAT, Pairs, engines, instant, text};
use crate::rig::{Answer, Fake, Node, chat, eventually, post_as};

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
async fn a_stream_that_breaks_at_its_decode_engine_goes_on_through_another_pair() {
    // Tokens come one by one, so that the first are read before the cut.
    let mut slow = instant();
    slow.timing.inter_token = Duration::from_millis(10);
    let (prefill, decode) =
        (engines(2, Role::Prefill, &instant()).await, engines(2, Role::Decode, &slow).await);
    let pairs = Pairs::of(prefill, decode, &[("split", "always")]).await;
    let mut resumed = 0.0;
    for number in 0..64 {
        let content = text(&format!("prompt {number}"), 200);
        let undisturbed = pairs.chat(&content).await;
        let home = undisturbed.header("x-grapevine-endpoint").expect("who answered").to_owned();
        let undisturbed = undisturbed.json();
        // Its connection may break with everything that was on it: then it is a decode leg that failed.
        let decode = pairs.decode.iter().find(|engine| engine.url() == home).expect("one of the pair");
        decode.fail(Fault::ResetAfter { tokens: 3 }, Some(1));
        let body = chat(&content, true);
        let reply = pairs.node.post(CHAT, &body).await;
        let events = reply.text().lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<&str> = events.collect();
        assert_eq!(events.last(), Some(&"[DONE]"), "{}", reply.text());
        let deltas = events[..events.len() - 1].iter().map(|event| {
            let event: Value = serde_json::from_str(event).expect("JSON");
            event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
        });
        assert_eq!(deltas.collect::<String>(), undisturbed["choices"][0]["message"]["content"]);
        pairs.node.at_rest().await;
        resumed = pairs.metrics().await.sum("resumed_total", &["cause=\"truncated\""]);
        if resumed > 0.0 {
            break;
        }
    }
    assert_eq!(resumed, 1.0, "no stream broke after its first byte");
    eventually("what was staged to be let go of", async || (pairs.pinned() == 0).then_some(())).await;
    assert_eq!(pairs.spoiled(), 0);
    // The continuation was split as well.
    assert!(pairs.metrics().await.sum("pd_split_total", &["split=\"yes\""]) >= 3.0);
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
        let explained = pairs.explain(chat(&text("later", 200), false)).await;
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
    // By sequences, for it is looked at once more whether the engine is there.
    assert_eq!((pairs.prefill[0].stats().finished, pairs.staged()), (2, 1));
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

/// A body with `params` in it, as legs have them.
fn leg(content: &str, params: &Value) -> String {
    let mut body: Value = serde_json::from_str(&chat(content, false)).expect("JSON");
    body["kv_transfer_params"] = params.clone();
    body.to_string()
}

async fn prefilled(engine: &Engine, content: &str) -> Value {
    let asked = json!({"do_remote_decode": true, "do_remote_prefill": false});
    post_as(engine.addr(), CHAT, "", leg(content, &asked)).await.json()
}

#[actix_web::test]
async fn decode_engines_that_say_at_once_that_a_prefill_engine_is_gone_serve_whole_and_are_not_to_blame() {
    for count in [1, 2] {
        let gone = engines(1, Role::Prefill, &instant()).await.remove(0);
        let mut patient = instant();
        patient.transfer.handshake_max = Duration::from_secs(3_600);
        let decode = engines(count, Role::Decode, &patient).await;
        for engine in &decode {
            let staged = prefilled(&gone, "they meet").await;
            let reply =
                post_as(engine.addr(), CHAT, "", leg("they meet", &staged["kv_transfer_params"])).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        let staged = prefilled(&gone, &text("a prompt", 20)).await.to_string();
        gone.kill().await;
        let prefill = Fake::start(move |_| Answer::ok(&staged)).await;
        let mut endpoints = vec![format!("{},role=prefill", prefill.url())];
        endpoints.extend(decode.iter().map(|engine| format!("{},role=decode", engine.url())));
        let node = Node::over(&endpoints, &[("split", "always"), ("probe_every_ms", "600000")]).await;
        for _ in 0..8 {
            let reply = node.chat(&text("a prompt", 20)).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        node.at_rest().await;
        for engine in &decode {
            assert!(engine.stats().transfers_failed >= 8, "each was asked to fetch");
            assert_eq!(node.endpoint(&engine.url()).standing().as_str(), "ready");
        }
    }
}

#[actix_web::test]
async fn a_prefill_engine_that_falls_silent_before_its_kv_was_read_holds_nobody_up() {
    for stream in [false, true] {
        let silent = AtomicBool::new(false);
        let staged = r#"{"id":"c","choices":[],"kv_transfer_params":{"remote_port":1}}"#;
        let prefill = Fake::start_raw(move |asked| match asked.path.as_str() {
            _ if silent.load(Ordering::Relaxed) => Answer::Silence,
            "/health" => Answer::ok(""),
            "/v1/models" => Answer::ok(r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#),
            CHAT => {
                silent.store(true, Ordering::Relaxed);
                Answer::ok(staged)
            }
            _ => Answer::status(404),
        })
        .await;
        let decode = Fake::start(|asked| match String::from_utf8_lossy(&asked.body) {
            body if body.contains("remote_port") => Answer::Silence,
            body if body.contains("\"stream\":true") => Answer::stream(2, Duration::ZERO),
            _ => Answer::completion(9, 2),
        })
        .await;
        let endpoints = [format!("{},role=prefill", prefill.url()), format!("{},role=decode", decode.url())];
        let flags = [("split", "always"), ("probe_every_ms", "50"), ("probe_timeout_ms", "100")];
        let node = Node::over(&endpoints, &flags).await;
        let reply = node.post(CHAT, chat(&text("a prompt", 20), stream)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!((prefill.served(), decode.served()), (1, 2), "a leg each, and the request whole");
        assert_eq!(node.endpoint(&decode.url()).standing().as_str(), "ready");
        node.at_rest().await;
    }
}
