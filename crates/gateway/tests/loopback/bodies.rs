//! Bodies in both directions: untouched, bounded, and refused when they make no sense.

use std::time::Duration;

use gateway::GatewaySettings;

use crate::rig::{Connection, Fake, Rig, Step, Wishes, chat, eventually, get, post, request};

fn ok() -> Vec<Step> {
    vec![Step::reply(200, "application/json", r#"{"id":"x","choices":[]}"#), Step::Next, Step::AwaitClose]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_but_legal_bodies_reach_the_engine_byte_for_byte() {
    let odd = [
        r#"{ "unknown_field": {"b":1,"a":[2]}, "messages":[{"role":"user","content":"hi"}] , "model":"sim"}"#,
        r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"big":123456789012345678901234567890.10e400}"#,
        r#"{"model":"a","model":"sim","messages":[{"role":"user","content":"\u00e9\ud83d\ude42 漢字"}],"temperature":0.10}"#,
    ];
    for body in odd {
        let fake = Fake::start(ok()).await;
        let rig = Rig::start(std::slice::from_ref(&fake.url));
        assert_eq!(post(rig.address(), "/v1/chat/completions", body).await.status, 200);
        assert_eq!(fake.only_request().1, body.as_bytes());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_any_script_cut_at_every_byte_reaches_the_client_unchanged() {
    let events: String = ["data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"]
        .into_iter()
        .map(str::to_owned)
        .chain(["漢字", "🙂🏽", "é", "ﷺ"].map(|text| {
            format!(
                "data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
            )
        }))
        .chain([
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n".to_owned()
        ])
        .collect();
    let mut script = vec![Step::stream_head()];
    for byte in events.as_bytes() {
        script.push(Step::Dribble([b"1\r\n", &[*byte][..], b"\r\n"].concat()));
    }
    script.push(Step::end());
    let fake = Fake::start(script).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let reply = post(rig.address(), "/v1/chat/completions", chat(true)).await;
    assert!(reply.complete);
    assert_eq!(reply.text(), events);
    rig.at_rest().await;
    assert_eq!(rig.phases(), ["finished"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_pass_and_those_over_the_cap_get_413_both_ways() {
    let fake = Fake::start_each(vec![ok()]).await;
    let cap = 32 << 20;
    let gateway = GatewaySettings { body_bytes_max: cap, ..GatewaySettings::default() };
    let rig = Rig::start_as(std::slice::from_ref(&fake.url), Wishes { gateway, ..Wishes::default() });
    let image = "A".repeat(31 << 20);
    let body = format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}]}}"#
    );
    let reply = post(rig.address(), "/v1/chat/completions", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(fake.only_request().1, body.as_bytes());

    for path in ["/v1/chat/completions", "/v1/audio/transcriptions"] {
        let mut connection = Connection::open(rig.address()).await;
        connection
            .send(format!("POST {path} HTTP/1.1\r\nHost: g\r\nContent-Length: {}\r\n\r\n", cap + 1))
            .await;
        let reply = connection.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (413, "request_too_large"), "{path}");

        let mut connection = Connection::open(rig.address()).await;
        connection
            .send(format!("POST {path} HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"))
            .await;
        let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, "-".repeat(1 << 20));
        for _ in 0..40 {
            if connection.try_send(&chunk).await.is_err() {
                break;
            }
        }
        let reply = connection.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (413, "request_too_large"), "{path}");
    }
    rig.at_rest().await;
}

