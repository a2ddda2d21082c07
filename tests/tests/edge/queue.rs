//! When every engine is busy: who waits, who goes next, who is refused, and that nothing stays behind.

use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{
    Answer, Connection, Fake, Node, Reply, chat, eventually, get, piece, post_as, request, until,
};

const CHATS: &str = "/v1/chat/completions";

/// An engine whose streams stay open until their client leaves.
async fn stalling() -> Fake {
    Fake::start(|_| Answer::Stalled(vec![piece(0)])).await
}

/// A replica that sends one request at a time to its engine.
async fn one_at_a_time(engine: &Fake, flags: &[(&'static str, &str)]) -> Node {
    let mut all = vec![("running_max", "1")];
    all.extend(flags);
    Node::over(&[engine.url()], &all).await
}

/// A stream that has begun.
async fn running(node: &Node) -> Connection {
    let mut open = waiting(node, "").await;
    open.read_until("word0").await;
    open
}

/// A stream that was asked for.
async fn waiting(node: &Node, headers: &str) -> Connection {
    let mut open = Connection::open(node.public()).await;
    open.send(request("POST", CHATS, headers, chat("hello", true))).await;
    open
}

/// Waits until as many requests wait.
async fn queued(node: &Node, count: usize) {
    until("requests in the queue", || node.router().queue_stats().requests == count).await;
}

/// The phases of what is in flight, by id.
async fn phase_of(node: &Node, id: &str) -> Value {
    get(node.admin(), &format!("/requests/{id}")).await.json()["phase"].clone()
}

/// The value of a metric, 0 if it is not there.
async fn metric(node: &Node, name: &str) -> f64 {
    let page = get(node.admin(), "/metrics").await;
    let line = page.text().lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    line.map_or(0.0, |value| value.trim().parse().expect("a number"))
}

fn assert_refused(reply: &Reply) {
    assert_eq!(reply.status, 429, "{}", reply.text());
    let seconds: u64 = reply.header("retry-after").expect("a Retry-After").parse().expect("seconds");
    assert!((1..=60).contains(&seconds), "{seconds}");
    let error = &reply.json()["error"];
    assert_eq!((&error["type"], &error["code"]), (&json!("rate_limit_error"), &json!("overloaded")));
}

#[actix_web::test]
pub(super) async fn a_request_beyond_running_max_waits_is_shown_and_goes_when_there_is_room() {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[]).await;
    let first = running(&node).await;
    let mut second = waiting(&node, "x-request-id: second\r\n").await;
    queued(&node, 1).await;
    eventually("its phase", async || (phase_of(&node, "second").await == json!("queued")).then_some(()))
        .await;
    let cluster = get(node.admin(), "/cluster").await.json();
    assert_eq!(cluster["queue"]["requests"], json!(1));
    assert!(cluster["queue"]["bytes"].as_u64().is_some_and(|bytes| bytes > 0));
    assert_eq!(engine.asked(CHATS), 1, "the engine has not heard of it");
    assert_eq!(metric(&node, "grapevine_queue_requests").await, 1.0);
    assert!(metric(&node, "grapevine_queue_bytes").await > 0.0);
    drop(first);
    second.read_until("word0").await;
    queued(&node, 0).await;
    drop(second);
    node.at_rest().await;
    assert_eq!(metric(&node, "grapevine_queue_requests").await, 0.0);
    assert_eq!(metric(&node, r#"grapevine_queue_admitted_total{priority="2"}"#).await, 1.0);
    // Without the key there is no such bound.
    let unbounded = Node::over(&[engine.url()], &[]).await;
    let _both = (running(&unbounded).await, running(&unbounded).await);
}

#[actix_web::test]
pub(super) async fn who_finds_the_queue_full_is_refused_at_once_and_a_higher_class_takes_the_place_of_a_lower()
 {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[("queue_requests_max", "1")]).await;
    let _first = running(&node).await;
    let mut low = waiting(&node, "x-request-priority: 3\r\n").await;
    queued(&node, 1).await;
    let refused = post_as(node.public(), CHATS, "x-request-priority: 3\r\n", chat("hello", true)).await;
    assert_refused(&refused);
    let _high = waiting(&node, "x-request-priority: 1\r\nx-request-id: high\r\n").await;
    assert_refused(&low.reply().await);
    for reason in ["queue-full", "pushed-out"] {
        let name = format!(r#"grapevine_queue_shed_total{{priority="3",reason="{reason}"}}"#);
        assert_eq!(metric(&node, &name).await, 1.0, "{reason}");
    }
    assert_eq!(node.router().queue_stats().requests, 1);
    eventually("the higher one waits", async || {
        (phase_of(&node, "high").await == json!("queued")).then_some(())
    })
    .await;
}

#[actix_web::test]
pub(super) async fn bodies_that_wait_are_bounded_together() {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[("queue_bytes_max", "150")]).await;
    let _first = running(&node).await;
    let _second = waiting(&node, "").await;
    queued(&node, 1).await;
    assert_refused(&post_as(node.public(), CHATS, "", chat("hello", true)).await);
}

#[actix_web::test]
pub(super) async fn who_has_waited_for_as_long_as_it_may_is_refused() {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[("queue_wait_ms_max", "50")]).await;
    let first = running(&node).await;
    assert_refused(&post_as(node.public(), CHATS, "", chat("hello", true)).await);
    assert_eq!(engine.asked(CHATS), 1);
    drop(first);
    node.at_rest().await;
}

#[actix_web::test]
async fn who_leaves_the_queue_leaves_nothing_behind() {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[]).await;
    let first = running(&node).await;
    let mut leaving = Vec::new();
    for _ in 0..5 {
        leaving.push(waiting(&node, "").await);
    }
    queued(&node, 5).await;
    drop(leaving);
    queued(&node, 0).await;
    until("only the first is in flight", || node.in_flight() == 1).await;
    drop(first);
    node.at_rest().await;
    assert_eq!((engine.asked(CHATS), node.router().queue_stats().bytes), (1, 0));
}

