//! Large fleets, of which a few are weighed.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::choosing::{Asked, Scratch};
use super::super::shortlist::WEIGHED_ALL_MAX;
use super::*;
use crate::admission::Gate;
use crate::decision::{Decision, Reason, Refusal};
use crate::facts::{LedgerRecord, LoadRow, Pulse};

const FLEET: usize = 200;

/// The choice when all endpoints are weighed.
fn among_all(router: &Router, shape: &RequestShape, now: Moment) -> Decision {
    let asked = Asked { shape, tried: &[], charged: None, gate: None };
    let (view, active) = (router.view.load(), router.active.load());
    let ground = router.ground(&asked, &view, &active, now);
    let scope = router.scope(&ground).unwrap();
    let (rosters, number) = router.rosters(&view, shape, &scope, now).unwrap();
    let mut scratch = Scratch::default();
    let decided = router.decide_among_all(&mut scratch, rosters.get(number), &scope, &ground, &mut rng());
    decided.unwrap().decision
}

fn explain(router: &Router, shape: &RequestShape, now: Moment) -> Decision {
    router.explain(shape, now, &mut rng()).unwrap()
}

fn cost_of(decision: &Decision, endpoint: EndpointId) -> f64 {
    decision.candidates.iter().find(|each| each.endpoint == endpoint).unwrap().cost_ms
}

/// Another replica runs so many requests with so many prompt tokens at each.
fn hear(router: &Router, version: u64, loads: impl IntoIterator<Item = (usize, u32, u32)>) {
    let row = |(number, running, prefill_tokens)| LoadRow {
        endpoint: id(number),
        running,
        prefill_tokens,
        decode_tokens: running * 100,
        placed_tokens: 0,
    };
    let load = loads.into_iter().map(row).collect();
    router.merge_pulse(&ReplicaId::new("b"), &Pulse { epoch: 1, version, load, ..Pulse::default() }, at(1));
}

/// Another replica placed the prompt there.
fn place(router: &Router, shape: &RequestShape, number: usize) {
    let blocks = shape.blocks.clone();
    router.merge_ledger(&[LedgerRecord::Place { endpoint: id(number), blocks }], at(1));
}

/// Prompts of which each is like no other.
fn unrelated(router: &Router, count: usize) -> Vec<RequestShape> {
    (0..count).map(|at| shape(router, &text(&format!("prompt {at}"), 4_000))).collect()
}

/// Prefixes are common only by their share of the traffic: some is needed before one is not.
fn some_traffic(router: &Router) {
    for prompt in unrelated(router, 100) {
        drop(choose(router, &prompt, at(0)));
    }
}

#[test]
fn all_of_a_small_fleet_are_weighed_and_a_few_of_a_large_one() {
    for (count, weighed) in [(WEIGHED_ALL_MAX, WEIGHED_ALL_MAX), (WEIGHED_ALL_MAX + 1, 12), (FLEET, 12)] {
        let router = router(count, Settings::default());
        let prompt = shape(&router, &text("a", 4_000));
        let decision = explain(&router, &prompt, at(1));
        assert_eq!(decision.candidates.len(), weighed, "of {count}");
        assert!(decision.candidates.is_sorted_by_key(|each| each.endpoint));
        assert!(decision.chosen_cost().is_some());
    }
}

#[test]
fn who_holds_the_prompt_is_found_in_a_large_fleet_however_small_the_part() {
    let router = router(FLEET, Settings::default());
    some_traffic(&router);
    let stem = text("stem", 2_048);
    let known = shape(&router, &stem);
    place(&router, &known, 77);
    let longer = shape(&router, &format!("{stem}{}", text("more", 8_000)));
    let decision = explain(&router, &longer, at(500));
    assert_eq!((decision.chosen, decision.reason), (id(77), Reason::LeastCost));
    assert_eq!(
        decision,
        Decision { candidates: decision.candidates.clone(), ..among_all(&router, &longer, at(500)) }
    );
}

#[test]
fn of_a_crowd_that_holds_the_prompt_one_is_chosen() {
    let router = router(FLEET, Settings::default());
    some_traffic(&router);
    let stem = text("stem", 8_192);
    let known = shape(&router, &stem);
    let crowd: BTreeSet<usize> = (0..40).collect();
    crowd.iter().for_each(|number| place(&router, &known, *number));
    let members: BTreeSet<EndpointId> = crowd.iter().map(|number| id(*number)).collect();
    let mut chosen = BTreeSet::new();
    for at_end in 0..30 {
        let prompt = shape(&router, &format!("{stem}{}", text(&format!("end {at_end}"), 2_000)));
        let decision = explain(&router, &prompt, at(500));
        assert!(members.contains(&decision.chosen), "{decision:?}");
        assert_eq!(decision.chosen_cost().unwrap().warm_tokens, 2_048);
        chosen.insert(decision.chosen);
    }
    assert!(chosen.len() > 10, "and not always the same: {}", chosen.len());
}

