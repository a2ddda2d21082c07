//! Nothing grows without bound.

use serde_json::json;
use tests::{Chat, Cluster, Fleet, MODEL, PATIENCE, Plan, Talker, until, words};
use tokio::task::JoinSet;

/// The smallest index that can be configured.
const INDEX_BYTES_MAX: f64 = 1_048_576.0;

/// Sends unique prompts behind one common system prompt: `count` of 100 blocks each, numbered from `from`.
async fn flood(cluster: &Cluster, from: usize, count: usize) {
    let replicas = cluster.public();
    let mut clients = JoinSet::new();
    for client in 0..4 {
        let replicas = replicas.clone();
        clients.spawn(async move {
            for number in (from..from + count).filter(|number| number % 4 == client) {
                let prompt =
                    format!("{}{}", words("system", 2_048), words(&format!("prompt {number}"), 51_200));
                let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
                Talker::default().complete(replicas[number % replicas.len()], &body).await;
            }
        });
    }
    clients.join_all().await;
}

#[tokio::test]
async fn unique_prompts_do_not_grow_the_index_or_the_memory_past_the_cap() {
    let fleet = Fleet::instant(4).await;
    let plan = Plan::new(2, &fleet.urls()).settings("index_bytes_max = 1048576");
    let cluster = Cluster::start(plan).await;
    let index_bytes = async |at: usize| {
        let metrics = cluster.replicas()[at].admin().metrics().await;
        metrics.sum("grapevine_index_bytes", &[]).expect("an index")
    };
    // 100,000 blocks are more than twice what the cap holds.
    flood(&cluster, 0, 1_000).await;
    let full: Vec<u64> = cluster.replicas().iter().map(tests::Replica::resident_bytes).collect();
    flood(&cluster, 1_000, 1_000).await;
    for (at, replica) in cluster.replicas().iter().enumerate() {
        let bytes = index_bytes(at).await;
        assert!((INDEX_BYTES_MAX / 4.0..=INDEX_BYTES_MAX).contains(&bytes), "{}: {bytes}", replica.name);
        // An index without a cap would have grown by 2.4 MB at least; the allocator's own play is less than
        // what the process began with.
        let (before, after) = (full[at], replica.resident_bytes());
        assert!(after < before + (8 << 20), "{}: {before} bytes, then {after}", replica.name);
    }
    // Still of use: what came last is warm.
    let prompt = format!("{}{}", words("system", 2_048), words("prompt 1999", 51_200));
    let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
    let explained = cluster.replicas()[0].admin().explain("/v1/completions", &body).await;
    assert!(explained.candidates.values().any(|each| each.warm_tokens > 1_000), "{explained:?}");
}

#[tokio::test]
async fn the_oldest_sessions_leave_a_full_table_and_the_newest_stay() {
    let fleet = Fleet::instant(4).await;
    let plan = Plan::new(2, &fleet.urls()).settings("session_table_max = 100");
    let cluster = Cluster::start(plan).await;
    let replicas = cluster.public();
    for session in 0..600 {
        let talker = Talker::with_headers(&[("x-session-id", &format!("session-{session}"))]);
        talker.chat(replicas[session % 2], &Chat::new(&format!("chat {session}"), "").say(60).body()).await;
    }
    for replica in cluster.replicas() {
        let known = async |session: usize| {
            let reply = replica.admin().get(&format!("/sessions/session-{session}")).await;
            reply.map(|(status, _)| status == 200)
        };
        until("the newest session is known here", PATIENCE, async || match known(599).await? {
            true => Ok(()),
            false => Err(replica.name.clone()),
        })
        .await;
        let mut count = 0;
        for session in 0..600 {
            count += usize::from(known(session).await.expect("an answer"));
        }
        assert!((50..=100).contains(&count), "{}: {count} sessions known", replica.name);
        assert!(!known(0).await.expect("an answer"), "{}: the oldest is still there", replica.name);
    }
}
