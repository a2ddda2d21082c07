//! Policies and filters, as configured and as changed while requests run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::Lies;
use serde_json::json;
use tests::{Chat, Cluster, Fleet, MODEL, PATIENCE, Plan, Talker, until, words};
use tokio::task::JoinSet;

/// A cluster with a prompt that is warm at one endpoint, known to all; the body and that endpoint.
async fn warmed(fleet: &Fleet, settings: &str) -> (Cluster, serde_json::Value, String) {
    let plan = Plan::new(3, &fleet.urls()).settings(settings);
    let cluster = Cluster::start(plan.flags(&["--scrape-every-ms", "50"])).await;
    let body = Chat::new("chat", &words("system", 340)).say(2_500).body();
    let home = Talker::default().chat(cluster.public()[0], &body).await.endpoint;
    for replica in cluster.replicas() {
        until("the holder is known", PATIENCE, async || {
            let explained = replica.admin().explain_chat(&body).await;
            if explained.warm_at(&home) > 0 { Ok(()) } else { Err(format!("{explained:?}")) }
        })
        .await;
    }
    (cluster, body, home)
}

/// Waits until every replica has heard that `url` queues `waiting`.
async fn until_queue_known(cluster: &Cluster, url: &str, waiting: u64) {
    for replica in cluster.replicas() {
        until("the queue is known", PATIENCE, async || {
            let seen = replica.admin().cluster().await?;
            let endpoints = seen.json["endpoints"].as_array().cloned().unwrap_or_default();
            let known = endpoints.iter().filter(|each| !each["engine"].is_null()).count() == endpoints.len();
            let queue =
                endpoints.iter().find(|each| each["url"] == url).map(|each| &each["engine"]["waiting"]);
            if known && queue.is_some_and(|queue| *queue == waiting) {
                Ok(())
            } else {
                Err(seen.json.to_string())
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_queueing_holder_keeps_its_requests_without_the_filter() {
    let fleet = Fleet::instant(4).await;
    let (cluster, body, home) = warmed(&fleet, "policy = \"prefix-longest\"").await;
    fleet.at(&home).set_lies(Lies { waiting: Some(20), ..Lies::default() });
    until_queue_known(&cluster, &home, 20).await;
    for replica in cluster.replicas() {
        let explained = replica.admin().explain_chat(&body).await;
        assert_eq!(explained.chosen, home, "{}: {explained:?}", replica.name);
        assert_eq!(Talker::default().chat(replica.public(), &body).await.endpoint, home);
    }
}

#[tokio::test]
async fn queue_percentile_sends_a_request_away_from_a_holder_that_queues_while_others_are_idle() {
    let fleet = Fleet::instant(4).await;
    let settings = "policy = \"prefix-longest\"\nendpoint_filter = [\"queue-percentile\"]";
    let (cluster, body, home) = warmed(&fleet, settings).await;
    until_queue_known(&cluster, &home, 0).await;
    let explained = cluster.replicas()[1].admin().explain_chat(&body).await;
    assert_eq!(explained.chosen, home, "with no queue anywhere: {explained:?}");
    fleet.at(&home).set_lies(Lies { waiting: Some(20), ..Lies::default() });
    until_queue_known(&cluster, &home, 20).await;
    for replica in cluster.replicas() {
        let explained = replica.admin().explain_chat(&body).await;
        assert_ne!(explained.chosen, home, "{}: {explained:?}", replica.name);
        assert_eq!(explained.candidates[&home].dropped_by.as_deref(), Some("queue-percentile"));
        assert!(explained.reverted.is_empty(), "{explained:?}");
        assert_ne!(Talker::default().chat(replica.public(), &body).await.endpoint, home);
    }
}

#[tokio::test]
async fn a_filter_that_would_leave_nobody_is_undone_by_name_and_the_request_is_served() {
    let fleet = Fleet::instant(4).await;
    let settings = "policy = \"prefix-longest\"\nendpoint_filter = [\"queue-percentile\", \"kv-pressure\"]";
    let (cluster, body, home) = warmed(&fleet, settings).await;
    for engine in fleet.engines() {
        let waiting = if engine.url() == home { 20 } else { 0 };
        engine.set_lies(Lies { waiting: Some(waiting), kv_ratio: Some(0.999), ..Lies::default() });
    }
    until_queue_known(&cluster, &home, 20).await;
    for replica in cluster.replicas() {
        let admin = replica.admin();
        until("all caches are known to be full", PATIENCE, async || {
            let explained = admin.explain_chat(&body).await;
            if explained.reverted == ["kv-pressure"] { Ok(()) } else { Err(format!("{explained:?}")) }
        })
        .await;
        let explained = admin.explain_chat(&body).await;
        assert_ne!(explained.chosen, home, "the other filter still holds: {explained:?}");
        Talker::default().chat(replica.public(), &body).await;
        let reverted =
            admin.metrics().await.sum("grapevine_filter_reverted_total", &["filter=\"kv-pressure\""]);
        assert!(reverted.is_some_and(|count| count >= 1.0), "{reverted:?}");
    }
}

#[tokio::test]
async fn a_policy_changed_by_hang_up_under_load_fails_nothing_and_keeps_what_is_warm() {
    let fleet = Fleet::instant(4).await;
    let mut cluster = Cluster::start(Plan::new(3, &fleet.urls()).settings("policy = \"round-robin\"")).await;
    let replicas = cluster.public();
    let talker = Talker::default();
    let mut warm = Vec::new();
    for number in 0..20 {
        let body = Chat::new(&format!("warm {number}"), &words("system", 340)).say(2_500).body();
        let home = talker.chat(replicas[number % 3], &body).await.endpoint;
        warm.push((body, home));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for client in 0..6 {
        let (stop, replicas, talker) = (Arc::clone(&stop), replicas.clone(), talker.clone());
        clients.spawn(async move {
            let mut served = 0;
            while !stop.load(Ordering::Relaxed) {
                let body = json!({
                    "model": MODEL,
                    "messages": [{"role": "user", "content": words(&format!("{client}-{served}"), 400)}],
                    "stream": served % 2 == 0,
                    "max_tokens": 8,
                });
                talker.chat(replicas[(client + served) % 3], &body).await;
                served += 1;
            }
            served
        });
    }
    cluster.reconfigure("policy = \"cost\"");
    for replica in cluster.replicas() {
        until("the policy is taken", PATIENCE, async || {
            let seen = replica.admin().cluster().await?;
            if seen.json["policy"] == "cost" { Ok(()) } else { Err(seen.json["policy"].to_string()) }
        })
        .await;
        for (body, home) in &warm {
            let explained = replica.admin().explain_chat(body).await;
            assert!(explained.warm_at(home) > 0, "{}: warm at {home}: {explained:?}", replica.name);
        }
    }
    // A file with a fault changes nothing.
    cluster.reconfigure("policy = \"no-such-policy\"");
    for replica in cluster.replicas() {
        until("the fault is reported", PATIENCE, async || {
            let log = replica.log();
            if log.contains("no-such-policy") { Ok(()) } else { Err(log) }
        })
        .await;
        let seen = replica.admin().cluster().await.expect("an answer");
        assert_eq!(seen.json["policy"], "cost", "{}", replica.name);
    }
    stop.store(true, Ordering::Relaxed);
    // A request that fails panics in its client.
    let served = clients.join_all().await;
    assert!(served.iter().all(|count| *count > 0), "{served:?}");
    for (number, (body, home)) in warm.iter().enumerate() {
        let reply = talker.chat(replicas[(number + 1) % 3], body).await;
        assert_eq!(reply.endpoint, *home, "warm {number}");
    }
}
