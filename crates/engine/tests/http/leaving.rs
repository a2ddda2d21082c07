//! Clients that leave before the end.

use std::time::Duration;

use bytes::Bytes;
use engine::{Config, Engine, Profile, SchedulerKind};
use http::Request;
use http_body_util::{BodyExt, Full};
use serde_json::json;

use crate::harness::{DEADLINE, exchange, get, metric, open, post, until};

/// Times so long that nothing ends by itself within a test.
async fn slow(scheduler: SchedulerKind, prefill_token_ms: u64, inter_token_ms: u64) -> Engine {
    let mut config = Config { scheduler, ..Config::profile(Profile::Instant) };
    config.timing.prefill_per_token = Duration::from_millis(prefill_token_ms);
    config.timing.inter_token = Duration::from_millis(inter_token_ms);
    config.limits.running_max = 1;
    Engine::start(config).await.expect("starts")
}

fn request(content: &str, stream: bool) -> Request<Full<Bytes>> {
    let body = json!({
        "messages": [{"role": "user", "content": content}], "max_tokens": 100_000, "stream": stream,
    });
    post("/v1/chat/completions", &body.to_string(), &[])
}

async fn everything_is_free(engine: &Engine) {
    until("nothing runs, waits or holds blocks", || {
        let stats = engine.stats();
        (stats.running, stats.waiting, stats.kv_ratio, stats.connections_open) == (0, 0, 0.0, 0)
    })
    .await;
    for gauge in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
        assert_eq!(metric(engine, &format!("vllm:{gauge}{{engine=\"0\",model_name=\"sim\"}}")).await, 0.0);
    }
    assert_eq!(get(engine, "/load").await.json(), json!({"server_load": 0}));
}

#[tokio::test]
async fn a_client_that_leaves_while_waiting_or_in_prefill_frees_everything() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        for stream in [false, true] {
            let engine = slow(scheduler, 100_000, 1).await;
            let in_prefill = exchange(&engine, request("first", stream));
            let waiting = exchange(&engine, request("second", stream));
            let seen = until("one runs, one waits", || {
                let stats = engine.stats();
                (stats.running, stats.waiting) == (1, 1)
            });
            tokio::select! {
                _ = in_prefill => panic!("answered"),
                _ = waiting => panic!("answered"),
                () = seen => {}
            }
            everything_is_free(&engine).await;
            assert_eq!(engine.stats().requests_abandoned, 2, "{scheduler:?}, stream {stream}");
            assert_eq!(engine.stats().aborted, 2);
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_its_answer_is_decoded_frees_everything() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        for stream in [false, true] {
            let engine = slow(scheduler, 0, 1).await;
            let asking = tokio::time::timeout(DEADLINE, async {
                let mut response = open(&engine, request("first", stream)).await.expect("a head");
                while response.frame().await.is_some_and(|frame| frame.is_ok()) {
                    if engine.stats().generation_tokens > 5 {
                        return;
                    }
                }
                panic!("the stream ended");
            });
            tokio::select! {
                done = asking => done.expect("in time"),
                () = until("some tokens are out", || !stream && engine.stats().generation_tokens > 5) => {}
            }
            assert!(engine.stats().kv_ratio > 0.0);
            everything_is_free(&engine).await;
            assert_eq!(engine.stats().requests_abandoned, 1, "{scheduler:?}, stream {stream}");
        }
    }
}

#[tokio::test]
async fn the_next_in_line_is_served_when_the_one_before_leaves() {
    let engine = slow(SchedulerKind::Fifo, 100, 1).await;
    let long = open(&engine, request(&"long ".repeat(10_000), false));
    tokio::select! {
        _ = long => panic!("answered"),
        () = until("it runs", || engine.stats().running == 1) => {}
    }
    let next = post("/v1/completions", r#"{"prompt":"next","max_tokens":2}"#, &[]);
    let answer = tokio::time::timeout(DEADLINE, open(&engine, next)).await.expect("in time");
    assert_eq!(answer.expect("an answer").status(), 200);
}