#[test]
fn the_only_endpoint_with_room_is_found() {
    let router = router(FLEET, Settings::default());
    hear(&router, 1, (0..FLEET).filter(|number| *number != 123).map(|number| (number, 1, 0)));
    let gate = Gate { running_max: 1, ..Gate::of_newcomer(1, 1_000.0) };
    for prompt in unrelated(&router, 20) {
        let asked = Asked { shape: &prompt, tried: &[], charged: None, gate: Some(gate) };
        let decided = router.decide(&asked, at(2), &mut rng()).unwrap();
        assert_eq!(decided.chosen(), id(123));
    }
    hear(&router, 2, (0..FLEET).map(|number| (number, 1, 0)));
    let asked = Asked { shape: &unrelated(&router, 1)[0], tried: &[], charged: None, gate: Some(gate) };
    let refused = router.decide(&asked, at(3), &mut rng()).map(|decided| decided.chosen());
    assert!(matches!(refused, Err(Refusal::Overloaded { .. })), "{refused:?}");
}

#[test]
fn a_session_stays_at_its_home_in_a_large_fleet() {
    let router = router(FLEET, Settings::default());
    for number in 0..30 {
        let body = |turn: usize| {
            let prompt = text(&format!("session {number} turn {turn}"), 3_000);
            let body = serde_json::json!({"model": "m", "prompt": prompt, "stream": true});
            shape_with(&router, &body, &[("x-session-id", &format!("s{number}"))])
        };
        let first = choose(&router, &body(0), at(10));
        let home = first.endpoint.id;
        drop(first);
        for turn in 1..4 {
            let chosen = choose(&router, &body(turn), at(10 + turn as u64));
            assert_eq!((chosen.endpoint.id, chosen.decision.reason), (home, Reason::TieSession));
        }
    }
}

#[test]
fn who_goes_on_from_a_response_goes_to_who_made_it_in_a_large_fleet() {
    let router = router(FLEET, Settings::default());
    for number in 0..20 {
        let body =
            serde_json::json!({"model": "m", "input": "on", "previous_response_id": format!("r{number}")});
        let on = shape_of(&router, &body);
        router.sessions.pin(on.previous_response.unwrap(), id(number), at(1));
        let decision = explain(&router, &on, at(2));
        assert_eq!((decision.chosen, decision.reason), (id(number), Reason::OnlyCandidate));
    }
}

#[test]
fn replicas_send_new_prompts_to_the_same_and_evenly() {
    let (one, other) =
        (router_named("a", FLEET, Settings::default()), router_named("b", FLEET, Settings::default()));
    let mut placed: BTreeMap<EndpointId, usize> = BTreeMap::new();
    for prompt in unrelated(&one, 20 * FLEET) {
        let chosen = explain(&one, &prompt, at(1)).chosen;
        assert_eq!(chosen, explain(&other, &prompt, at(1)).chosen);
        for router in [&one, &other] {
            // What one does the other hears of.
            router.view().get(chosen).unwrap().add_placed(1_000.0, at(1));
        }
        *placed.entry(chosen).or_default() += 1;
    }
    assert_eq!(placed.len(), FLEET);
    let busiest = placed.values().max().unwrap();
    assert!(*busiest <= 30, "the mean is 20: {busiest}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Where others are idle, what is chosen costs no more than the best of all; and where that is better than all others,
    /// it is the same.
    #[test]
    fn a_few_do_for_a_large_fleet(
        loads in prop::collection::vec((prop::bool::ANY, 0_u32..40, 0_u32..40_000), FLEET),
        held in prop::collection::vec((0_usize..6, 1_usize..5, 0_usize..FLEET), 0..40),
    ) {
        let router = router(FLEET, Settings::default());
        some_traffic(&router);
        let stems: Vec<String> = (0..6).map(|number| text(&format!("stem {number}"), 8_192)).collect();
        for (stem, quarters, number) in held {
            place(&router, &shape(&router, &stems[stem][..quarters * 2_048]), number);
        }
        let busy = loads.iter().enumerate().filter(|(_, (is_busy, ..))| *is_busy);
        hear(&router, 1, busy.map(|(number, (_, running, tokens))| (number, *running, *tokens)));
        let tie_ms = router.settings().policy_tables.cost.tie_ms;
        for (number, stem) in stems.iter().enumerate() {
            let prompt = shape(&router, &format!("{stem}{}", text(&format!("end {number}"), 2_000)));
            let (few, all) = (explain(&router, &prompt, at(500)), among_all(&router, &prompt, at(500)));
            prop_assert!(few.candidates.len() < 80);
            let (by_few, by_all) = (cost_of(&all, few.chosen), cost_of(&all, all.chosen));
            prop_assert!(by_few <= by_all + tie_ms, "{by_few} ms and not {by_all} ms");
            if matches!(all.reason, Reason::LeastCost | Reason::TieWarm) {
                prop_assert_eq!((few.chosen, few.reason), (all.chosen, all.reason));
            }
        }
    }
}
