//! Requests that two endpoints share.

use serde_json::json;

use super::*;
use crate::decision::{Part, Reason, Refusal, SplitReason};
use crate::endpoint::Cause;
use crate::policy::{PolicyName, SplitMode};
use crate::request::Route;

/// An endpoint of a role, as `number` and as in `--endpoint`.
fn part(number: usize, keys: &str) -> EndpointSpec {
    EndpointSpec::parse(&format!("http://10.0.0.{number}:8000,{keys}")).unwrap().remove(0)
}

/// A replica with these endpoints, all ready and serving `m`.
fn router_of(settings: Settings, specs: &[EndpointSpec]) -> Router {
    let router = Router::new(ReplicaId::new("a"), 1, settings).unwrap();
    router.set_endpoints(specs.to_vec(), at(0));
    for spec in specs {
        router.set_served(spec.id(), Served::Models(vec!["m".to_owned()]));
        router.report(spec.id(), Signal::ProbeOk, at(0));
    }
    router
}

/// Two to prefill, 0 and 1, and two to decode, 2 and 3.
fn two_and_two(settings: Settings) -> Router {
    let specs = [0, 1].map(|number| part(number, "role=prefill"));
    let decode = [2, 3].map(|number| part(number, "role=decode"));
    router_of(settings, &[specs, decode].concat())
}

fn always() -> Settings {
    Settings { split: SplitMode::Always, ..Settings::default() }
}

fn long(router: &Router, name: &str) -> RequestShape {
    shape(router, &text(name, 32_000))
}

fn why(chosen: &Chosen) -> SplitReason {
    chosen.decision.split.as_ref().unwrap().reason
}

#[track_caller]
fn check_pair(chosen: &Chosen, prefill: &[usize], decode: &[usize]) {
    let from = chosen.prefill.as_ref().map(|leg| leg.endpoint.id);
    assert!(prefill.iter().any(|number| from == Some(id(*number))), "{:?}", chosen.decision);
    assert!(decode.iter().any(|number| chosen.endpoint.id == id(*number)), "{:?}", chosen.decision);
    assert_eq!(chosen.decision.prefill(), from);
    assert_eq!(chosen.decision.chosen, chosen.endpoint.id);
    assert!(why(chosen).splits());
}

#[track_caller]
fn check_whole(chosen: &Chosen, at: &[usize], reason: SplitReason) {
    assert!(chosen.prefill.is_none(), "{:?}", chosen.decision);
    assert!(at.iter().any(|number| chosen.endpoint.id == id(*number)), "{:?}", chosen.decision);
    assert_eq!(why(chosen), reason, "{:?}", chosen.decision);
    assert_eq!(chosen.footing.part, Part::Whole);
}

#[test]
fn a_long_cold_prompt_is_split_and_a_short_or_warm_one_is_not() {
    let router = two_and_two(Settings::default());
    let prompt = long(&router, "a");
    let first = choose(&router, &prompt, at(1));
    check_pair(&first, &[0, 1], &[2, 3]);
    assert_eq!(why(&first), SplitReason::Paid);
    let split = first.decision.split.as_ref().unwrap();
    assert!(split.pair_ms.unwrap() < split.whole_ms.unwrap(), "{split:?}");
    assert_eq!(split.candidates.len(), 2);
    assert_eq!(first.decision.candidates.len(), 2);
    let decode = first.endpoint.id;
    drop(first);

    let again = choose(&router, &prompt, at(2));
    check_whole(&again, &[2, 3], SplitReason::Warm);
    assert_eq!(again.endpoint.id, decode, "its KV is there");
    check_whole(&choose(&router, &shape(&router, &text("b", 256)), at(3)), &[2, 3], SplitReason::Short);
}

#[test]
fn a_split_request_weighs_prompt_tokens_at_one_end_and_output_at_the_other_until_each_leg_is_over() {
    let router = two_and_two(always());
    let chosen = choose(&router, &long(&router, "a"), at(1));
    let leg = chosen.prefill.unwrap();
    let (prefill, decode) = (leg.endpoint.load(at(1)), chosen.endpoint.load(at(1)));
    assert_eq!((prefill.running, prefill.prefill_tokens, prefill.decode_tokens), (1, 8_000, 0));
    // 16 output tokens, and 8,000 times 5 us of handoff, which are as long as 4 tokens.
    assert_eq!((decode.running, decode.prefill_tokens, decode.decode_tokens), (1, 0, 20));
    assert_eq!((leg.footing.part, chosen.footing.part), (Part::Prefill, Part::Decode));
    drop(leg.reservation);
    let prefill = leg.endpoint.load(at(2));
    assert_eq!((prefill.running, prefill.prefill_tokens), (0, 0));
    chosen.reservation.first_token();
    assert_eq!(chosen.endpoint.load(at(3)).decode_tokens, 20);
    drop(chosen.reservation);
    let decode = chosen.endpoint.load(at(4));
    assert_eq!((decode.running, decode.decode_tokens), (0, 0));
}

