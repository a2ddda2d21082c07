//! Prompts computed in one engine and decoded in another over NIXL.

use std::time::Duration;

use engine::{Config, Connector, Engine, Profile, Role, SchedulerKind};
use serde_json::{Value, json};

use crate::harness::{ask, exchange, metric, open, post, until};
use crate::surface::{fixture, shape, tiny};

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A prefill and a decode engine of one kind.
pub(crate) async fn pair(config: impl Fn() -> Config) -> (Engine, Engine) {
    let start = |role| Engine::start(config().with_role(role, Connector::Nixl));
    (start(Role::Prefill).await.expect("starts"), start(Role::Decode).await.expect("starts"))
}

/// As many token ids as the recordings have.
pub(crate) fn prompt(first: u32) -> Value {
    (0..600).map(|i| first * 1_000 + i + 1).collect()
}

/// The body of a first leg, as a router makes it.
pub(crate) fn first_leg(mut body: Value) -> String {
    body["max_tokens"] = json!(1);
    body["stream"] = json!(false);
    body["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    body.to_string()
}

/// Computes a prompt for others; what is to be sent on.
pub(crate) async fn prefill(engine: &Engine, path: &str, body: &Value) -> Value {
    let reply = ask(engine, path, &first_leg(body.clone())).await;
    assert_eq!(reply.status, 200, "{:?}", reply.body);
    reply.json()["kv_transfer_params"].clone()
}

/// The body of a second leg.
pub(crate) fn second_leg(body: &Value, params: &Value) -> String {
    let mut body = body.clone();
    body["kv_transfer_params"] = params.clone();
    body.to_string()
}

/// What an engine that does all by itself answers.
pub(crate) async fn plain(path: &str, body: &Value) -> String {
    let alone = Engine::start(tiny()).await.expect("starts");
    ask(&alone, path, &body.to_string()).await.text()
}

fn recorded_line(label: &str) -> String {
    let text = fixture("pd_nixl.txt");
    let after = text.split_once(label).unwrap_or_else(|| panic!("no {label}")).1;
    let json = after.find('{').map(|at| &after[at..]).expect("a reply");
    json.lines().next().expect("a line").to_owned()
}

#[tokio::test]
async fn replies_of_both_legs_have_the_recorded_shapes() {
    let (p, d) = pair(tiny).await;
    let body =
        json!({"model": "tiny", "prompt": prompt(1), "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    let request = post(TEXT, &first_leg(body.clone()), &[("x-request-id", "pd-1")]);
    let got = exchange(&p, request).await.expect("an answer");
    let text = String::from_utf8(got.body.to_vec()).expect("UTF-8");
    assert_eq!(shape(&text), shape(&recorded_line("### P response 200")));
    let got = got.json();
    assert_eq!(got["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let params = got["kv_transfer_params"].clone();
    let recorded: Value = serde_json::from_str(&recorded_line("### P response 200")).expect("JSON");
    let recorded = &recorded["kv_transfer_params"];
    for same in ["do_remote_prefill", "do_remote_decode", "tp_size", "remote_num_tokens", "transfer_mode"] {
        assert_eq!(params[same], recorded[same], "{same}");
    }
    let blocks = |params: &Value| params["remote_block_ids"][0].as_array().map(Vec::len);
    assert_eq!(blocks(&params), blocks(recorded));
    let name = params["remote_request_id"].as_str().expect("a name");
    assert_eq!(name.len(), "cmpl-pd-1-0-83a6b28a".len(), "{name}");
    assert!(name.starts_with("cmpl-pd-1-0-"), "{name}");
    assert_eq!(params["remote_port"], p.side_addr().expect("a side channel").port());

    let got = exchange(&d, post(TEXT, &second_leg(&body, &params), &[("x-request-id", "pd-1")])).await;
    let text = String::from_utf8(got.expect("an answer").body.to_vec()).expect("UTF-8");
    assert_eq!(shape(&text), shape(&recorded_line("### D response 200")));

    let chat = json!({"messages": [{"role": "user", "content": "x".repeat(1_200)}], "max_tokens": 4});
    let text = ask(&p, CHAT, &first_leg(chat.clone())).await;
    assert_eq!(
        shape(std::str::from_utf8(&text.body).expect("UTF-8")),
        shape(&recorded_line("### chat P 200"))
    );
    let mut streamed = chat.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let got = ask(&d, CHAT, &second_leg(&streamed, &text.json()["kv_transfer_params"])).await;
    let recorded = fixture("pd_nixl.txt");
    let recorded = recorded.split_once("### chat stream D 200 \n").expect("a stream").1;
    let recorded = recorded.split("\n\n").take_while(|event| event.starts_with("data: "));
    let shapes = |event: &str| if event == "[DONE]" { event.to_owned() } else { shape(event) };
    let recorded: Vec<String> = recorded.map(|event| shapes(&event["data: ".len()..])).collect();
    assert_eq!(got.events().iter().map(|event| shapes(event)).collect::<Vec<_>>(), recorded);
}

#[tokio::test]
async fn counters_move_as_they_were_recorded_to() {
    let (p, d) = pair(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 8});
    let params = prefill(&p, TEXT, &body).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&body, &params)).await.status, 200);
    let plain = |name: &str| format!("vllm:{name}{{engine=\"0\",model_name=\"tiny\"}}");
    let by = |name: &str, source: &str| {
        format!("vllm:{name}{{engine=\"0\",model_name=\"tiny\",source=\"{source}\"}}")
    };
    let by_source = |source| by("prompt_tokens_by_source_total", source);
    for (series, prefill, decode) in [
        (plain("prefix_cache_queries_total"), 600.0, 600.0),
        (plain("prefix_cache_hits_total"), 0.0, 0.0),
        (plain("external_prefix_cache_queries_total"), 600.0, 600.0),
        (plain("external_prefix_cache_hits_total"), 0.0, 600.0),
        (by_source("local_compute"), 600.0, 0.0),
        (by_source("external_kv_transfer"), 0.0, 600.0),
        (by("prompt_tokens_cached_by_source_total", "p2p"), 0.0, 600.0),
        (plain("nixl_xfer_time_seconds_count"), 0.0, 1.0),
        (plain("nixl_bytes_transferred_count"), 0.0, 1.0),
        (plain("nixl_bytes_transferred_sum"), 0.0, 600.0 * 131_072.0),
        (plain("nixl_num_failed_transfers_total"), 0.0, 0.0),
    ] {
        assert_eq!(metric(&p, &series).await, prefill, "P: {series}");
        assert_eq!(metric(&d, &series).await, decode, "D: {series}");
    }
    for (reason, count) in [("pulled", 1.0), ("abandoned", 0.0), ("expired", 0.0)] {
        let series = format!("sim:kv_released_total{{engine=\"0\",model_name=\"tiny\",reason=\"{reason}\"}}");
        assert_eq!(metric(&p, &series).await, count, "{reason}");
    }
}

#[tokio::test]
async fn the_answer_is_that_of_one_engine_and_the_prompt_is_warm_where_it_was_decoded() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        for profile in [Profile::Instant, Profile::Llama8bH100] {
            let config = || {
                let base = tiny();
                let Config { timing, transfer, .. } = Config::fifo(profile, 1_000.0);
                Config { scheduler, timing, transfer, ..base }
            };
            let (p, d) = pair(config).await;
            for (first, stream) in [(1, false), (2, true)] {
                let body = json!({"prompt": prompt(first), "max_tokens": 8, "stream": stream});
                let params = prefill(&p, TEXT, &body).await;
                assert_eq!((p.stats().pinned_requests, p.stats().pinned_blocks), (1, 19));
                assert!(p.stats().kv_ratio > 0.0);
                let got = ask(&d, TEXT, &second_leg(&body, &params)).await;
                let name = format!("{scheduler:?} {profile:?} {stream}");
                assert_eq!(got.text(), plain(TEXT, &body).await, "{name}");
                until("nothing is kept", || p.stats().pinned_blocks == 0 && p.stats().kv_ratio == 0.0).await;
                let again =
                    ask(&d, TEXT, &json!({"prompt": prompt(first), "max_tokens": 1}).to_string()).await;
                assert_eq!(again.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 576, "{name}");
            }
            let (p, d) = (p.stats(), d.stats());
            assert_eq!((d.fetched_tokens, d.transfers, d.transfers_failed, d.spoiled), (1_200, 2, 0, 0));
            assert_eq!((p.staged, p.expired, d.fetching, d.kv_ratio), (2, 0, 0, 0.0));
        }
    }
}

