//! Each policy does what its name says.

use serde_json::json;

use super::*;
use crate::affinity::AffinityName;
use crate::decision::Reason;
use crate::endpoint_filter::FilterName;
use crate::facts::{LoadRow, Pulse};
use crate::policy::{PolicyName, PrefixRingSettings};
use crate::request::BeginningHash;

fn with(policy: PolicyName) -> Settings {
    Settings { policy, ..Settings::default() }
}

/// Another replica says what it runs at each endpoint, by number.
fn load(router: &Router, running: &[u32]) {
    let load = running.iter().enumerate().map(|(number, running)| LoadRow {
        endpoint: id(number),
        running: *running,
        prefill_tokens: 0,
        decode_tokens: 0,
        placed_tokens: 0,
    });
    let pulse = Pulse { epoch: 1, version: 1, load: load.collect(), ..Pulse::default() };
    router.merge_pulse(&ReplicaId::new("other"), &pulse, at(1));
}

fn decided(router: &Router, prompt: &str, now: Moment) -> (EndpointId, Reason) {
    let decision = router.explain(&shape(router, prompt), now, &mut rng()).unwrap();
    (decision.chosen, decision.reason)
}

#[test]
fn load_is_the_clusters_not_the_replicas() {
    for policy in [PolicyName::LeastLoad, PolicyName::PowerOfTwo, PolicyName::PrefixLongest] {
        let router = router(2, with(policy));
        load(&router, &[9, 0]);
        assert_eq!(decided(&router, "x", at(2)).0, id(1), "{policy}");
    }
}

#[test]
fn round_robin_takes_each_in_turn() {
    let router = router(3, with(PolicyName::RoundRobin));
    let chosen: Vec<_> = (0..9).map(|_| decided(&router, "x", at(1)).0).collect();
    assert_eq!(chosen[..3], chosen[3..6]);
    let mut distinct = chosen[..3].to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 3);
}

#[test]
fn prefix_longest_follows_the_longest_match_whatever_the_load() {
    let router = router(4, with(PolicyName::PrefixLongest));
    assert_eq!(router.rules().block_bytes, 128);
    let prompt = text("warm", 1_000);
    let home = choose(&router, &shape(&router, &prompt), at(1)).endpoint.id;
    load(&router, &[50; 4]);
    let longer = prompt.clone() + &text("more", 500);
    assert_eq!(decided(&router, &longer, at(2)), (home, Reason::PrefixHolder));
    assert_eq!(decided(&router, &text("cold", 1_000), at(2)).1, Reason::NoMatchLeastLoad);
}

#[test]
fn cache_aware_follows_a_good_match_until_loads_are_uneven() {
    let router = router(2, with(PolicyName::CacheAware));
    let prompt = text("warm", 4_096);
    let home = choose(&router, &shape(&router, &prompt), at(1)).endpoint.id;
    let other = [id(0), id(1)].into_iter().find(|each| *each != home).unwrap();
    let at_home = |busy: u32, idle: u32| if home == id(0) { [busy, idle] } else { [idle, busy] };
    load(&router, &at_home(64, 0));
    assert_eq!(decided(&router, &prompt, at(2)), (home, Reason::PrefixHolder));
    // 20% of the prompt is no good match.
    let long = prompt.clone() + &text("more", 16_384);
    assert_eq!(decided(&router, &long, at(2)), (other, Reason::NoMatchLeastLoad));
    for (busy, idle, chosen) in [(65, 0, other), (190, 125, other), (200, 134, home)] {
        let router = router_of_home(home, &prompt);
        load(&router, &at_home(busy, idle));
        let (got, reason) = decided(&router, &prompt, at(2));
        assert_eq!(got, chosen, "{busy} against {idle}: {reason:?}");
        assert_eq!(reason == Reason::ImbalancedLeastLoad, chosen == other);
    }
}

/// A cache-aware router where `prompt` is warm at `home`.
fn router_of_home(home: EndpointId, prompt: &str) -> Router {
    let router = router(2, with(PolicyName::CacheAware));
    let tried: Vec<_> = [id(0), id(1)].into_iter().filter(|each| *each != home).collect();
    drop(router.choose(&shape(&router, prompt), &tried, at(1), &mut rng()).unwrap());
    router
}

#[test]
fn a_ring_homes_prompts_by_their_beginning_alike_on_every_replica() {
    let settings = with(PolicyName::PrefixRing);
    let (a, b) = (router_named("a", 8, settings.clone()), router_named("b", 8, settings));
    let mut homes = Vec::new();
    for number in 0..40 {
        let beginning = text(&format!("{number}"), 512);
        let (home, reason) = decided(&a, &(beginning.clone() + "one"), at(1));
        assert_eq!(reason, Reason::RingHome);
        assert_eq!(decided(&b, &(beginning + "two"), at(9)).0, home);
        homes.push(home);
    }
    homes.sort_unstable();
    homes.dedup();
    assert!(homes.len() >= 6, "{homes:?}");
}

#[test]
fn a_bounded_ring_passes_a_prompt_on_where_its_home_is_too_loaded() {
    let mut settings = with(PolicyName::PrefixRing);
    settings.policy_tables.prefix_ring = PrefixRingSettings { bound: Some(1.25), ..Default::default() };
    let router = router(4, settings);
    let prompt = text("hot", 600);
    let held: Vec<_> = (0..40).map(|_| choose(&router, &shape(&router, &prompt), at(1))).collect();
    let most = router.view().endpoints.iter().map(|endpoint| endpoint.running(at(1))).max().unwrap();
    assert!(most <= 13, "{most} of 40 at one of 4");
    assert!(held.iter().any(|chosen| chosen.decision.reason == Reason::RingBounded));
    let home = held[0].endpoint.id;
    drop(held);
    assert_eq!(decided(&router, &prompt, at(2)).0, home);
}

