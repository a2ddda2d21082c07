//! What goes wrong between a prefill and a decode engine, and what a real engine does then.

use std::time::Duration;

use engine::{BadParams, Config, Connector, Engine, Fault, Role};
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::handoff::{pair, plain, prefill, prompt, second_leg};
use crate::harness::{DEADLINE, ask, exchange, get, open, post, until};
use crate::surface::{fixture, tiny};

const TEXT: &str = "/v1/completions";
const CORE_DIED: &str = r#"{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}"#;

fn impatient() -> Config {
    let mut config = tiny();
    config.transfer.handshake_max = Duration::from_millis(20);
    config
}

async fn decoder(config: Config) -> Engine {
    Engine::start(config.with_role(Role::Decode, Connector::Nixl)).await.expect("starts")
}

fn body(first: u32, stream: bool) -> Value {
    json!({"prompt": prompt(first), "max_tokens": 4, "stream": stream})
}

#[tokio::test]
async fn a_dead_prefill_engine_is_an_error_as_recorded_and_the_next_request_is_served() {
    let (p, d) = pair(impatient).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    p.kill().await;
    let got = ask(&d, TEXT, &second_leg(&body(1, false), &params)).await;
    assert_eq!(got.status, 500);
    let recorded = fixture("pd_nixl_errors.txt");
    assert!(recorded.contains(std::str::from_utf8(&got.body).expect("UTF-8")), "{:?}", got.body);

    let got = ask(&d, TEXT, &second_leg(&body(1, true), &params)).await;
    assert_eq!(got.status, 200);
    let [error, done] = &got.events()[..] else { panic!("{:?}", got.events()) };
    let error: Value = serde_json::from_str(error).expect("JSON");
    assert_eq!(
        error,
        json!({"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}})
    );
    assert_eq!(done, "[DONE]");

    let stats = d.stats();
    assert_eq!((stats.transfers_failed, stats.fetching, stats.waiting, stats.kv_ratio), (2, 0, 0, 0.0));
    assert_eq!(ask(&d, TEXT, &body(1, false).to_string()).await.text(), plain(TEXT, &body(1, false)).await);
}

#[tokio::test]
async fn the_death_of_a_prefill_engine_that_was_met_is_noticed_at_once() {
    let patient = || {
        let mut config = tiny();
        config.transfer.handshake_max = Duration::from_secs(3_600);
        config
    };
    let (p, d) = pair(patient).await;
    let met = prefill(&p, TEXT, &body(1, false)).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&body(1, false), &met)).await.status, 200);
    let params = prefill(&p, TEXT, &body(1_000, false)).await;
    p.kill().await;
    for stream in [false, true] {
        let second = second_leg(&body(1_000, stream), &params);
        let got = tokio::time::timeout(DEADLINE, ask(&d, TEXT, &second)).await.expect("in time");
        assert_eq!(got.status, if stream { 200 } else { 500 });
        assert!(String::from_utf8_lossy(&got.body).contains("Internal server error"), "{:?}", got.body);
    }
    assert_eq!(d.stats().transfers_failed, 2);
}

#[tokio::test]
async fn a_prefill_engine_that_dies_in_mid_transfer_is_an_error() {
    let slow = || {
        let mut config = tiny();
        config.transfer.base = Duration::from_secs(3_600);
        config
    };
    let (p, d) = pair(slow).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    let second = second_leg(&body(1, false), &params);
    let decode = ask(&d, TEXT, &second);
    let kill = async {
        until("it fetches", || d.stats().fetching == 1).await;
        p.kill().await;
    };
    let (got, ()) =
        tokio::time::timeout(DEADLINE, async { tokio::join!(decode, kill) }).await.expect("in time");
    assert_eq!(got.status, 500);
    assert_eq!(d.stats().transfers_failed, 1);
}

#[tokio::test]
async fn a_restarted_prefill_engine_does_not_know_its_old_name() {
    let (p, d) = pair(tiny).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    p.restart();
    assert_eq!(p.stats().pinned_blocks, 0);
    assert_eq!(ask(&d, TEXT, &second_leg(&body(1, false), &params)).await.status, 500);
    let params = prefill(&p, TEXT, &body(1, false)).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&body(1, false), &params)).await.status, 200);
}