/// What `/metrics` says that bodies take.
async fn held(rig: &Rig) -> f64 {
    let page = get(rig.admin(), "/metrics").await;
    let line = page.text().lines().find(|line| line.starts_with("grapevine_body_bytes ")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_have_room_together_and_what_does_not_fit_is_told_so_while_others_go_on() {
    let fake = Fake::start([vec![ok().remove(0), Step::Next], ok()].concat()).await;
    let gateway = GatewaySettings { body_room_bytes: 6 << 20, ..GatewaySettings::default() };
    let rig = Rig::start_as(std::slice::from_ref(&fake.url), Wishes { gateway, ..Wishes::default() });
    let large = "-".repeat(4 << 20);
    let body = format!(r#"{{"model":"sim","messages":[{{"role":"user","content":"{large}"}}]}}"#);
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: {}\r\n\r\n", body.len());
    // All but the last byte: the room is taken, and nothing decides how long.
    let mut first = Connection::open(rig.address()).await;
    first.send(format!("{head}{}", &body[..body.len() - 1])).await;
    eventually("the room is taken", async || (held(&rig).await >= 4e6).then_some(())).await;
    let mut second = Connection::open(rig.address()).await;
    let _ = second.try_send(format!("{head}{body}")).await;
    let refused = second.reply().await;
    assert_eq!((refused.status, refused.error_code().as_str()), (503, "no_room_for_body"));
    assert_eq!(post(rig.address(), "/v1/chat/completions", chat(false)).await.status, 200);
    first.send(&body[body.len() - 1..]).await;
    assert_eq!(first.reply().await.status, 200);
    eventually("the room is given back", async || (held(&rig).await == 0.0).then_some(())).await;
    rig.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_takes_too_long_as_a_whole_is_given_up() {
    let fake = Fake::start_each(vec![ok()]).await;
    let gateway = GatewaySettings { body_timeout: Duration::from_millis(200), ..GatewaySettings::default() };
    let rig = Rig::start_as(std::slice::from_ref(&fake.url), Wishes { gateway, ..Wishes::default() });
    let mut connection = Connection::open(rig.address()).await;
    connection.send("POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 100000\r\n\r\n{").await;
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (408, "body_timeout"));
    rig.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn multipart_passes_as_it_comes_without_being_held() {
    let fake = Fake::start(vec![Step::reply(200, "application/json", r#"{"text":"hello"}"#)]).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut body =
        b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n".to_vec();
    body.extend((0..10 << 20).map(|at| (at % 251) as u8));
    body.extend_from_slice(b"\r\n--b--\r\n");
    let mut connection = Connection::open(rig.address()).await;
    connection
        .send(format!(
            "POST /v1/audio/transcriptions?x=1 HTTP/1.1\r\nHost: g\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: {}\r\n\r\n",
            body.len()
        ))
        .await;
    connection.send(&body).await;
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.text()), (200, r#"{"text":"hello"}"#));
    let (head, sent) = fake.only_request();
    assert!(head.starts_with("post /v1/audio/transcriptions?x=1 http/1.1"), "{head}");
    assert!(head.contains(&format!("content-length: {}", body.len())));
    assert!(sent == body);
    rig.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_make_no_sense_get_a_400_and_nothing_goes_upstream() {
    let fake = Fake::start(ok()).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let cases: [(&[u8], &str); 9] = [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{\"messages\":[{}]", "invalid_json"),
        (b"[1]", "invalid_type"),
        (b"{\"model\":\"sim\"}", "missing_required_parameter"),
        (b"{\"messages\":7}", "invalid_type"),
        (b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}", "invalid_utf8"),
        (
            b"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"kv_transfer_params\":{\"do_remote_prefill\":true}}",
            "unsupported_parameter",
        ),
        (b"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"bootstrap_room\":1}", "unsupported_parameter"),
    ];
    for (body, code) in cases {
        let reply = post(rig.address(), "/v1/chat/completions", body).await;
        assert_eq!(
            (reply.status, reply.error_code().as_str()),
            (400, code),
            "{}",
            String::from_utf8_lossy(body)
        );
    }
    for path in ["/v1/messages", "/v1/chat/completion%73", "//v1/chat/completions"] {
        let reply = post(rig.address(), path, r#" {"kv_transfer_params":{}}"#).await;
        assert_eq!(reply.status, 400, "{path}");
    }
    assert!(fake.requests().is_empty());
    assert_eq!(rig.in_flight(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_framing_gets_a_4xx_and_nothing_goes_upstream() {
    let fake = Fake::start(ok()).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n";

    let mut connection = Connection::open(rig.address()).await;
    connection.send(format!("{head}Content-Length: 500\r\n\r\n{{\"messages\":")).await;
    connection.finish_writing().await;
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (400, "incomplete_body"));

    let mut connection = Connection::open(rig.address()).await;
    connection.send(format!("{head}Transfer-Encoding: chunked\r\n\r\n5\r\n{{\"mes\r\nzz\r\n")).await;
    let reply = connection.reply().await;
    assert_eq!((reply.status, reply.error_code().as_str()), (400, "incomplete_body"));

    let long = format!("POST / HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(200_000));
    let many = format!("POST / HTTP/1.1\r\n{}\r\n", "X: a\r\n".repeat(1_000));
    for (head, status, code) in [
        ("POST / HTTP/1.1\r\nbroken header\r\n\r\n", 400, "malformed_request"),
        ("POST / HTTP/9.9\r\n\r\n", 400, "malformed_request"),
        ("\u{0}\u{1}\u{2}\r\n\r\n", 400, "malformed_request"),
        ("POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400, "malformed_request"),
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "malformed_request"),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: zip\r\n\r\n", 400, "malformed_request"),
        (&many, 431, "head_too_large"),
        (&long, 431, "head_too_large"),
    ] {
        let mut connection = Connection::open(rig.address()).await;
        let _ = connection.try_send(head).await;
        let reply = connection.reply().await;
        let shown = &head[..head.len().min(60)];
        assert_eq!((reply.status, reply.error_code().as_str()), (status, code), "{shown:?}");
        assert!(reply.header("x-request-id").is_some() && reply.complete);
    }

    assert!(fake.requests().is_empty());
    rig.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_serves_one_request_after_another() {
    let fake = Fake::start(vec![
        Step::reply(200, "application/json", "{}"),
        Step::Next,
        Step::reply(200, "application/json", "{}"),
        Step::AwaitClose,
    ])
    .await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut connection = Connection::open(rig.address()).await;
    for _ in 0..2 {
        connection.send(request("POST", "/v1/chat/completions", "", chat(false))).await;
        assert_eq!(connection.reply().await.status, 200);
    }
    assert_eq!(fake.requests().len(), 2);
}
