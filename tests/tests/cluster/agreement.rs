//! Replicas come to the same end without asking each other.

use std::time::Duration;

use serde_json::Value;
use tests::{Chat, Cluster, Fleet, PATIENCE, Plan, Talker, stated, until, words};

#[tokio::test]
async fn what_one_replica_placed_is_warm_at_the_same_endpoint_for_all_within_a_second() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let mut chat = Chat::new("chat", &words("system", 340));
    let body = chat.say(2_500).body();
    let home = Talker::default().chat(cluster.public()[0], &body).await.endpoint;
    for replica in &cluster.replicas()[1..] {
        let admin = replica.admin();
        until("the others know", stated(Duration::from_secs(1)), async || {
            let explained = admin.explain_chat(&body).await;
            let elsewhere =
                explained.candidates.iter().any(|(url, each)| *url != home && each.warm_tokens > 0);
            assert!(!elsewhere, "{}: warm at another endpoint: {explained:?}", replica.name);
            if explained.warm_at(&home) > 0 && explained.chosen == home {
                Ok(())
            } else {
                Err(format!("{}: {explained:?}", replica.name))
            }
        })
        .await;
    }
}

/// Bodies of every kind of history: chats that were served, their next turns, and chats nobody has seen.
async fn bodies(cluster: &Cluster) -> Vec<Value> {
    let replicas = cluster.public();
    let mut bodies = Vec::new();
    for number in 0..200 {
        let mut chat = Chat::new(&format!("chat {number}"), &words("system", 340));
        let body = chat.say(200 + number * 20).body();
        if number % 2 == 0 {
            let reply = Talker::default().chat(replicas[number % 3], &body).await;
            if number % 4 == 0 {
                chat.answered(&reply.text);
                bodies.push(chat.say(400).body());
                continue;
            }
        }
        bodies.push(body);
    }
    bodies
}

#[tokio::test]
async fn quiet_replicas_choose_the_same_endpoint_for_99_of_100_bodies() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let bodies = bodies(&cluster).await;
    cluster.wait_until_idle(PATIENCE).await;
    // Quiet: what was last said has been heard. The first round may still find the last rows on their way.
    until("the replicas agree", PATIENCE, async || {
        let mut differing = Vec::new();
        for (number, body) in bodies.iter().enumerate() {
            let mut chosen = Vec::new();
            for replica in cluster.replicas() {
                let explained = replica.admin().explain_chat(body).await;
                chosen.push((explained.chosen, explained.reason));
            }
            if chosen.iter().any(|(endpoint, _)| *endpoint != chosen[0].0) {
                differing.push((number, chosen));
            }
        }
        if differing.len() * 100 <= bodies.len() {
            Ok(())
        } else {
            Err(format!("{} of {} differ: {differing:?}", differing.len(), bodies.len()))
        }
    })
    .await;
}
