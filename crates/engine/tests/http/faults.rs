//! What tests can break, and what they can look at.

use std::time::Duration;

use engine::{Config, Engine, Fault, Health, Lies, Profile, Route};
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{DEADLINE, ask, exchange, get, metric, open, post, until};

async fn start() -> Engine {
    let config = Config { faults: true, recorded_max: 3, ..Config::profile(Profile::Instant) };
    Engine::start(config).await.expect("starts")
}

const PATH: &str = "/v1/completions";

fn body(stream: bool) -> String {
    json!({"prompt": "Hello", "max_tokens": 6, "stream": stream}).to_string()
}

/// What a raw connection receives until its end, and how it ends.
async fn raw(engine: &Engine, stream: bool) -> (String, std::io::Result<usize>) {
    let mut line = TcpStream::connect(engine.addr()).await.expect("connects");
    let body = body(stream);
    let request = format!(
        "POST {PATH} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    line.write_all(request.as_bytes()).await.expect("sends");
    let mut got = Vec::new();
    let end = tokio::time::timeout(DEADLINE, line.read_to_end(&mut got)).await.expect("in time");
    (String::from_utf8(got).expect("UTF-8"), end)
}

/// The words of the events that came.
fn words(got: &str) -> usize {
    got.matches("\"text\":\" ~").count()
}

#[tokio::test]
async fn a_status_is_given_as_often_as_planned_with_or_without_retry_after() {
    let engine = start().await;
    engine.fail(Fault::Status { status: 503, retry_after_s: Some(7) }, Some(1));
    engine.fail(Fault::Status { status: 429, retry_after_s: None }, Some(1));
    let first = ask(&engine, PATH, &body(false)).await;
    assert_eq!((first.status.as_u16(), &first.headers["retry-after"]), (503, &"7".parse().expect("a value")));
    let second = ask(&engine, PATH, &body(true)).await;
    assert_eq!((second.status.as_u16(), second.headers.get("retry-after")), (429, None));
    assert_eq!(ask(&engine, PATH, &body(false)).await.status, 200);
}

#[tokio::test]
async fn a_reset_comes_before_the_first_byte_or_behind_the_planned_token() {
    let engine = start().await;
    for (fault, stream, expected) in [
        (Fault::Reset, true, 0),
        (Fault::Reset, false, 0),
        (Fault::ResetAfter { tokens: 0 }, true, 0),
        (Fault::ResetAfter { tokens: 4 }, true, 4),
        (Fault::ResetAfter { tokens: 6 }, true, 6),
        (Fault::ResetAfter { tokens: 4 }, false, 0),
    ] {
        engine.fail(fault, Some(1));
        let (got, end) = raw(&engine, stream).await;
        let reset = end.err().map(|error| error.kind());
        assert_eq!(reset, Some(std::io::ErrorKind::ConnectionReset), "{fault:?}");
        assert_eq!(words(&got), expected, "{fault:?}: {got}");
        assert_eq!(got.is_empty(), fault == Fault::Reset || !stream, "{fault:?}: {got}");
        assert!(!got.contains("[DONE]") && !got.contains("length\""), "{got}");
    }
    // A plan that is longer than the answer never strikes.
    engine.fail(Fault::ResetAfter { tokens: 7 }, Some(1));
    assert_eq!(ask(&engine, PATH, &body(true)).await.events().len(), 7);
}

#[tokio::test]
async fn a_frozen_request_is_accepted_and_never_answered_or_stops_midway() {
    let engine = start().await;
    engine.fail(Fault::Freeze, Some(1));
    let silent =
        tokio::time::timeout(Duration::from_millis(200), exchange(&engine, post(PATH, &body(true), &[])));
    assert!(silent.await.is_err(), "nothing comes, not even a head");
    engine.fail(Fault::FreezeAfter { tokens: 2 }, Some(1));
    let mut response = open(&engine, post(PATH, &body(true), &[])).await.expect("a head");
    let mut got = String::new();
    while words(&got) < 2 {
        let frame = response.frame().await.expect("more").expect("no error");
        got.push_str(std::str::from_utf8(frame.data_ref().expect("data")).expect("UTF-8"));
    }
    assert!(
        tokio::time::timeout(Duration::from_millis(200), response.frame()).await.is_err(),
        "no more comes"
    );
    assert_eq!(words(&got), 2);
    drop(response);
    until("the request is gone", || engine.stats().requests_abandoned == 2).await;
}

#[tokio::test]
async fn an_error_event_is_followed_by_done() {
    let engine = start().await;
    engine.fail(Fault::ErrorEventAfter { tokens: 3 }, Some(2));
    let events = ask(&engine, PATH, &body(true)).await.events();
    assert_eq!((events.len(), events.last().map(String::as_str)), (5, Some("[DONE]")));
    let error: Value = serde_json::from_str(&events[3]).expect("JSON");
    assert_eq!(error["error"]["code"], 500);
    assert_eq!(ask(&engine, PATH, &body(false)).await.status, 500);
}

#[tokio::test]
async fn an_abort_ends_the_stream_as_a_stopping_engine_does() {
    let engine = start().await;
    for (tokens, chunks) in [(0, 1), (3, 3)] {
        engine.fail(Fault::AbortAfter { tokens }, Some(1));
        let events = ask(&engine, PATH, &body(true)).await.events();
        assert_eq!(
            (events.len(), events.last().map(String::as_str)),
            (chunks + 1, Some("[DONE]")),
            "{events:?}"
        );
        let last: Value = serde_json::from_str(&events[chunks - 1]).expect("JSON");
        assert_eq!(last["choices"][0]["finish_reason"], "abort");
        let recorded = include_str!("../fixtures/sigterm_midstream_tail.txt");
        let recorded =
            recorded.lines().rev().find_map(|line| line.strip_prefix("data: {")).expect("an event");
        let recorded: Value = serde_json::from_str(&format!("{{{recorded}")).expect("JSON");
        assert_eq!(last["choices"][0]["finish_reason"], recorded["choices"][0]["finish_reason"]);
        let keys = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&last), keys(&recorded));
        assert_eq!(keys(&last["choices"][0]), keys(&recorded["choices"][0]));
    }
    engine.fail(Fault::AbortAfter { tokens: 3 }, Some(1));
    let whole = ask(&engine, PATH, &body(false)).await;
    assert_eq!(
        (whole.text().len(), whole.json()["choices"][0]["finish_reason"].clone()),
        (18, json!("abort"))
    );
}