#[test]
fn legs_held_through_one_replica_send_the_next_request_of_another_elsewhere() {
    let settings = || Settings { policy: PolicyName::PdLoadAware, ..always() };
    let (one, other) = (two_and_two(settings()), two_and_two(settings()));
    let held: Vec<_> = (0..9)
        .map(|number| one.choose(&long(&one, &format!("{number}")), &[id(1)], at(1), &mut rng()).unwrap())
        .collect();
    other.merge_pulse(&ReplicaId::new("b"), &one.pulse(at(2)), at(2));
    let next = choose(&other, &long(&other, "next"), at(3));
    check_pair(&next, &[1], &[2, 3]);
    let reason = next.decision.split.as_ref().unwrap().prefill.unwrap().reason;
    assert_eq!(reason, Reason::ImbalancedLeastLoad);
    drop(held);
}

#[test]
fn what_was_split_is_warm_at_both_ends_for_all_replicas_and_void_if_it_failed() {
    let (one, other) = (two_and_two(always()), two_and_two(always()));
    let prompt = long(&one, "a");
    let chosen = choose(&one, &prompt, at(1));
    let leg = chosen.prefill.as_ref().unwrap();
    other.merge_ledger(&one.take_ledger(usize::MAX), at(2));
    let warm = |router: &Router| {
        let decision = router.explain(&prompt, at(3), &mut rng()).unwrap();
        let split = decision.split.unwrap();
        let all = decision.candidates.iter().chain(&split.candidates);
        all.filter(|each| each.warm_tokens > 7_000).map(|each| each.endpoint).collect::<Vec<_>>()
    };
    assert_eq!(warm(&one), [chosen.endpoint.id, leg.endpoint.id]);
    assert_eq!(warm(&other), [chosen.endpoint.id, leg.endpoint.id]);
    one.withdraw(&prompt, &leg.footing);
    assert_eq!(warm(&one), [chosen.endpoint.id]);
    one.withdraw(&prompt, &chosen.footing);
    assert_eq!(warm(&one), []);
}

#[test]
fn the_settings_say_when_to_split() {
    let router = two_and_two(always());
    let short = choose(&router, &shape(&router, "x"), at(1));
    check_pair(&short, &[0, 1], &[2, 3]);
    assert_eq!(why(&short), SplitReason::Always);
    let router = two_and_two(Settings { split: SplitMode::Never, ..Settings::default() });
    check_whole(&choose(&router, &long(&router, "a"), at(1)), &[2, 3], SplitReason::Never);
}

#[test]
fn what_has_no_prompt_or_no_answer_or_several_or_shows_its_prompt_is_not_split() {
    let router = two_and_two(always());
    let prompt = text("a", 32_000);
    for body in [
        json!({"model": "m", "input": prompt}),
        json!({"model": "m", "prompt": prompt, "n": 2}),
        json!({"model": "m", "prompt": [prompt, "b"]}),
        json!({"model": "m", "prompt": prompt, "prompt_logprobs": 0}),
        json!({"model": "m", "prompt": prompt, "use_beam_search": true}),
    ] {
        check_whole(&choose(&router, &shape_of(&router, &body), at(1)), &[2, 3], SplitReason::Unsplittable);
    }
    let other = RequestShape::read(Route::Other, &Headers(&[]), b"{}", &router.rules()).unwrap();
    check_whole(&choose(&router, &other, at(1)), &[2, 3], SplitReason::Unsplittable);
    let rooms = ["role=prefill,connector=sglang-bootstrap", "role=decode,connector=sglang-bootstrap"];
    let router = router_of(always(), &[part(0, rooms[0]), part(1, rooms[1])]);
    let several = shape_of(&router, &json!({"model": "m", "prompt": prompt, "n": 2}));
    check_pair(&choose(&router, &several, at(1)), &[0], &[1]);
}

