//! The core in virtual time over generated chats: replicas that hear of each other late, engines that queue and
//! forget.
//!
//! Everything is seeded; a failing assertion names the seed. `cargo test -p lab --test chats -- --nocapture` prints the
//! figures.

use std::time::Duration;

use lab::{
    ChatFigures, ChatShape, Crowding, Decider, EngineSpec, Figures, Gossip, Limits, Scenario, SchedulerKind,
    Timing, Workload,
};
use routing::policy::PolicyName;
use routing::settings::Settings;

/// An engine that computes one prompt after the other: microseconds per prompt token that is not cached, per prompt,
/// and per output token of a request alone (each further one adds 1/32), and the blocks of 16 tokens that it caches.
fn one_at_a_time(prefill_token_us: u64, base_us: u64, itl_us: u64, kv_blocks: u32) -> EngineSpec {
    EngineSpec {
        scheduler: SchedulerKind::Fifo,
        timing: Timing {
            prefill_base: Duration::from_micros(base_us),
            prefill_per_token: Duration::from_micros(prefill_token_us),
            inter_token: Duration::from_micros(itl_us),
            crowding: Crowding::Each(1.0 / 32.0),
            beside_prefill: 1.0,
        },
        limits: Limits { block_tokens: 16, kv_blocks, step_tokens_max: 1, running_max: 1, waiting_max: None },
    }
}

/// Each change is heard by the other replicas after so long.
fn heard_after(delay: Duration) -> Gossip {
    Gossip { push_every: Some(Duration::ZERO), delay, ..Gossip::default() }
}

/// The chats of a scenario.
fn chats(scenario: &Scenario) -> ChatShape {
    match scenario.workload {
        Workload::Chats(shape) => shape,
        Workload::Trace(_) => panic!("chats are generated here"),
    }
}

fn at_home(figures: &Figures) -> ChatFigures {
    figures.chats.expect("chats have such figures")
}

/// Four engines that compute one prompt at a time and cache a third of what is asked of them; 16 clients that
/// ask again as soon as they are answered; 12 tenants.
fn headline(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        decider,
        engines: vec![one_at_a_time(250, 5_000, 5_000, 700); 4],
        workload: Workload::Chats(ChatShape {
            tenants: 12,
            common_bytes: 2_048,
            tenant_bytes: 6_144,
            first_bytes: 200,
            turn_bytes: 200,
            turns: 4,
            output_tokens: 32,
            clients: 16,
            chats: 300,
            think: Duration::ZERO,
            chat: true,
        }),
        seed,
        gossip: heard_after(Duration::from_millis(3)),
        usage: true,
    }
}

/// One chat after the other, at engines that answer at once, and the next turn comes before the other
/// replicas have heard of the last one.
fn one_after_the_other(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        engines: vec![one_at_a_time(0, 500, 10, 100_000); 4],
        workload: Workload::Chats(ChatShape {
            tenants: 1,
            common_bytes: 340,
            tenant_bytes: 0,
            first_bytes: 2_500,
            turn_bytes: 400,
            turns: 5,
            output_tokens: 16,
            clients: 1,
            chats: 80,
            think: Duration::from_millis(1),
            chat: true,
        }),
        ..headline(decider, seed)
    }
}

/// Fifty tenants behind a long common system prompt, at a load that one engine could not carry.
fn behind_a_common_prompt(common_bytes: usize, decider: Decider, seed: u64) -> Scenario {
    Scenario {
        engines: vec![one_at_a_time(250, 30_000, 12_000, 12_000); 4],
        workload: Workload::Chats(ChatShape {
            tenants: 50,
            common_bytes,
            tenant_bytes: 6_000,
            first_bytes: 400,
            turn_bytes: 400,
            turns: 1,
            output_tokens: 32,
            clients: 16,
            chats: 600,
            think: Duration::ZERO,
            chat: true,
        }),
        ..headline(decider, seed)
    }
}

fn replicas(count: usize) -> Decider {
    policy(count, PolicyName::Cost)
}

fn policy(count: usize, policy: PolicyName) -> Decider {
    Decider::Replicas { count, settings: Box::new(Settings { policy, ..Settings::default() }) }
}

/// Runs the scenario with each of `seeds` and gives the mean figures.
fn mean(name: &str, seeds: std::ops::Range<u64>, of: impl Fn(u64) -> Scenario) -> Figures {
    let all: Vec<Figures> =
        seeds.map(|seed| lab::run(&of(seed)).expect("the scenario has no faults")).collect();
    let mean = Figures::mean(&all);
    println!("{name:34} {mean}");
    mean
}

/// The headline bench in virtual time.
fn bench(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        decider,
        engines: vec![one_at_a_time(83, 0, 4_000, 710); 4],
        workload: Workload::Chats(ChatShape::default()),
        seed,
        gossip: heard_after(Duration::from_millis(3)),
        usage: true,
    }
}

/// Sixteen clients with chats of their own, at engines that compute one prompt at a time.
fn sixteen_clients(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        engines: vec![one_at_a_time(250, 30_000, 12_000, 100_000); 4],
        workload: Workload::Chats(ChatShape {
            clients: 16,
            think: Duration::ZERO,
            output_tokens: 32,
            ..chats(&one_after_the_other(decider.clone(), seed))
        }),
        ..headline(decider, seed)
    }
}

#[test]
fn sixteen_clients_keep_their_chats_at_home() {
    for count in [1, 3, 8] {
        let name = format!("sixteen clients, {count} replicas");
        let figures = mean(&name, 1..3, |seed| sixteen_clients(replicas(count), seed));
        assert!(at_home(&figures).follow_ups_at_home >= 0.98, "{count} replicas: {figures}");
        assert!(figures.busiest_over_mean <= 1.35, "{count} replicas: {figures}");
    }
}