#[tokio::test]
async fn only_what_the_decode_engine_lacks_is_fetched() {
    let (p, d) = pair(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 8});
    ask(&d, TEXT, &body.to_string()).await;
    let params = prefill(&p, TEXT, &body).await;
    let got = ask(&d, TEXT, &second_leg(&body, &params)).await;
    assert_eq!(got.text(), plain(TEXT, &body).await);
    assert_eq!(d.stats().fetched_tokens, 600 - 576);
}

#[tokio::test]
async fn a_decode_leg_reports_as_cached_what_the_prefill_engine_had() {
    let (p, d) = pair(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 8});
    let cached = async |params: &Value| {
        let got = ask(&d, TEXT, &second_leg(&body, params)).await;
        got.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    ask(&d, TEXT, &body.to_string()).await;
    assert_eq!(cached(&prefill(&p, TEXT, &body).await).await, 0);
    assert_eq!(cached(&prefill(&p, TEXT, &body).await).await, 576);
}

#[tokio::test]
async fn nothing_is_decoded_before_the_transfer_has_had_its_time() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        let slow = || {
            let mut config = Config { scheduler, ..tiny() };
            config.timing.inter_token = Duration::from_millis(1);
            config.transfer.base = Duration::from_millis(10);
            config.transfer.per_token = Duration::from_micros(50);
            config
        };
        let (p, d) = pair(slow).await;
        let body = json!({"prompt": prompt(1), "max_tokens": 1});
        let params = prefill(&p, TEXT, &body).await;
        let asked = tokio::time::Instant::now();
        assert_eq!(ask(&d, TEXT, &second_leg(&body, &params)).await.status, 200);
        // 10 ms, 600 x 50 us, and the decode of one token.
        assert!(asked.elapsed() >= Duration::from_millis(41), "{scheduler:?}: {:?}", asked.elapsed());
    }
}

