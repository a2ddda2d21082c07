//! Leaving: SIGTERM finishes what runs, and liveness does not depend on load.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use grapevine::ports;

use crate::rig::{
    Answer, Connection, Fake, PATIENCE, Process, chat, eventually, get, piece, request, try_get, until,
};

/// A replica as a process of its own.
fn replica(engine: &str, flags: &[&str]) -> (Process, ports::ReplicaPorts) {
    let own = ports::find(1).expect("free ports").remove(0);
    let [public, admin, gossip] = [own.public, own.admin, own.gossip].map(|address| address.to_string());
    let mut arguments = vec!["serve", "--listen", &public, "--admin", &admin, "--gossip", &gossip];
    arguments.extend(["--endpoint", engine, "--log", "warn"]);
    arguments.extend(flags);
    (Process::start(&arguments, Stdio::inherit()), own)
}

async fn ready(address: SocketAddr) {
    eventually("ready", async || (try_get(address, "/readyz").await?.status == 200).then_some(())).await;
}

#[actix_web::test]
pub(super) async fn sigterm_ends_50_streams_in_their_own_time_and_then_the_process_with_0() {
    const STREAMS: usize = 50;
    const TOKENS: usize = 40;
    let engine = Fake::start(|_| Answer::stream(TOKENS, Duration::from_millis(50))).await;
    let (mut process, own) = replica(&engine.url(), &["--drain-settle-ms", "500"]);
    ready(own.public).await;
    let mut streams = Vec::new();
    for n in 0..STREAMS {
        let mut connection = Connection::open(own.public).await;
        connection.send(request("POST", "/v1/chat/completions", "", chat(&format!("{n}"), true))).await;
        connection.read_until("word0").await;
        streams.push(connection);
    }
    assert_eq!(engine.open(), STREAMS, "all were under way at the signal");
    process.signal("TERM");
    // It says so while it still accepts.
    eventually("not ready", async || {
        let reply = try_get(own.public, "/readyz").await?;
        (reply.status == 503 && reply.json()["missing"].to_string().contains("draining")).then_some(())
    })
    .await;
    assert_eq!(get(own.public, "/livez").await.status, 200);
    for (n, mut stream) in streams.into_iter().enumerate() {
        let reply = stream.reply().await;
        let text = reply.text();
        assert!(reply.complete && text.contains("data: [DONE]"), "stream {n} was cut: {text}");
        assert!(text.contains(&format!("word{}", TOKENS - 1)) && !text.contains("\"error\""), "stream {n}");
    }
    assert_eq!(process.ended().await, Some(0));
    assert!(try_get(own.public, "/livez").await.is_none(), "nobody listens any more");
}

#[actix_web::test]
pub(super) async fn a_stream_that_outlives_the_drain_ends_in_an_error_event_and_the_process_with_0() {
    let engine = Fake::start(|_| Answer::Stalled(vec![piece(0)])).await;
    let flags = ["--drain-settle-ms", "0", "--drain-deadline-ms", "300"];
    let (mut process, own) = replica(&engine.url(), &flags);
    ready(own.public).await;
    let mut stream = Connection::open(own.public).await;
    stream.send(request("POST", "/v1/chat/completions", "", chat("hello", true))).await;
    stream.read_until("word0").await;
    process.signal("TERM");
    let reply = stream.reply().await;
    let text = reply.text();
    assert!(text.contains("\"error\"") && !text.contains("[DONE]"), "{text}");
    assert_eq!(process.ended().await, Some(0));
    until("the engine to be left", || engine.open() == 0).await;
}

/// Thousands of open streams. The replica is a process of its own for the descriptors' sake; the engine's
/// ends and the clients' share this one.
#[actix_web::test]
async fn liveness_and_metrics_answer_while_thousands_of_streams_are_open() {
    let streams = streams_possible();
    let engine = Fake::start(|_| Answer::Stalled(vec![piece(0)])).await;
    let (_process, own) = replica(&engine.url(), &[]);
    ready(own.public).await;
    let mut open = Vec::with_capacity(streams);
    while open.len() < streams {
        let first = open.len();
        for n in first..streams.min(first + STREAMS_AT_ONCE) {
            let mut connection = Connection::open(own.public).await;
            let body = chat(&format!("{n}"), true);
            connection.send(request("POST", "/v1/chat/completions", "", body)).await;
            open.push(connection);
        }
        for connection in &mut open[first..] {
            connection.read_until("word0").await;
        }
    }
    for address in [own.public, own.admin] {
        let live = tokio::time::timeout(PATIENCE, get(address, "/livez")).await.expect("in time");
        assert_eq!(live.status, 200);
    }
    let page = get(own.admin, "/metrics").await;
    let in_flight = page.text().lines().find_map(|line| line.strip_prefix("grapevine_requests_in_flight "));
    assert_eq!(in_flight, Some(streams.to_string().as_str()));
    drop(open);
    eventually("all over", async || {
        let page = get(own.admin, "/metrics").await;
        page.text().contains("\ngrapevine_requests_in_flight 0\n").then_some(())
    })
    .await;
}

/// Streams begun before the first of them is looked at.
const STREAMS_AT_ONCE: usize = 250;

/// 5,000, or what the descriptors allow: either process needs two for each stream. Unoptimised, a fifth of
/// them is work enough.
fn streams_possible() -> usize {
    const WANTED: usize = if cfg!(debug_assertions) { 1_000 } else { 5_000 };
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().nth(3)?.parse::<usize>().ok()).unwrap_or(1_024);
    let possible = WANTED.min(soft.saturating_sub(500) / 2);
    if possible < WANTED {
        eprintln!("{possible} streams instead of {WANTED}: only {soft} descriptors");
    }
    possible
}
