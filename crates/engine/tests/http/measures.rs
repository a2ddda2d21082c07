//! Every figure of `/metrics` moves, gauges come back to zero, and time passes as the model says.

use std::time::Duration;

use engine::{Config, Engine, Options, Profile, SchedulerKind};
use http_body_util::BodyExt;
use serde_json::json;

use crate::harness::{DEADLINE, ask, exchange, get, metric, open, post, until};

const PATH: &str = "/v1/completions";

fn small() -> Config {
    let mut config = Config::profile(Profile::Instant);
    config.timing.prefill_base = Duration::from_millis(1);
    config.timing.inter_token = Duration::from_millis(1);
    config.limits.kv_blocks = 24;
    config
}

fn series(name: &str) -> String {
    format!("vllm:{name}{{engine=\"0\",model_name=\"sim\"}}")
}

#[tokio::test]
async fn gauges_show_what_runs_and_waits_and_a_full_queue_is_counted() {
    let mut config = small();
    config.timing.inter_token = Duration::from_secs(3_600);
    config.limits.waiting_max = Some(1);
    let engine = Engine::start(config).await.expect("starts");
    let request = || post(PATH, &json!({"prompt": "x".repeat(400), "max_tokens": 9}).to_string(), &[]);
    let running = exchange(&engine, request());
    let waiting = async {
        until("the first decodes", || engine.stats().generation_tokens == 1).await;
        exchange(&engine, request()).await
    };
    let watched = async {
        until("the second waits", || engine.stats().waiting == 1).await;
        assert_eq!(metric(&engine, &series("num_requests_running")).await, 1.0);
        assert_eq!(metric(&engine, &series("num_requests_waiting")).await, 1.0);
        // 100 tokens and one to come are in 7 of 24 blocks.
        assert_eq!(metric(&engine, &series("kv_cache_usage_perc")).await, 7.0 / 24.0);
        assert_eq!(get(&engine, "/load").await.json(), json!({"server_load": 2}));
        assert_eq!(exchange(&engine, request()).await.expect("an answer").status, 503);
    };
    tokio::select! {
        _ = running => panic!("answered"),
        _ = waiting => panic!("answered"),
        () = watched => {}
    }
    let rejections = "vllm:admission_rejections_total{model_name=\"sim\",reason=\"max_num_queued_reqs\"}";
    assert_eq!(metric(&engine, rejections).await, 1.0);
    until("both are gone", || engine.stats().aborted == 2).await;
    let aborts = "vllm:request_success_total{engine=\"0\",finished_reason=\"abort\",model_name=\"sim\"}";
    assert_eq!(metric(&engine, aborts).await, 2.0);
    for gauge in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
        assert_eq!(metric(&engine, &series(gauge)).await, 0.0, "{gauge}");
    }
}

#[tokio::test]
async fn every_count_moves() {
    let engine = Engine::start(small()).await.expect("starts");
    // Two answers of 200 tokens share 6 blocks and need 13 each: more than there are.
    let two = json!({"prompt": "x".repeat(400), "max_tokens": 200, "n": 2}).to_string();
    let two = ask(&engine, PATH, &two).await.json();
    assert!((0..2).all(|n| two["choices"][n]["text"].as_str().is_some_and(|text| text.len() == 200 * 6)));
    assert_eq!(
        ask(&engine, PATH, &json!({"prompt": "x".repeat(400), "max_tokens": 2}).to_string()).await.status,
        200
    );
    let natural = r#"{"messages":[{"role":"user","content":"x"}]}"#;
    assert_eq!(ask(&engine, "/v1/chat/completions", natural).await.status, 200);
    for moved in [
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "prompt_tokens_cached_total",
        "generation_tokens_total",
        "request_prompt_tokens_count",
        "request_generation_tokens_sum",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum",
        "e2e_request_latency_seconds_sum",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_count",
        "request_inference_time_seconds_sum",
    ] {
        assert!(metric(&engine, &series(moved)).await > 0.0, "{moved}");
    }
    for (reason, count) in [("length", 3.0), ("stop", 1.0)] {
        let series = format!(
            "vllm:request_success_total{{engine=\"0\",finished_reason=\"{reason}\",model_name=\"sim\"}}"
        );
        assert_eq!(metric(&engine, &series).await, count, "{reason}");
    }
}

#[tokio::test]
async fn nothing_comes_before_its_time() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        let mut config = Config { scheduler, ..small() };
        config.timing.prefill_base = Duration::from_millis(30);
        config.timing.inter_token = Duration::from_millis(10);
        let engine = Engine::start(config).await.expect("starts");
        let body = json!({"prompt": "x", "max_tokens": 8, "stream": true}).to_string();
        let asked = tokio::time::Instant::now();
        let mut response = open(&engine, post(PATH, &body, &[])).await.expect("a head");
        let all = async {
            while let Some(frame) = response.frame().await {
                frame.expect("no error");
                assert!(asked.elapsed() >= Duration::from_millis(30), "{scheduler:?}: before its prefill");
            }
        };
        tokio::time::timeout(DEADLINE, all).await.expect("in time");
        // 30 ms and seven gaps of 10 ms.
        assert!(asked.elapsed() >= Duration::from_millis(100), "{scheduler:?}: {:?}", asked.elapsed());
    }
}

#[tokio::test]
async fn the_first_token_is_sent_without_waiting_for_the_second() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        let mut config = Config { scheduler, ..small() };
        config.timing.inter_token = Duration::from_secs(3_600);
        let engine = Engine::start(config).await.expect("starts");
        let body = json!({"prompt": "x", "max_tokens": 2, "stream": true}).to_string();
        let mut response = open(&engine, post(PATH, &body, &[])).await.expect("a head");
        let first = tokio::time::timeout(DEADLINE, response.frame()).await.expect("in time");
        let first = first.expect("an event").expect("no error").into_data().expect("data");
        assert_eq!(String::from_utf8_lossy(&first).matches("data: ").count(), 1, "{scheduler:?}");
    }
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

#[tokio::test]
async fn an_engine_serves_from_its_flags_until_it_is_told_to_stop() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
    let line = format!("engine --listen {free} --profile instant --model m --output-tokens 3 --faults");
    let line: Line = clap::Parser::try_parse_from(line.split(' ')).expect("parses");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(engine::serve(line.options, async {
        let _ = stopped.await;
    }));
    let models = async {
        loop {
            if let Ok(mut line) = tokio::net::TcpStream::connect(free).await {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                let request = b"GET /v1/models HTTP/1.1\r\nhost: e\r\nconnection: close\r\n\r\n";
                line.write_all(request).await.expect("sends");
                let mut got = String::new();
                line.read_to_string(&mut got).await.expect("an answer");
                return got;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let models = tokio::time::timeout(DEADLINE, models).await.expect("in time");
    assert!(models.contains("\"id\":\"m\""), "{models}");
    stop.send(()).expect("still serving");
    let ended = tokio::time::timeout(DEADLINE, serving).await.expect("in time").expect("no panic");
    assert!(ended.is_ok());
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let first = Engine::start(Config::profile(Profile::Instant)).await.expect("starts");
    let second = Config { listen: first.addr(), ..Config::profile(Profile::Instant) };
    let error = Engine::start(second).await.err().expect("no second engine");
    assert!(error.to_string().contains(&first.addr().to_string()), "{error}");
    assert_eq!(get(&first, "/health").await.status, 200);
}
