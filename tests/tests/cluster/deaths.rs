//! A replica or an engine that dies takes with it only what ran through it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use engine::{Config, Fault, Profile};
use grapevine::load::ErrorKind;
use serde_json::json;
use tests::{Chat, Cluster, Fleet, PATIENCE, Plan, Talker, stated, until, words};
use tokio::task::JoinSet;

#[tokio::test]
async fn the_next_turns_of_a_killed_replicas_chats_find_their_engines_at_once_through_the_others() {
    let fleet = Fleet::instant(4).await;
    let mut cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let talker = Talker::default();
    let mut chats = Vec::new();
    for number in 0..40 {
        let mut chat = Chat::new(&format!("chat {number}"), &words("system", 340));
        let reply = talker.chat(replicas[0], &chat.say(2_500).body()).await;
        chat.answered(&reply.text);
        chats.push((chat, reply.endpoint));
    }
    cluster.replica_mut(0).kill();
    let killed = Instant::now();
    let mut at_home = 0;
    for (number, (chat, home)) in chats.iter_mut().enumerate() {
        let reply = talker.chat(replicas[1 + number % 2], &chat.say(400).body()).await;
        at_home += usize::from(reply.endpoint == *home);
    }
    assert!(at_home >= 39, "{at_home} of 40 at home, {:?} after the kill", killed.elapsed());
}

#[tokio::test]
async fn what_ran_through_a_killed_replica_no_longer_counts_after_two_seconds() {
    let fleet = Fleet::instant(4).await;
    let mut cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    for engine in fleet.engines() {
        engine.fail(Fault::FreezeAfter { tokens: 1 }, None);
    }
    let to = cluster.public()[0];
    let mut streams = JoinSet::new();
    for number in 0..40 {
        streams.spawn(async move {
            let mut body = Chat::new(&format!("chat {number}"), "").say(500).body();
            body["stream"] = json!(true);
            drop(Talker::default().send(to, "/v1/chat/completions", &body).await);
        });
    }
    let counted = |seen: &tests::Seen| -> u64 {
        seen.by_replica.values().filter_map(|rows| rows.get("replica-0")).sum()
    };
    for replica in &cluster.replicas()[1..] {
        until("the load is known", PATIENCE, async || match counted(&replica.admin().cluster().await?) {
            40 => Ok(()),
            count => Err(format!("{}: {count}", replica.name)),
        })
        .await;
    }
    cluster.replica_mut(0).kill();
    for replica in &cluster.replicas()[1..] {
        until("the load is gone", stated(Duration::from_secs(2)), async || {
            let seen = replica.admin().cluster().await?;
            let gone =
                counted(&seen) == 0 && seen.charges() == 0 && !seen.live.contains(&"replica-0".to_owned());
            if gone { Ok(()) } else { Err(format!("{}: {}", replica.name, seen.json)) }
        })
        .await;
    }
}

/// What became of the requests of a load.
#[derive(Default)]
struct Ended {
    whole: usize,
    failed: Vec<Failed>,
}

#[derive(Debug)]
struct Failed {
    through: SocketAddr,
    kind: ErrorKind,
    status: Option<u16>,
    text: String,
}

/// Twelve clients, each with streams one after the other, over `replicas` in turn, until `enough` requests have
/// ended. `midway` is run once a quarter has.
async fn under_load(replicas: &[SocketAddr], enough: usize, midway: impl AsyncFnOnce()) -> Ended {
    let begun = Arc::new(AtomicUsize::new(0));
    let mut clients = JoinSet::new();
    for _ in 0..12 {
        let (begun, replicas) = (Arc::clone(&begun), replicas.to_vec());
        clients.spawn(async move {
            let mut ended = Ended::default();
            loop {
                let number = begun.fetch_add(1, Ordering::Relaxed);
                if number >= enough {
                    return ended;
                }
                let mut body = Chat::new(&format!("chat {number}"), &words("system", 340)).say(600).body();
                body["stream"] = json!(true);
                body["max_tokens"] = json!(24);
                body["ignore_eos"] = json!(true);
                let through = replicas[number % replicas.len()];
                let outcome = Talker::default().send(through, "/v1/chat/completions", &body).await;
                match outcome.verdict {
                    Ok(()) => ended.whole += 1,
                    Err(failure) => ended.failed.push(Failed {
                        through,
                        kind: failure.kind,
                        status: outcome.status,
                        text: outcome.text,
                    }),
                }
            }
        });
    }
    until("a quarter of the requests has begun", PATIENCE, async || {
        let count = begun.load(Ordering::Relaxed);
        if count * 4 >= enough { Ok(()) } else { Err(format!("{count} have begun")) }
    })
    .await;
    midway().await;
    clients.join_all().await.into_iter().fold(Ended::default(), |mut all, part| {
        all.whole += part.whole;
        all.failed.extend(part.failed);
        all
    })
}