#[tokio::test]
async fn comments_go_on_while_nothing_else_comes() {
    let engine = start().await;
    engine.fail(Fault::CommentsAfter { tokens: 1, every_ms: 2 }, Some(1));
    let mut response = open(&engine, post(PATH, &body(true), &[])).await.expect("a head");
    let mut got = String::new();
    while got.matches(": ping\n\n").count() < 3 {
        let frame = response.frame().await.expect("more").expect("no error");
        got.push_str(std::str::from_utf8(frame.data_ref().expect("data")).expect("UTF-8"));
    }
    assert_eq!(words(&got), 1);
}

#[tokio::test]
async fn a_dripping_body_arrives_whole() {
    let engine = start().await;
    let texts = [ask(&engine, PATH, &body(false)).await.text(), ask(&engine, PATH, &body(true)).await.text()];
    engine.fail(Fault::Drip { bytes: 100, every_ms: 1 }, Some(2));
    for (stream, text) in [false, true].into_iter().zip(texts) {
        let mut response = open(&engine, post(PATH, &body(stream), &[])).await.expect("a head");
        let mut pieces = 0;
        let mut got = Vec::new();
        while let Some(frame) = response.frame().await {
            let frame = frame.expect("no error").into_data().expect("data");
            pieces += 1;
            got.extend_from_slice(&frame);
        }
        assert!(pieces > 3, "{pieces} pieces");
        let got = String::from_utf8(got).expect("UTF-8");
        assert!(got.contains(&text[text.len() - 6..]), "{got}");
        assert_eq!(got.ends_with("data: [DONE]\n\n"), stream);
    }
}

