//! Chats stay where their prefix is warm, whichever replica a turn comes through, and the work is spread.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::{Config, Profile};
use grapevine::load::{self, ChatShape, Live, Order, Pace, Report, Source, Target, Targets};
use serde_json::json;
use tests::{Chat, Cluster, Fleet, MODEL, Plan, Talker, words};

/// Sends `chats` through all replicas in turn, each request on a connection of its own, without a session.
pub(crate) async fn drive(cluster: &Cluster, chats: ChatShape, clients: usize, order: Order) -> Report {
    let target =
        |address| Target::new(&format!("http://{address}"), "/v1/chat/completions").expect("a target");
    let targets = Targets::new(cluster.public().into_iter().map(target).collect()).expect("targets");
    let pace = Pace::Closed { clients, order };
    let mut plan = load::Plan::new(targets, Source::Chat(Arc::new(chats)), pace);
    plan.envelope.model = Some(MODEL.to_owned());
    plan.wire.fresh_connections = true;
    load::drive(plan, Live::new(), std::future::pending()).await
}

fn assert_at_home(report: &Report, share_min: f64, busiest_max: f64) {
    assert_eq!(report.errors, BTreeMap::new(), "{:?}", report.error_details);
    let at_home = report.follow_up_at_home.expect("follow-up turns");
    let busiest = report.busiest_over_mean().expect("named endpoints");
    assert!(
        at_home >= share_min && busiest <= busiest_max,
        "at home {at_home:.3} of {}, busiest over mean {busiest:.2}: {:?}",
        report.follow_ups,
        report.per_endpoint
    );
}

/// The busiest over the mean of all engines, those that got nothing included.
fn busiest_over_mean(requests: &[u64]) -> f64 {
    let all: u64 = requests.iter().sum();
    requests.iter().copied().max().unwrap_or(0) as f64 * requests.len() as f64 / (all as f64).max(1.0)
}

#[tokio::test]
async fn one_at_a_time_98_percent_of_follow_up_turns_stay_and_the_work_is_spread() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    // 80 chats of 5 turns, 2.5 KB at first behind a common system prompt of 340 bytes, then 400 bytes a turn.
    let report = drive(&cluster, ChatShape::default(), 1, Order::Chats).await;
    assert_eq!(report.requests, 400);
    assert_at_home(&report, 0.98, 1.35);
}

#[tokio::test]
async fn every_chats_next_turn_after_all_others_stays_at_home_too() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let report = drive(&cluster, ChatShape::default(), 1, Order::Turns).await;
    assert_eq!(report.requests, 400);
    assert_at_home(&report, 0.98, 1.35);
}

#[tokio::test]
async fn sixteen_clients_on_engines_that_queue_keep_98_percent_of_follow_up_turns_at_home() {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.timing = config.timing.sped_up(4.0);
    let fleet = Fleet::of(4, config).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let report = drive(&cluster, ChatShape::default(), 16, Order::Chats).await;
    assert_eq!(report.requests, 400);
    assert_at_home(&report, 0.98, 1.35);
}

#[tokio::test]
async fn engines_that_say_nothing_of_themselves_get_the_same_affinity_and_spread() {
    let config = Config { metrics: false, cached_tokens: false, ..Config::profile(Profile::Instant) };
    let fleet = Fleet::of(4, config).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let report = drive(&cluster, ChatShape::default(), 1, Order::Chats).await;
    assert_at_home(&report, 0.98, 1.35);
}

#[tokio::test]
async fn three_replicas_have_the_hit_rate_of_one() {
    let chats = || ChatShape { tenants: 8, tenant_bytes: 2_000, sessions: Some(60), ..ChatShape::default() };
    let mut hit_rates = Vec::new();
    for replicas in [1, 3] {
        let fleet = Fleet::instant(4).await;
        let cluster = Cluster::start(Plan::new(replicas, &fleet.urls())).await;
        let report = drive(&cluster, chats(), 4, Order::Chats).await;
        assert_eq!(report.errors, BTreeMap::new());
        hit_rates.push(fleet.hit_rate());
    }
    assert!(
        hit_rates[1] >= 0.97 * hit_rates[0],
        "one replica {:.3}, three {:.3}",
        hit_rates[0],
        hit_rates[1]
    );
}