async fn engines_that_take_their_time(count: usize) -> Fleet {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.timing = config.timing.sped_up(4.0);
    Fleet::of(count, config).await
}

#[tokio::test]
async fn one_replicas_death_costs_only_the_requests_that_run_through_it() {
    let fleet = engines_that_take_their_time(4).await;
    let mut cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let victim = replicas[2];
    let ended = under_load(&replicas, 240, async || cluster.replica_mut(2).kill()).await;
    let strangers: Vec<&Failed> = ended.failed.iter().filter(|failed| failed.through != victim).collect();
    assert!(strangers.is_empty(), "{strangers:?}");
    assert!(ended.failed.iter().any(|failed| failed.through == victim), "nothing ran through the victim");
    cluster.wait_until_idle(stated(Duration::from_secs(2)).saturating_mul(2)).await;
}

#[tokio::test]
async fn a_killed_engine_fails_no_stream_for_all_go_on_elsewhere() {
    let ended = while_an_engine_is_killed("").await;
    assert!(ended.failed.is_empty(), "{:?}", ended.failed);
    assert_eq!(ended.whole, 240);
}

/// What became of 240 requests through three replicas over four engines of which one is killed midway.
async fn while_an_engine_is_killed(settings: &str) -> Ended {
    let mut fleet = engines_that_take_their_time(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls()).settings(settings)).await;
    let victim = fleet.take(0);
    let ended = under_load(&cluster.public(), 240, async || {
        until("the engine is in the middle of something", PATIENCE, async || match victim.stats().running {
            0 => Err("nothing runs".to_owned()),
            _ => Ok(()),
        })
        .await;
        victim.kill().await;
    })
    .await;
    cluster.wait_until_idle(stated(Duration::from_secs(2))).await;
    ended
}

#[tokio::test]
async fn where_streams_are_not_resumed_a_killed_engine_fails_nothing_that_has_no_byte_yet_and_ends_cut_streams_with_an_error()
 {
    let ended = while_an_engine_is_killed("resume = false").await;
    // A stream that was cut after its first byte says so; the client would take a stream without an end, or
    // with an end that is none, for something else than an error event.
    let others: Vec<&Failed> = ended
        .failed
        .iter()
        .filter(|failed| {
            failed.kind != ErrorKind::ErrorEvent || failed.text.is_empty() || failed.status != Some(200)
        })
        .collect();
    assert!(others.is_empty(), "{others:?}");
    assert!(ended.failed.len() <= 24, "{} streams were cut: {:?}", ended.failed.len(), ended.failed);
    assert_eq!(ended.whole + ended.failed.len(), 240);
}

#[tokio::test]
async fn a_stream_cut_after_its_first_byte_ends_in_an_error_event_and_no_done() {
    // Tokens come one by one, so that the first are at the client before the cut.
    let fleet = engines_that_take_their_time(1).await;
    let cluster = Cluster::start(Plan::new(1, &fleet.urls())).await;
    let address = cluster.public()[0];
    for fault in [Fault::ResetAfter { tokens: 3 }, Fault::ErrorEventAfter { tokens: 3 }] {
        fleet.engines()[0].fail(fault, Some(1));
        let mut body = Chat::new("chat", "").say(300).body();
        body["stream"] = json!(true);
        let raw = raw_post(address, &body.to_string()).await;
        let events: Vec<&str> = raw.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let errors = events.iter().filter(|event| event.contains("\"error\"")).count();
        assert_eq!(errors, 1, "{fault:?}: {raw}");
        assert!(!raw.contains("[DONE]"), "{fault:?}: {raw}");
        let last = events.last().and_then(|event| serde_json::from_str::<serde_json::Value>(event).ok());
        let keys = last.map(|event| {
            let error = event["error"].as_object().cloned().unwrap_or_default();
            error.into_iter().map(|(key, _)| (key, ())).collect::<BTreeMap<_, _>>()
        });
        for key in ["message", "type", "param", "code"] {
            assert!(keys.as_ref().is_some_and(|keys| keys.contains_key(key)), "{fault:?}: no {key}: {raw}");
        }
    }
}

/// Sends a chat and returns everything that comes back until the connection ends, as it came.
async fn raw_post(to: SocketAddr, body: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut connection = tokio::net::TcpStream::connect(to).await.expect("a connection");
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    connection.write_all(format!("{head}{body}").as_bytes()).await.expect("the request is taken");
    let mut answer = Vec::new();
    // A reset is one of the ways in which a cut stream may end; what came before it is what counts.
    drop(tokio::time::timeout(PATIENCE, connection.read_to_end(&mut answer)).await.expect("an end"));
    String::from_utf8_lossy(&answer).into_owned()
}
