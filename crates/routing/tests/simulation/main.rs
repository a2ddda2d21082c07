//! The core in virtual time: replicas that hear of each other late, engines that queue and forget.
//!
//! Everything is seeded; a failing assertion names the seed. `cargo test -p routing --test simulation --
//! --nocapture` prints the figures.

mod cache;
mod cluster;
mod engine;
mod pd;
mod replicas;
mod workload;

use cluster::{Cluster, Decider, Figures, Scenario};
use engine::Profile;
use routing::policy::PolicyName;
use routing::settings::Settings;
use workload::Workload;

/// Four engines that compute one prompt at a time and cache a third of what is asked of them; 16 clients that
/// ask again as soon as they are answered; 12 tenants.
fn headline(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        decider,
        engines: 4,
        profile: Profile { prefill_us_per_token: 250, base_us: 5_000, itl_us: 5_000, cache_blocks: 700 },
        workload: Workload {
            tenants: 12,
            common_bytes: 2_048,
            tenant_bytes: 6_144,
            first_bytes: 200,
            turn_bytes: 200,
            turns: 4,
            output_tokens: 32,
            clients: 16,
            chats: 300,
            think_us: 0,
            chat: true,
        },
        seed,
        push_us: 3_000,
        usage: true,
    }
}

/// One chat after the other, at engines that answer at once, and the next turn comes before the other
/// replicas have heard of the last one.
fn one_after_the_other(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        profile: Profile { prefill_us_per_token: 0, base_us: 500, itl_us: 10, cache_blocks: 1_000_000 },
        workload: Workload {
            tenants: 1,
            common_bytes: 340,
            tenant_bytes: 0,
            first_bytes: 2_500,
            turn_bytes: 400,
            turns: 5,
            output_tokens: 16,
            clients: 1,
            chats: 80,
            think_us: 1_000,
            chat: true,
        },
        ..headline(decider, seed)
    }
}

/// Fifty tenants behind a long common system prompt, at a load that one engine could not carry.
fn behind_a_common_prompt(common_bytes: usize, decider: Decider, seed: u64) -> Scenario {
    Scenario {
        profile: Profile { prefill_us_per_token: 250, base_us: 30_000, itl_us: 12_000, cache_blocks: 20_000 },
        workload: Workload {
            tenants: 50,
            common_bytes,
            tenant_bytes: 6_000,
            first_bytes: 400,
            turn_bytes: 400,
            turns: 1,
            output_tokens: 32,
            clients: 16,
            chats: 600,
            think_us: 0,
            chat: true,
        },
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
    let all: Vec<Figures> = seeds.map(|seed| Cluster::run(&of(seed))).collect();
    let mean = Figures::mean(&all);
    println!("{name:34} {mean}");
    mean
}

/// The headline bench in virtual time.
fn bench(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        decider,
        engines: 4,
        profile: Profile { prefill_us_per_token: 83, base_us: 0, itl_us: 4_000, cache_blocks: 710 },
        workload: Workload {
            tenants: 12,
            common_bytes: 2_000,
            tenant_bytes: 6_000,
            first_bytes: 1_000,
            turn_bytes: 400,
            turns: 4,
            output_tokens: 16,
            clients: 16,
            chats: 240,
            think_us: 30_000,
            chat: true,
        },
        seed,
        push_us: 3_000,
        usage: true,
    }
}

/// Sixteen clients with chats of their own, at engines that compute one prompt at a time.
fn sixteen_clients(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        profile: Profile {
            prefill_us_per_token: 250,
            base_us: 30_000,
            itl_us: 12_000,
            cache_blocks: 100_000,
        },
        workload: Workload {
            clients: 16,
            think_us: 0,
            output_tokens: 32,
            ..one_after_the_other(decider.clone(), seed).workload
        },
        ..headline(decider, seed)
    }
}

#[test]
fn sixteen_clients_keep_their_chats_at_home() {
    for count in [1, 3, 8] {
        let name = format!("sixteen clients, {count} replicas");
        let figures = mean(&name, 1..3, |seed| sixteen_clients(replicas(count), seed));
        assert!(figures.follow_ups_at_home >= 0.98, "{count} replicas: {figures}");
        assert!(figures.busiest_over_mean <= 1.35, "{count} replicas: {figures}");
    }
}

