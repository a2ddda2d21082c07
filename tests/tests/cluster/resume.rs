//! Streams over engines that are lost under them: every word comes, once, in its place.

use std::net::SocketAddr;

use grapevine::load::Outcome;
use serde_json::{Value, json};
use tests::{Chat, Cluster, EngineProcess, PATIENCE, Plan, Talker, until};
use tokio::task::JoinSet;

const STREAMS: usize = 8;
const TOKENS: usize = 600;

fn body(number: usize, chat: bool) -> Value {
    let mut body = Chat::new(&format!("chat {number}"), "").say(400).body();
    if !chat {
        body["prompt"] = body["messages"][0]["content"].take();
        body.as_object_mut().expect("an object").remove("messages");
    }
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body["max_tokens"] = json!(TOKENS);
    body
}

fn path(chat: bool) -> &'static str {
    if chat { "/v1/chat/completions" } else { "/v1/completions" }
}

/// Asks for all streams at once, does `midway` when each has some words, and returns what came of them.
async fn streams(to: SocketAddr, chat: bool, midway: impl AsyncFnOnce()) -> Vec<Outcome> {
    let mut clients = JoinSet::new();
    for number in 0..STREAMS {
        clients.spawn(
            async move { (number, Talker::default().send(to, path(chat), &body(number, chat)).await) },
        );
    }
    midway().await;
    let mut all = clients.join_all().await;
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, outcome)| outcome).collect()
}

async fn running(cluster: &Cluster, phase: &str) -> usize {
    let (_, rows) = cluster.replicas()[0].admin().get("/requests").await.expect("an answer");
    let rows: Vec<Value> = serde_json::from_str(&rows).expect("JSON");
    rows.iter().filter(|row| row["phase"] == phase).count()
}

/// What of the streams was resumed, by cause.
async fn resumed(cluster: &Cluster, cause: &str) -> f64 {
    let page = cluster.replicas()[0].admin().metrics().await;
    page.sum("grapevine_resumed_total", &[&format!("cause=\"{cause}\"")]).unwrap_or(0.0)
}

/// Streams over two engines of which one is lost midway come to the same words as those of an undisturbed run.
async fn check(chat: bool, cause: &str, lose: impl FnOnce(&mut EngineProcess)) {
    let flags = ["--profile", "8b-h100", "--speed", "2"];
    let mut engines = [EngineProcess::start(&flags).await, EngineProcess::start(&flags).await];
    let cluster = Cluster::start(Plan::new(1, &engines.each_ref().map(EngineProcess::url))).await;
    let to = cluster.public()[0];
    let undisturbed = streams(engines[1].address(), chat, async || ()).await;
    let disturbed = streams(to, chat, async || {
        until("every stream has begun", PATIENCE, async || match running(&cluster, "decoding").await {
            STREAMS => Ok(()),
            decoding => Err(format!("{decoding} decode")),
        })
        .await;
        lose(&mut engines[0]);
    })
    .await;
    for (number, (whole, seen)) in undisturbed.iter().zip(&disturbed).enumerate() {
        assert!(seen.verdict.is_ok(), "stream {number}: {:?}", seen.verdict);
        assert_eq!(seen.text, whole.text, "stream {number}");
        let tokens = |outcome: &Outcome| {
            let usage = outcome.usage.expect("a report");
            (usage.prompt_tokens, usage.completion_tokens)
        };
        assert_eq!((tokens(seen), tokens(seen).1), (tokens(whole), TOKENS as u64), "stream {number}");
    }
    assert!(resumed(&cluster, cause).await >= 1.0, "none was lost");
    cluster.wait_until_idle(PATIENCE).await;
    let worst =
        |all: &[Outcome]| all.iter().flat_map(|outcome| &outcome.gaps).max().copied().unwrap_or_default();
    let (before, now) = (worst(&undisturbed), worst(&disturbed));
    println!("{cause}, chat {chat}: worst gap {now:?}, undisturbed {before:?}");
}

#[tokio::test]
async fn chats_of_a_killed_engine_go_on_word_for_word() {
    check(true, "truncated", EngineProcess::kill).await;
}

#[tokio::test]
async fn text_completions_of_a_killed_engine_go_on_word_for_word() {
    check(false, "truncated", EngineProcess::kill).await;
}

#[tokio::test]
async fn chats_of_a_stopped_engine_go_on_word_for_word() {
    check(true, "endpoint-lost", |engine| engine.signal("STOP")).await;
}

#[tokio::test]
async fn chats_of_an_engine_that_is_shut_down_go_on_word_for_word() {
    check(true, "aborted", |engine| engine.signal("TERM")).await;
}
