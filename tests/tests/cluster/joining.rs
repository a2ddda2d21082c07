//! Coming and going: a replica says ready when it knows what the others know, and not for ever later.

use std::time::{Duration, Instant};

use grapevine::load::{ChatShape, Order};
use tests::{Chat, Cluster, Fleet, PATIENCE, Plan, Talker, until, words};
use tokio::io::AsyncWriteExt as _;

use crate::home::drive;

#[tokio::test]
async fn a_restarted_replica_knows_what_is_warm_from_the_moment_it_says_ready() {
    let fleet = Fleet::instant(4).await;
    let mut cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let mut warm = Vec::new();
    for number in 0..60 {
        let body = Chat::new(&format!("chat {number}"), &words("system", 340)).say(2_500).body();
        let home = Talker::default().chat(replicas[number % 3], &body).await.endpoint;
        warm.push((body, home));
    }
    cluster.replica_mut(1).kill();
    cluster.restart(1);
    let replica = &cluster.replicas()[1];
    until("the restarted replica is ready", PATIENCE, async || {
        if replica.admin().is_ready().await { Ok(()) } else { Err("not ready".to_owned()) }
    })
    .await;
    // At once, in its first moment.
    let mut cold = Vec::new();
    for (number, (body, home)) in warm.iter().enumerate() {
        let explained = replica.admin().explain_chat(body).await;
        if explained.warm_at(home) == 0 || explained.chosen != *home {
            cold.push((number, explained));
        }
    }
    assert!(cold.is_empty(), "{} of 60: {:?}", cold.len(), cold.first());
}

#[tokio::test]
async fn a_restart_of_one_of_three_costs_less_than_five_points_of_the_hit_rate() {
    let fleet = Fleet::instant(4).await;
    let mut cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let chats = |sessions| ChatShape {
        sessions: Some(sessions),
        turns: 4,
        tenants: 8,
        tenant_bytes: 2_000,
        ..ChatShape::default()
    };
    // The tenants' prompts are warm after the first run, so that all further runs are alike.
    drive(&cluster, chats(32), 4, Order::Chats).await;
    let before = drive(&cluster, chats(32), 4, Order::Chats).await.hit_rate.expect("counted");
    cluster.replica_mut(2).kill();
    cluster.restart(2);
    cluster.wait_until_whole().await;
    let after = drive(&cluster, chats(32), 4, Order::Chats).await.hit_rate.expect("counted");
    assert!(before - after < 0.05, "before {before:.3}, after {after:.3}");
}

#[tokio::test]
async fn a_replica_whose_seeds_do_not_answer_is_ready_after_the_snapshot_wait_and_serves() {
    let fleet = Fleet::instant(2).await;
    let wait = Duration::from_millis(1_500);
    // Nobody listens at the discard port of the loopback interface.
    let flags = ["--seed", "127.0.0.1:9", "--snapshot-wait-ms", "1500"];
    let begun = Instant::now();
    let cluster = Cluster::begin(Plan::new(1, &fleet.urls()).flags(&flags)).await;
    let admin = cluster.replicas()[0].admin();
    let ready_after = until("the replica is ready", PATIENCE, async || {
        if admin.is_ready().await { Ok(begun.elapsed()) } else { Err("not ready".to_owned()) }
    })
    .await;
    assert!(ready_after >= wait, "ready after {ready_after:?}");
    Talker::default().chat(cluster.public()[0], &Chat::new("chat", "").say(100).body()).await;
}

#[tokio::test]
async fn garbage_on_the_gossip_ports_is_counted_and_changes_nothing() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let target = cluster.replicas()[0].gossip();
    let rejected = async || {
        let metrics = cluster.replicas()[0].admin().metrics().await;
        metrics.sum("grapevine_gossip_rejected_total", &[]).unwrap_or(0.0)
    };
    let before = rejected().await;
    let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
    let mut ledger = target;
    ledger.set_port(target.port() + 1);
    for number in 0..200_usize {
        let noise = words(&format!("noise {number}"), 1 + number * 7).into_bytes();
        let noise: Vec<u8> = noise.iter().map(|byte| byte.wrapping_mul(number as u8 | 1)).collect();
        let to = if number % 2 == 0 { target } else { ledger };
        socket.send_to(&noise, to).await.expect("sent");
        if number % 20 == 0 {
            let mut pull = tokio::net::TcpStream::connect(target).await.expect("a connection");
            // The replica may close as soon as it has seen enough.
            drop(pull.write_all(&noise).await);
        }
    }
    // The kernel may drop datagrams of a burst; most arrive.
    until("the garbage is counted", PATIENCE, async || {
        let count = rejected().await - before;
        if count >= 100.0 { Ok(()) } else { Err(format!("{count} counted")) }
    })
    .await;
    let mut chat = Chat::new("chat", &words("system", 340));
    let replicas = cluster.public();
    let first = Talker::default().chat(replicas[0], &chat.say(2_500).body()).await;
    chat.answered(&first.text);
    let body = chat.say(400).body();
    for replica in cluster.replicas() {
        until("placements still arrive", PATIENCE, async || {
            let seen = replica.admin().cluster().await?;
            let explained = replica.admin().explain_chat(&body).await;
            if seen.live.len() == 3 && explained.chosen == first.endpoint {
                Ok(())
            } else {
                Err(format!("{}: {} live, {explained:?}", replica.name, seen.live.len()))
            }
        })
        .await;
    }
}