#[test]
fn a_pair_shares_connector_and_group_and_zone_if_it_can() {
    let check = |prefill: &str, decodes: [&str; 2], want: &[usize]| {
        let router = router_of(
            always(),
            &[
                part(0, &format!("role=prefill{prefill}")),
                part(1, &format!("role=decode{}", decodes[0])),
                part(2, &format!("role=decode{}", decodes[1])),
            ],
        );
        for number in 0..8 {
            let chosen = choose(&router, &long(&router, &format!("{number}")), at(number));
            match want {
                [] => check_whole(&chosen, &[1, 2], SplitReason::NoPair),
                _ => check_pair(&chosen, &[0], want),
            }
        }
    };
    check(",group=g", [",group=g", ",group=h"], &[1]);
    check(",group=g", ["", ",group=h"], &[]);
    check("", [",group=g", ",group=h"], &[1, 2]);
    check(",connector=none", [",connector=none", ",connector=vllm-nixl"], &[1]);
    check("", ["", ",connector=vllm-nixl"], &[1, 2]);
    check(",zone=a", [",zone=b", ",zone=a"], &[2]);
    check(",zone=a", [",zone=b", ",zone=b"], &[1, 2]);
}

#[test]
fn an_endpoint_of_both_roles_does_either_and_is_never_its_own_pair() {
    let router = router_of(always(), &[part(0, "role=both"), part(1, "role=decode")]);
    for number in 0..4 {
        check_pair(&choose(&router, &long(&router, &format!("{number}")), at(number)), &[0], &[1]);
    }
    let policies = [PolicyName::PdCost, PolicyName::PdQoe, PolicyName::PdLoadAware, PolicyName::Random];
    for policy in policies {
        let specs = [part(0, "role=prefill"), part(1, "role=both"), part(2, "role=both")];
        let router = router_of(Settings { policy, ..always() }, &specs);
        for number in 0..30 {
            let chosen = choose(&router, &long(&router, &format!("{number}")), at(number));
            check_pair(&chosen, &[0, 1, 2], &[1, 2]);
            assert_ne!(chosen.decision.prefill(), Some(chosen.endpoint.id), "{policy}");
        }
    }
}

#[test]
fn without_roles_the_policies_for_pairs_serve_whole() {
    for policy in [PolicyName::PdCost, PolicyName::PdQoe, PolicyName::PdLoadAware] {
        let router = router(3, Settings { policy, ..Settings::default() });
        let chosen = choose(&router, &long(&router, "a"), at(1));
        assert!(chosen.prefill.is_none() && chosen.decision.split.is_none(), "{:?}", chosen.decision);
    }
}

#[test]
fn a_failed_prefill_is_tried_at_another_and_then_served_whole() {
    let router = two_and_two(Settings::default());
    let prompt = long(&router, "a");
    let mut tried = Vec::new();
    for number in 1..3 {
        let chosen = router.choose(&prompt, &tried, at(number), &mut rng()).unwrap();
        check_pair(&chosen, &[0, 1], &[2, 3]);
        assert!(!tried.contains(&chosen.decision.prefill().unwrap()));
        tried.extend(chosen.decision.prefill());
        router.withdraw(&prompt, &chosen.prefill.unwrap().footing);
        router.withdraw(&prompt, &chosen.footing);
    }
    let third = router.choose(&prompt, &tried, at(3), &mut rng()).unwrap();
    check_whole(&third, &[2, 3], SplitReason::PrefillFailed);

    let three = [0, 1, 2].map(|number| part(number, "role=prefill"));
    let router = router_of(always(), &[&three[..], &[part(3, "role=decode")]].concat());
    let third = router.choose(&long(&router, "a"), &[id(0), id(1)], at(1), &mut rng()).unwrap();
    check_whole(&third, &[3], SplitReason::PrefillFailed);
}

