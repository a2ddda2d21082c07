//! Who can be chosen, who is, and what the decision says of it.

use serde_json::json;

use super::*;
use crate::decision::{Reason, Refusal};
use crate::endpoint::{Role, Signal};
use crate::endpoint_filter::FilterName;
use crate::policy::PolicyName;
use crate::request::response_key;

#[test]
fn a_warm_prompt_goes_to_its_holder_although_another_endpoint_is_hot() {
    let router = router(4, Settings::default());
    let prompt = shape(&router, &text("warm", 8_000));
    let home = choose(&router, &prompt, at(1)).endpoint.id;
    let hot = (0..4).map(id).find(|each| *each != home).unwrap();
    let others: Vec<_> = (0..4).map(id).filter(|each| *each != hot).collect();
    let _busy: Vec<_> = (0..20)
        .map(|number| {
            let shape = shape(&router, &text(&format!("{number}"), 8_000));
            router.choose(&shape, &others, at(1), &mut rng()).unwrap()
        })
        .collect();
    let decision = router.explain(&prompt, at(2), &mut rng()).unwrap();
    assert_eq!(decision.chosen, home);
    assert_eq!(decision.reason, Reason::LeastCost);
    assert_eq!(decision.candidates.len(), 4);
    let chosen = decision.chosen_cost().unwrap();
    assert!(chosen.warm_tokens > 1_800 && chosen.uncached_tokens < 200, "{chosen:?}");
}

#[test]
fn what_begins_anew_leaves_a_waiting_holder_sooner_for_an_endpoint_that_got_little() {
    let home_of = |placed_elsewhere: bool| {
        let router = router(2, Settings::default());
        let place = |name: &str, bytes, not: usize| {
            router.choose(&shape(&router, &text(name, bytes)), &[id(not)], at(1), &mut rng()).unwrap()
        };
        for number in 0..40 {
            drop(place(&format!("early {number}"), 4_000, 1));
            if placed_elsewhere {
                drop(place(&format!("elsewhere {number}"), 4_000, 0));
            }
        }
        let tenant = text("tenant", 4_000);
        drop(router.choose(&shape(&router, &tenant), &[id(1)], at(1), &mut rng()).unwrap());
        // 1,000 warm tokens are worth 250 ms, or three times that; two prompts of 1,000 before it take 500 ms.
        let _busy = [place("one", 4_000, 1), place("two", 4_000, 1)];
        let next = shape(&router, &(tenant + &text("another chat", 400)));
        router.explain(&next, at(1), &mut rng()).unwrap().chosen
    };
    assert_eq!(home_of(true), id(0), "both got as much: it waits where it is warm");
    assert_eq!(home_of(false), id(1), "the other got nothing: it begins there");
}

#[test]
fn a_holder_with_a_long_wait_loses_to_an_idle_endpoint() {
    let router = router(2, Settings::default());
    let prompt = shape(&router, &text("warm", 4_000));
    let home = choose(&router, &prompt, at(1)).endpoint.id;
    let elsewhere = [id(0), id(1)].into_iter().find(|each| *each != home).unwrap();
    // 1,000 warm tokens are worth three times their 250 ms; four prompts of 1,000 before it take 1,000 ms.
    let _busy: Vec<_> = (0..4)
        .map(|number| {
            let shape = shape(&router, &text(&format!("{number}"), 4_000));
            router.choose(&shape, &[elsewhere], at(1), &mut rng()).unwrap()
        })
        .collect();
    assert_eq!(choose(&router, &prompt, at(1)).endpoint.id, elsewhere);
}

fn refusal(router: &Router, body: &serde_json::Value, tried: &[EndpointId]) -> Refusal {
    router.choose(&shape_of(router, body), tried, at(1), &mut rng()).unwrap_err()
}

