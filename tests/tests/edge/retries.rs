//! Retries: few, elsewhere, and with regard to what engines ask for.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use routing::endpoint::Standing;

use crate::rig::{Answer, Fake, Node};

/// Requests sent at once.
const CLIENTS: usize = 16;

#[actix_web::test]
async fn when_all_engines_say_503_retries_add_at_most_a_fifth() {
    const REQUESTS: usize = 300;
    let engines = [
        Fake::start(|_| Answer::status(503)).await,
        Fake::start(|_| Answer::status(503)).await,
        Fake::start(|_| Answer::status(503)).await,
        Fake::start(|_| Answer::status(503)).await,
    ];
    let node = Node::over(&engines.each_ref().map(Fake::url), &[("policy", "random")]).await;
    let (node, next) = (Arc::new(node), Arc::new(AtomicUsize::new(0)));
    let clients = (0..CLIENTS).map(|_| {
        let (node, next) = (Arc::clone(&node), Arc::clone(&next));
        actix_web::rt::spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::SeqCst);
                if n >= REQUESTS {
                    return;
                }
                let reply = node.chat(&format!("number {n}")).await;
                assert_eq!(reply.status, 503, "{}", reply.text());
                assert!(reply.json()["error"]["message"].is_string());
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("a client");
    }
    let attempts: usize = engines.iter().map(Fake::served).sum();
    assert!(attempts > 0 && attempts * 5 <= REQUESTS * 6, "{attempts} attempts for {REQUESTS} requests");
    node.at_rest().await;
}

/// A full engine is not a bad one: its request goes elsewhere, and so do others for as long as it asked.
#[actix_web::test]
async fn an_engine_that_asks_for_a_pause_is_left_alone_while_another_can_serve() {
    let full = Fake::start(|_| {
        Answer::Whole(429, "Retry-After: 600\r\n", r#"{"error":{"message":"full"}}"#.to_owned())
    })
    .await;
    let free = Fake::start(|_| Answer::completion(1, 1)).await;
    let node = Node::over(&[full.url(), free.url()], &[("policy", "round-robin")]).await;
    for n in 0..40 {
        assert_eq!(node.chat(&format!("number {n}")).await.status, 200);
    }
    assert_eq!(full.served(), 1, "asked once, then left alone");
    assert_eq!(free.served(), 40);
    assert_eq!(node.endpoint(&full.url()).standing(), Standing::Ready);
}

/// With nobody else to serve, the pause is the client's to make.
#[actix_web::test]
async fn when_every_engine_asks_for_a_pause_the_client_is_told_how_long() {
    let full = || Answer::Whole(429, "Retry-After: 7\r\n", r#"{"error":{"message":"full"}}"#.to_owned());
    let engines = [Fake::start(move |_| full()).await, Fake::start(move |_| full()).await];
    let node = Node::over(&engines.each_ref().map(Fake::url), &[]).await;
    for n in 0..5 {
        let reply = node.chat(&format!("number {n}")).await;
        assert_eq!((reply.status, reply.header("retry-after")), (429, Some("7")), "{}", reply.text());
    }
}