#[actix_web::test]
async fn the_urgent_go_before_those_that_came_first() {
    let engine = Fake::start(|_| Answer::stream(3, Duration::from_millis(50))).await;
    let node = one_at_a_time(&engine, &[]).await;
    let mut first = running(&node).await;
    let mut low = waiting(&node, "x-request-priority: 3\r\nx-request-id: low\r\n").await;
    queued(&node, 1).await;
    let mut high = waiting(&node, "x-request-priority: 1\r\nx-request-id: high\r\n").await;
    for open in [&mut first, &mut high, &mut low] {
        let reply = open.reply().await;
        assert!(reply.text().contains("data: [DONE]"), "{}", reply.text());
    }
    node.at_rest().await;
    let rows = get(node.admin(), "/requests").await.json();
    // The last to end is shown first.
    let ids: Vec<&str> = rows.as_array().expect("rows").iter().filter_map(|row| row["id"].as_str()).collect();
    assert_eq!(ids[..2], ["low", "high"]);
}

#[actix_web::test]
async fn what_waits_when_the_replica_ends_is_told_to_come_again() {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[]).await;
    let _first = running(&node).await;
    let mut second = waiting(&node, "").await;
    queued(&node, 1).await;
    node.replica.lifecycles().end_all();
    let reply = second.reply().await;
    assert_eq!((reply.status, reply.json()["error"]["code"].clone()), (503, json!("shutting_down")));
    queued(&node, 0).await;
}

#[actix_web::test]
async fn with_no_queue_what_finds_no_room_is_refused_at_once() {
    let engine = stalling().await;
    let node = one_at_a_time(&engine, &[("queue_requests_max", "0")]).await;
    let _first = running(&node).await;
    assert_refused(&post_as(node.public(), CHATS, "", chat("hello", true)).await);
}

#[actix_web::test]
async fn no_session_gets_more_than_its_share_and_one_while_others_wait() {
    let engine = stalling().await;
    let node = Node::over(&[engine.url()], &[("running_max", "4")]).await;
    let of_session = async |name: &str| waiting(&node, &format!("x-session-id: {name}\r\n")).await;
    let mut before = Vec::new();
    for number in 0..4 {
        let mut open = of_session(&format!("before-{number}")).await;
        open.read_until("word0").await;
        before.push(open);
    }
    let mut greedy = Vec::new();
    for number in 1..=6 {
        greedy.push(of_session("greedy").await);
        queued(&node, number).await;
    }
    let mut modest = [of_session("modest").await, of_session("shy").await];
    queued(&node, 8).await;
    drop(before);
    for open in &mut modest {
        open.read_until("word0").await;
    }
    // Four places, three sessions: the greedy one has a share and a third of one, and so two.
    queued(&node, 4).await;
    assert_eq!(engine.open(), 4);
}
