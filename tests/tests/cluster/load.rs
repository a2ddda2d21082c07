//! Load is what is in flight through all replicas: it is charged at once, counted once, and given back.

use std::net::SocketAddr;
use std::time::Duration;

use engine::{Config, Engine, Fault, Profile, Route};
use serde_json::{Value, json};
use tests::{Chat, Cluster, Fleet, PATIENCE, Plan, Talker, stated, until, words};
use tokio::task::JoinSet;

/// A chat of its own that streams.
fn streamed(name: &str, bytes: usize) -> Value {
    let mut body = Chat::new(name, "").say(bytes).body();
    body["stream"] = json!(true);
    body
}

/// Requests under way; dropping them hangs up.
type Open = JoinSet<()>;

/// Opens `count` streams through `to` and leaves them open: whatever comes of them is not looked at.
fn open(count: usize, to: SocketAddr, body: impl Fn(usize) -> Value) -> Open {
    let mut streams = Open::new();
    for number in 0..count {
        let body = body(number);
        streams.spawn(async move {
            // They are hung up on, which is all that becomes of them.
            drop(Talker::default().send(to, "/v1/chat/completions", &body).await);
        });
    }
    streams
}

async fn until_running(cluster: &Cluster, url: &str, count: u64, limit: Duration) {
    for replica in cluster.replicas() {
        until(&format!("{} counts {count} at {url}", replica.name), limit, async || {
            let seen = replica.admin().cluster().await?;
            if seen.running[url] == count { Ok(()) } else { Err(seen.json.to_string()) }
        })
        .await;
    }
}

/// Engines that send one token and then nothing, so that streams stay open until their clients leave.
fn stall(fleet: &Fleet) {
    for engine in fleet.engines() {
        engine.fail(Fault::FreezeAfter { tokens: 1 }, None);
    }
}

#[tokio::test]
async fn another_replica_avoids_an_endpoint_that_a_hundred_requests_run_at() {
    let fleet = Fleet::instant(4).await;
    // With this policy a hundred equal prompts all go to their holder.
    let plan = Plan::new(3, &fleet.urls()).settings("policy = \"prefix-longest\"");
    let mut cluster = Cluster::start(plan).await;
    let replicas = cluster.public();
    let body = streamed("the hundred", 2_000);
    let busy = Talker::default().send(replicas[0], "/v1/chat/completions", &body).await.endpoint;
    let busy = busy.expect("replies name their endpoint");
    stall(&fleet);
    let hundred = open(100, replicas[0], |_| body.clone());
    until("the hundred run", PATIENCE, async || {
        // The first one came before them.
        let sent = fleet.at(&busy).requests(Route::Chat) - 1;
        if sent == 100 { Ok(()) } else { Err(format!("{sent} run: {:?}", fleet.requests())) }
    })
    .await;
    let limit = stated(Duration::from_millis(300));
    until_running(&cluster, &busy, 100, limit).await;
    // What is in flight counts the same whatever the policy; the default one is the one to be sure of.
    for policy in ["prefix-longest", "least-load", "cost"] {
        cluster.reconfigure(&format!("policy = \"{policy}\""));
        for replica in cluster.replicas() {
            let what = format!("{} decides by {policy}", replica.name);
            until(&what, PATIENCE, async || {
                let seen = replica.admin().cluster().await?;
                if seen.json["policy"] == policy { Ok(()) } else { Err(seen.json["policy"].to_string()) }
            })
            .await;
            for number in 0..20 {
                let explained =
                    replica.admin().explain_chat(&streamed(&format!("other {number}"), 1_500)).await;
                assert_ne!(explained.chosen, busy, "{} by {policy}: {explained:?}", replica.name);
            }
        }
    }
    drop(hundred);
    cluster.wait_until_idle(stated(Duration::from_secs(2))).await;
}

#[tokio::test]
async fn a_hot_endpoint_does_not_take_other_chats_from_their_idle_homes() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let talker = Talker::default();
    let mut chats = Vec::new();
    for number in 0..12 {
        let mut chat = Chat::new(&format!("chat {number}"), "");
        let reply = talker.chat(replicas[number % 3], &chat.say(2_500).body()).await;
        chat.answered(&reply.text);
        chats.push((chat, reply.endpoint));
    }
    let hot = chats[0].1.clone();
    fleet.at(&hot).fail(Fault::FreezeAfter { tokens: 1 }, None);
    // The hot one's own chat, again and again: the longest part of its prompt is warm only there.
    let body = {
        let mut body = chats[0].0.clone().say(100).body();
        body["stream"] = json!(true);
        body
    };
    let before = fleet.at(&hot).requests(Route::Chat);
    let streams = open(12, replicas[0], |_| body.clone());
    until("some run at the hot endpoint", PATIENCE, async || {
        let sent = fleet.at(&hot).requests(Route::Chat) - before;
        if sent >= 4 { Ok(()) } else { Err(format!("{sent} run: {:?}", fleet.requests())) }
    })
    .await;
    for (number, (chat, home)) in chats.iter_mut().enumerate().filter(|(_, (_, home))| *home != hot) {
        let body = chat.say(400).body();
        let admin = cluster.replicas()[(number + 1) % 3].admin();
        until("the chat goes home", PATIENCE, async || {
            let explained = admin.explain_chat(&body).await;
            if explained.chosen == *home { Ok(()) } else { Err(format!("home {home}: {explained:?}")) }
        })
        .await;
    }
    drop(streams);
}