#[test]
fn models_are_resolved_by_what_endpoints_have_said() {
    let router = Router::new(ReplicaId::new("a"), 1, Settings::default()).unwrap();
    let prompt = json!({"model": "m", "prompt": "x"});
    assert_eq!(refusal(&router, &prompt, &[]), Refusal::NoEndpointConfigured);
    router.set_endpoints((0..2).map(spec).collect(), at(0));
    let not_yet =
        Refusal::NoEndpointReady { model: Some("m".to_owned()), missing_role: None, retry_after_ms: 1_000 };
    assert_eq!(refusal(&router, &prompt, &[]), not_yet, "nobody has said anything yet");
    router.set_served(id(0), Served::Models(vec!["other".to_owned()]));
    assert_eq!(refusal(&router, &prompt, &[]), not_yet, "one has not said anything yet");
    router.set_served(id(1), Served::Models(vec!["other".to_owned()]));
    assert_eq!(refusal(&router, &prompt, &[]), Refusal::ModelUnknown { model: "m".to_owned() });

    let unnamed = json!({"prompt": "x"});
    let chosen = |body: &serde_json::Value| choose(&router, &shape_of(&router, body), at(1)).endpoint.id;
    chosen(&unnamed);
    router.set_served(id(1), Served::Models(vec!["m".to_owned()]));
    assert_eq!(chosen(&prompt), id(1));
    let served = vec!["m".to_owned(), "other".to_owned()];
    assert_eq!(refusal(&router, &unnamed, &[]), Refusal::ModelRequired { served });
    assert_eq!(refusal(&router, &prompt, &[id(1)]), Refusal::AllTried);
    router.set_served(id(0), Served::Any);
    assert_eq!(chosen(&json!({"model": "whatever", "prompt": "x"})), id(0));
}

#[test]
fn a_prefill_endpoint_alone_serves_nobody_and_the_refusal_says_what_is_missing() {
    let router = router(0, Settings::default());
    let prefill = EndpointSpec { role: Role::Prefill, models: vec!["m".to_owned()], ..spec(0) };
    let decode = EndpointSpec { role: Role::Decode, models: vec!["m".to_owned()], ..spec(1) };
    router.set_endpoints(vec![prefill.clone()], at(0));
    assert!(router.lacks().is_some());
    let prompt = json!({"model": "m", "prompt": "x"});
    let want = Refusal::NoEndpointReady {
        model: Some("m".to_owned()),
        missing_role: Some(Role::Decode),
        retry_after_ms: 1_000,
    };
    assert_eq!(refusal(&router, &prompt, &[]), want);
    router.set_endpoints(vec![prefill, decode], at(0));
    assert_eq!(router.lacks(), None);
    assert_eq!(choose(&router, &shape_of(&router, &prompt), at(1)).endpoint.id, id(1));
}

#[test]
fn an_endpoint_not_heard_of_is_taken_only_when_no_better_is_left() {
    let router = router(2, Settings::default());
    router.set_endpoints((0..3).map(spec).collect(), at(1));
    router.set_served(id(2), Served::Models(vec!["m".to_owned()]));
    let prompt = shape(&router, "x");
    for _ in 0..20 {
        assert_ne!(choose(&router, &prompt, at(1)).endpoint.id, id(2));
    }
    let last = router.choose(&prompt, &[id(0), id(1)], at(1), &mut rng()).unwrap();
    assert_eq!(last.endpoint.id, id(2));
    let candidates = |now| router.explain(&prompt, now, &mut rng()).unwrap().candidates.len();
    assert_eq!(candidates(at(2)), 2);
    router.report(id(2), Signal::ProbeOk, at(3));
    assert_eq!(candidates(at(3)), 3);
}

#[test]
fn what_goes_on_from_a_response_goes_to_its_maker_or_nowhere() {
    let router = router(4, Settings::default());
    let next = json!({"model": "m", "previous_response_id": "resp_1", "input": "go on"});
    assert_eq!(refusal(&router, &next, &[]), Refusal::ResponseUnknown);
    router.pin(response_key(b"resp_1"), id(3), at(1));
    assert_eq!(choose(&router, &shape_of(&router, &next), at(2)).endpoint.id, id(3));
    assert_eq!(refusal(&router, &next, &[id(3)]), Refusal::AllTried);
}

