//! The HTTP surface against exchanges recorded from a real engine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use bytes::Bytes;
use engine::{Config, Engine, Profile};
use http::Request;
use http_body_util::Full;
use serde_json::json;

use crate::harness::{Got, ask, exchange, get, post};

/// A recorded exchange.
struct Recorded {
    request: Option<Request<Full<Bytes>>>,
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

pub(crate) fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn recorded(name: &str) -> Recorded {
    let text = fixture(name);
    let (request, reply) = match text.split_once("<<<\n") {
        Some((request, reply)) => (Some(parse_request(request)), reply),
        None => (None, &*text),
    };
    let (head, body) = reply.split_once("\r\n\r\n").expect("a head and a body");
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).expect("a status line");
    let headers = lines.filter_map(|line| line.split_once(": "));
    Recorded {
        request,
        status: status.parse().expect("a number"),
        headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        body: body.trim_end().to_owned(),
    }
}

fn parse_request(text: &str) -> Request<Full<Bytes>> {
    let mut lines = text.strip_prefix(">>> ").expect("a request").lines();
    let head = lines.next().expect("a first line");
    let (line, header) = head.split_once("  ").expect("a method, a path and headers");
    let (method, path) = line.split_once(' ').expect("a method and a path");
    let body = lines.next().unwrap_or("").to_owned();
    let mut request = Request::builder().method(method).uri(path).header("host", "engine");
    if let Some((name, value)) = header.strip_prefix("-H ").and_then(|header| header.split_once(": ")) {
        request = request.header(name, value);
    }
    if method == "POST" {
        request = request.header("content-type", "application/json");
    }
    request.body(Full::new(body.into())).expect("a valid request")
}

/// The engine of the recordings.
pub(crate) fn tiny() -> Config {
    let mut config =
        Config { model: "tiny".to_owned(), model_tokens_max: 2048, ..Config::profile(Profile::Instant) };
    config.limits.block_tokens = 32;
    config
}

/// Keys whose values are part of the shape.
const KEPT: [&str; 6] = ["object", "finish_reason", "role", "owned_by", "stop_reason", "organization"];

/// JSON with its keys in order, and values replaced by their kind; lists by their first member.
pub(crate) fn shape(json: &str) -> String {
    fn value(bytes: &[u8], at: &mut usize, keep: bool, out: &mut String) {
        match bytes[*at] {
            b'{' => {
                let mut first = true;
                out.push('{');
                *at += 1;
                while bytes[*at] != b'}' {
                    if !first {
                        *at += 1;
                        out.push(',');
                    }
                    first = false;
                    let key = string(bytes, at);
                    out.push_str(&format!("{key}:"));
                    *at += 1;
                    value(bytes, at, KEPT.contains(&&*key), out);
                }
                *at += 1;
                out.push('}');
            }
            b'[' => {
                let mut members = Vec::new();
                *at += 1;
                while bytes[*at] != b']' {
                    if bytes[*at] == b',' {
                        *at += 1;
                    }
                    let mut member = String::new();
                    value(bytes, at, false, &mut member);
                    members.push(member);
                }
                *at += 1;
                out.push_str(&format!("[{}]", members.first().map_or("", String::as_str)));
            }
            b'"' => {
                let text = string(bytes, at);
                out.push_str(if keep { &text } else { "text" });
            }
            _ => {
                let end = bytes[*at..].iter().position(|byte| b",}]".contains(byte)).expect("an end");
                let word = std::str::from_utf8(&bytes[*at..*at + end]).expect("UTF-8");
                out.push_str(if word.parse::<f64>().is_ok() { "number" } else { word });
                *at += end;
            }
        }
    }
    fn string(bytes: &[u8], at: &mut usize) -> String {
        let start = *at + 1;
        *at = start;
        while bytes[*at] != b'"' {
            *at += if bytes[*at] == b'\\' { 2 } else { 1 };
        }
        *at += 1;
        String::from_utf8_lossy(&bytes[start..*at - 1]).into_owned()
    }
    let mut out = String::new();
    value(json.as_bytes(), &mut 0, false, &mut out);
    out
}

fn same_head(name: &str, got: &Got, expected: &Recorded) {
    assert_eq!(got.status.as_u16(), expected.status, "{name}: {:?}", got.body);
    let names: BTreeSet<&str> = got.headers.keys().map(http::HeaderName::as_str).collect();
    let expected_names: BTreeSet<&str> = expected.headers.keys().map(String::as_str).collect();
    assert_eq!(names, expected_names, "{name}");
    for same in ["content-type", "server", "vary", "allow", "transfer-encoding"] {
        let value = got.headers.get(same).map(|value| value.to_str().expect("ASCII"));
        assert_eq!(value, expected.headers.get(same).map(String::as_str), "{name}: {same}");
    }
}