#[test]
fn the_headline_bench_in_virtual_time() {
    let least = mean("bench, least connections", 1..3, |seed| bench(Decider::LeastConnections, seed));
    mean("bench, all-knowing", 1..3, |seed| bench(Decider::AllKnowing, seed));
    for count in [1, 3, 8] {
        let figures = mean(&format!("bench, {count} replicas"), 1..3, |seed| bench(replicas(count), seed));
        assert!(
            figures.ttft_mean_ms <= 0.25 * least.ttft_mean_ms,
            "{count} replicas {figures}, least connections {least}"
        );
        assert!(figures.busiest_over_mean <= 1.35, "{count} replicas: {figures}");
    }
}

#[test]
fn three_replicas_come_near_an_all_knowing_router_and_far_below_least_connections() {
    let least = mean("least connections", 1..3, |seed| headline(Decider::LeastConnections, seed));
    let oracle = mean("all-knowing", 1..3, |seed| headline(Decider::AllKnowing, seed));
    let one = mean("cost, 1 replica", 1..3, |seed| headline(replicas(1), seed));
    let three = mean("cost, 3 replicas", 1..3, |seed| headline(replicas(3), seed));
    assert!(one.ttft_mean_ms < 1.15 * oracle.ttft_mean_ms, "1 replica {one}, all-knowing {oracle}");
    assert!(three.ttft_mean_ms < 0.4 * least.ttft_mean_ms, "3 replicas {three}, least connections {least}");
    assert!(three.hit_rate > 0.97 * one.hit_rate, "3 replicas {three}, 1 replica {one}");
    assert!(three.busiest_over_mean <= 1.35, "{three}");
}

#[test]
fn chats_stay_at_home_though_their_turns_outrun_the_news() {
    for count in [1, 3, 8] {
        let name = format!("one after the other, {count} replicas");
        let figures = mean(&name, 1..5, |seed| one_after_the_other(replicas(count), seed));
        assert!(at_home(&figures).follow_ups_at_home >= 0.97, "{count} replicas: {figures}");
        assert!(figures.busiest_over_mean <= 1.35, "{count} replicas: {figures}");
    }
    let heard = mean("the same, news in time", 1..5, |seed| Scenario {
        gossip: heard_after(Duration::from_millis(1)),
        ..one_after_the_other(replicas(3), seed)
    });
    assert!(at_home(&heard).follow_ups_at_home >= 0.99, "{heard}");
    assert!(heard.busiest_over_mean <= 1.35, "{heard}");
}

#[test]
fn a_long_common_prompt_neither_draws_all_to_one_engine_nor_parts_tenants_from_theirs() {
    for (common_tokens, common_bytes) in [(2_000, 8_000), (8_000, 32_000)] {
        let name = format!("{common_tokens} common tokens");
        let run = |decider: Decider, who: &str| {
            mean(&format!("{name}, {who}"), 1..3, |seed| {
                behind_a_common_prompt(common_bytes, decider.clone(), seed)
            })
        };
        let oracle = run(Decider::AllKnowing, "all-knowing");
        let three = run(replicas(3), "3 replicas");
        assert!(three.busiest_over_mean <= 1.3, "{name}: {three}");
        assert!(at_home(&three).tenants_at_home >= 0.75, "{name}: {three}");
        assert!(three.ttft_mean_ms < 1.15 * oracle.ttft_mean_ms, "{name}: {three}, all-knowing {oracle}");
    }
}

#[test]
fn prompts_that_share_nothing_but_their_first_block_are_spread() {
    let of = |seed| Scenario {
        workload: Workload::Chats(ChatShape {
            tenants: 400,
            common_bytes: 600,
            tenant_bytes: 2_000,
            turns: 1,
            ..chats(&headline(replicas(3), seed))
        }),
        ..headline(replicas(3), seed)
    };
    let figures = mean("one common block", 1..4, of);
    assert!(figures.busiest_over_mean <= 1.3, "{figures}");
}

#[test]
fn every_policy_that_follows_load_spreads_prompts_that_come_one_at_a_time() {
    let of = |name, seed| Scenario {
        workload: Workload::Chats(ChatShape {
            tenants: 400,
            common_bytes: 0,
            tenant_bytes: 300,
            first_bytes: 20,
            turn_bytes: 20,
            turns: 1,
            chats: 400,
            chat: false,
            ..chats(&one_after_the_other(replicas(1), seed))
        }),
        ..one_after_the_other(policy(1, name), seed)
    };
    use PolicyName as P;
    for name in
        [P::Cost, P::PrefixLongest, P::CacheAware, P::Session, P::RoundRobin, P::LeastLoad, P::PowerOfTwo]
    {
        for seed in 1..4 {
            let served = lab::run(&of(name, seed)).expect("the scenario has no faults").served;
            let even = served.iter().all(|count| (70..=130).contains(count));
            assert!(even, "{name} with seed {seed}: {served:?}");
        }
    }
}

#[test]
fn engines_that_report_nothing_get_affinity_and_spread_all_the_same() {
    let silent =
        mean("no usage, 3 replicas", 1..3, |seed| Scenario { usage: false, ..headline(replicas(3), seed) });
    let least = mean("least connections", 1..3, |seed| headline(Decider::LeastConnections, seed));
    assert!(silent.ttft_mean_ms < 0.5 * least.ttft_mean_ms, "{silent}, least connections {least}");
    assert!(silent.busiest_over_mean <= 1.35, "{silent}");
}
