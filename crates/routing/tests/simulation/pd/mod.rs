//! Prefill and decode endpoints in virtual time.
//!
//! The headline: two engines to prefill and two to decode that queue, cache and slow each other down, 14 clients in
//! closed loop, chats of two turns of which four in ten begin with 12 KB.

mod cluster;
mod engine;

use cluster::{Cluster, Decider, Figures, Scenario};
use engine::Profile;
use routing::policy::{PolicyName, SplitMode};
use routing::settings::Settings;

/// A prompt of 12 KB takes 0.42 s, 24 tokens 0.2 s; whoever decodes beside a prompt is four times slower.
const PROFILE: Profile = Profile {
    prefill_us_per_token: 140.0,
    base_us: 10_000.0,
    itl_us: 8_000.0,
    slowdown: 4.0,
    each_running: 0.15,
    transfer_base_us: 5_000.0,
    transfer_us_per_token: 5.0,
    cache_blocks: 6_000,
};

fn headline(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        decider,
        prefills: 2,
        decodes: 2,
        profile: PROFILE,
        clients: 14,
        chats: 200,
        long_share: 0.4,
        long_bytes: 12_000,
        short_bytes: 400,
        output_tokens: 96,
        seed,
        push_us: 3_000,
        think_us: 100_000,
    }
}

/// More long prompts, of 8,000 tokens, than two engines prefill in time: 16 clients at engines like those of an 8B
/// model.
fn pressed(decider: Decider, seed: u64) -> Scenario {
    Scenario {
        profile: Profile {
            prefill_us_per_token: 250.0,
            base_us: 20_000.0,
            itl_us: 12_000.0,
            slowdown: 2.0,
            each_running: 0.03,
            cache_blocks: 100_000,
            ..PROFILE
        },
        clients: 16,
        chats: 100,
        long_bytes: 32_000,
        short_bytes: 256,
        output_tokens: 64,
        ..headline(decider, seed)
    }
}

fn replicas(count: usize, settings: Settings) -> Decider {
    Decider::Replicas { count, settings: Box::new(settings) }
}

fn policy(policy: PolicyName, split: SplitMode) -> Settings {
    Settings { policy, split, ..Settings::default() }
}

/// Runs the scenario with each of `seeds` and gives the mean figures.
fn mean(name: &str, seeds: std::ops::Range<u64>, of: impl Fn(u64) -> Scenario) -> Figures {
    let all: Vec<Figures> = seeds.map(|seed| Cluster::run(of(seed))).collect();
    let mean = Figures::mean(&all);
    println!("{name:34} {mean}");
    mean
}

#[test]
fn the_headline_of_prefill_and_decode() {
    let run = |name: &str, decider: Decider| mean(name, 1..4, |seed| headline(decider.clone(), seed));
    let least = run("pd, least connections, whole", Decider::LeastConnections);
    let oracle = run("pd, all-knowing", Decider::Oracle);
    let always = run("pd, always split", replicas(3, policy(PolicyName::PdCost, SplitMode::Always)));
    for count in [1, 3, 8] {
        let figures = run(&format!("pd-cost, {count} replicas"), replicas(count, Settings::default()));
        assert!(
            figures.ttft_ms <= 0.6 * least.ttft_ms,
            "{count} replicas {figures}; least connections {least}"
        );
        assert!(figures.ttft_ms <= 1.1 * oracle.ttft_ms, "{count} replicas {figures}; all-knowing {oracle}");
        assert!(figures.ttft_ms <= 0.8 * always.ttft_ms, "{count} replicas {figures}; always split {always}");
        assert!(figures.within >= 0.95, "{count} replicas {figures}");
        assert!(figures.busiest_over_mean <= 1.3, "{count} replicas {figures}");
        assert!(figures.long_split >= 0.95 && figures.others_split <= 0.05, "{count} replicas {figures}");
    }
}

/// The policies for pairs meet more of what is expected than the load-aware one, and that more than lots.
fn check_policies(scenario: &str, of: fn(Decider, u64) -> Scenario) {
    let run = |name: PolicyName| {
        let decider = replicas(3, policy(name, SplitMode::Auto));
        mean(&format!("{scenario}, {name}"), 1..4, |seed| of(decider.clone(), seed))
    };
    let random = run(PolicyName::Random);
    let load_aware = run(PolicyName::PdLoadAware);
    for best in [PolicyName::PdCost, PolicyName::PdQoe] {
        let best = run(best);
        for (better, plainer) in [(&best, &load_aware), (&load_aware, &random)] {
            assert!(better.within > plainer.within, "{scenario}: {better}; {plainer}");
            assert!(better.qoe > plainer.qoe, "{scenario}: {better}; {plainer}");
        }
    }
}

#[test]
fn each_policy_for_pairs_is_better_than_the_plainer_one() {
    check_policies("pd", headline);
}

#[test]
fn each_policy_for_pairs_is_better_than_the_plainer_one_with_more_to_prefill_than_fits() {
    check_policies("pressed", pressed);
}
