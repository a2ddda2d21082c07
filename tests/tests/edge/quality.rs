//! How users fare: what a replica says of each stream, its session and its class.

use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{Answer, Fake, Node, chat, eventually, get, piece, post_as};

/// Between two tokens. The first one comes as long after the role, so that no target below it can be met.
const PAUSE: Duration = Duration::from_millis(10);

/// Streams of ten tokens.
async fn steady() -> Fake {
    Fake::start(|_| {
        let role = r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#.to_owned();
        Answer::Events(std::iter::once(role).chain((0..10).map(piece)).collect(), PAUSE)
    })
    .await
}

/// What is said of the stream with this id once it is over.
pub async fn streamed(node: &Node, id: &str, headers: &str) -> Value {
    let headers = format!("X-Request-Id: {id}\r\n{headers}");
    post_as(node.public(), "/v1/chat/completions", &headers, chat("hello", true)).await;
    node.at_rest().await;
    get(node.admin(), &format!("/requests/{id}")).await.json()
}

#[actix_web::test]
async fn a_stream_is_measured_by_what_its_user_expected() {
    let engine = steady().await;
    let node = Node::over(&[engine.url()], &[]).await;
    let patient = "X-SLO-TTFT-MS: 60000\r\nX-SLO-TPOT-MS: 60000\r\nX-SLA-Target-MS: 60000\r\n";
    let row = streamed(&node, "patient", patient).await;
    assert_eq!(
        (&row["qoe"], &row["slo"]),
        (&json!(1.0), &json!({"ttft": "met", "tpot": "met", "e2e": "met"}))
    );
    let hasty = "X-SLO-TTFT-MS: 1\r\nX-SLO-TPOT-MS: 1\r\nX-SLA-Target-MS: 1\r\n";
    let row = streamed(&node, "hasty", hasty).await;
    let qoe = row["qoe"].as_f64().expect("a number");
    assert!(qoe > 0.0 && qoe < 1.0, "{qoe}");
    assert_eq!(row["slo"], json!({"ttft": "missed", "tpot": "missed", "e2e": "missed"}));
    // Without a target for the whole there is nothing to say of it; a reply in one piece has no quality.
    assert!(streamed(&node, "plain", "").await["slo"]["e2e"].is_null());
}

#[actix_web::test]
async fn a_session_has_the_quality_of_its_streams() {
    let engine = steady().await;
    let node = Node::over(&[engine.url()], &[]).await;
    let quality = async || get(node.admin(), "/sessions/one").await.json()["qoe"].as_f64();
    let session = "X-Session-Id: one\r\n";
    streamed(&node, "first", &format!("{session}X-SLO-TTFT-MS: 60000\r\nX-SLO-TPOT-MS: 60000\r\n")).await;
    eventually("a good first turn", async || (quality().await == Some(1.0)).then_some(())).await;
    streamed(&node, "second", &format!("{session}X-SLO-TTFT-MS: 1\r\nX-SLO-TPOT-MS: 1\r\n")).await;
    eventually("a worse second turn", async || {
        quality().await.is_some_and(|qoe| qoe > 0.5 && qoe < 1.0).then_some(())
    })
    .await;
}

#[actix_web::test]
async fn a_stream_that_nobody_serves_had_no_quality_and_one_that_nobody_could_serve_is_not_counted() {
    let engine = Fake::start(|_| Answer::status(503)).await;
    let node = Node::over(&[engine.url()], &[]).await;
    let row = streamed(&node, "unserved", "X-SLA-Target-MS: 60000\r\n").await;
    assert_eq!((&row["phase"], &row["qoe"]), (&json!("failed"), &json!(0.0)));
    assert_eq!(row["slo"], json!({"ttft": "missed", "tpot": "missed", "e2e": "missed"}));
    let wrong = Fake::start(|_| Answer::status(422)).await;
    let node = Node::over(&[wrong.url()], &[]).await;
    let row = streamed(&node, "wrong", "X-SLA-Target-MS: 60000\r\n").await;
    assert_eq!(
        (&row["qoe"], &row["slo"]["tpot"], &row["slo"]["e2e"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
}
