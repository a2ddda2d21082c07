//! Streams whose engine is lost midway: what the client sees of it, which is nothing where the rest can be said
//! exactly by another engine, and an error event else.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::rig::{Answer, Asked, Connection, Fake, Node, chat, get, piece, request, until};

/// Whether a request asks for the rest of an answer.
fn continues(asked: &Asked) -> bool {
    let body: Value = serde_json::from_slice(&asked.body).expect("JSON");
    body["continue_final_message"] == true
        || body["prompt"].as_str().is_some_and(|text| text.contains("word"))
}

/// An event of the engine that goes on, which names its stream as it likes.
fn other(delta: &Value, finish: Option<&str>) -> String {
    json!({
        "id": "c-2", "object": "chat.completion.chunk", "created": 2, "model": "other",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    })
    .to_string()
}

fn rest() -> Vec<String> {
    let usage = json!({"prompt_tokens": 22, "completion_tokens": 2, "total_tokens": 24});
    vec![
        other(&json!({"role": "assistant", "content": ""}), None),
        other(&json!({"content": "two "}), None),
        other(&json!({"content": "three"}), Some("stop")),
        json!({"id": "c-2", "object": "chat.completion.chunk", "created": 2, "model": "other", "choices": [],
            "usage": usage})
        .to_string(),
    ]
}

/// The same events as the client is to see them, behind `tokens` that came before.
fn rest_seen(tokens: u32) -> String {
    let usage = |text: &str| {
        text.replace("\"prompt_tokens\":22", &format!("\"prompt_tokens\":{}", 22 - tokens))
            .replace("\"completion_tokens\":2,", &format!("\"completion_tokens\":{},", 2 + tokens))
    };
    let own = |event: &String| {
        let named = event.replace("c-2", "c-1").replace("\"created\":2", "\"created\":1");
        format!("data: {}\n\n", usage(&named.replace("other", "sim")))
    };
    rest()[1..].iter().map(own).chain(["data: [DONE]\n\n".to_owned()]).collect()
}

fn seen(events: &[String]) -> String {
    events.iter().map(|event| format!("data: {event}\n\n")).collect()
}

/// Two engines that each break a stream as `broken` says, and go on with one as `rest` says.
async fn pair(
    broken: impl Fn() -> Answer + Clone + Send + Sync + 'static,
    rest: impl Fn() -> Answer + Clone + Send + Sync + 'static,
) -> [Fake; 2] {
    let engine = async || {
        let (broken, rest) = (broken.clone(), rest.clone());
        Fake::start(move |asked| if continues(asked) { rest() } else { broken() }).await
    };
    [engine().await, engine().await]
}

fn urls(engines: &[Fake]) -> Vec<String> {
    engines.iter().map(Fake::url).collect()
}

/// The body that asked for the rest.
fn continuation(engines: &[Fake]) -> Value {
    let last =
        engines.iter().filter_map(Fake::last).find(continues).expect("somebody was asked for the rest");
    serde_json::from_slice(&last.body).expect("JSON")
}

async fn metric(node: &Node, series: &str) -> f64 {
    let page = get(node.admin(), "/metrics").await;
    let line = page.text().lines().find(|line| line.starts_with(series)).map(str::to_owned);
    line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok()).unwrap_or(0.0)
}

/// The stream breaks as `last` says once the client has its first two pieces.
async fn check_resumed(last: Option<String>, cause: &str, before: &str, tokens: u32) {
    let two = vec![piece(0), piece(1)];
    let go_on = Arc::new(Notify::new());
    let broken = match last {
        Some(last) => Answer::Then(two, Arc::clone(&go_on), vec![last]),
        None => Answer::Cut(two),
    };
    let engines = pair(move || broken.clone(), || Answer::Events(rest(), Duration::ZERO)).await;
    let node = Node::over(&urls(&engines), &[]).await;
    let mut client = Connection::open(node.public()).await;
    client.send(request("POST", "/v1/chat/completions", "", chat("hi", true))).await;
    client.read_until("word1").await;
    go_on.notify_one();
    let reply = client.reply().await;
    assert_eq!(reply.text(), format!("{before}{}", rest_seen(tokens)), "{cause}");
    let asked = continuation(&engines);
    assert_eq!(asked["messages"][0], json!({"role": "user", "content": "hi"}));
    let said: String = (0..tokens).map(|n| format!("word{n} ")).collect();
    assert_eq!(asked["messages"][1], json!({"role": "assistant", "content": said}));
    assert_eq!((&asked["max_tokens"], &asked["add_generation_prompt"]), (&json!(8 - tokens), &json!(false)));
    node.at_rest().await;
    assert_eq!(metric(&node, &format!("grapevine_resumed_total{{cause=\"{cause}\"}}")).await, 1.0);
    let breaks = format!("grapevine_stream_breaks_total{{cause=\"{cause}\",outcome=\"resumed\"}}");
    assert_eq!(metric(&node, &breaks).await, 1.0);
    let rows: Value = get(node.admin(), "/requests").await.json();
    assert_eq!((&rows[0]["phase"], &rows[0]["breaks"][0]["cause"]), (&json!("finished"), &json!(cause)));
    let one =
        get(node.admin(), &format!("/requests/{}", rows[0]["id"].as_str().expect("an id"))).await.json();
    assert_ne!(one["breaks"][0]["endpoint"], one["endpoint"]);
}