#[test]
fn a_holder_with_a_queue_is_left_only_with_the_filter() {
    let filtered = Settings {
        policy: PolicyName::PrefixLongest,
        filters: vec![FilterName::QueuePercentile],
        ..Settings::default()
    };
    let plain = Settings { filters: Vec::new(), ..filtered.clone() };
    for (settings, leaves) in [(filtered, true), (plain, false)] {
        let router = router(4, settings);
        let prompt = shape(&router, &text("warm", 4_000));
        let home = choose(&router, &prompt, at(1)).endpoint.id;
        for number in 0..4 {
            let waiting = if id(number) == home { 20 } else { 0 };
            router.observe(&look(number, waiting, 0), at(2));
        }
        let decision = router.explain(&prompt, at(3), &mut rng()).unwrap();
        assert_eq!(decision.chosen != home, leaves, "{decision:?}");
        let holder = decision.candidates.iter().find(|each| each.endpoint == home).unwrap();
        assert_eq!(holder.dropped_by, leaves.then_some("queue-percentile"));
        assert!(decision.reverted.is_empty());
        // A stale figure leaves nobody out.
        let later = router.explain(&prompt, at(60_000), &mut rng()).unwrap();
        assert!(later.candidates.iter().all(|each| each.dropped_by.is_none()), "{later:?}");
    }
}

#[test]
fn a_filter_that_would_leave_nobody_is_undone_and_named_and_the_others_still_run() {
    let settings = Settings {
        filters: vec![FilterName::KvPressure, FilterName::QueuePercentile],
        ..Settings::default()
    };
    let router = router(4, settings);
    for number in 0..4 {
        let waiting = if number == 0 { 20 } else { 0 };
        let full = ObservedRow { kv_ratio: Some(0.99), ..look(number, waiting, 0) };
        router.observe(&full, at(1));
    }
    let decision = router.explain(&shape(&router, "x"), at(2), &mut rng()).unwrap();
    assert_eq!(decision.reverted[..], ["kv-pressure"]);
    let dropped = decision.candidates.iter().filter(|each| each.dropped_by == Some("queue-percentile"));
    assert_eq!(dropped.map(|each| each.endpoint).collect::<Vec<_>>(), [id(0)]);
}

#[test]
fn requests_that_came_past_the_routers_count_as_waiting() {
    let router = router(2, Settings::default());
    router.observe(&look(0, 10, 0), at(1));
    let decision = router.explain(&shape(&router, "x"), at(2), &mut rng()).unwrap();
    let wait = |number| decision.candidates.iter().find(|each| each.endpoint == id(number)).unwrap().wait_ms;
    // 10 requests of 512 tokens at 250 us.
    assert_eq!((wait(0), wait(1)), (1_280.0, 0.0));
    assert_eq!(decision.chosen, id(1));
}

#[test]
fn what_a_failed_placement_added_is_taken_back_and_no_more() {
    let router = router(1, Settings::default());
    let short = text("tenant", 4_096);
    let long = short.clone() + &text("turn", 4_096);
    let (short, long) = (shape(&router, &short), shape(&router, &long));
    drop(choose(&router, &short, at(1)));
    let chosen = choose(&router, &long, at(2));
    assert_eq!(warm_tokens(&router, &long, 0, at(3)), 2_047);
    router.withdraw(&long, &chosen.footing);
    assert_eq!(warm_tokens(&router, &long, 0, at(3)), 1_024);
    assert_eq!(warm_tokens(&router, &short, 0, at(3)), 1_023);
}

#[test]
fn reconfiguring_keeps_what_is_warm_and_what_is_charged_or_changes_nothing() {
    let round = Settings { policy: PolicyName::RoundRobin, ..Settings::default() };
    let router = router(4, round);
    let prompt = shape(&router, &text("warm", 4_000));
    let chosen = choose(&router, &prompt, at(1));
    let faulty = Settings { index_bytes_max: 0, session_table_max: 0, ..Settings::default() };
    let faults = router.reconfigure(faulty).unwrap_err();
    let keys: Vec<_> = faults.iter().map(|fault| fault.key.as_str()).collect();
    assert_eq!(keys, ["limits.index_bytes_max", "limits.session_table_max"]);
    assert_eq!(router.settings().policy, PolicyName::RoundRobin);
    router.reconfigure(Settings::default()).unwrap();
    assert_eq!(router.settings().policy, PolicyName::Cost);
    assert_eq!(chosen.endpoint.running(at(2)), 1);
    chosen.reservation.first_token();
    let decision = router.explain(&prompt, at(2), &mut rng()).unwrap();
    assert_eq!(decision.chosen, chosen.endpoint.id);
    assert!(decision.chosen_cost().unwrap().warm_tokens > 800);
}