#[tokio::test]
async fn whole_replies_have_the_recorded_shapes() {
    let engine = Engine::start(tiny()).await.expect("starts");
    for name in [
        "chat_nonstream.txt",
        "completions.txt",
        "maxct.txt",
        "cache_salt.txt",
        "no_model_field.txt",
        "unknown_field.txt",
        "err_priority_fcfs.txt",
        "hdr_dprank0.txt",
        "models.txt",
        "tokenize_chat.txt",
        "tokenize_prompt.txt",
        "detokenize.txt",
        "load.txt",
        "version.txt",
    ] {
        let expected = recorded(name);
        let got = exchange(&engine, recorded(name).request.expect("a request")).await.expect("an answer");
        same_head(name, &got, &expected);
        assert_eq!(shape(std::str::from_utf8(&got.body).expect("UTF-8")), shape(&expected.body), "{name}");
    }
}

#[tokio::test]
async fn streams_have_the_recorded_shapes_event_by_event() {
    let engine = Engine::start(tiny()).await.expect("starts");
    for name in ["chat_stream.txt", "chat_stream_continuous.txt", "completions_stream.txt"] {
        let expected = recorded(name);
        let got = exchange(&engine, recorded(name).request.expect("a request")).await.expect("an answer");
        same_head(name, &got, &expected);
        let shapes = |events: Vec<String>| -> Vec<String> {
            events.iter().map(|event| if event == "[DONE]" { event.clone() } else { shape(event) }).collect()
        };
        let expected: Vec<String> =
            expected.body.split("\n\n").map(|event| event.trim_start_matches("data: ").to_owned()).collect();
        // The one thing left out of these events: log-probabilities.
        let without_logprobs = |shape: String| match shape.split_once("logprobs:{") {
            Some((before, after)) => {
                let end = after.find("},finish_reason").expect("its end");
                format!("{before}logprobs:null{}", &after[end + 1..])
            }
            None => shape,
        };
        let expected: Vec<String> = shapes(expected).into_iter().map(without_logprobs).collect();
        assert_eq!(shapes(got.events()), expected, "{name}");
    }
}

#[tokio::test]
async fn errors_are_the_recorded_ones_to_the_byte() {
    let engine = Engine::start(tiny()).await.expect("starts");
    for name in [
        "err_404.txt",
        "err_badtemp.txt",
        "err_maxtokens.txt",
        "err_method.txt",
        "err_missing_messages.txt",
        "err_n0.txt",
        "err_streamopts_nostream.txt",
        "err_unknown_model.txt",
        "err_wrongtype.txt",
        "hdr_dprank_bad.txt",
        "health.txt",
        "ping.txt",
    ] {
        let expected = recorded(name);
        let got = exchange(&engine, recorded(name).request.expect("a request")).await.expect("an answer");
        same_head(name, &got, &expected);
        assert_eq!(std::str::from_utf8(&got.body), Ok(&*expected.body), "{name}");
    }
}

#[tokio::test]
async fn too_long_a_prompt_is_refused_before_any_event() {
    let engine = Engine::start(tiny()).await.expect("starts");
    // The recordings cut the requests short.
    for (name, stream) in [("err_toolong.txt", false), ("err_toolong_stream.txt", true)] {
        let expected = recorded(name);
        let messages = json!([{"role": "user", "content": "hello world ".repeat(3_000)}]);
        let body = json!({"messages": messages, "max_tokens": 2, "stream": stream}).to_string();
        let got = ask(&engine, "/v1/chat/completions", &body).await;
        same_head(name, &got, &expected);
        assert_eq!(std::str::from_utf8(&got.body), Ok(&*expected.body), "{name}");
    }
}

#[tokio::test]
async fn bad_json_is_refused_with_its_place() {
    let engine = Engine::start(tiny()).await.expect("starts");
    let expected = recorded("err_badjson.txt");
    let got =
        exchange(&engine, recorded("err_badjson.txt").request.expect("a request")).await.expect("an answer");
    same_head("err_badjson", &got, &expected);
    let expected: serde_json::Value = serde_json::from_str(&expected.body).expect("JSON");
    let got = got.json();
    for key in ["type", "param", "code"] {
        assert_eq!(got["error"][key], expected["error"][key]);
    }
}