#[tokio::test]
async fn a_frozen_engine_says_nothing_until_it_thaws() {
    let engine = start().await;
    let mut config = Config::profile(Profile::Llama8bH100);
    config.timing.inter_token = Duration::from_millis(1);
    let slow = Engine::start(config).await.expect("starts");
    let request = post(PATH, &json!({"prompt": "x", "max_tokens": 100_000, "stream": true}).to_string(), &[]);
    let mut under_way = open(&slow, request).await.expect("a head");
    under_way.frame().await.expect("an event").expect("no error");
    for engine in [&engine, &slow] {
        engine.freeze(true);
    }
    let quiet = async {
        // What was on its way when the engine froze still arrives.
        while tokio::time::timeout(Duration::from_millis(200), under_way.frame()).await.is_ok() {}
    };
    tokio::time::timeout(DEADLINE, quiet).await.expect("the stream falls silent");
    let health = get(&engine, "/health");
    tokio::pin!(health);
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut health).await.is_err());
    for engine in [&engine, &slow] {
        engine.freeze(false);
    }
    assert_eq!(health.await.status, 200);
    assert!(under_way.frame().await.is_some_and(|frame| frame.is_ok()));
}

#[tokio::test]
async fn health_can_be_bad_or_come_and_go() {
    let engine = start().await;
    let probes = async || [get(&engine, "/health").await.status, get(&engine, "/health").await.status];
    for (health, expected) in
        [(Health::Sick, [503, 503]), (Health::Flapping, [503, 200]), (Health::Well, [200, 200])]
    {
        engine.set_health(health);
        assert_eq!(probes().await.map(|status| status.as_u16()), expected, "{health:?}");
    }
}

#[tokio::test]
async fn metrics_can_lie_and_the_stats_tell_the_truth() {
    let engine = start().await;
    engine.set_lies(Lies { running: Some(3), waiting: Some(20), kv_ratio: Some(0.5) });
    let shown =
        async |name: &str| metric(&engine, &format!("vllm:{name}{{engine=\"0\",model_name=\"sim\"}}")).await;
    assert_eq!(shown("num_requests_running").await, 3.0);
    assert_eq!(shown("num_requests_waiting").await, 20.0);
    assert_eq!(shown("kv_cache_usage_perc").await, 0.5);
    assert_eq!((engine.stats().running, engine.stats().waiting), (0, 0));
    engine.clear_faults();
    assert_eq!(shown("num_requests_waiting").await, 0.0);
}

#[tokio::test]
async fn a_restarted_engine_has_an_empty_cache_new_counters_and_a_new_start_time() {
    let engine = start().await;
    let long = json!({"prompt": "all the same ".repeat(30), "max_tokens": 1}).to_string();
    let cached = async || {
        let usage = ask(&engine, PATH, &long).await.json()["usage"].clone();
        usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
    };
    assert_eq!(cached().await, 0);
    assert!(cached().await > 0);
    let started = metric(&engine, "process_start_time_seconds").await;
    engine.restart();
    assert_eq!(metric(&engine, "vllm:prompt_tokens_total{engine=\"0\",model_name=\"sim\"}").await, 0.0);
    assert_eq!(cached().await, 0);
    assert!(metric(&engine, "process_start_time_seconds").await > started);
}

#[tokio::test]
async fn a_restart_cuts_what_is_under_way() {
    let engine = Engine::start(Config::profile(Profile::Llama8bH100)).await.expect("starts");
    let request = post(PATH, &json!({"prompt": "x", "max_tokens": 100_000, "stream": true}).to_string(), &[]);
    let mut under_way = open(&engine, request).await.expect("a head");
    under_way.frame().await.expect("an event").expect("no error");
    engine.restart();
    let cut = async { while under_way.frame().await.is_some_and(|frame| frame.is_ok()) {} };
    tokio::time::timeout(DEADLINE, cut).await.expect("the stream ends");
    let stats = engine.stats();
    assert_eq!((stats.running, stats.kv_ratio), (0, 0.0));
}