#[test]
fn a_role_that_is_lost_is_no_outage() {
    let lose = |router: &Router, lost: [usize; 2]| {
        for number in lost.into_iter().flat_map(|number| [number; 3]) {
            router.report(id(number), Signal::ProbeFailed(Cause::Refused), at(1));
        }
    };
    let router = two_and_two(Settings::default());
    lose(&router, [0, 1]);
    check_whole(&choose(&router, &long(&router, "a"), at(2)), &[2, 3], SplitReason::NoPrefillEndpoint);
    let router = two_and_two(Settings::default());
    lose(&router, [2, 3]);
    check_whole(&choose(&router, &long(&router, "a"), at(2)), &[0, 1], SplitReason::NoDecodeEndpoint);
    lose(&router, [0, 1]);
    let none = router.choose(&long(&router, "a"), &[], at(2), &mut rng()).unwrap_err();
    assert!(matches!(none, Refusal::NoEndpointReady { missing_role: None, .. }), "{none:?}");
}

#[test]
fn a_failed_decode_goes_to_another_of_the_same_group_with_the_same_prefill() {
    let specs = [
        part(0, "role=prefill,group=g"),
        part(1, "role=decode,group=g"),
        part(2, "role=decode,group=g"),
        part(3, "role=decode,group=h"),
    ];
    for policy in [PolicyName::PdCost, PolicyName::PdQoe, PolicyName::PdLoadAware, PolicyName::RoundRobin] {
        let router = router_of(Settings { policy, ..always() }, &specs);
        let prompt = long(&router, "a");
        let first = choose(&router, &prompt, at(1));
        check_pair(&first, &[0], &[1, 2]);
        let failed = first.endpoint.id;
        let next = router.choose_decode_again(&prompt, id(0), &[failed], at(2), &mut rng()).unwrap();
        assert!(next.prefill.is_none());
        assert_eq!((why(&next), next.decision.prefill()), (SplitReason::Prefilled, Some(id(0))));
        assert_eq!(next.footing.part, Part::Decode);
        assert!(next.endpoint.id != failed && next.endpoint.id != id(3), "{policy}");
        let tried = [failed, next.endpoint.id];
        let none = router.choose_decode_again(&prompt, id(0), &tried, at(3), &mut rng());
        assert_eq!(none.unwrap_err(), Refusal::AllTried);
    }
}

#[test]
fn each_leg_has_the_policy_that_is_named_for_it() {
    let settings = Settings {
        prefill_policy: Some(PolicyName::RoundRobin),
        decode_policy: Some(PolicyName::LeastLoad),
        ..always()
    };
    let router = two_and_two(settings);
    let chosen: Vec<_> = (0..8).map(|n| choose(&router, &long(&router, &format!("{n}")), at(n))).collect();
    for (number, decode) in [(0, 2), (1, 3)] {
        let to = |want: usize, got: fn(&Chosen) -> EndpointId| {
            chosen.iter().filter(|chosen| got(chosen) == id(want)).count()
        };
        assert_eq!(to(number, |chosen| chosen.decision.prefill().unwrap()), 4);
        assert_eq!(to(decode, |chosen| chosen.endpoint.id), 4);
    }
    let last = &chosen[7].decision;
    assert_eq!((last.policy, last.split.as_ref().unwrap().policy), ("least-load", "round-robin"));
}

#[test]
fn a_policy_for_pairs_can_not_stand_for_one_leg() {
    let settings = Settings { prefill_policy: Some(PolicyName::PdQoe), ..Settings::default() };
    let faults = settings.faults();
    assert_eq!(faults.len(), 1);
    assert_eq!((faults[0].key.as_str(), faults[0].value.as_str()), ("prefill_policy", "pd-qoe"));
    assert!(faults[0].allowed.starts_with("cost, ") && !faults[0].allowed.contains("pd-"), "{}", faults[0]);
}

#[test]
fn prompts_that_come_one_at_a_time_spread_over_each_role() {
    for policy in [PolicyName::Cost, PolicyName::PdQoe, PolicyName::PdLoadAware] {
        let router = two_and_two(Settings { policy, ..always() });
        let mut prefills = [0; 2];
        let mut decodes = [0; 2];
        let mut rng = rng();
        for number in 0..200 {
            let prompt = long(&router, &format!("{number} x"));
            let chosen = router.choose(&prompt, &[], at(number * 50), &mut rng).unwrap();
            let from = chosen.decision.prefill().unwrap();
            prefills[usize::from(from == id(1))] += 1;
            decodes[usize::from(chosen.endpoint.id == id(3))] += 1;
        }
        for counts in [prefills, decodes] {
            assert!(
                counts.iter().all(|count| (70..=130).contains(count)),
                "{policy}: {prefills:?} {decodes:?}"
            );
        }
    }
}