#[tokio::test]
async fn counters_change_by_requests_alone_however_often_engines_are_looked_at() {
    let fleet = Fleet::instant(1).await;
    let plan = Plan::new(2, &fleet.urls()).flags(&["--scrape-every-ms", "20", "--probe-every-ms", "20"]);
    let cluster = Cluster::start(plan).await;
    let url = fleet.urls().remove(0);
    let engine = &fleet.engines()[0];
    stall(&fleet);
    // The engine says that nothing runs: what it says is not what is in flight.
    engine.set_lies(engine::Lies { running: Some(0), ..engine::Lies::default() });
    let streams = open(100, cluster.public()[0], |number| streamed(&format!("chat {number}"), 200));
    until_running(&cluster, &url, 100, PATIENCE).await;
    let looks = || engine.requests(Route::Metrics).min(engine.requests(Route::Health));
    let before = looks();
    until("twenty looks at the engine", PATIENCE, async || {
        for replica in cluster.replicas() {
            let seen = replica.admin().cluster().await?;
            assert_eq!(seen.running[&url], 100, "{} after {} looks", replica.name, looks() - before);
        }
        if looks() >= before + 20 { Ok(()) } else { Err(format!("{} looks", looks() - before)) }
    })
    .await;
    drop(streams);
    cluster.wait_until_idle(stated(Duration::from_secs(2))).await;
}

#[tokio::test]
async fn a_stream_counts_until_its_last_byte() {
    let fleet = Fleet::instant(1).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let url = fleet.urls().remove(0);
    let engine = &fleet.engines()[0];
    engine.fail(Fault::Drip { bytes: 64, every_ms: 20 }, Some(1));
    let mut streams = open(1, cluster.public()[0], |_| {
        let mut body = streamed("long", 200);
        body["max_tokens"] = json!(64);
        body["ignore_eos"] = json!(true);
        body
    });
    until_running(&cluster, &url, 1, PATIENCE).await;
    // As long as it flows it counts, over more than one look at the engine and many rounds of gossip.
    let before = engine.requests(Route::Metrics);
    until("four more looks at the engine", PATIENCE, async || {
        for replica in cluster.replicas() {
            let seen = replica.admin().cluster().await?;
            assert!(streams.try_join_next().is_none(), "the stream is too short for this test");
            assert_eq!(seen.running[&url], 1, "{}", replica.name);
        }
        let looks = engine.requests(Route::Metrics) - before;
        if looks >= 4 { Ok(()) } else { Err(format!("{looks} looks")) }
    })
    .await;
    let ended = streams.join_next().await;
    assert!(ended.is_some_and(|ended| ended.is_ok()));
    cluster.wait_until_idle(stated(Duration::from_secs(2))).await;
}

#[tokio::test]
async fn a_burst_spreads_evenly_before_any_look_at_the_engines() {
    let fleet = Fleet::instant(4).await;
    let plan = Plan::new(1, &fleet.urls()).settings("policy = \"least-load\"");
    let cluster = Cluster::start(plan.flags(&["--scrape-every-ms", "60000"])).await;
    stall(&fleet);
    let streams = open(100, cluster.public()[0], |number| streamed(&format!("chat {number}"), 300));
    until("all run", PATIENCE, async || {
        let all: u64 = fleet.requests().iter().sum();
        if all == 100 { Ok(()) } else { Err(format!("{all} run")) }
    })
    .await;
    let requests = fleet.requests();
    let (least, most) = (requests.iter().min(), requests.iter().max());
    assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 3), "{requests:?}");
    drop(streams);
}

#[tokio::test]
async fn after_load_with_hang_ups_at_any_time_nothing_is_left_anywhere() {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.timing = config.timing.sped_up(10.0);
    let fleet = Fleet::of(4, config).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let mut clients = JoinSet::new();
    for client in 0..25 {
        let replicas = replicas.clone();
        clients.spawn(async move {
            for turn in 0..20 {
                let number = client * 20 + turn;
                let mut body = Chat::new(&format!("chat {number}"), &words("system", 340)).say(1_000).body();
                body["stream"] = json!(number % 3 != 0);
                body["max_tokens"] = json!(40);
                let to = replicas[number % 3];
                // From before the connection is made to after the end.
                let patience = Duration::from_micros((number as u64 * 7_919) % 120_000);
                let talker = Talker::default();
                let asked = talker.send(to, "/v1/chat/completions", &body);
                drop(tokio::time::timeout(patience, asked).await);
            }
        });
    }
    clients.join_all().await;
    cluster.wait_until_idle(stated(Duration::from_secs(2))).await;
    for replica in cluster.replicas() {
        let metrics = replica.admin().metrics().await;
        assert_eq!(metrics.sum("grapevine_requests_in_flight", &[]), Some(0.0), "{}", replica.name);
        assert_eq!(metrics.sum("grapevine_endpoint_running", &[]), Some(0.0), "{}", replica.name);
        let (_, requests) = replica.admin().get("/requests").await.expect("requests");
        let rows: Vec<Value> = serde_json::from_str(&requests).expect("JSON");
        let ended = ["finished", "failed", "cancelled"];
        let open: Vec<&Value> =
            rows.iter().filter(|row| !ended.contains(&row["phase"].as_str().unwrap_or_default())).collect();
        assert!(!rows.is_empty() && open.is_empty() && rows.len() <= 1_000, "{}: {open:?}", replica.name);
    }
    let abandoned: u64 = fleet.engines().iter().map(|engine| engine.stats().requests_abandoned).sum();
    assert!(abandoned > 0, "no hang-up reached an engine");
    until("the engines are idle", PATIENCE, async || {
        let busy = |engine: &&Engine| engine.stats().running + engine.stats().waiting > 0;
        match fleet.engines().iter().find(busy) {
            Some(engine) => Err(format!("{:?}", engine.stats())),
            None => Ok(()),
        }
    })
    .await;
}