#[test]
fn the_ring_hashes_as_many_characters_as_are_set_and_as_is_set() {
    let mut settings = with(PolicyName::PrefixRing);
    settings.policy_tables.prefix_ring =
        PrefixRingSettings { prefix_chars: 16, hash: BeginningHash::Simhash, bound: None };
    let router = router(8, settings.clone());
    let beginning = |router: &Router, prompt| shape(router, prompt).beginning.unwrap();
    assert_eq!(beginning(&router, "sixteen of these and so on"), beginning(&router, "sixteen of these"));
    settings.policy_tables.prefix_ring.hash = BeginningHash::Xxhash;
    let exact = router_named("b", 8, settings);
    assert_ne!(beginning(&exact, "sixteen of these"), beginning(&router, "sixteen of these"));
}

#[test]
fn a_session_stays_at_its_home_on_every_replica_and_no_key_means_least_load() {
    let routers = ["a", "b", "c"].map(|name| router_named(name, 8, with(PolicyName::Session)));
    for number in 0..40 {
        let session = format!("session {number}");
        let homes = routers.each_ref().map(|router| {
            let body = json!({"model": "m", "prompt": text(&format!("{number}"), 100)});
            let shape = shape_with(router, &body, &[("x-session-id", &session)]);
            let chosen = choose(router, &shape, at(1));
            assert_eq!(chosen.decision.reason, Reason::SessionHome);
            chosen.endpoint.id
        });
        assert!(homes.iter().all(|home| *home == homes[0]), "{session}");
    }
    load(&routers[0], &[5, 5, 5, 0, 5, 5, 5, 5]);
    assert_eq!(decided(&routers[0], "x", at(2)), (id(3), Reason::NoSessionLeastLoad));
}

#[test]
fn a_session_whose_home_is_gone_moves_once_and_is_told() {
    let router = router(4, with(PolicyName::Session));
    let body = json!({"model": "m", "prompt": "x"});
    let shape = shape_with(&router, &body, &[("x-session-id", "s")]);
    let home = choose(&router, &shape, at(1)).endpoint.id;
    let told = |router: &Router| {
        let records = router.take_ledger(usize::MAX);
        records.iter().any(|record| matches!(record, crate::facts::LedgerRecord::Pin { .. }))
    };
    assert!(!told(&router), "every replica finds the ring's home by itself");
    let moved = router.choose(&shape, &[home], at(2), &mut rng()).unwrap().endpoint.id;
    assert_ne!(moved, home);
    assert!(told(&router));
    assert_eq!(choose(&router, &shape, at(3)).endpoint.id, moved);
}

#[test]
fn an_affinity_can_be_put_before_any_picker() {
    let warm = text("warm", 4_000);
    for (affinity, stays) in [
        (AffinityName::None, false),
        (AffinityName::Session, true),
        (AffinityName::PrefixLongest, true),
        (AffinityName::PrefixRing, true),
        (AffinityName::PrefixCost, true),
    ] {
        let settings = Settings { affinity: Some(affinity), ..with(PolicyName::RoundRobin) };
        let router = router(4, settings);
        let body = json!({"model": "m", "prompt": warm});
        let shape = shape_with(&router, &body, &[("x-session-id", "s")]);
        let mut homes: Vec<_> = (0..8).map(|ms| choose(&router, &shape, at(ms)).endpoint.id).collect();
        homes.sort_unstable();
        homes.dedup();
        assert_eq!(homes.len() == 1, stays, "{affinity}");
    }
}

#[test]
fn an_unknown_name_is_answered_with_all_that_are_known() {
    fn check<T: std::str::FromStr<Err = crate::settings::UnknownName>>(text: &str, allowed: &str) {
        let Err(error) = text.parse::<T>() else { panic!("{text} is known") };
        assert_eq!((error.value.as_str(), error.allowed.as_str()), (text, allowed));
    }
    check::<PolicyName>(
        "fastest",
        "cost, prefix-longest, prefix-ring, cache-aware, session, round-robin, random, least-load, \
         power-of-two, pd-cost, pd-load-aware, pd-qoe",
    );
    check::<AffinityName>("", "none, session, prefix-longest, prefix-ring, prefix-cost");
    check::<FilterName>("queue", "queue-percentile, kv-pressure, latency-outlier");
    check::<BeginningHash>("md5", "xxhash, simhash");
}

#[test]
fn every_fault_is_named_with_its_key_its_value_and_what_would_do() {
    let mut settings = Settings::default();
    settings.policy_tables.cost.tie_ms = -1.0;
    settings.policy_tables.prefix_longest.chunk_chars = 3;
    settings.policy_tables.prefix_ring.bound = Some(0.5);
    settings.filter_tables.queue_percentile.percentile = 90.0;
    settings.filters = vec![FilterName::KvPressure; 2];
    settings.rules.block_bytes = 1;
    settings.speed.itl_us = f32::NAN;
    let faults: Vec<String> = settings.faults().iter().map(ToString::to_string).collect();
    let want = [
        "policy.cost.tie_ms = -1: allowed: 0 to 1000",
        "policy.prefix-longest.chunk_chars = 3: allowed: 16 to 65536",
        "policy.prefix-ring.bound = 0.5: allowed: 1 to 100",
        "filter.queue-percentile.percentile = 90: allowed: 0 to 1",
        "speed.itl_us = NaN: allowed: 10 to 10000000",
        "prefix.block_bytes = 1: allowed: 16 to 65536",
        "endpoint_filters = kv-pressure: allowed: each filter at most once",
    ];
    assert_eq!(faults, want);
    assert!(Router::new(ReplicaId::new("a"), 1, settings).is_err_and(|faults| faults.len() == 7));
}