#[test]
fn roles_count_for_the_models_that_are_served_with_them() {
    let specs = [part(0, "role=prefill"), part(1, "role=decode"), part(2, "role=both"), part(3, "role=both")];
    let router = router_of(always(), &specs);
    for number in [0, 1] {
        router.set_served(id(number), Served::Models(vec!["other".to_owned()]));
    }
    // Whole engines of a model that has no others hand nothing over, whatever else there is.
    let chosen = choose(&router, &long(&router, "a"), at(1));
    assert!(chosen.prefill.is_none() && chosen.decision.split.is_none(), "{:?}", chosen.decision);
    let other = shape_of(&router, &json!({"model": "other", "prompt": text("a", 32_000)}));
    check_pair(&choose(&router, &other, at(2)), &[0], &[1]);
    router.set_served(id(0), Served::Models(vec!["m".to_owned()]));
    check_whole(&choose(&router, &other, at(3)), &[1], SplitReason::NoPrefillEndpoint);
}

#[test]
fn the_last_prefill_endpoint_may_be_ejected_for_how_requests_fare_there_and_the_last_decode_endpoint_not() {
    let router = router_of(Settings::default(), &[part(0, "role=prefill"), part(1, "role=decode")]);
    for number in 0..50 {
        for endpoint in [id(0), id(1)] {
            router.report(endpoint, Signal::Failure(Cause::ServerError), at(number));
        }
    }
    check_whole(&choose(&router, &long(&router, "a"), at(60)), &[1], SplitReason::NoPrefillEndpoint);
    assert_eq!(router.lacks(), None);
}

#[test]
fn the_load_aware_policy_decodes_where_the_fewest_run_within_the_group() {
    let settings = Settings { policy: PolicyName::PdLoadAware, ..always() };
    let keys = ["role=prefill,group=g", "role=decode,group=g", "role=decode,group=g", "role=decode,group=h"];
    let specs: Vec<_> = keys.iter().enumerate().map(|(number, keys)| part(number, keys)).collect();
    let router = router_of(settings, &specs);
    let held: Vec<_> = (0..6).map(|n| choose(&router, &long(&router, &format!("{n}")), at(n))).collect();
    for number in [1, 2] {
        assert_eq!(held.iter().filter(|chosen| chosen.endpoint.id == id(number)).count(), 3, "of group g");
    }
}

#[test]
fn a_session_knows_its_pair_until_it_moves() {
    let router = two_and_two(always());
    let body = json!({"model": "m", "prompt": text("a", 32_000), "stream": true});
    let asked = shape_with(&router, &body, &[("x-session-id", "s")]);
    let key = asked.session.unwrap();
    let chosen = choose(&router, &asked, at(1));
    let home = router.session(key).home().unwrap();
    assert_eq!((home.endpoint, home.prefill), (chosen.endpoint.id, chosen.decision.prefill()));
    let tried = [chosen.endpoint.id];
    let next = router.choose_decode_again(&asked, home.prefill.unwrap(), &tried, at(2), &mut rng()).unwrap();
    let moved = router.session(key).home().unwrap();
    assert_eq!((moved.endpoint, moved.prefill), (next.endpoint.id, home.prefill));
    router.pin(key, home.endpoint, at(3));
    assert_eq!(router.session(key).home().unwrap().prefill, None);
}

#[test]
fn many_threads_that_choose_pairs_leave_both_roles_even() {
    let even = Some(PolicyName::LeastLoad);
    let router = two_and_two(Settings { prefill_policy: even, decode_policy: even, ..always() });
    let prompts: Vec<_> = (0..64).map(|number| shape(&router, &text(&format!("{number}"), 4_000))).collect();
    let held: Vec<Chosen> = std::thread::scope(|scope| {
        let choose_some = |prompts: &[RequestShape]| {
            let choose_one = |prompt| router.choose(prompt, &[], at(1), &mut rng()).unwrap();
            prompts.iter().map(choose_one).collect::<Vec<_>>()
        };
        let threads: Vec<_> =
            prompts.chunks(8).map(|prompts| scope.spawn(move || choose_some(prompts))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let running = |number: usize| router.view().get(id(number)).unwrap().running(at(2));
    assert_eq!([0, 1, 2, 3].map(running), [32; 4]);
    drop(held);
    assert_eq!([0, 1, 2, 3].map(running), [0; 4]);
}
