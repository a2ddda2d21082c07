//! Prefill and decode engines behind several replicas: what one has under way the others count.

use std::time::Duration;

use engine::{Config, Connector, Engine, Profile, Role, SchedulerKind};
use serde_json::{Value, json};
use tests::{Chat, Cluster, MODEL, PATIENCE, Plan, Talker, until, words};
use tokio::task::JoinSet;

async fn engines(count: usize, role: Role, config: &Config) -> Vec<Engine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        let config = Config { model: MODEL.to_owned(), ..config.clone() };
        engines.push(Engine::start(config.with_role(role, Connector::Nixl)).await.expect("an engine starts"));
    }
    engines
}

fn endpoints(prefill: &[Engine], decode: &[Engine]) -> Vec<String> {
    let of = |engines: &[Engine], role: &str| -> Vec<String> {
        engines.iter().map(|engine| format!("{},role={role}", engine.url())).collect()
    };
    [of(prefill, "prefill"), of(decode, "decode")].concat()
}

fn prompt(name: &str, tokens: usize) -> Value {
    let messages = json!([{"role": "user", "content": words(name, tokens * 4)}]);
    json!({"model": MODEL, "messages": messages, "max_tokens": 4})
}

#[tokio::test]
async fn prefill_legs_held_through_one_replica_count_for_another_s_choice() {
    let mut never = Config::profile(Profile::Instant);
    never.timing.prefill_base = Duration::from_secs(3_600);
    never.scheduler = SchedulerKind::Fifo;
    let prefill = engines(2, Role::Prefill, &never).await;
    let decode = engines(1, Role::Decode, &Config::profile(Profile::Instant)).await;
    let plan = Plan::new(2, &endpoints(&prefill, &decode));
    let cluster = Cluster::start(plan.flags(&["--split", "always", "--policy", "pd-load-aware"])).await;
    let [a, b] = [0, 1].map(|at| &cluster.replicas()[at]);
    let mut held = JoinSet::new();
    let mut ask = |to, name: &str| {
        let body = prompt(name, 1_000);
        held.spawn(async move { Talker::default().send(to, "/v1/chat/completions", &body).await });
    };
    // In flight at both prefill engines, as `replica` counts them, the most first.
    let loads = async |replica: &tests::Replica| {
        let seen = replica.admin().cluster().await?;
        let mut loads = prefill.iter().map(|each| seen.running[&each.url()]).collect::<Vec<_>>();
        loads.sort_unstable_by(|one, other| other.cmp(one));
        Ok::<_, String>(loads)
    };
    for number in 1..=9 {
        ask(a.public(), "the same for all");
        until("the leg is counted at the warm engine", PATIENCE, async || match loads(a).await? {
            loads if loads == [number, 0] => Ok(()),
            loads => Err(format!("{loads:?}")),
        })
        .await;
    }
    until("the other replica counts them", PATIENCE, async || match loads(b).await? {
        loads if loads == [9, 0] => Ok(()),
        loads => Err(format!("{loads:?}")),
    })
    .await;
    ask(b.public(), "another");
    until("its own goes to the least loaded", PATIENCE, async || match loads(b).await? {
        loads if loads == [9, 1] => Ok(()),
        loads => Err(format!("{loads:?}")),
    })
    .await;
    let imbalance = async |replica: &tests::Replica| {
        replica.admin().metrics().await.sum("grapevine_load_imbalance_total", &["role=\"prefill\""])
    };
    assert_eq!((imbalance(a).await, imbalance(b).await), (None, Some(1.0)));
}

#[tokio::test]
async fn cold_prompts_are_prefilled_once_and_both_sides_share_the_work_evenly() {
    let instant = Config::profile(Profile::Instant);
    let (prefill, decode) =
        (engines(2, Role::Prefill, &instant).await, engines(2, Role::Decode, &instant).await);
    let cluster = Cluster::start(Plan::new(3, &endpoints(&prefill, &decode))).await;
    let replicas = cluster.public();
    const PROMPTS: usize = 60;
    for number in 0..PROMPTS {
        let body = prompt(&format!("cold {number}"), 8_000);
        let reply = Talker::default().chat(replicas[number % replicas.len()], &body).await;
        assert!(decode.iter().any(|engine| engine.url() == reply.endpoint), "{}", reply.endpoint);
    }
    let staged: Vec<u64> = prefill.iter().map(|engine| engine.stats().staged).collect();
    let taken: Vec<u64> = decode.iter().map(|engine| engine.stats().transfers).collect();
    for side in [&staged, &taken] {
        assert_eq!(side.iter().sum::<u64>(), PROMPTS as u64, "{staged:?} {taken:?}");
        let busiest = side.iter().max().copied().unwrap_or(0);
        assert!(busiest * 10 <= PROMPTS as u64 / 2 * 13, "{staged:?} {taken:?}");
    }
    let spoiled: u64 = decode.iter().map(|engine| engine.stats().spoiled).sum();
    let pinned: u32 = prefill.iter().map(|engine| engine.stats().pinned_blocks).sum();
    assert_eq!((spoiled, pinned), (0, 0));
}

#[tokio::test]
async fn the_next_turns_of_a_killed_replicas_split_chats_stay_with_their_pairs_through_the_others() {
    const CHATS: usize = 40;
    let instant = Config::profile(Profile::Instant);
    let (prefill, decode) =
        (engines(2, Role::Prefill, &instant).await, engines(2, Role::Decode, &instant).await);
    let mut cluster = Cluster::start(Plan::new(3, &endpoints(&prefill, &decode))).await;
    let replicas = cluster.public();
    let mut chats = Vec::new();
    for number in 0..CHATS {
        let key = format!("session-{number}");
        let talker = Talker::with_headers(&[("x-session-id", &key)]);
        let mut chat = Chat::new(&format!("chat {number}"), "");
        let reply = talker.chat(replicas[0], &chat.say(24_000).body()).await;
        let shown = cluster.replicas()[0].admin().session(&key).await;
        let pair =
            [&shown["pair"]["prefill"], &shown["pair"]["decode"]].map(|url| url.as_str().map(str::to_owned));
        let [Some(prefill), Some(decode)] = pair else { panic!("no pair: {shown}") };
        assert_eq!(reply.endpoint, decode);
        chat.answered(&reply.text);
        chats.push((talker, chat, prefill, decode));
    }
    cluster.replica_mut(0).kill();
    let staged = || prefill.iter().map(|engine| (engine.url(), engine.stats().staged)).collect::<Vec<_>>();
    let asked_more = |before: &[(String, u64)]| {
        let after = staged();
        let more = after.iter().zip(before).find(|(after, before)| after.1 > before.1);
        more.map(|(after, _)| after.0.clone())
    };
    // The second turn adds little to what is warm where it was decoded; the third enough to be split again.
    let mut with_their_pair = [0, 0];
    for (turn, bytes) in [400, 16_000].into_iter().enumerate() {
        for (number, (talker, chat, prefill, decode)) in chats.iter_mut().enumerate() {
            let before = staged();
            let reply = talker.chat(replicas[1 + number % 2], &chat.say(bytes).body()).await;
            chat.answered(&reply.text);
            let split_at = asked_more(&before);
            assert_eq!(split_at.is_some(), turn == 1, "turn {turn} of {number} is split if it is long");
            with_their_pair[turn] +=
                usize::from(reply.endpoint == *decode && split_at.is_none_or(|url| url == *prefill));
        }
    }
    assert!(with_their_pair.iter().all(|count| count * 100 >= CHATS * 95), "{with_their_pair:?} of {CHATS}");
}
