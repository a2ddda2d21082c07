//! Replicas that die between the legs of split requests: what they have staged is let go of by others.

use std::time::Duration;

use engine::{Config, Connector, Engine, Fault, Profile, Role};
use serde_json::json;
use tests::{Cluster, MODEL, PATIENCE, Plan, Talker, until, words};
use tokio::task::JoinSet;

const LEGS: u32 = 20;

async fn engine(role: Role, pin_max: Duration) -> Engine {
    let mut config = Config { model: MODEL.to_owned(), ..Config::profile(Profile::Instant) };
    config.transfer.pin_max = pin_max;
    Engine::start(config.with_role(role, Connector::Nixl)).await.expect("an engine starts")
}

/// Has twenty requests stop between their legs at one of three replicas, which is then killed; what the others have
/// counted by `end` once they have counted all.
async fn orphaned(prefill: &Engine, decode: &Engine, end: &str) {
    let endpoints = [format!("{},role=prefill", prefill.url()), format!("{},role=decode", decode.url())];
    let mut cluster = Cluster::start(Plan::new(3, &endpoints).flags(&["--split", "always"])).await;
    let to = cluster.public()[0];
    let mut clients = JoinSet::new();
    for number in 0..LEGS {
        clients.spawn(async move {
            let messages = json!([{"role": "user", "content": words(&format!("client {number}"), 4_000)}]);
            let body = json!({"model": MODEL, "messages": messages, "max_tokens": 4});
            Talker::default().send(to, "/v1/chat/completions", &body).await
        });
    }
    for heir in &cluster.replicas()[1..] {
        until("all are between their legs, and known to be", PATIENCE, async || {
            let heard = heir.admin().metrics().await.sum("grapevine_kv_staged_heard", &[]);
            if heard == Some(f64::from(LEGS)) { Ok(()) } else { Err(format!("{heard:?}")) }
        })
        .await;
    }
    assert_eq!(prefill.stats().pinned_requests, LEGS);
    cluster.replica_mut(0).kill();
    until("the others have seen to all", PATIENCE, async || {
        let mut counted = 0.0;
        for replica in &cluster.replicas()[1..] {
            let metrics = replica.admin().metrics().await;
            let labels = [format!("end=\"{end}\"")];
            let labels = labels.each_ref().map(String::as_str);
            counted += metrics.sum("grapevine_kv_orphaned_total", &labels).unwrap_or(0.0);
        }
        if counted == f64::from(LEGS) { Ok(()) } else { Err(format!("{counted}")) }
    })
    .await;
}

#[tokio::test]
async fn what_a_killed_replica_has_staged_is_released_by_its_heir() {
    let never = Duration::from_secs(3_600);
    let (prefill, decode) = (engine(Role::Prefill, never).await, engine(Role::Decode, never).await);
    decode.fail(Fault::Freeze, Some(LEGS.into()));
    orphaned(&prefill, &decode, "released").await;
    let stats = prefill.stats();
    assert_eq!((stats.staged, stats.pinned_requests, stats.pinned_blocks), (LEGS.into(), 0, 0));
}

#[tokio::test]
async fn what_its_heir_can_not_release_is_counted_and_left_to_the_engine_s_limit() {
    let (prefill, decode) =
        (engine(Role::Prefill, Duration::from_secs(5)).await, engine(Role::Decode, Duration::MAX).await);
    decode.fail(Fault::Freeze, Some(LEGS.into()));
    decode.fail(Fault::Status { status: 503, retry_after_s: None }, None);
    orphaned(&prefill, &decode, "left").await;
    until("the engine has let go", PATIENCE, async || match prefill.stats() {
        stats if stats.pinned_blocks == 0 && stats.expired == u64::from(LEGS) => Ok(()),
        stats => Err(format!("{stats:?}")),
    })
    .await;
}