#[tokio::test]
async fn a_stopped_engine_aborts_streams_politely_and_a_killed_one_does_not() {
    for polite in [true, false] {
        let engine = Engine::start(Config::profile(Profile::Llama8bH100)).await.expect("starts");
        let addr = engine.addr();
        let request =
            post(PATH, &json!({"prompt": "x", "max_tokens": 100_000, "stream": true}).to_string(), &[]);
        let mut response = open(&engine, request).await.expect("a head");
        response.frame().await.expect("an event").expect("no error");
        if polite {
            engine.stop().await;
        } else {
            engine.kill().await;
        }
        let rest = response.collect().await.map(http_body_util::Collected::to_bytes);
        match rest {
            Ok(rest) => {
                assert!(polite);
                assert!(String::from_utf8_lossy(&rest).contains("\"finish_reason\":\"abort\""));
                assert!(rest.ends_with(b"data: [DONE]\n\n"));
            }
            Err(_) => assert!(!polite),
        }
        let again = Config { listen: addr, ..Config::profile(Profile::Instant) };
        let again = Engine::start(again).await.expect("the port is free again");
        assert_eq!(get(&again, "/health").await.status, 200);
    }
}

#[tokio::test]
async fn faults_are_ordered_over_http() {
    let engine = start().await;
    let order = async |order: Value| ask(&engine, "/fault", &order.to_string()).await.status.as_u16();
    let fault = json!({"fault": {"kind": "status", "status": 500}, "requests": 1});
    assert_eq!(order(fault).await, 200);
    assert_eq!(ask(&engine, PATH, &body(false)).await.status, 500);
    assert_eq!(ask(&engine, PATH, &body(false)).await.status, 200);
    assert_eq!(order(json!({"health": "sick", "lies": {"waiting": 9}})).await, 200);
    assert_eq!(get(&engine, "/health").await.status, 503);
    assert_eq!(order(json!({"clear": true, "restart": true})).await, 200);
    assert_eq!(get(&engine, "/health").await.status, 200);
    assert_eq!(engine.stats().prompt_tokens, 0);
    for wrong in [json!({"fault": {"kind": "nope"}}), json!({"nope": 1}), json!({"fault": {"kind": "drip"}})]
    {
        assert_eq!(order(wrong).await, 400);
    }
}

#[tokio::test]
async fn requests_are_counted_and_the_last_ones_kept_as_they_came() {
    let engine = start().await;
    for n in 0..5 {
        let odd = format!("{{ \"max_tokens\":1,\"b\":{n}, \"b\" : 1e400x, \"prompt\":\"x\"}}");
        exchange(&engine, post("/v1/completions?a=b", &odd, &[("x-odd", "1")])).await.expect("an answer");
    }
    assert_eq!((engine.requests(Route::Completions), engine.requests(Route::Chat)), (5, 0));
    let kept = engine.recorded();
    assert_eq!(kept.len(), 3);
    let last = kept.last().expect("the last");
    assert_eq!(last.body, "{ \"max_tokens\":1,\"b\":4, \"b\" : 1e400x, \"prompt\":\"x\"}");
    assert_eq!((last.path.as_str(), last.headers["x-odd"].as_bytes()), ("/v1/completions?a=b", &b"1"[..]));
    assert_eq!(engine.stats().connections_opened, 5);
    until("all connections are closed", || engine.stats().connections_open == 0).await;
}

#[tokio::test]
async fn anything_sent_to_echo_comes_back_as_it_was() {
    let engine = start().await;
    let sent: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
    let request = Request::builder()
        .method(Method::PUT)
        .uri("/v1/echo/files?x=1")
        .header("host", "engine")
        .header("content-type", "multipart/form-data; boundary=b")
        .body(Full::new(sent.clone().into()))
        .expect("a valid request");
    let got = exchange(&engine, request).await.expect("an answer");
    assert_eq!(got.body, sent);
    assert_eq!(got.headers["content-type"], "multipart/form-data; boundary=b");
    assert_eq!(
        (got.headers["x-echo-method"].as_bytes(), got.headers["x-echo-path"].as_bytes()),
        (&b"PUT"[..], &b"/v1/echo/files?x=1"[..])
    );
}