#[tokio::test]
async fn an_engine_met_before_is_found_whatever_port_the_parameters_say() {
    let (p, d) = pair(tiny).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&body(1, false), &params)).await.status, 200);
    let mut params = prefill(&p, TEXT, &body(2, false)).await;
    params["remote_port"] = json!(1);
    let got = ask(&d, TEXT, &second_leg(&body(2, false), &params)).await;
    assert_eq!(got.text(), plain(TEXT, &body(2, false)).await);
}

#[tokio::test]
async fn used_parameters_serve_their_own_prompt_again_while_its_blocks_are_not_overwritten() {
    let (p, d) = pair(tiny).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    for engine in [&d, &decoder(tiny()).await] {
        let got = ask(engine, TEXT, &second_leg(&body(1, false), &params)).await;
        assert_eq!(got.text(), plain(TEXT, &body(1, false)).await);
        assert_eq!(engine.stats().spoiled, 0);
    }
}

#[tokio::test]
async fn parameters_of_another_prompt_give_wrong_answers_and_poison_the_cache() {
    let (p, d) = pair(tiny).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    let right = plain(TEXT, &body(2, false)).await;
    for stream in [false, true] {
        let got = ask(&d, TEXT, &second_leg(&body(2, stream), &params)).await;
        assert_eq!(got.status, 200);
        assert_ne!(got.text(), right, "stream {stream}");
    }
    // What was spoiled once is found by those who did nothing wrong.
    let got = ask(&d, TEXT, &body(2, false).to_string()).await;
    assert_ne!(got.text(), right);
    assert_eq!(got.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 576);
    assert_eq!(d.stats().spoiled, 3);
    d.restart();
    assert_eq!(ask(&d, TEXT, &body(2, false).to_string()).await.text(), right);
}

#[tokio::test]
async fn blocks_that_others_have_overwritten_give_wrong_answers() {
    let small = || {
        let mut config = tiny();
        config.limits.kv_blocks = 20;
        config.transfer.pin_max = Duration::from_millis(1);
        config
    };
    let (p, d) = pair(small).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    until("its time is up", || p.stats().pinned_blocks == 0).await;
    assert_eq!(ask(&p, TEXT, &body(2, false).to_string()).await.status, 200);
    let got = ask(&d, TEXT, &second_leg(&body(1, false), &params)).await;
    assert_ne!(got.text(), plain(TEXT, &body(1, false)).await);
    assert_eq!(d.stats().spoiled, 1);
}

#[tokio::test]
async fn too_few_blocks_for_the_prompt_are_an_error() {
    let (p, d) = pair(tiny).await;
    let short = json!({"prompt": [1, 2, 3], "max_tokens": 4});
    let params = prefill(&p, TEXT, &short).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&body(2, false), &params)).await.status, 500);
    assert_eq!(ask(&d, TEXT, &second_leg(&short, &params)).await.text(), plain(TEXT, &short).await);
}

#[tokio::test]
async fn engines_of_different_kinds_refuse_each_other() {
    let (p, _) = pair(tiny).await;
    let mut other = tiny();
    other.limits.block_tokens = 16;
    let d = decoder(other).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&body(1, false), &params)).await.status, 500);
}

#[tokio::test]
async fn incomplete_parameters_kill_the_engine_and_all_it_was_doing() {
    let slow = || {
        let mut config = tiny();
        config.timing.inter_token = Duration::from_secs(3_600);
        config
    };
    let d = decoder(slow()).await;
    let mut streaming = open(&d, post(TEXT, &body(1, true).to_string(), &[])).await.expect("a head");
    streaming.frame().await.expect("a token").expect("no error");
    let fatal = second_leg(&body(2, false), &json!({"do_remote_prefill": true}));
    let got = ask(&d, TEXT, &fatal).await;
    assert_eq!((got.status.as_u16(), std::str::from_utf8(&got.body)), (500, Ok(CORE_DIED)));
    let rest = tokio::time::timeout(DEADLINE, streaming.collect()).await.expect("in time").expect("no reset");
    let rest = String::from_utf8(rest.to_bytes().to_vec()).expect("UTF-8");
    assert_eq!(rest, format!("data: {CORE_DIED}\n\ndata: [DONE]\n\n"));
    assert!(d.core_is_dead());
    let refused = async {
        while tokio::net::TcpStream::connect(d.addr()).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, refused).await.expect("connections are refused");
}

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    options: engine::Options,
}