#[tokio::test]
async fn only_json_is_taken() {
    let engine = Engine::start(tiny()).await.expect("starts");
    let expected = recorded("err_ctype.txt");
    let mut request = post("/v1/chat/completions", "{}", &[]);
    request.headers_mut().insert("content-type", "text/plain".parse().expect("a value"));
    let got = exchange(&engine, request).await.expect("an answer");
    same_head("err_ctype", &got, &expected);
    assert_eq!(std::str::from_utf8(&got.body), Ok(&*expected.body));
}

#[tokio::test]
async fn a_key_is_asked_for_under_v1_only() {
    let engine =
        Engine::start(Config { api_key: Some("secret".to_owned()), ..tiny() }).await.expect("starts");
    let expected = recorded("err_noauth.txt");
    let got =
        exchange(&engine, recorded("err_noauth.txt").request.expect("a request")).await.expect("an answer");
    same_head("err_noauth", &got, &expected);
    assert_eq!(std::str::from_utf8(&got.body), Ok(&*expected.body));
    let body = r#"{"prompt":"x","max_tokens":1}"#;
    for (authorization, status) in [("Bearer secret", 200), ("Bearer secrets", 401), ("secret", 401)] {
        let request = post("/v1/completions", body, &[("authorization", authorization)]);
        assert_eq!(exchange(&engine, request).await.expect("an answer").status, status, "{authorization}");
    }
    assert_eq!(get(&engine, "/health").await.status, 200);
}

