//! Odd input through a whole replica: a clear 4xx, nothing upstream, nothing left behind.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::rig::{Answer, Connection, Fake, Node, Reply, chat, post, request};

async fn rig() -> (Fake, Node) {
    let engine = Fake::start(|_| Answer::completion(3, 1)).await;
    let node = Node::over(&[engine.url()], &[]).await;
    (engine, node)
}

/// Sends `bytes` as they are and reads what comes back, if anything does.
async fn raw(node: &Node, bytes: &[u8]) -> Option<Reply> {
    let mut connection = Connection::open(node.public()).await;
    connection.send(bytes).await;
    connection.finish_writing().await;
    connection.reply_to(true).await
}

/// What the product itself refuses, it refuses in OpenAI's shape and with the reason.
#[actix_web::test]
async fn what_no_engine_could_serve_is_refused_in_openai_s_shape_and_goes_nowhere() {
    let (engine, node) = rig().await;
    let with = |field: &str| {
        format!(r#"{{"model":"sim","messages":[{{"role":"user","content":"x"}}],{field}}}"#).into_bytes()
    };
    let cases: Vec<(&str, Vec<u8>, u16, &str)> = vec![
        ("/v1/chat/completions", b"".to_vec(), 400, "invalid_json"),
        ("/v1/chat/completions", b"{".to_vec(), 400, "invalid_json"),
        ("/v1/chat/completions", b"[]".to_vec(), 400, "invalid_type"),
        ("/v1/chat/completions", vec![0; 64], 400, "invalid_json"),
        ("/v1/chat/completions", with(r#""stream":"yes""#), 400, "invalid_type"),
        ("/v1/chat/completions", with(r#""max_tokens":"many""#), 400, "invalid_type"),
        ("/v1/chat/completions", with(r#""x":NaN"#), 400, "invalid_json"),
        ("/v1/chat/completions", with("\"x\":\"\u{0}\""), 400, "invalid_json"),
        ("/v1/chat/completions", with(r#""kv_transfer_params":{}"#), 400, "unsupported_parameter"),
        ("/v1/chat/completions", with(r#""bootstrap_host":"h""#), 400, "unsupported_parameter"),
        ("/v1/chat/completions", br#"{"model":"sim"}"#.to_vec(), 400, "missing_required_parameter"),
        ("/v1/completions", br#"{"model":"sim"}"#.to_vec(), 400, "missing_required_parameter"),
        ("/v1/completions", br#"{"model":"sim","prompt":{}}"#.to_vec(), 400, "invalid_type"),
        ("/v1/completions", b"{\"prompt\":\"\xc3\x28\"}".to_vec(), 400, "invalid_utf8"),
        ("/v1/embeddings", br#"{"model":"sim"}"#.to_vec(), 400, "missing_required_parameter"),
        ("/v1/responses", br#"{"model":"sim"}"#.to_vec(), 400, "missing_required_parameter"),
        ("/v1/completions", br#"{"model":7,"prompt":"x"}"#.to_vec(), 400, "invalid_type"),
        ("/v1/completions", br#"{"model":"nobody's","prompt":"x"}"#.to_vec(), 404, "model_not_found"),
        ("/v1/chat/completions", br#"{"a":"#.repeat(1 << 18), 400, "nesting_too_deep"),
    ];
    for (path, body, status, code) in cases {
        let reply = post(node.public(), path, &body).await;
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert_eq!((reply.status, reply.error_code().as_str()), (status, code), "{path} {shown}");
        assert!(reply.header("x-request-id").is_some(), "{path} {shown}");
    }
    node.at_rest().await;
    assert_eq!(engine.served(), 0);
}

/// Framing that the HTTP layer itself refuses needs no JSON, but is a 4xx all the same, and at once.
#[actix_web::test]
async fn broken_framing_and_absurd_heads_get_a_4xx_and_go_nowhere() {
    let (engine, node) = rig().await;
    let line = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n";
    let body = chat("hello", false);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("a body cut short", format!("{line}Content-Length: 5000\r\n\r\n{body}").into_bytes()),
        (
            "a chunk that is no number",
            format!("{line}Transfer-Encoding: chunked\r\n\r\n4\r\n{{\"me\r\nxyz\r\n").into_bytes(),
        ),
        (
            "a chunk longer than any number",
            format!("{line}Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{body}").into_bytes(),
        ),
        (
            "chunks without an end",
            format!("{line}Transfer-Encoding: chunked\r\n\r\n4\r\n{{\"me\r\n").into_bytes(),
        ),
        ("a negative length", format!("{line}Content-Length: -1\r\n\r\n{body}").into_bytes()),
        ("a length that is no number", format!("{line}Content-Length: ten\r\n\r\n{body}").into_bytes()),
        (
            "two lengths that differ",
            format!("{line}Content-Length: 5\r\nContent-Length: 6\r\n\r\n{body}").into_bytes(),
        ),
        ("an unknown coding", format!("{line}Transfer-Encoding: rot13\r\n\r\n{body}").into_bytes()),
        ("a header without a colon", format!("{line}nonsense\r\n\r\n").into_bytes()),
        ("a header name with a blank", format!("{line}bad name: x\r\n\r\n").into_bytes()),
        ("a huge header", format!("{line}X-Big: {}\r\n\r\n", "y".repeat(1 << 20)).into_bytes()),
        (
            "thousands of headers",
            format!("{line}{}\r\n", (0..5_000).map(|n| format!("x-{n}: y\r\n")).collect::<String>())
                .into_bytes(),
        ),
        ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hello there\r\n\r\n".to_vec()),
        ("a bad version", b"POST / HTTP/9.9\r\nHost: h\r\n\r\n".to_vec()),
        (
            "a control character in the path",
            b"POST /v1/\x01 HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".to_vec(),
        ),
    ];
    for (what, bytes) in cases {
        let reply = raw(&node, &bytes).await;
        let status = reply.map(|reply| reply.status);
        assert!(matches!(status, Some(400..=499)), "{what}: {status:?}");
    }
    node.at_rest().await;
    assert_eq!(engine.served(), 0);
    assert_eq!(node.chat("hello").await.status, 200, "and it still serves");
}

/// A connection that leaves HTTP has no end of a body: what a client sends behind the announced one would be a
/// request of its own at the engine, past all that is refused here.
#[actix_web::test]
async fn requests_to_leave_http_are_refused_at_once_and_carry_nothing_to_an_engine() {
    let (engine, node) = rig().await;
    let behind = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}";
    for head in [
        "POST /anything HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nContent-Length: 5\r\n\r\nhello",
        "POST /anything HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: WebSocket\r\n\r\n",
        "CONNECT engine:80 HTTP/1.1\r\nHost: h\r\n\r\n",
        "CONNECT /anything HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
    ] {
        let mut connection = Connection::open(node.public()).await;
        connection.send(format!("{head}{behind}")).await;
        let reply = connection.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (400, "unsupported_protocol"), "{head}");
    }
    node.at_rest().await;
    assert_eq!(engine.served(), 0);
}

/// Clients of HTTP/1.0 (ApacheBench, older nginx as a proxy) take the size of a chunk for text.
#[actix_web::test]
async fn a_stream_for_a_client_of_http_1_0_has_no_chunks_and_ends_with_its_connection() {
    let engine = Fake::start(|_| Answer::stream(2, Duration::ZERO)).await;
    let node = Node::over(&[engine.url()], &[]).await;
    let body = chat("hello", true);
    for keep in ["", "Connection: keep-alive\r\n"] {
        let mut connection = Connection::open(node.public()).await;
        let line = "POST /v1/chat/completions HTTP/1.0\r\n";
        connection.send(format!("{line}{keep}Content-Length: {}\r\n\r\n{body}", body.len())).await;
        let reply = connection.reply().await;
        assert_eq!((reply.status, reply.header("transfer-encoding")), (200, None));
        assert!(reply.text().starts_with("data: {"), "{}", reply.text());
        assert!(reply.text().ends_with("data: [DONE]\n\n"), "{}", reply.text());
    }
    node.at_rest().await;
}

/// Header values that are no text, or absurd, neither break a request nor count as what they claim to be.
#[actix_web::test]
async fn absurd_values_in_our_own_headers_are_taken_for_none() {
    let (engine, node) = rig().await;
    let headers = [
        b"X-Request-Priority: 99\r\n".to_vec(),
        b"X-Request-Priority: high\r\n".to_vec(),
        b"X-SLO-TTFT-MS: -5\r\n".to_vec(),
        b"X-SLO-TTFT-MS: NaN\r\n".to_vec(),
        b"X-SLO-TPOT-MS: 1e999\r\n".to_vec(),
        b"X-Expected-Output-Tokens: 99999999999999999999\r\n".to_vec(),
        b"X-SLA-Target-MS: \xff\xfe\r\n".to_vec(),
        b"X-Session-Id: \xff\xfe\x80\r\n".to_vec(),
        format!("X-Session-Id: {}\r\n", "s".repeat(10_000)).into_bytes(),
        format!("X-Request-Id: {}\r\n", "r".repeat(10_000)).into_bytes(),
        b"X-Request-Id: \xf0\x9f\r\n".to_vec(),
        b"X-Data-Parallel-Rank: 77\r\n".to_vec(),
    ];
    let body = chat("hello", false);
    for header in &headers {
        let mut bytes =
            format!("POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n", body.len())
                .into_bytes();
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(body.as_bytes());
        let mut connection = Connection::open(node.public()).await;
        connection.send(&bytes).await;
        let reply = connection.reply().await;
        let shown = String::from_utf8_lossy(&header[..header.len().min(60)]).into_owned();
        assert!(matches!(reply.status, 200 | 400..=499), "{shown}: {}", reply.status);
        if reply.status != 200 {
            reply.error_code();
        }
    }
    node.at_rest().await;
    assert!(engine.served() <= headers.len());
}

/// Bodies that were once good, broken at random: whatever is not refused is served, and nothing else happens.
#[actix_web::test]
async fn two_thousand_broken_bodies_are_refused_or_served_and_leave_nothing() {
    const SEED: u64 = 7;
    let (engine, node) = rig().await;
    let mut rng = StdRng::seed_from_u64(SEED);
    let whole = br#"{"model":"sim","messages":[{"role":"system","content":"Be \u00e9 brief."},{"role":"user","content":[{"type":"text","text":"hi"}]}],"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"max_tokens":8,"temperature":0.5,"stream":false,"stop":["a"],"n":1}"#;
    let mut connection = Connection::open(node.public()).await;
    let mut served = 0;
    for n in 0..2_000 {
        let mut body = whole.to_vec();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..body.len());
            match rng.random_range(0..4) {
                0 => body.truncate(at.max(1)),
                1 => body[at] = rng.random(),
                2 => drop(body.remove(at)),
                _ => body.insert(at, b"{}[],:\"\\0-e\x00\xff"[rng.random_range(0..13)]),
            }
        }
        connection.send(request("POST", "/v1/chat/completions", "", &body)).await;
        let reply = connection.reply().await;
        let shown =
            || format!("seed {SEED}, body {n}: {:?} -> {}", String::from_utf8_lossy(&body), reply.text());
        match reply.status {
            200 => served += 1,
            400..=499 => drop(reply.error_code()),
            _ => panic!("{}", shown()),
        }
        assert_eq!(engine.served(), served, "{}", shown());
    }
    assert!(served > 20 && served < 1_900, "the mix is of no use: {served} served");
    node.at_rest().await;
}

/// Sizes around the default cap of 64 MiB.
#[actix_web::test]
async fn by_default_31_mib_pass_and_one_byte_over_64_mib_gets_413() {
    const CAP: usize = 64 << 20;
    let (engine, node) = rig().await;
    let body = chat(&"x".repeat(31 << 20), false);
    assert_eq!(post(node.public(), "/v1/chat/completions", &body).await.status, 200);
    let last = engine.last().expect("it was asked");
    assert!(last.body == body.as_bytes(), "byte for byte");
    // Announced: refused before a byte of it is read.
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", CAP + 1);
    let mut connection = Connection::open(node.public()).await;
    connection.send(head).await;
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "request_too_large"));
    // Not announced: refused once it is too much.
    let mut connection = Connection::open(node.public()).await;
    connection
        .send("POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let chunk = vec![b'x'; 1 << 20];
    for _ in 0..CAP / chunk.len() {
        connection.send(format!("{:x}\r\n", chunk.len())).await;
        connection.send(&chunk).await;
        connection.send("\r\n").await;
    }
    connection.send("1\r\nx\r\n").await;
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (413, "request_too_large"));
    assert_eq!(engine.served(), 1);
    node.at_rest().await;
}
