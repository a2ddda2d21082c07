//! The endpoint list and operators' changes to it.

use super::*;
use crate::Refusal;
use crate::endpoint::{Cause, StandingChange};
use crate::facts::{AdminFact, AdminOperation, LedgerRecord};

fn ids(router: &Router) -> Vec<EndpointId> {
    router.view().endpoints.iter().map(|endpoint| endpoint.id).collect()
}

fn sorted(numbers: &[usize]) -> Vec<EndpointId> {
    let mut ids: Vec<_> = numbers.iter().map(|number| id(*number)).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn operators_changes_stay_on_top_of_the_configured_list() {
    let router = router(2, Settings::default());
    let (_, changes) = router.administer(id(5), AdminOperation::Add(spec(5)), at(1)).unwrap();
    assert_eq!(changes.added, [id(5)]);
    let (_, changes) = router.administer(id(0), AdminOperation::Remove, at(2)).unwrap();
    assert_eq!(changes.removed, [id(0)]);
    assert_eq!(ids(&router), sorted(&[1, 5]));
    router.set_endpoints((0..4).map(spec).collect(), at(3));
    assert_eq!(ids(&router), sorted(&[1, 2, 3, 5]));
    router.administer(id(0), AdminOperation::Add(spec(0)), at(4)).unwrap();
    assert_eq!(ids(&router), sorted(&[0, 1, 2, 3, 5]));
}

#[test]
fn of_two_changes_the_later_holds_whatever_the_order_of_hearing() {
    let fact = |counter, replica: &str, operation| AdminFact {
        endpoint: id(0),
        operation,
        counter,
        replica: ReplicaId::new(replica),
    };
    let add = fact(3, "b", AdminOperation::Add(spec(0)));
    let remove = fact(3, "c", AdminOperation::Remove);
    for order in [[&add, &remove], [&remove, &add]] {
        let router = router(1, Settings::default());
        for fact in order {
            router.apply_admin(fact.clone(), at(1));
        }
        assert_eq!(router.admin_facts(), std::slice::from_ref(&remove));
        assert!(ids(&router).is_empty());
        // What this replica says next is later than all it has heard.
        let (own, _) = router.administer(id(0), AdminOperation::Add(spec(0)), at(2)).unwrap();
        assert_eq!(own.counter, 4);
        assert_eq!(ids(&router), [id(0)]);
    }
}

#[test]
fn a_draining_endpoint_gets_nothing_new_and_goes_once_it_is_idle() {
    let router = router(2, Settings::default());
    let prompt = shape(&router, "x");
    let held = router.choose(&prompt, &[id(1)], at(1), &mut rng()).unwrap();
    let drain = AdminOperation::Drain { deadline_ms: 10_000 };
    let (_, changes) = router.administer(id(0), drain, at(2)).unwrap();
    assert_eq!(changes.draining, [id(0)]);
    for _ in 0..10 {
        assert_eq!(choose(&router, &prompt, at(3)).endpoint.id, id(1));
    }
    assert_eq!(router.finish_drains(at(4)).removed, []);
    drop(held);
    assert_eq!(router.finish_drains(at(5)).removed, [id(0)]);
    assert_eq!(ids(&router), [id(1)]);
}

#[test]
fn a_drain_ends_when_its_time_is_up() {
    let router = router(2, Settings::default());
    let _held = router.choose(&shape(&router, "x"), &[id(1)], at(1), &mut rng()).unwrap();
    router.administer(id(0), AdminOperation::Drain { deadline_ms: 1_000 }, at(2)).unwrap();
    assert_eq!(router.finish_drains(at(1_001)).removed, []);
    assert_eq!(router.finish_drains(at(1_003)).removed, [id(0)]);
}

#[test]
fn a_charge_outlives_its_endpoints_configuration() {
    let router = router(1, Settings::default());
    let chosen = choose(&router, &shape(&router, "x"), at(1));
    let zoned = EndpointSpec { zone: Some("z".to_owned()), ..spec(0) };
    router.set_endpoints(vec![zoned], at(2));
    let endpoint = std::sync::Arc::clone(router.view().get(id(0)).unwrap());
    assert_eq!(endpoint.spec.zone.as_deref(), Some("z"));
    assert_eq!(endpoint.running(at(2)), 1);
    drop(chosen);
    assert_eq!(endpoint.running(at(2)), 0);
}

#[test]
fn a_removed_endpoint_that_comes_back_is_cold() {
    let router = router(1, Settings::default());
    let prompt = shape(&router, &text("warm", 4_000));
    drop(choose(&router, &prompt, at(1)));
    router.set_endpoints(Vec::new(), at(2));
    router.set_endpoints(vec![spec(0)], at(3));
    router.set_served(id(0), Served::Any);
    assert_eq!(warm_tokens(&router, &prompt, 0, at(4)), 0);
}

#[test]
fn the_last_endpoint_is_not_ejected_for_how_requests_fare_there_but_for_failed_probes() {
    let router = router(2, Settings::default());
    let fail = |number, times, signal| {
        (0..times).map(|n| router.report(id(number), signal, at(10 + n))).last().unwrap()
    };
    let reset = Cause::Reset;
    assert_eq!(fail(0, 3, Signal::Failure(reset)), StandingChange::Ejected { cause: reset });
    assert!(matches!(fail(1, 3, Signal::Failure(reset)), StandingChange::Spared { .. }));
    assert_eq!(router.lacks(), None);
    fail(1, 3, Signal::ProbeFailed(Cause::Refused));
    assert!(router.lacks().is_some());
}

#[test]
fn a_dead_engines_placements_are_forgotten() {
    let router = router(2, Settings::default());
    let prompt = shape(&router, &text("warm", 4_000));
    let home = choose(&router, &prompt, at(1)).endpoint.id;
    for ms in 0..3 {
        router.report(home, Signal::ProbeFailed(Cause::Refused), at(2 + ms));
    }
    for ms in 0..4 {
        router.report(home, Signal::ProbeOk, at(5_000 + ms * 1_000));
    }
    let number = (0..2).find(|number| id(*number) == home).unwrap();
    assert_eq!(warm_tokens(&router, &prompt, number, at(10_000)), 0);
}

#[test]
fn all_models_are_listed_with_how_many_serve_them() {
    let router = router(3, Settings::default());
    router.set_served(id(2), Served::Models(vec!["m".to_owned(), "n".to_owned()]));
    let models: Vec<_> = router.models().into_iter().map(|entry| (entry.id, entry.endpoints)).collect();
    assert_eq!(models, [("m".to_owned(), 3), ("n".to_owned(), 1)]);
}

#[test]
fn one_live_replica_looks_after_each_endpoint_and_all_agree_who() {
    let names = ["a", "b", "c"];
    let live = names.map(ReplicaId::new);
    let routers = names.map(|name| router_named(name, 12, Settings::default()));
    routers.iter().for_each(|router| router.set_replicas(&live));
    let owner = |router: &Router, number| router.scrape_owner(id(number)).unwrap();
    for number in 0..12 {
        assert!(routers.iter().all(|router| owner(router, number) == owner(&routers[0], number)));
    }
    let of_b: Vec<_> = (0..12).filter(|number| owner(&routers[0], *number) == live[1]).collect();
    assert!(!of_b.is_empty() && of_b.len() < 12);
    let survivors = [live[0].clone(), live[2].clone()];
    routers[0].set_replicas(&survivors);
    assert!(of_b.iter().all(|number| owner(&routers[0], *number) != live[1]));
}

#[test]
fn operators_changes_are_bounded_and_one_too_many_is_refused_and_counted() {
    let router = router(1, Settings::default());
    let elsewhere = |number: u64| EndpointId::of(&format!("http://10.1.0.0:{number}"), None);
    let most = 16_384;
    for number in 0..most {
        router.administer(elsewhere(number), AdminOperation::Remove, at(1)).unwrap();
    }
    assert_eq!(router.stats().admin_facts as u64, most);
    let told = router.take_ledger(usize::MAX).len();
    let one_more = router.administer(id(7), AdminOperation::Add(spec(7)), at(2));
    assert_eq!(one_more, Err(crate::AdminFactsFull));
    assert_eq!((told as u64, router.take_ledger(usize::MAX).len()), (most, 0), "nobody is told of it");
    assert!(router.view().get(id(7)).is_none());
    // Another change to what was changed before has its room.
    router.administer(elsewhere(0), AdminOperation::Remove, at(3)).unwrap();
    // One that is heard is no more welcome.
    let fact = AdminFact {
        endpoint: id(8),
        operation: AdminOperation::Add(spec(8)),
        counter: 99_999,
        replica: ReplicaId::new("b"),
    };
    router.apply_admin(fact, at(4));
    assert_eq!((router.stats().admin_facts as u64, router.stats().admin_facts_refused), (most, 2));
}

#[test]
fn a_change_is_told_on_once_by_whoever_hears_it_and_its_origin_hears_that_it_is_kept() {
    let [a, b, c] = ["a", "b", "c"].map(|name| router_named(name, 1, Settings::default()));
    let told = |router: &Router| router.take_ledger(usize::MAX);
    let (fact, _) = a.administer(id(5), AdminOperation::Add(spec(5)), at(1)).unwrap();
    let first = told(&a);
    b.merge_ledger(&first, at(2));
    b.merge_ledger(&first, at(2));
    let second = told(&b);
    assert_eq!(second, [LedgerRecord::Admin(fact.clone())]);
    assert!(!a.is_shared(&fact));
    // The one that never heard its origin has it from the other, and the origin knows that it is not alone.
    c.merge_ledger(&second, at(3));
    assert_eq!(c.admin_facts(), std::slice::from_ref(&fact));
    a.merge_ledger(&second, at(3));
    assert!(a.is_shared(&fact));
    a.merge_ledger(&told(&c), at(4));
    b.merge_ledger(&told(&c), at(4));
    assert_eq!((told(&a), told(&b), told(&c)), (vec![], vec![], vec![]), "nobody tells it again");
    let (later, _) = a.administer(id(5), AdminOperation::Remove, at(5)).unwrap();
    assert!(!a.is_shared(&later), "another change is another matter");
}

#[test]
fn what_an_endpoint_says_that_it_serves_counts_from_the_next_request_on() {
    let router = router(2, Settings::default());
    let candidates = |model: &str| {
        let wanted = shape_of(&router, &serde_json::json!({"model": model, "prompt": "p"}));
        router.explain(&wanted, at(3), &mut rng()).map(|decision| decision.candidates.len())
    };
    assert_eq!(candidates("m"), Ok(2));
    assert_eq!(candidates("n"), Err(Refusal::ModelUnknown { model: "n".to_owned() }));
    router.set_served(id(0), Served::Models(vec!["n".to_owned()]));
    assert_eq!((candidates("m"), candidates("n")), (Ok(1), Ok(1)));
    router.set_endpoints((0..3).map(spec).collect(), at(2));
    router.report(id(2), Signal::ProbeOk, at(2));
    router.set_served(id(2), Served::Models(vec!["m".to_owned(), "n".to_owned()]));
    assert_eq!((candidates("m"), candidates("n")), (Ok(2), Ok(2)));
}