#[tokio::test]
async fn a_full_queue_answers_503_without_retry_after() {
    let mut config = Config { model: "tiny".to_owned(), ..Config::profile(Profile::Llama8bH100) };
    config.limits.waiting_max = Some(0);
    config.timing.prefill_base = std::time::Duration::from_secs(3_600);
    let engine = Engine::start(config).await.expect("starts");
    let request = || post("/v1/completions", r#"{"prompt":"x","max_tokens":1}"#, &[]);
    let first = exchange(&engine, request());
    tokio::select! {
        _ = first => panic!("answered"),
        () = async {
            crate::harness::until("the first runs", || engine.stats().running == 1).await;
            let expected = recorded("err_overload.txt");
            let got = exchange(&engine, request()).await.expect("an answer");
            same_head("err_overload", &got, &expected);
            assert_eq!(std::str::from_utf8(&got.body), Ok(&*expected.body));
            assert_eq!(engine.stats().rejections, 1);
        } => {}
    }
}

/// `name{labels} value` of every series, as name and the labels' names; buckets with their bound.
fn series(page: &str) -> BTreeSet<String> {
    let one = |line: &str| {
        let (name, labels) =
            line.rsplit_once(' ').map(|(name, _)| name.split_once('{').unwrap_or((name, "")))?;
        let keep = |label: &str| label.starts_with("le=") || !label.contains('=');
        let names = labels.trim_end_matches('}').split(',').filter(|label| !label.is_empty());
        let names: Vec<&str> = names
            .map(|label| if keep(label) { label } else { label.split('=').next().unwrap_or("") })
            .collect();
        Some(format!("{name} {}", names.join(" ")))
    };
    page.lines().filter(|line| !line.starts_with('#')).filter_map(one).collect()
}

#[tokio::test]
async fn metrics_have_recorded_names_labels_and_buckets() {
    let engine = Engine::start(tiny()).await.expect("starts");
    let page = String::from_utf8(get(&engine, "/metrics").await.body.to_vec()).expect("UTF-8");
    let expected = fixture("vllm_metrics.txt");
    let (expected_series, got) = (series(&expected), series(&page));
    let invented: Vec<_> = got.iter().filter(|line| !line.contains("cache_config_info")).collect();
    assert!(invented.len() > 100, "{invented:?}");
    for line in invented {
        assert!(expected_series.contains(line), "not in the recording: {line}");
    }
    let info =
        |page: &str| page.lines().find(|line| line.starts_with("vllm:cache_config_info")).map(str::to_owned);
    let info = info(&page).expect("cache_config_info");
    for label in ["block_size=\"32\"", "num_gpu_blocks=\"25700\"", "engine=\"0\""] {
        assert!(info.contains(label), "{info}");
    }
}

#[tokio::test]
async fn what_an_engine_lacks_is_left_out_not_zero() {
    let config = Config { metrics: false, cached_tokens: false, ..tiny() };
    let engine = Engine::start(config).await.expect("starts");
    assert_eq!(get(&engine, "/metrics").await.status, 404);
    let body = json!({"prompt": "x", "max_tokens": 1});
    let usage = ask(&engine, "/v1/completions", &body.to_string()).await.json()["usage"].clone();
    assert!(usage["prompt_tokens_details"].is_null());
    let streamed = json!({"prompt": "x", "stream": true, "stream_options": {"include_usage": true}});
    let streamed = ask(&engine, "/v1/completions", &streamed.to_string()).await;
    assert!(!String::from_utf8_lossy(&streamed.body).contains("cached_tokens"));
}

#[tokio::test]
async fn odd_but_legal_bodies_are_taken() {
    let engine = Engine::start(tiny()).await.expect("starts");
    for body in [
        r#"{"max_tokens":1,"max_tokens":2,"messages":[],"messages":[{"role":"user","content":"x"}]}"#,
        r#"{"max_tokens":2,"messages":[{"role":"user","role":"system","content":[{"type":"text","text":"x"}]}]}"#,
        r#"{"max_tokens":2,"seed":123456789012345678901234567890,"messages":[{"role":"user","content":null}]}"#,
        "{\"ma\\u0078_tokens\":2,\"messages\":[{\"role\":\"user\",\"content\":\"\\ud83d\\ude00 \\\"\"}],\"stop\":null}",
        r#"{"max_tokens":2,"tools":null,"kv_transfer_params":null,"messages":[{"role":"tool","tool_call_id":"1","content":"x"}]}"#,
    ] {
        let got = ask(&engine, "/v1/chat/completions", body).await;
        assert_eq!(got.status, 200, "{body}: {:?}", got.body);
        assert_eq!(got.json()["usage"]["completion_tokens"], 2, "{body}");
    }
}

#[tokio::test]
async fn impossible_requests_are_refused_before_anything_is_computed() {
    let engine = Engine::start(tiny()).await.expect("starts");
    let chat = "/v1/chat/completions";
    let text = "/v1/completions";
    for (path, body) in [
        (chat, "[1,2]"),
        (chat, r#"{"messages":[{"role":"user","content":{"a":1}}]}"#),
        (chat, r#"{"messages":[{"role":"user","content":"x"}],"continue_final_message":true}"#),
        (chat, r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":0}"#),
        (chat, r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":2041}"#),
        (chat, r#"{"messages":[{"role":"user","content":"x"}],"n":100000}"#),
        (chat, r#"{"messages":[{"role":"user","content":"x"}],"kv_transfer_params":7}"#),
        (text, r#"{"max_tokens":1}"#),
        (text, r#"{"prompt":"x","max_tokens":2,"min_tokens":3}"#),
        (text, r#"{"prompt":""}"#),
        (text, r#"{"prompt":[]}"#),
        (text, r#"{"prompt":[[]]}"#),
        (text, r#"{"prompt":{"a":1}}"#),
        (text, r#"{"prompt":"x","stream":"yes"}"#),
        ("/v1/embeddings", r#"{"input":[]}"#),
        ("/v1/responses", r#"{"input":7}"#),
        ("/tokenize", r"{}"),
        ("/detokenize", r#"{"tokens":[-1]}"#),
    ] {
        let got = ask(&engine, path, body).await;
        assert_eq!(got.status, 400, "{body}");
        assert_eq!(got.json()["error"]["code"], 400, "{body}");
    }
    assert_eq!(engine.stats().prompt_tokens, 0);
    let deep = format!("{{\"messages\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(ask(&engine, chat, &deep).await.status, 400);
}

#[tokio::test]
async fn load_comes_in_a_header_of_whole_replies_when_asked_for() {
    let engine = Engine::start(tiny()).await.expect("starts");
    let body = |stream: bool| json!({"prompt": "x", "max_tokens": 1, "stream": stream}).to_string();
    for (stream, format, there) in [
        (false, Some("JSON"), true),
        (false, None, false),
        (true, Some("JSON"), false),
        (false, Some("BIN"), false),
    ] {
        let headers: Vec<_> =
            format.map(|format| ("endpoint-load-metrics-format", format)).into_iter().collect();
        let got =
            exchange(&engine, post("/v1/completions", &body(stream), &headers)).await.expect("an answer");
        assert_eq!(got.headers.contains_key("endpoint-load-metrics"), there, "{stream} {format:?}");
    }
}

#[tokio::test]
async fn ranks_have_caches_and_figures_of_their_own() {
    let engine = Engine::start(Config { ranks: 2, ..tiny() }).await.expect("starts");
    let prompt = "the same again ".repeat(40);
    let body = json!({"prompt": prompt, "max_tokens": 1}).to_string();
    let mut cached = Vec::new();
    for rank in ["0", "0", "1", "1"] {
        let request = post("/v1/completions", &body, &[("x-data-parallel-rank", rank)]);
        let usage = exchange(&engine, request).await.expect("an answer").json()["usage"].clone();
        cached.push(usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count") > 0);
    }
    assert_eq!(cached, [false, true, false, true]);
    for rank in 0..2 {
        let series = format!("vllm:prompt_tokens_total{{engine=\"{rank}\",model_name=\"tiny\"}}");
        assert_eq!(crate::harness::metric(&engine, &series).await, 300.0);
    }
}

#[tokio::test]
async fn embeddings_follow_from_the_input() {
    let engine = Engine::start(tiny()).await.expect("starts");
    let embed = |input: serde_json::Value, format: &str| {
        json!({"model": "tiny", "input": input, "encoding_format": format}).to_string()
    };
    let got = ask(&engine, "/v1/embeddings", &embed(json!(["a", "b", "a"]), "float")).await.json();
    let vector = |index: usize| got["data"][index]["embedding"].as_array().expect("a vector").clone();
    assert_eq!(vector(0), vector(2));
    assert_ne!(vector(0), vector(1));
    let length: f64 = vector(0).iter().filter_map(serde_json::Value::as_f64).map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5, "{length}");
    let base64 = ask(&engine, "/v1/embeddings", &embed(json!("a"), "base64")).await.json();
    assert_eq!(
        base64["data"][0]["embedding"].as_str().expect("a string").len(),
        16 * 4_usize.div_ceil(3) * 3 - 8
    );
    assert_eq!(base64["usage"]["prompt_tokens"], 1);
}

#[tokio::test]
async fn responses_are_kept_followed_up_and_cancelled_by_id() {
    let config = Config { model: "tiny".to_owned(), ..Config::profile(Profile::Instant) };
    let engine = Engine::start(config).await.expect("starts");
    let first = ask(&engine, "/v1/responses", r#"{"input":"Hello","max_output_tokens":3}"#).await.json();
    assert_eq!((first["status"].clone(), first["object"].clone()), (json!("completed"), json!("response")));
    let id = first["id"].as_str().expect("an id");
    assert_eq!(get(&engine, &format!("/v1/responses/{id}")).await.json(), first);
    let follow = json!({"input": "And?", "previous_response_id": id}).to_string();
    let follow = ask(&engine, "/v1/responses", &follow).await.json();
    let tokens = |response: &serde_json::Value| response["usage"]["input_tokens"].as_u64().expect("a count");
    assert!(tokens(&follow) > tokens(&first));
    assert_eq!(ask(&engine, &format!("/v1/responses/{id}/cancel"), "{}").await.status, 400);
    let unstored = ask(&engine, "/v1/responses", r#"{"input":"Hello","store":false}"#).await.json();
    let unstored = unstored["id"].as_str().expect("an id").to_owned();
    for unknown in [&unstored, "resp_nope"] {
        assert_eq!(get(&engine, &format!("/v1/responses/{unknown}")).await.status, 404);
        assert_eq!(ask(&engine, &format!("/v1/responses/{unknown}/cancel"), "{}").await.status, 404);
        let follow = json!({"input": "And?", "previous_response_id": unknown}).to_string();
        assert_eq!(ask(&engine, "/v1/responses", &follow).await.status, 404);
    }
}

#[tokio::test]
async fn a_background_response_can_be_cancelled_and_then_holds_nothing() {
    let engine = Engine::start(Config::profile(Profile::Llama8bH100)).await.expect("starts");
    let body = r#"{"input":"Hello","background":true,"max_output_tokens":100000}"#;
    let queued = ask(&engine, "/v1/responses", body).await.json();
    assert_eq!(queued["status"], "queued");
    crate::harness::until("it runs", || engine.stats().running == 1).await;
    let path = format!("/v1/responses/{}", queued["id"].as_str().expect("an id"));
    assert_eq!(ask(&engine, &format!("{path}/cancel"), "{}").await.json()["status"], "cancelled");
    crate::harness::until("nothing runs", || engine.stats().running == 0 && engine.stats().kv_ratio == 0.0)
        .await;
    assert_eq!(get(&engine, &path).await.json()["status"], "cancelled");
}

#[tokio::test]
async fn faults_and_echo_exist_only_where_they_are_allowed() {
    let engine = Engine::start(tiny()).await.expect("starts");
    for path in ["/fault", "/echo", "/v1/echo/x"] {
        assert_eq!(ask(&engine, path, "{}").await.status, 404, "{path}");
    }
}