#[tokio::test]
async fn a_session_header_keeps_unrelated_prompts_together_through_any_replica() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let (mut stayed, mut later) = (0, 0);
    for session in 0..200 {
        let talker = Talker::with_headers(&[("x-session-id", &format!("session {session}"))]);
        let mut home = None;
        for turn in 0..6 {
            let mut chat = Chat::new(&format!("{session}-{turn}"), "");
            let through = replicas[(session + turn) % replicas.len()];
            let reply = talker.chat(through, &chat.say(60).body()).await;
            match &home {
                None => home = Some(reply.endpoint),
                Some(home) => {
                    later += 1;
                    stayed += usize::from(*home == reply.endpoint);
                }
            }
        }
    }
    assert!(stayed * 100 >= later * 95, "{stayed} of {later} at home");
    let busiest = busiest_over_mean(&fleet.requests());
    assert!(busiest <= 1.35, "busiest over mean {busiest:.2}: {:?}", fleet.requests());
}

#[tokio::test]
async fn distinct_prompts_one_at_a_time_go_to_all_endpoints_alike() {
    for bytes in [20, 600] {
        let fleet = Fleet::instant(4).await;
        let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
        let replicas = cluster.public();
        for n in 0..400 {
            let mut chat = Chat::new(&format!("prompt {n}"), "");
            Talker::default().chat(replicas[n % 3], &chat.say(bytes).body()).await;
        }
        let requests = fleet.requests();
        assert!(requests.iter().all(|each| (70..=130).contains(each)), "{bytes} bytes: {requests:?}");
    }
}

#[tokio::test]
async fn a_first_block_that_all_prompts_share_does_not_send_them_to_one_place() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let shared = words("what all have", 2_048);
    for n in 0..300 {
        let prompt = format!("{shared}{}", words(&format!("request {n}"), 3_000));
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 4});
        Talker::default().complete(replicas[n % 3], &body).await;
    }
    let busiest = busiest_over_mean(&fleet.requests());
    assert!(busiest <= 1.3, "busiest over mean {busiest:.2}: {:?}", fleet.requests());
}

/// Sends 500 requests of 50 tenants, by hash, from 16 clients; for each tenant the requests by endpoint.
async fn tenants(cluster: &Cluster, common_bytes: usize) -> BTreeMap<u64, BTreeMap<String, u32>> {
    let replicas = cluster.public();
    let common: Arc<str> = words("common", common_bytes).into();
    let next = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (replicas, common, next) = (replicas.clone(), Arc::clone(&common), Arc::clone(&next));
        clients.spawn(async move {
            let mut seen = Vec::new();
            loop {
                let n = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                if n >= 500 {
                    return seen;
                }
                let tenant = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 0xffff;
                let tenant = tenant % 50;
                let system = format!("{common}{}", words(&format!("tenant {tenant}"), 3_000));
                let mut chat = Chat::new(&format!("request {n}"), &system);
                let reply = Talker::default().chat(replicas[n as usize % 3], &chat.say(200).body()).await;
                seen.push((tenant, reply.endpoint));
            }
        });
    }
    let mut by_tenant: BTreeMap<u64, BTreeMap<String, u32>> = BTreeMap::new();
    for (tenant, endpoint) in clients.join_all().await.into_iter().flatten() {
        *by_tenant.entry(tenant).or_default().entry(endpoint).or_default() += 1;
    }
    by_tenant
}

#[tokio::test]
async fn a_long_common_system_prompt_does_not_make_tenants_alike() {
    for common_tokens in [2_000, 8_000] {
        let mut config = Config::profile(Profile::Llama8bH100);
        config.timing = config.timing.sped_up(20.0);
        let fleet = Fleet::of(4, config).await;
        let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
        let by_tenant = tenants(&cluster, common_tokens * 4).await;
        let all: u32 = by_tenant.values().flat_map(BTreeMap::values).sum();
        let at_home: u32 = by_tenant.values().filter_map(|counts| counts.values().max()).sum();
        let busiest = busiest_over_mean(&fleet.requests());
        assert!(
            at_home * 10 >= all * 8 && busiest <= 1.3,
            "{common_tokens} common tokens: {at_home} of {all} at their tenant's own endpoint, busiest over mean \
             {busiest:.2}: {:?}",
            fleet.requests()
        );
    }
}