#[test]
fn the_headline_bench_in_virtual_time() {
    let least = mean("bench, least connections", 1..3, |seed| bench(Decider::LeastConnections, seed));
    mean("bench, all-knowing", 1..3, |seed| bench(Decider::Oracle, seed));
    for count in [1, 3, 8] {
        let figures = mean(&format!("bench, {count} replicas"), 1..3, |seed| bench(replicas(count), seed));
        assert!(
            figures.ttft_ms <= 0.25 * least.ttft_ms,
            "{count} replicas {figures}, least connections {least}"
        );
        assert!(figures.busiest_over_mean <= 1.35, "{count} replicas: {figures}");
    }
}

#[test]
fn three_replicas_come_near_an_all_knowing_router_and_far_below_least_connections() {
    let least = mean("least connections", 1..3, |seed| headline(Decider::LeastConnections, seed));
    let oracle = mean("all-knowing", 1..3, |seed| headline(Decider::Oracle, seed));
    let one = mean("cost, 1 replica", 1..3, |seed| headline(replicas(1), seed));
    let three = mean("cost, 3 replicas", 1..3, |seed| headline(replicas(3), seed));
    assert!(one.ttft_ms < 1.15 * oracle.ttft_ms, "1 replica {one}, all-knowing {oracle}");
    assert!(three.ttft_ms < 0.4 * least.ttft_ms, "3 replicas {three}, least connections {least}");
    assert!(three.hit_ratio > 0.97 * one.hit_ratio, "3 replicas {three}, 1 replica {one}");
    assert!(three.busiest_over_mean <= 1.35, "{three}");
}

#[test]
fn chats_stay_at_home_though_their_turns_outrun_the_news() {
    for count in [1, 3, 8] {
        let name = format!("one after the other, {count} replicas");
        let figures = mean(&name, 1..5, |seed| one_after_the_other(replicas(count), seed));
        assert!(figures.follow_ups_at_home >= 0.97, "{count} replicas: {figures}");
        assert!(figures.busiest_over_mean <= 1.35, "{count} replicas: {figures}");
    }
    let heard = mean("the same, news in time", 1..5, |seed| Scenario {
        push_us: 1_000,
        ..one_after_the_other(replicas(3), seed)
    });
    assert!(heard.follow_ups_at_home >= 0.99, "{heard}");
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
        let oracle = run(Decider::Oracle, "all-knowing");
        let three = run(replicas(3), "3 replicas");
        assert!(three.busiest_over_mean <= 1.3, "{name}: {three}");
        assert!(three.tenants_at_home >= 0.75, "{name}: {three}");
        assert!(three.ttft_ms < 1.15 * oracle.ttft_ms, "{name}: {three}, all-knowing {oracle}");
    }
}

#[test]
fn prompts_that_share_nothing_but_their_first_block_are_spread() {
    let of = |seed| Scenario {
        workload: Workload {
            tenants: 400,
            common_bytes: 600,
            tenant_bytes: 2_000,
            turns: 1,
            ..headline(replicas(3), seed).workload
        },
        ..headline(replicas(3), seed)
    };
    let figures = mean("one common block", 1..4, of);
    assert!(figures.busiest_over_mean <= 1.3, "{figures}");
}

#[test]
fn every_policy_that_follows_load_spreads_prompts_that_come_one_at_a_time() {
    let of = |name, seed| Scenario {
        workload: Workload {
            tenants: 400,
            common_bytes: 0,
            tenant_bytes: 300,
            first_bytes: 20,
            turn_bytes: 20,
            turns: 1,
            chats: 400,
            chat: false,
            ..one_after_the_other(replicas(1), seed).workload
        },
        ..one_after_the_other(policy(1, name), seed)
    };
    use PolicyName as P;
    for name in
        [P::Cost, P::PrefixLongest, P::CacheAware, P::Session, P::RoundRobin, P::LeastLoad, P::PowerOfTwo]
    {
        for seed in 1..4 {
            let served = Cluster::served(&of(name, seed));
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
    assert!(silent.ttft_ms < 0.5 * least.ttft_ms, "{silent}, least connections {least}");
    assert!(silent.busiest_over_mean <= 1.35, "{silent}");
}
