//! Engines that fail: tried elsewhere before the first byte, told truthfully after it.

use std::time::Duration;

use actors::lifecycle::LifecycleSettings;
use routing::lifecycle::Limits;

use crate::rig::{Connection, Fake, Reply, Rig, Step, Wishes, chat, get, post, request};

const EVENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
const STOP: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
const ABORTED: &str = r#""choices":[{"message":{"content":"half"},"finish_reason":"abort"}]}"#;
const DONE: &str = "data: [DONE]\n\n";

fn good_stream() -> Vec<Step> {
    vec![Step::stream_head(), Step::chunk(EVENT), Step::chunk(STOP), Step::chunk(DONE), Step::end()]
}

/// An address where nobody listens.
fn nobody() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// Whatever the first endpoint does, the client gets the good stream of the other.
async fn check_moved(first: Vec<Step>) {
    // Which of the two is tried first follows from their addresses, which are new each time.
    for _ in 0..64 {
        let (bad, good) = (Fake::start(first.clone()).await, Fake::start(good_stream()).await);
        let rig = Rig::start(&[bad.url.clone(), good.url.clone()]);
        let reply = post(rig.address(), "/v1/chat/completions", chat(true)).await;
        assert_eq!((reply.status, reply.text()), (200, &*[EVENT, STOP, DONE].concat()));
        assert!(bad.requests().len() <= 1 && good.requests().len() == 1);
        rig.at_rest().await;
        assert_eq!(rig.phases(), ["finished"]);
        if !bad.requests().is_empty() {
            return;
        }
    }
    panic!("the bad endpoint was never chosen first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fails_before_its_first_byte_is_tried_elsewhere() {
    check_moved(vec![Step::Reset]).await;
    check_moved(vec![]).await;
    for status in [500, 502, 503, 504, 429] {
        check_moved(vec![Step::reply(status, "application/json", "{}")]).await;
    }
    check_moved(vec![Step::Send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec())]).await;
    check_moved(vec![Step::stream_head(), Step::Reset]).await;
    check_moved(vec![Step::stream_head(), Step::chunk(": ping\n\n"), Step::Reset]).await;
    check_moved(vec![Step::stream_head(), Step::end()]).await;
    check_moved(vec![
        Step::stream_head(),
        Step::chunk("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"),
    ])
    .await;
    let abort = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n";
    check_moved(vec![Step::stream_head(), Step::chunk(abort), Step::chunk(DONE), Step::end()]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_endpoint_costs_no_request() {
    let good = Fake::start(vec![Step::reply(200, "application/json", "{}")]).await;
    let rig = Rig::start(&[nobody(), good.url.clone()]);
    for _ in 0..20 {
        assert_eq!(post(rig.address(), "/v1/chat/completions", chat(false)).await.status, 200);
    }
    rig.at_rest().await;
}

/// What comes after the first byte is kept, an error event follows, and nothing looks complete.
async fn check_broken(rest: Vec<Step>, kept: &str) {
    let mut script = vec![Step::stream_head(), Step::chunk(EVENT), Step::Await];
    script.extend(rest);
    let fake = Fake::start(script).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut connection = Connection::open(rig.address()).await;
    connection.send(request("POST", "/v1/chat/completions", "", chat(true))).await;
    connection.read_until("content\"").await;
    fake.go_on();
    let reply = connection.reply().await;
    assert_eq!(reply.status, 200);
    let text = reply.text();
    let error = text.strip_prefix(kept).unwrap_or_else(|| panic!("kept {kept:?}, got {text:?}"));
    assert!(error.starts_with("data: {\"error\":{") && error.ends_with("}}\n\n"), "{error:?}");
    assert_eq!(error.matches("data: ").count(), 1, "{error:?}");
    assert!(!text.contains("[DONE]"), "{text:?}");
    rig.at_rest().await;
    assert_eq!(rig.phases(), ["failed"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_breaks_after_its_first_byte_ends_in_an_error_event_and_no_done() {
    check_broken(vec![Step::Reset], EVENT).await;
    check_broken(vec![], EVENT).await;
    check_broken(vec![Step::chunk(EVENT), Step::end()], &[EVENT, EVENT].concat()).await;
    check_broken(vec![Step::chunk("data: {\"choi"), Step::Reset], EVENT).await;
    check_broken(vec![Step::chunk("data: {\"choi"), Step::end()], EVENT).await;
    check_broken(vec![Step::Send(b"xyz\r\n".to_vec())], EVENT).await;
    let abort = "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"abort\"}]}\n\n";
    let kept = [EVENT, &abort.replace("\"abort\"", "null")].concat();
    check_broken(vec![Step::chunk(abort), Step::chunk(DONE), Step::end()], &kept).await;
    // The engine's own error event stands for ours.
    let error = "data: {\"error\":{\"message\":\"boom\",\"code\":500}}\n\n";
    check_broken(vec![Step::chunk(error), Step::chunk(DONE), Step::end()], EVENT).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_reply_that_breaks_is_cut_so_that_the_client_can_tell() {
    // Of so long a reply the client has had the beginning.
    let text = "x".repeat(70_000);
    let begun = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{{\"id\":\"{text}\",",
        text.len() + 9 + ABORTED.len()
    );
    for rest in [Step::Reset, Step::Send(ABORTED.as_bytes().to_vec())] {
        let fake = Fake::start(vec![Step::Send(begun.clone().into_bytes()), Step::Await, rest]).await;
        let rig = Rig::start(std::slice::from_ref(&fake.url));
        let mut connection = Connection::open(rig.address()).await;
        connection.send(request("POST", "/v1/chat/completions", "", chat(false))).await;
        connection.read_until("{\"id\":").await;
        fake.go_on();
        let reply = connection.reply().await;
        assert!(!reply.complete);
        rig.at_rest().await;
        assert_eq!(rig.phases(), ["failed"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_whole_reply_that_breaks_or_is_none_comes_from_elsewhere() {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
    let sized =
        |body: &str, length: usize| format!("{head}Content-Length: {length}\r\n\r\n{body}").into_bytes();
    let chunked = format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{ABORTED}\r\n", ABORTED.len());
    let scripts = [
        vec![Step::Send(sized("{\"id\":", 100)), Step::Reset],
        vec![Step::Send(sized(ABORTED, ABORTED.len()))],
        vec![Step::Send(chunked.into_bytes()), Step::Send(b"0\r\n\r\n".to_vec())],
    ];
    for script in scripts {
        // Which of the two is tried first follows from their addresses, which are new each time.
        for round in 0.. {
            assert!(round < 64, "the bad endpoint was never chosen first");
            let good = Fake::start(vec![Step::reply(200, "application/json", "{}")]).await;
            let bad = Fake::start(script.clone()).await;
            let rig = Rig::start(&[bad.url.clone(), good.url.clone()]);
            let reply = post(rig.address(), "/v1/chat/completions", chat(false)).await;
            assert_eq!((reply.status, reply.text()), (200, "{}"));
            rig.at_rest().await;
            assert_eq!(rig.phases(), ["finished"]);
            if !bad.requests().is_empty() {
                break;
            }
        }
    }
}

async fn pass_on(status: u16, body: &str, extra: &str) -> (Reply, usize) {
    let reply = format!(
        "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{extra}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let (one, two) = (
        Fake::start(vec![Step::Send(reply.clone().into_bytes())]).await,
        Fake::start(vec![Step::Send(reply.into_bytes())]).await,
    );
    let rig = Rig::start(&[one.url.clone(), two.url.clone()]);
    let reply = post(rig.address(), "/v1/chat/completions", chat(true)).await;
    rig.at_rest().await;
    (reply, one.requests().len() + two.requests().len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_s_4xx_is_passed_on_as_it_is_and_not_tried_elsewhere() {
    for status in [400, 401, 404, 422] {
        let (reply, tries) = pass_on(status, r#"{"error":"Unauthorized"}"#, "X-Engine: e\r\n").await;
        assert_eq!((reply.status, reply.text(), tries), (status, r#"{"error":"Unauthorized"}"#, 1));
        assert_eq!(reply.header("x-engine"), Some("e"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_500_of_two_engines_is_passed_on_as_it_is() {
    let (reply, tries) = pass_on(500, r#"{"error":{"message":"core died"}}"#, "X-Engine: e\r\n").await;
    assert_eq!((reply.status, reply.text(), tries), (500, r#"{"error":{"message":"core died"}}"#, 2));
    assert_eq!(reply.header("x-engine"), Some("e"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_engines_are_full_the_last_one_s_answer_is_passed_on_with_its_retry_after() {
    let (reply, tries) = pass_on(429, r#"{"error":{"message":"full"}}"#, "Retry-After: 7\r\n").await;
    assert_eq!((reply.status, reply.header("retry-after"), tries), (429, Some("7"), 2));
    assert_eq!(reply.text(), r#"{"error":{"message":"full"}}"#);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_serves_is_refused_with_a_reason() {
    let rig = Rig::start(&[]);
    let reply = post(rig.address(), "/v1/chat/completions", chat(false)).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (503, "no_endpoint"));
    assert!(reply.header("retry-after").is_some());
    let reply = get(rig.address(), "/readyz").await;
    assert_eq!((reply.status, reply.text()), (503, r#"{"ready":false,"missing":["endpoint"]}"#));
    assert_eq!(get(rig.address(), "/livez").await.status, 200);

    let rig = Rig::start(&[format!("{},model=a", nobody()), format!("{},model=b", nobody())]);
    let reply = post(rig.address(), "/v1/chat/completions", chat(false)).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (404, "model_not_found"));
    let reply = post(rig.address(), "/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (400, "model_required"));
    assert!(reply.text().contains("Served: a, b"), "{}", reply.text());
    let listed = get(rig.address(), "/v1/models").await.json();
    assert_eq!(listed["object"], "list");
    let ids: Vec<_> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(ids, ["a", "b"]);
    assert_eq!(get(rig.address(), "/v1/models/a").await.json()["id"], "a");
    assert_eq!(get(rig.address(), "/v1/models/%61").await.json()["id"], "a", "as some clients write it");
    assert_eq!(get(rig.address(), "/v1/models/c").await.error_code(), "model_not_found");
    let reply = post(rig.address(), "/v1/completions", r#"{"model":"a","prompt":"x"}"#).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (502, "bad_gateway"));
}

fn with_limits(change: impl FnOnce(&mut Limits)) -> Wishes {
    let mut lifecycle = LifecycleSettings::default();
    change(&mut lifecycle.limits);
    Wishes { lifecycle, ..Wishes::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_byte_idle_and_total_are_limits_of_their_own() {
    // A black hole is given up at the first-byte limit, and its connection closed.
    let hole = Fake::start(vec![Step::AwaitClose]).await;
    let wishes = with_limits(|limits| limits.first_byte = Duration::from_millis(200));
    let rig = Rig::start_as(std::slice::from_ref(&hole.url), wishes);
    let reply = post(rig.address(), "/v1/chat/completions", chat(true)).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "first_byte_timeout"));
    hole.closed(1).await;
    rig.at_rest().await;

    // Comments keep nobody alive.
    let hole = Fake::start(vec![Step::stream_head(), Step::chunk(": ping\n\n"), Step::AwaitClose]).await;
    let wishes = with_limits(|limits| limits.first_byte = Duration::from_millis(200));
    let rig = Rig::start_as(std::slice::from_ref(&hole.url), wishes);
    assert_eq!(post(rig.address(), "/v1/chat/completions", chat(true)).await.status, 504);

    // A stream that is slow but alive is not cut by a first-byte limit far below its length.
    let mut script = vec![Step::stream_head()];
    for _ in 0..8 {
        script.extend([Step::chunk(EVENT), Step::Pause(Duration::from_millis(60))]);
    }
    script.extend([Step::chunk(DONE), Step::end()]);
    let slow = Fake::start(script).await;
    let wishes = with_limits(|limits| {
        limits.first_byte = Duration::from_millis(200);
        limits.idle = Duration::from_secs(5);
    });
    let rig = Rig::start_as(std::slice::from_ref(&slow.url), wishes);
    assert!(post(rig.address(), "/v1/chat/completions", chat(true)).await.text().ends_with(DONE));

    // Silence within a stream ends it with an error event.
    let frozen = Fake::start(vec![Step::stream_head(), Step::chunk(EVENT), Step::AwaitClose]).await;
    let wishes = with_limits(|limits| limits.idle = Duration::from_millis(200));
    let rig = Rig::start_as(std::slice::from_ref(&frozen.url), wishes);
    let reply = post(rig.address(), "/v1/chat/completions", chat(true)).await;
    assert!(reply.text().contains("idle-timeout") && !reply.text().contains("[DONE]"), "{}", reply.text());
    frozen.closed(1).await;

    // A whole reply has a total limit only.
    let hole = Fake::start(vec![Step::AwaitClose]).await;
    let wishes = with_limits(|limits| {
        limits.first_byte = Duration::from_millis(1);
        limits.total_whole = Duration::from_millis(300);
    });
    let rig = Rig::start_as(std::slice::from_ref(&hole.url), wishes);
    let reply = post(rig.address(), "/v1/chat/completions", chat(false)).await;
    assert_eq!((reply.status, reply.error_code().as_str()), (504, "total_timeout"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_is_not_an_engine_that_is_silent() {
    let big =
        format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "x".repeat(1 << 20));
    let mut script = vec![Step::stream_head()];
    script.extend(std::iter::repeat_n(Step::chunk(&big), 30));
    script.extend([Step::chunk(DONE), Step::end()]);
    let fake = Fake::start(script).await;
    let wishes = with_limits(|limits| limits.idle = Duration::from_millis(1_000));
    let rig = Rig::start_as(std::slice::from_ref(&fake.url), wishes);
    let mut connection = Connection::open(rig.address()).await;
    connection.send(request("POST", "/v1/chat/completions", "", chat(true))).await;
    fake.asked(1).await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    let reply = connection.reply().await;
    let end = &reply.text()[reply.text().len().saturating_sub(200)..];
    assert!(reply.complete && end.ends_with(DONE), "{end}");
    rig.at_rest().await;
    assert_eq!(rig.phases(), ["finished"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_connection_that_the_engine_has_closed_costs_no_request() {
    let once = vec![Step::reply(200, "application/json", "{}"), Step::Await];
    let fake = Fake::start(once).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    for round in 1..=20 {
        let reply = post(rig.address(), "/v1/chat/completions", chat(false)).await;
        assert_eq!(reply.status, 200, "round {round}");
        // The engine closes what the gateway has kept, sooner or later than the next request.
        fake.go_on();
    }
    rig.at_rest().await;
    assert_eq!(rig.phases(), ["finished"; 20]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_answers_before_it_has_read_the_whole_body_is_heard() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let rig = Rig::start(&[format!("http://{}", listener.local_addr().unwrap())]);
    tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = vec![0; 1024];
        let _ = stream.read(&mut head).await.unwrap();
        let reply = b"HTTP/1.1 401 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno";
        stream.write_all(reply).await.unwrap();
        // Held open until the gateway is done with it.
        let mut rest = vec![0; 1 << 20];
        while matches!(stream.read(&mut rest).await, Ok(1..)) {}
    });
    let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(16 << 20));
    let reply = post(rig.address(), "/v1/completions", body).await;
    assert_eq!((reply.status, reply.text()), (401, "no"));
}