#[tokio::test]
async fn blocks_nobody_comes_for_are_freed_when_their_time_is_up() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        let impatient = || {
            let mut config = Config { scheduler, ..tiny() };
            config.transfer.pin_max = Duration::from_millis(30);
            config
        };
        let (p, d) = pair(impatient).await;
        let body = json!({"prompt": prompt(1), "max_tokens": 4});
        let params = prefill(&p, TEXT, &body).await;
        until("they are freed", || p.stats().pinned_blocks == 0).await;
        assert_eq!((p.stats().expired, p.stats().kv_ratio), (1, 0.0));
        // They are only free: until others are written into them they can still be read.
        assert_eq!(ask(&d, TEXT, &second_leg(&body, &params)).await.text(), plain(TEXT, &body).await);
    }
}

#[tokio::test]
async fn of_several_prompts_only_the_first_is_named_and_the_others_stay_kept() {
    let (p, d) = pair(tiny).await;
    let first = json!({"prompt": prompt(1), "max_tokens": 4});
    let params = prefill(&p, TEXT, &json!({"prompt": [prompt(1), prompt(2), prompt(3)]})).await;
    assert_eq!(ask(&d, TEXT, &second_leg(&first, &params)).await.text(), plain(TEXT, &first).await);
    until("one is freed", || p.stats().pinned_requests == 2).await;
    assert_eq!((p.stats().staged, p.stats().pinned_blocks), (3, 2 * 19));
}

#[tokio::test]
async fn a_prefill_whose_client_leaves_keeps_nothing() {
    let slow = || {
        let mut config = tiny();
        config.timing.prefill_base = Duration::from_secs(3_600);
        config
    };
    let (p, _) = pair(slow).await;
    let leg = first_leg(json!({"prompt": prompt(1)}));
    let asking = exchange(&p, post(TEXT, &leg, &[]));
    tokio::select! {
        _ = asking => panic!("answered"),
        () = until("it runs", || p.stats().running == 1) => {}
    }
    until("nothing is held", || p.stats().running == 0 && p.stats().kv_ratio == 0.0).await;
    assert_eq!((p.stats().pinned_requests, p.stats().staged, p.stats().aborted), (0, 0, 1));
}

#[tokio::test]
async fn a_decode_leg_that_ends_in_any_phase_leaves_nothing_kept() {
    // Too small for two, and slow: one decodes for ever, one waits for room.
    let small = || {
        let mut config = tiny();
        config.timing.inter_token = Duration::from_secs(3_600);
        config.limits.kv_blocks = 25;
        config
    };
    let (p, d) = pair(small).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 4, "stream": true});
    let params = prefill(&p, TEXT, &body).await;
    let decoding = open(&d, post(TEXT, &second_leg(&body, &params), &[])).await.expect("a head");
    until("it decodes", || d.stats().running == 1 && p.stats().pinned_blocks == 0).await;

    // Before it fetches.
    let body = json!({"prompt": prompt(2), "max_tokens": 4, "stream": true});
    let params = prefill(&p, TEXT, &body).await;
    let waiting = open(&d, post(TEXT, &second_leg(&body, &params), &[])).await.expect("a head");
    until("it waits", || d.stats().waiting == 1).await;
    assert_eq!((d.stats().fetching, p.stats().pinned_blocks), (0, 19));
    drop(waiting);
    until("its blocks are freed", || d.stats().waiting == 0 && p.stats().pinned_blocks == 0).await;
    let abandoned = "sim:kv_released_total{engine=\"0\",model_name=\"tiny\",reason=\"abandoned\"}";
    assert_eq!(metric(&p, abandoned).await, 1.0);

    // While it decodes.
    drop(decoding);
    until("nothing is held", || d.stats().running == 0 && d.stats().kv_ratio == 0.0).await;
}

