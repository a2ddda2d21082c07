//! Leaving in good order.

use std::time::Duration;

use crate::rig::{Connection, Fake, Rig, Step, chat, get, request, until};

const EVENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
const DONE: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

async fn streaming(rig: &Rig) -> Connection {
    let mut client = Connection::open(rig.address()).await;
    client.send(request("POST", "/v1/chat/completions", "", chat(true))).await;
    client.read_until("content").await;
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_is_finished_and_nothing_new_is_asked_for() {
    let fake = Fake::start(vec![
        Step::stream_head(),
        Step::chunk(EVENT),
        Step::Await,
        Step::chunk(DONE),
        Step::end(),
    ])
    .await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut client = streaming(&rig).await;
    let (address, admin) = (rig.address(), rig.admin());
    let state = rig.serving.state().clone();
    let drain = tokio::spawn(rig.serving.drain(Duration::from_millis(300), Duration::from_secs(20)));
    until("the drain to begin", || state.readiness.is_draining()).await;
    // Still accepting while balancers take notice.
    let ready = get(address, "/readyz").await;
    assert_eq!((ready.status, ready.text()), (503, r#"{"ready":false,"missing":["draining"]}"#));
    assert_eq!(get(address, "/livez").await.status, 200);
    until("new connections to be refused", || std::net::TcpStream::connect(address).is_err()).await;
    assert_eq!(get(admin, "/livez").await.status, 200);
    fake.go_on();
    let reply = client.reply().await;
    assert!(reply.complete && reply.text().ends_with("[DONE]\n\n"), "{}", reply.text());
    drain.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_finish_in_time_ends_in_an_error_event() {
    let fake = Fake::start(vec![Step::stream_head(), Step::chunk(EVENT), Step::AwaitClose]).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut client = streaming(&rig).await;
    let drain = tokio::spawn(rig.serving.drain(Duration::ZERO, Duration::from_millis(200)));
    let reply = client.reply().await;
    assert!(reply.complete && reply.text().contains("\"code\":\"shutdown\""), "{}", reply.text());
    assert!(!reply.text().contains("[DONE]"));
    fake.closed(1).await;
    drain.await.unwrap();
}