#[actix_web::test]
async fn a_stream_that_breaks_goes_on_at_another_engine_and_its_client_sees_one_stream() {
    let two = seen(&[piece(0), piece(1)]);
    check_resumed(None, "truncated", &two, 2).await;
    // An engine that is shut down says so in its last event, which may hold a last piece.
    let abort = piece(2).replace("null", "\"abort\"");
    check_resumed(Some(abort), "aborted", &seen(&[piece(0), piece(1), piece(2)]), 3).await;
    let error = json!({"error": {"message": "core died", "code": 500}}).to_string();
    check_resumed(Some(error), "error-event", &two, 2).await;
}

#[actix_web::test]
async fn tokens_that_came_several_in_one_event_are_counted_by_an_engine_that_is_well() {
    let engine = async || {
        Fake::start_raw(|asked| match asked.path.as_str() {
            "/health" => Answer::ok(""),
            "/v1/models" => Answer::ok(r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#),
            "/metrics" => Answer::status(404),
            "/tokenize" if continues(asked) => Answer::ok(r#"{"count":16,"tokens":[1]}"#),
            "/tokenize" => Answer::ok(r#"{"count":10}"#),
            _ if continues(asked) => Answer::Events(rest(), Duration::ZERO),
            _ => Answer::Cut(vec![piece(0), piece(1)]),
        })
        .await
    };
    let engines = [engine().await, engine().await];
    let node = Node::over(&urls(&engines), &[]).await;
    let reply = node.post("/v1/chat/completions", chat("hi", true)).await;
    let usage = "\"usage\":{\"completion_tokens\":8,\"prompt_tokens\":10,\"total_tokens\":18}";
    assert!(reply.text().contains(usage), "{}", reply.text());
    assert_eq!(continuation(&engines)["max_tokens"], 8 - 6);
    node.at_rest().await;
}

#[actix_web::test]
async fn a_text_completion_goes_on_behind_its_prompt() {
    let text = |id: &str, text: &str, finish: Option<&str>| {
        json!({"id": id, "object": "text_completion", "created": 1, "model": "sim",
            "choices": [{"index": 0, "text": text, "finish_reason": finish}]})
        .to_string()
    };
    let broken = vec![text("t-1", "word \"", None)];
    let rest = vec![text("t-2", " end", Some("length"))];
    let (first, second) = (broken.clone(), rest.clone());
    let engines =
        pair(move || Answer::Cut(first.clone()), move || Answer::Events(second.clone(), Duration::ZERO))
            .await;
    let node = Node::over(&urls(&engines), &[]).await;
    let body = json!({"model": "sim", "prompt": "Say: ", "max_tokens": 2, "stream": true});
    let reply = node.post("/v1/completions", body.to_string()).await;
    let whole = [seen(&broken), seen(&rest).replace("t-2", "t-1"), "data: [DONE]\n\n".to_owned()].concat();
    assert_eq!(reply.text(), whole);
    let asked = continuation(&engines);
    assert_eq!((&asked["prompt"], &asked["max_tokens"]), (&json!("Say: word \""), &json!(1)));
    node.at_rest().await;
}

/// Ends in one error event, whatever came before, and nobody was asked for the rest unless `asked` says so.
async fn check_ended(node: &Node, engines: &[Fake], body: Value, before: &str, asked: usize, outcome: &str) {
    let path = if body["prompt"].is_null() { "/v1/chat/completions" } else { "/v1/completions" };
    let was_asked: usize = engines.iter().map(Fake::served).sum();
    let breaks = format!("grapevine_stream_breaks_total{{cause=\"truncated\",outcome=\"{outcome}\"}}");
    let counted = metric(node, &breaks).await;
    let reply = node.post(path, body.to_string()).await;
    let error = reply.text().strip_prefix(before).unwrap_or_else(|| panic!("{body}: {}", reply.text()));
    assert!(error.starts_with("data: {\"error\":{") && error.ends_with("}}\n\n"), "{body}: {error}");
    assert!(error.matches("data: ").count() == 1 && !error.contains("[DONE]"), "{body}: {error}");
    node.at_rest().await;
    assert_eq!(engines.iter().map(Fake::served).sum::<usize>() - was_asked, asked, "{body}");
    assert_eq!(metric(node, &breaks).await - counted, 1.0, "{body}: {outcome}");
}

#[actix_web::test]
async fn what_another_engine_can_not_continue_exactly_ends_in_an_error_event() {
    let broken = || Answer::Cut(vec![piece(0)]);
    let engines = pair(broken, || Answer::Events(rest(), Duration::ZERO)).await;
    let node = Node::over(&urls(&engines), &[]).await;
    let chats = [
        json!({"n": 2}),
        json!({"seed": 1}),
        json!({"logprobs": true}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"guided_regex": "a+"}),
        json!({"presence_penalty": 0.5}),
        json!({"add_generation_prompt": false}),
        json!({"return_token_ids": true}),
    ];
    for extra in chats {
        let mut body: Value = serde_json::from_str(&chat("hi", true)).expect("JSON");
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        check_ended(&node, &engines, body, &seen(&[piece(0)]), 1, "inexact").await;
    }
    let texts = [
        json!({"prompt": ["a", "b"], "max_tokens": 5}),
        json!({"prompt": [1, 2], "max_tokens": 5}),
        json!({"prompt": "a", "max_tokens": 5, "echo": true}),
        json!({"prompt": "a", "max_tokens": 5, "best_of": 2}),
        json!({"prompt": "a"}),
    ];
    for mut body in texts {
        body["stream"] = json!(true);
        body["model"] = json!("sim");
        check_ended(&node, &engines, body, &seen(&[piece(0)]), 1, "inexact").await;
    }
}

#[actix_web::test]
async fn an_answer_that_is_more_than_a_text_ends_in_an_error_event() {
    let thinking = other(&json!({"reasoning_content": "hm"}), None);
    let broken = vec![thinking, piece(0)];
    let before = seen(&broken);
    let engines = pair(move || Answer::Cut(broken.clone()), || Answer::Events(rest(), Duration::ZERO)).await;
    let node = Node::over(&urls(&engines), &[]).await;
    let body: Value = serde_json::from_str(&chat("hi", true)).expect("JSON");
    check_ended(&node, &engines, body, &before, 1, "unreadable").await;
}

#[actix_web::test]
async fn a_second_death_and_a_refusal_of_the_rest_end_in_an_error_event() {
    let body: Value = serde_json::from_str(&chat("hi", true)).expect("JSON");
    let before = seen(&[piece(0)]);
    // Two engines, and both are lost.
    let engines = pair(|| Answer::Cut(vec![piece(0)]), || Answer::Cut(rest()[..2].to_vec())).await;
    let node = Node::over(&urls(&engines), &[]).await;
    let two = rest_seen(1);
    let both = format!("{before}{}", &two[..two.find("\n\n").expect("an event") + 2]);
    check_ended(&node, &engines, body.clone(), &both, 2, "no-endpoint").await;
    assert_eq!(metric(&node, "grapevine_resumed_total{cause=\"truncated\"}").await, 1.0);
    // The other does not know how to continue.
    let engines = pair(|| Answer::Cut(vec![piece(0)]), || Answer::status(400)).await;
    let node = Node::over(&urls(&engines), &[]).await;
    check_ended(&node, &engines, body.clone(), &before, 2, "failed").await;
    // There is no other.
    let alone = Fake::start(|_| Answer::Cut(vec![piece(0)])).await;
    let node = Node::over(&[alone.url()], &[]).await;
    check_ended(&node, &[alone], body, &before, 1, "no-endpoint").await;
}

#[actix_web::test]
pub(super) async fn streams_are_resumed_only_if_it_is_said_so_and_only_as_long_as_is_said() {
    let engines = pair(|| Answer::Cut(vec![piece(0)]), || Answer::Events(rest(), Duration::ZERO)).await;
    let body: Value = serde_json::from_str(&chat("hi", true)).expect("JSON");
    let node = Node::over(&urls(&engines), &[("resume", "false")]).await;
    check_ended(&node, &engines, body.clone(), &seen(&[piece(0)]), 1, "off").await;
    let node = Node::over(&urls(&engines), &[("resume_bytes_max", "1024")]).await;
    let reply = node.post("/v1/chat/completions", body.to_string()).await;
    assert!(reply.text().ends_with("[DONE]\n\n"), "{}", reply.text());
    let long: Value = serde_json::from_str(&chat(&"x".repeat(1_000), true)).expect("JSON");
    check_ended(&node, &engines, long, &seen(&[piece(0)]), 1, "too-long").await;
    let more: Vec<String> = (0..12).map(piece).collect();
    let engines = {
        let more = more.clone();
        pair(move || Answer::Cut(more.clone()), || Answer::Events(rest(), Duration::ZERO)).await
    };
    let node = Node::over(&urls(&engines), &[("resume_bytes_max", "1024")]).await;
    let mut body: Value = body;
    body["max_tokens"] = json!(50);
    check_ended(&node, &engines, body.clone(), &seen(&more), 1, "too-long").await;
    let node = Node::over(&urls(&engines), &[]).await;
    let reply = node.post("/v1/chat/completions", body.to_string()).await;
    assert_eq!(reply.text(), format!("{}{}", seen(&more), rest_seen(12)));
}

#[actix_web::test]
async fn a_client_that_leaves_while_its_stream_is_resumed_leaves_nothing_behind() {
    let engines = pair(|| Answer::Cut(vec![piece(0)]), || Answer::Silence).await;
    let node = Node::over(&urls(&engines), &[]).await;
    let mut client = Connection::open(node.public()).await;
    client.send(request("POST", "/v1/chat/completions", "", chat("hi", true))).await;
    client.read_until("word0").await;
    until("the rest to be asked for", || engines.iter().map(Fake::served).sum::<usize>() == 2).await;
    let rows: Value = get(node.admin(), "/requests").await.json();
    assert_eq!((&rows[0]["phase"], node.running()), (&json!("resuming"), 1));
    drop(client);
    until("the engine to be let go", || engines.iter().all(|engine| engine.open() == 0)).await;
    node.at_rest().await;
    let interrupted = "grapevine_stream_breaks_total{cause=\"truncated\",outcome=\"interrupted\"}";
    assert_eq!(metric(&node, interrupted).await, 1.0);
}

/// An engine that answers nothing any more once it has begun a stream.
async fn freezing() -> Fake {
    let frozen = Arc::new(AtomicBool::new(false));
    Fake::start_raw(move |asked| match asked.path.as_str() {
        "/v1/models" => Answer::ok(r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#),
        "/health" if frozen.load(Ordering::SeqCst) => Answer::Silence,
        "/health" => Answer::ok(""),
        "/metrics" | "/tokenize" => Answer::status(404),
        _ if continues(asked) => Answer::Events(rest(), Duration::ZERO),
        _ => {
            frozen.store(true, Ordering::SeqCst);
            Answer::Stalled(vec![piece(0)])
        }
    })
    .await
}

/// The replica's own probes are not to find it out first.
const PATIENT: (&str, &str) = ("probe_every_ms", "600000");

#[actix_web::test]
async fn a_stream_of_an_engine_that_froze_goes_on_elsewhere_or_is_ended() {
    let engines = [freezing().await, freezing().await];
    let node = Node::over(&urls(&engines), &[PATIENT, ("quiet_ms", "100")]).await;
    let reply = node.post("/v1/chat/completions", chat("hi", true)).await;
    assert_eq!(reply.text(), format!("{}{}", seen(&[piece(0)]), rest_seen(1)));
    until("the frozen one to be left", || engines.iter().all(|engine| engine.open() == 0)).await;
    node.at_rest().await;

    let engines = [freezing().await, freezing().await];
    let node = Node::over(&urls(&engines), &[PATIENT, ("quiet_ms", "100")]).await;
    let body = chat("hi", true).replace("\"stream\"", "\"seed\":1,\"stream\"");
    let reply = node.post("/v1/chat/completions", body).await;
    let text = reply.text();
    assert!(text.contains("\"code\":\"endpoint-lost\"") && !text.contains("[DONE]"), "{text}");
    node.at_rest().await;
}

#[actix_web::test]
pub(super) async fn a_silent_engine_is_left_as_soon_as_is_said() {
    // One that answers is asked again each time as much silence has passed.
    let engine = async || Fake::start(|_| Answer::Stalled(vec![piece(0)])).await;
    let (watched, left_alone) = (engine().await, engine().await);
    let curious = Node::over(&[watched.url()], &[PATIENT, ("quiet_ms", "20")]).await;
    let trusting = Node::over(&[left_alone.url()], &[PATIENT, ("quiet_ms", "86400000")]).await;
    let mut streams = Vec::new();
    for node in [&trusting, &curious] {
        let mut client = Connection::open(node.public()).await;
        client.send(request("POST", "/v1/chat/completions", "", chat("hi", true))).await;
        client.read_until("word0").await;
        streams.push(client);
    }
    let before = left_alone.asked("/health");
    until("its health to be looked at", || watched.asked("/health") >= 5).await;
    assert_eq!(left_alone.asked("/health"), before);
}