#[tokio::test]
async fn an_engine_run_from_its_flags_ends_with_an_error_when_its_core_dies() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
    let line = format!("engine --listen {free} --profile instant --role decode");
    let line: Line = clap::Parser::try_parse_from(line.split(' ')).expect("parses");
    let serving = tokio::spawn(engine::serve(line.options, std::future::pending()));
    let fatal = second_leg(&body(1, false), &json!({"do_remote_prefill": true}));
    let ask = async {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let mut connection = loop {
            match tokio::net::TcpStream::connect(free).await {
                Ok(connection) => break connection,
                Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        };
        let head = format!(
            "POST {TEXT} HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            fatal.len()
        );
        connection.write_all(head.as_bytes()).await.expect("sends");
        connection.write_all(fatal.as_bytes()).await.expect("sends");
        let mut got = String::new();
        connection.read_to_string(&mut got).await.expect("an answer, then the end");
        got
    };
    let got = tokio::time::timeout(DEADLINE, ask).await.expect("in time");
    assert!(got.starts_with("HTTP/1.1 500") && got.ends_with(CORE_DIED), "{got}");
    let ended = tokio::time::timeout(DEADLINE, serving).await.expect("in time").expect("no panic");
    assert!(matches!(ended, Err(engine::EngineError::CoreDied)));
}

#[tokio::test]
async fn an_engine_kept_alive_without_its_core_says_so_until_it_starts_over() {
    let d = decoder(Config { keep_alive_on_core_death: true, ..tiny() }).await;
    d.fail(Fault::CoreDeath, Some(1));
    for _ in 0..2 {
        let got = ask(&d, TEXT, &body(1, false).to_string()).await;
        assert_eq!((got.status.as_u16(), std::str::from_utf8(&got.body)), (500, Ok(CORE_DIED)));
        assert_eq!(get(&d, "/health").await.status, 503);
    }
    d.restart();
    assert_eq!(get(&d, "/health").await.status, 200);
    assert_eq!(ask(&d, TEXT, &body(1, false).to_string()).await.status, 200);
}

#[tokio::test]
async fn an_engine_whose_core_is_dead_hands_over_nothing() {
    let (p, d) = pair(|| Config { keep_alive_on_core_death: true, ..tiny() }).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    p.fail(Fault::CoreDeath, Some(1));
    assert_eq!(ask(&p, TEXT, &body(2, false).to_string()).await.status, 500);
    assert_eq!(p.stats().pinned_blocks, 0);
    assert_eq!(ask(&d, TEXT, &second_leg(&body(1, false), &params)).await.status, 500);
}

#[tokio::test]
async fn incomplete_parameters_are_refused_where_that_was_asked_for() {
    let mut config = tiny();
    config.transfer.bad_params = BadParams::Refused;
    let d = decoder(config).await;
    let fatal = second_leg(&body(2, false), &json!({"do_remote_prefill": true}));
    assert_eq!(ask(&d, TEXT, &fatal).await.status, 400);
    assert_eq!(get(&d, "/health").await.status, 200);
}

#[tokio::test]
async fn a_frozen_prefill_engine_is_given_up() {
    let (p, d) = pair(impatient).await;
    let params = prefill(&p, TEXT, &body(1, false)).await;
    p.freeze(true);
    let got = exchange(&d, post(TEXT, &second_leg(&body(1, false), &params), &[])).await;
    assert_eq!(got.expect("an answer").status, 500);
}