#[tokio::test]
async fn a_decode_leg_that_ends_while_it_fetches_reads_to_the_end_and_frees() {
    let (p, d) = pair(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 4, "stream": true});
    let params = prefill(&p, TEXT, &body).await;
    p.freeze(true);
    let fetching = open(&d, post(TEXT, &second_leg(&body, &params), &[])).await.expect("a head");
    until("it fetches", || d.stats().fetching == 1).await;
    drop(fetching);
    until("it is gone", || d.stats().aborted == 1).await;
    assert_eq!((d.stats().fetching, p.stats().pinned_blocks), (0, 19));
    p.freeze(false);
    until("its blocks are freed", || p.stats().pinned_blocks == 0 && d.stats().kv_ratio == 0.0).await;
    until("the transfer is counted", || d.stats().transfers == 1).await;
}

#[tokio::test]
async fn a_decode_leg_that_is_sent_only_to_be_given_up_frees_the_blocks() {
    use tokio::io::AsyncWriteExt;
    let slow = || {
        let mut config = tiny();
        config.timing.inter_token = Duration::from_secs(3_600);
        config
    };
    let (p, d) = pair(slow).await;
    for first in 0..20 {
        let body = json!({"prompt": prompt(first), "max_tokens": 4, "stream": first % 2 == 0});
        let leg = second_leg(&body, &prefill(&p, TEXT, &body).await);
        let mut line = tokio::net::TcpStream::connect(d.addr()).await.expect("connects");
        let head = format!(
            "POST {TEXT} HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            leg.len()
        );
        line.write_all(format!("{head}{leg}").as_bytes()).await.expect("sends");
    }
    until("all is freed", || {
        let (p, d) = (p.stats(), d.stats());
        (p.pinned_blocks, d.running + d.waiting, d.kv_ratio) == (0, 0, 0.0)
    })
    .await;
}

#[tokio::test]
async fn every_rank_is_an_engine_of_its_own() {
    let two = || Config { ranks: 2, ..tiny() };
    let (p, d) = pair(two).await;
    for rank in ["0", "1"] {
        let body = json!({"prompt": prompt(1), "max_tokens": 4});
        let request = post(TEXT, &first_leg(body.clone()), &[("x-data-parallel-rank", rank)]);
        let params = exchange(&p, request).await.expect("an answer").json()["kv_transfer_params"].clone();
        let engine = params["remote_engine_id"].as_str().expect("an id");
        assert_eq!(engine.ends_with("_dp1"), rank == "1", "{engine}");
        let got = ask(&d, TEXT, &second_leg(&body, &params)).await;
        assert_eq!(got.text(), plain(TEXT, &body).await);
        until("nothing is kept", || p.stats().pinned_blocks == 0).await;
    }
    assert_eq!(d.stats().spoiled, 0);
}

#[tokio::test]
async fn an_engine_without_a_connector_ignores_the_parameters() {
    let engine = Engine::start(tiny()).await.expect("starts");
    assert_eq!(engine.side_addr(), None);
    let body = json!({"prompt": prompt(1), "max_tokens": 4});
    assert!(prefill(&engine, TEXT, &body).await.is_null());
    let got = ask(&engine, TEXT, &second_leg(&body, &json!({"do_remote_prefill": true}))).await;
    assert_eq!(got.text(), plain(TEXT, &body).await);
    assert_eq!(engine.stats().staged, 0);
}

#[tokio::test]
async fn a_role_refuses_the_other_leg_and_serves_whole_requests() {
    let (p, d) = pair(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 4});
    let params = prefill(&p, TEXT, &body).await;
    assert_eq!(ask(&d, TEXT, &first_leg(body.clone())).await.status, 400);
    assert_eq!(ask(&p, TEXT, &second_leg(&body, &params)).await.status, 400);
    for engine in [&p, &d] {
        assert_eq!(ask(engine, TEXT, &body.to_string()).await.text(), plain(TEXT, &body).await);
    }
    let both = Engine::start(tiny().with_role(Role::Both, Connector::Nixl)).await.expect("starts");
    let params = prefill(&both, TEXT, &body).await;
    assert_eq!(ask(&both, TEXT, &second_leg(&body, &params)).await.text(), plain(TEXT, &body).await);
    until("nothing is kept", || both.stats().pinned_blocks == 0).await;
}
