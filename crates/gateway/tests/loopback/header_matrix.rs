//! Which headers travel.

use crate::rig::{Connection, Fake, Rig, Step, chat, get, request};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_to_end_headers_pass_and_hop_by_hop_ones_stay_both_ways() {
    let fake = Fake::start(vec![Step::Send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: keep-alive, X-Hop-Back\r\nX-Hop-Back: 1\r\nKeep-Alive: timeout=5\r\nX-Custom-Back: yes\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nX-Request-Id: theirs\r\nServer: uvicorn\r\n\r\n{}"
            .to_vec(),
    )])
    .await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut connection = Connection::open(rig.address()).await;
    let sent = "Authorization: Bearer secret\r\nX-Custom: one\r\nX-Custom: two\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nTE: trailers\r\nKeep-Alive: timeout=9\r\nProxy-Authorization: no\r\nUpgrade: h2c\r\nAccept-Encoding: gzip\r\nX-Request-Id: mine-7\r\nX-Forwarded-For: 10.1.1.1\r\nUser-Agent: test\r\n";
    connection.send(request("POST", "/v1/chat/completions?a=b%20c", sent, chat(false))).await;
    let reply = connection.reply().await;

    let (head, _) = fake.only_request();
    assert!(head.starts_with("post /v1/chat/completions?a=b%20c http/1.1\r\n"), "{head}");
    let host = fake.url.strip_prefix("http://").unwrap();
    for kept in [
        "authorization: bearer secret",
        "x-custom: one",
        "x-custom: two",
        "content-type: application/json",
        "user-agent: test",
        "x-request-id: mine-7",
        "x-forwarded-for: 10.1.1.1, 127.0.0.1",
        &format!("content-length: {}", chat(false).len()),
        &format!("host: {host}"),
    ] {
        assert_eq!(head.lines().filter(|line| *line == kept).count(), 1, "{kept}: {head}");
    }
    for gone in [
        "connection:",
        "x-hop:",
        "te:",
        "keep-alive:",
        "proxy-authorization:",
        "upgrade:",
        "accept-encoding:",
    ] {
        assert!(!head.lines().any(|line| line.starts_with(gone)), "{gone}: {head}");
    }

    assert_eq!(reply.header("x-request-id"), Some("mine-7"));
    assert_eq!(reply.header("x-custom-back"), Some("yes"));
    assert_eq!(reply.header("content-length"), Some("2"));
    assert_eq!(reply.header("server"), Some("uvicorn"));
    let cookies: Vec<_> = reply.headers.iter().filter(|(name, _)| name == "set-cookie").collect();
    assert_eq!(cookies.len(), 2);
    for gone in ["x-hop-back", "keep-alive", "connection"] {
        assert_eq!(reply.header(gone), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_reply_has_a_request_id_and_the_engine_hears_the_same() {
    let fake = Fake::start(vec![Step::reply(200, "application/json", "{}")]).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let reply = get(rig.address(), "/version").await;
    let id = reply.header("x-request-id").unwrap().to_owned();
    assert!(fake.only_request().0.contains(&format!("x-request-id: {id}")));
    let refused = crate::rig::post(rig.address(), "/v1/chat/completions", "{").await;
    assert!(refused.header("x-request-id").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_is_told_in_its_header_and_overrides_the_client_s() {
    let fake = Fake::start(vec![Step::reply(200, "application/json", "{}")]).await;
    let rig = Rig::start(&[format!("{},dp=1", fake.url)]);
    let mut connection = Connection::open(rig.address()).await;
    connection
        .send(request("POST", "/v1/chat/completions", "X-data-parallel-rank: 9\r\n", chat(false)))
        .await;
    assert_eq!(connection.reply().await.status, 200);
    let (head, _) = fake.only_request();
    assert_eq!(head.lines().filter(|line| line.starts_with("x-data-parallel-rank")).count(), 1);
    assert!(head.contains("x-data-parallel-rank: 0"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_method_and_path_passes_through_and_head_has_no_body() {
    let fake = Fake::start_each(vec![
        vec![Step::reply(200, "text/plain", "pong")],
        vec![Step::Send(b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n".to_vec())],
        vec![Step::Send(b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n".to_vec())],
        vec![Step::reply(404, "application/json", r#"{"detail":"Not Found"}"#)],
    ])
    .await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let ask = async |method: &str, path: &str| {
        let mut connection = Connection::open(rig.address()).await;
        connection.send(format!("{method} {path} HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n")).await;
        connection
    };
    let reply = ask("GET", "/ping").await.reply().await;
    assert_eq!((reply.status, reply.text()), (200, "pong"));
    let mut head = ask("HEAD", "/big").await;
    head.read_until("content-length: 1234\r\n").await;
    let gone = ask("DELETE", "/v1/files/1").await.reply().await;
    assert_eq!((gone.status, gone.header("x-a")), (204, Some("b")));
    let unknown = ask("PATCH", "/nothing").await.reply().await;
    assert_eq!((unknown.status, unknown.text()), (404, r#"{"detail":"Not Found"}"#));
    rig.at_rest().await;
}
