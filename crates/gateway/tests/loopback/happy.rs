//! What works when everything works.

use engine::{Config, Engine, Profile};

use crate::rig::{Rig, chat, post};

async fn engine() -> Engine {
    Engine::start(Config::profile(Profile::Instant)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chats_are_answered_whole_and_streamed_and_leave_nothing_behind() {
    let (one, two) = (engine().await, engine().await);
    let rig = Rig::start(&[one.url(), two.url()]);
    for _ in 0..10 {
        let reply = post(rig.address(), "/v1/chat/completions", chat(false)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(reply.header("content-length").is_some() && reply.header("x-request-id").is_some());
        assert!(!reply.json()["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
        let reply = post(rig.address(), "/v1/chat/completions", chat(true)).await;
        assert_eq!(reply.header("content-type").map(|kind| &kind[..17]), Some("text/event-stream"));
        assert!(reply.complete && reply.text().ends_with("data: [DONE]\n\n"), "{}", reply.text());
    }
    rig.at_rest().await;
    assert_eq!(rig.phases(), ["finished"; 20]);
}
