//! Keys that bound what one request may take, and what all of them may take together.

use std::time::Duration;

use socket2::{Domain, Socket, Type};

use crate::rig::{Answer, Connection, Fake, Node, chat, piece};

/// A port whose queue of connections is full: a further connection is neither made nor refused.
struct Full {
    url: String,
    _held: Vec<Socket>,
}

impl Full {
    fn new() -> Self {
        let listener = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        listener.bind(&any.into()).expect("a port");
        listener.listen(0).expect("listens");
        let address = listener.local_addr().expect("bound");
        let shown = address.as_socket().expect("an IP address");
        let mut held = vec![listener];
        // One or two fit, whatever the kernel makes of a queue of 0.
        for _ in 0..8 {
            let client = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            client.set_nonblocking(true).expect("an option");
            let _ = client.connect(&address);
            held.push(client);
        }
        // What it serves has to be said here: it will not say so itself.
        Self { url: format!("http://{shown},model=sim"), _held: held }
    }
}

#[actix_web::test]
pub(super) async fn a_connection_that_is_not_made_ends_at_its_limit() {
    let full = Full::new();
    let impatient =
        Node::start_unready(&[("endpoint", full.url.as_str()), ("connect_timeout_ms", "50")]).await;
    // Its probes are as patient: an endpoint found dead by them would end the request too.
    let patience = [("connect_timeout_ms", "600000"), ("probe_timeout_ms", "600000")];
    let patient = Node::start_unready(&[("endpoint", full.url.as_str()), patience[0], patience[1]]).await;
    let waiting = actix_web::rt::spawn({
        let address = patient.public();
        async move { crate::rig::post(address, "/v1/chat/completions", chat("hi", false)).await.status }
    });
    // Its health is not known either; it is asked for want of a better one.
    let reply = impatient.chat("hi").await;
    assert!(matches!(reply.status, 502 | 504), "{} {}", reply.status, reply.text());
    if waiting.is_finished() {
        panic!("the patient one still waits, but was answered {:?}", waiting.await);
    }
    waiting.abort();
}

#[actix_web::test]
pub(super) async fn each_limit_ends_a_request_and_says_which_it_was() {
    let engine = Fake::start(|asked| {
        let says = |what: &str| asked.body.windows(what.len()).any(|window| window == what.as_bytes());
        if says("silence") {
            Answer::Silence
        } else if says("stall") {
            Answer::Stalled(vec![piece(0)])
        } else {
            Answer::stream(10_000, Duration::from_millis(10))
        }
    })
    .await;
    let cases = [
        ("first_byte_timeout_ms", "300", "silence", true, 504, "first_byte_timeout"),
        ("total_timeout_whole_ms", "300", "silence", false, 504, "total_timeout"),
        ("idle_timeout_ms", "300", "stall", true, 200, "idle-timeout"),
        // Long enough for the first byte to be there on any machine.
        ("total_timeout_ms", "3000", "go on", true, 200, "total-timeout"),
    ];
    for (key, limit, content, stream, status, code) in cases {
        let node = Node::over(&[engine.url()], &[(key, limit)]).await;
        let reply = node.post("/v1/chat/completions", chat(content, stream)).await;
        let text = reply.text();
        assert_eq!(reply.status, status, "{key}: {text}");
        assert!(text.contains(&format!("\"code\":\"{code}\"")), "{key}: {text}");
        assert!(!text.contains("[DONE]"), "{key}: {text}");
        node.at_rest().await;
    }
}

#[actix_web::test]
pub(super) async fn bodies_have_the_room_and_the_time_that_is_said() {
    let engine = Fake::start(|_| Answer::completion(20, 1)).await;
    let cases = [
        ("body_room_bytes", "1000000", 503, "no_room_for_body"),
        ("body_timeout_ms", "300", 408, "body_timeout"),
    ];
    for (key, limit, status, code) in cases {
        let node = Node::over(&[engine.url()], &[(key, limit)]).await;
        let mut client = Connection::open(node.public()).await;
        client.send("POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 3000000\r\n\r\n").await;
        // The refusal may come before all of it is sent.
        let _ = client.try_send(" ".repeat(2_000_000)).await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.error_code().as_str()), (status, code), "{key}");
        node.at_rest().await;
    }
}

#[actix_web::test]
pub(super) async fn a_request_is_tried_as_often_as_allowed() {
    let engine = async || Fake::start(|_| Answer::status(503)).await;
    let engines = [engine().await, engine().await, engine().await, engine().await];
    let urls = engines.each_ref().map(Fake::url);
    let mut before = 0;
    for tries in [1, 2, 3] {
        let node = Node::over(&urls, &[("tries_max", &tries.to_string())]).await;
        assert_eq!(node.chat("hi").await.status, 503);
        let served: usize = engines.iter().map(Fake::served).sum();
        assert_eq!(served - before, tries);
        before = served;
    }
}

#[actix_web::test]
pub(super) async fn the_index_stays_within_its_memory() {
    const SMALL: usize = 1 << 20;
    let engine = Fake::start(|_| Answer::completion(20, 1)).await;
    let bytes_after = async |cap: usize| {
        let node = Node::over(&[engine.url()], &[("index_bytes_max", &cap.to_string())]).await;
        for n in 0..300 {
            let prompt = format!("{n} ").repeat(40_000);
            assert_eq!(node.chat(&prompt).await.status, 200);
        }
        node.router().stats().index_bytes
    };
    let (small, large) = (bytes_after(SMALL).await, bytes_after(64 << 20).await);
    assert!(small <= SMALL, "{small} bytes in {SMALL}");
    assert!(large > small, "{large} bytes with room for more");
}
