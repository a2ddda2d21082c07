//! Clients that leave: the engine hears of it, whatever the phase.

use crate::rig::{Connection, Fake, Rig, Step, chat, request};

async fn check(script: Vec<Step>, stream: bool, seen_by_client: Option<&str>) {
    let fake = Fake::start(script).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut connection = Connection::open(rig.address()).await;
    connection.send(request("POST", "/v1/chat/completions", "", chat(stream))).await;
    fake.asked(1).await;
    assert_eq!((rig.in_flight(), rig.running()), (1, 1));
    if let Some(text) = seen_by_client {
        connection.read_until(text).await;
    }
    drop(connection);
    fake.closed(1).await;
    rig.at_rest().await;
    assert_eq!(rig.phases(), ["cancelled"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_head_of_a_whole_reply() {
    check(vec![Step::AwaitClose], false, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_head_of_a_stream() {
    check(vec![Step::AwaitClose], true, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_only_comments_have_come() {
    check(vec![Step::stream_head(), Step::chunk(": ping\n\n"), Step::AwaitClose], true, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_middle_of_a_stream() {
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    check(vec![Step::stream_head(), Step::chunk(event), Step::AwaitClose], true, Some(event)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_middle_of_a_whole_reply() {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{\"id\":";
    // A short one is held, a long one on its way.
    check(vec![Step::Send(head.into()), Step::AwaitClose], false, None).await;
    let long = format!("{head}\"{}", "x".repeat(70_000));
    check(vec![Step::Send(long.into()), Step::AwaitClose], false, Some("{\"id\":")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_at_random_points_leave_nothing() {
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
    let mut script = vec![Step::stream_head()];
    for _ in 0..20 {
        script.push(Step::chunk(event));
        script.push(Step::Pause(std::time::Duration::from_millis(1)));
    }
    script.extend([Step::chunk("data: [DONE]\n\n"), Step::end()]);
    let (one, two) = (Fake::start(script.clone()).await, Fake::start(script).await);
    let rig = Rig::start(&[one.url.clone(), two.url.clone()]);
    let mut clients = Vec::new();
    for number in 0..500_u32 {
        let address = rig.address();
        clients.push(tokio::spawn(async move {
            let mut connection = Connection::open(address).await;
            connection.send(request("POST", "/v1/chat/completions", "", chat(true))).await;
            // Some leave at once, some in the middle, some at the end; the order is fixed, the timing is not.
            let wait = u64::from(number.wrapping_mul(2_654_435_761) >> 24) / 8;
            tokio::time::sleep(std::time::Duration::from_millis(wait)).await;
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    rig.at_rest().await;
    // A client may be gone before its request was read; of all others nothing but the record is left.
    let phases = rig.phases();
    assert!(phases.len() > 100 && phases.contains(&"cancelled"), "{phases:?}");
    assert!(phases.iter().all(|phase| matches!(*phase, "cancelled" | "finished")), "{phases:?}");
}
