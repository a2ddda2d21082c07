use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::scenario::Name;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn replica(number: usize) -> Name {
    Name { kind: Kind::Replica, number }
}

const fn engine(number: usize) -> Name {
    Name { kind: Kind::Engine, number }
}

fn act(at: u64, verb: Verb, target: Name) -> Act {
    Act { from: ms(at), at: ms(at + 1), verb, target }
}

/// A second turn that went from `began` to `ended` through replica 0 to engine 0, its home.
fn exchange(began: u64, ended: u64) -> Exchange {
    Exchange {
        id: format!("r-{began}"),
        turn: 1,
        began: ms(began),
        first_content: Some(ms(began + 1)),
        ended: ms(ended),
        failure: None,
        replica: Some(replica(0)),
        endpoint: Some("http://e0".to_owned()),
        home: Some("http://e0".to_owned()),
    }
}

fn failed(began: u64, ended: u64, kind: ErrorKind) -> Exchange {
    Exchange { failure: Some((kind, "why".to_owned())), ..exchange(began, ended) }
}

/// What replica `from` said at `at`: all three alive, and replica 0 with `running` requests.
fn sample(at: u64, from: usize, running: u64) -> Sample {
    let by_replica =
        if running > 0 { BTreeMap::from([("replica-0".to_owned(), running)]) } else { BTreeMap::new() };
    Sample {
        at: ms(at),
        replica: replica(from),
        live: BTreeSet::from(["replica-0", "replica-1", "replica-2"].map(str::to_owned)),
        running_by_replica: by_replica,
        running,
    }
}

fn evidence(acts: Vec<Act>, exchanges: Vec<Exchange>, samples: Vec<Sample>) -> Evidence {
    let engine_urls = vec!["http://e0".to_owned(), "http://e1".to_owned()];
    Evidence { acts, exchanges, samples, engine_urls, load_ended: ms(1_000), ..Evidence::default() }
}

fn check(rule: Rule, evidence: &Evidence, holds: bool) {
    let (got, seen) = one(&rule, evidence);
    assert_eq!(got, holds, "{rule:?}: {seen}");
}

#[test]
fn a_failure_is_excused_only_if_it_was_cut_with_the_killed_replica() {
    let kill = || vec![act(100, Verb::Kill, replica(0))];
    let with = |exchange: Exchange| evidence(kill(), vec![exchange], vec![]);
    let rule = Rule::OnlyCutRequestsFail;
    check(rule, &with(failed(50, 100, ErrorKind::Reset)), true);
    check(rule, &with(failed(50, 100, ErrorKind::Truncated)), true);
    check(rule, &with(failed(50, 100, ErrorKind::Status(502))), false);
    check(rule, &with(failed(50, 100, ErrorKind::ErrorEvent)), false);
    check(rule, &with(failed(110, 120, ErrorKind::Reset)), false);
    check(rule, &with(failed(50, 90, ErrorKind::Reset)), false);
    check(rule, &with(Exchange { replica: Some(replica(1)), ..failed(50, 100, ErrorKind::Reset) }), false);
    let unknown = Exchange { replica: None, ..failed(50, 100, ErrorKind::Reset) };
    check(rule, &with(unknown.clone()), true);
    let mut logged = with(unknown);
    logged.logged.insert("r-50".to_owned(), replica(2));
    check(rule, &logged, false);
    check(Rule::NothingFails, &with(failed(50, 100, ErrorKind::Reset)), false);
    check(Rule::NothingFails, &with(exchange(50, 101)), true);
}

#[test]
fn with_a_dead_engine_only_streams_that_had_begun_there_may_end_in_an_error_event() {
    let with = |exchange: Exchange| evidence(vec![act(100, Verb::Kill, engine(0))], vec![exchange], vec![]);
    let rule = Rule::OnlyBegunStreamsFail;
    check(rule, &with(failed(50, 100, ErrorKind::ErrorEvent)), true);
    check(rule, &with(failed(50, 100, ErrorKind::Truncated)), false);
    check(rule, &with(Exchange { first_content: None, ..failed(50, 100, ErrorKind::ErrorEvent) }), false);
    let elsewhere =
        Exchange { endpoint: Some("http://e1".to_owned()), ..failed(50, 100, ErrorKind::ErrorEvent) };
    check(rule, &with(elsewhere), false);
}

#[test]
fn only_turns_after_the_fault_whose_home_was_not_hit_count_for_follow_ups() {
    let away = |began| Exchange { endpoint: Some("http://e1".to_owned()), ..exchange(began, began + 10) };
    let rule = Rule::FollowUpsAtHome { ratio_min: 0.95 };
    let kill = |target| vec![act(100, Verb::Kill, target)];
    check(rule, &evidence(kill(replica(0)), vec![away(50), exchange(150, 160)], vec![]), true);
    check(rule, &evidence(kill(replica(0)), vec![away(150), exchange(150, 160)], vec![]), false);
    check(rule, &evidence(kill(replica(0)), vec![exchange(50, 60)], vec![]), false);
    check(rule, &evidence(kill(engine(0)), vec![away(150)], vec![]), false);
    let on_e1 = Exchange {
        endpoint: Some("http://e1".to_owned()),
        home: Some("http://e1".to_owned()),
        ..exchange(150, 160)
    };
    check(rule, &evidence(kill(engine(0)), vec![away(150), on_e1], vec![]), true);
}

#[test]
fn load_is_forgotten_when_no_other_replica_counts_it_past_the_limit() {
    let rule = Rule::LoadForgotten { within_ms: 2_000 };
    let kill = || vec![act(1_000, Verb::Kill, replica(0))];
    let before = sample(900, 1, 3);
    check(
        rule,
        &evidence(kill(), vec![], vec![before.clone(), sample(2_000, 1, 3), sample(3_100, 1, 0)]),
        true,
    );
    check(rule, &evidence(kill(), vec![], vec![before.clone(), sample(3_100, 1, 1)]), false);
    check(rule, &evidence(kill(), vec![], vec![before.clone()]), false);
    check(rule, &evidence(kill(), vec![], vec![sample(900, 1, 0), sample(3_100, 1, 0)]), false);
    check(rule, &evidence(vec![], vec![], vec![before.clone(), sample(3_100, 1, 0)]), false);
    let own_word = vec![before.clone(), sample(3_100, 1, 0), sample(3_200, 0, 5)];
    check(rule, &evidence(kill(), vec![], own_word), true);
    let back = vec![act(1_000, Verb::Stop, replica(0)), act(4_000, Verb::Continue, replica(0))];
    check(rule, &evidence(back, vec![], vec![before, sample(3_100, 1, 0), sample(4_100, 1, 2)]), true);
}

#[test]
fn a_replica_that_came_back_must_be_alive_to_all_others() {
    let rule = Rule::SeenAlive { within_ms: 500 };
    let back = || vec![act(1_000, Verb::Stop, replica(0)), act(2_000, Verb::Continue, replica(0))];
    let blind = Sample { live: BTreeSet::new(), ..sample(2_600, 2, 0) };
    check(rule, &evidence(back(), vec![], vec![sample(2_600, 1, 0)]), true);
    check(rule, &evidence(back(), vec![], vec![sample(2_600, 1, 0), blind]), false);
    check(rule, &evidence(back(), vec![], vec![sample(2_400, 1, 0)]), false);
}

#[test]
fn what_still_runs_after_the_load_is_found_at_the_replicas_that_live() {
    let rule = Rule::NothingLeftRunning { within_ms: 500 };
    check(rule, &evidence(vec![], vec![], vec![sample(1_600, 1, 0)]), true);
    check(rule, &evidence(vec![], vec![], vec![sample(1_600, 1, 1)]), false);
    check(rule, &evidence(vec![], vec![], vec![sample(1_400, 1, 0)]), false);
    let killed = vec![act(100, Verb::Kill, replica(1))];
    check(rule, &evidence(killed, vec![], vec![sample(1_600, 1, 1), sample(1_600, 2, 0)]), true);
}

#[test]
fn a_load_that_was_none_or_a_process_that_ended_by_itself_breaks_the_run() {
    check(Rule::Answered { at_least: 1 }, &evidence(vec![], vec![exchange(1, 2)], vec![]), true);
    check(Rule::Answered { at_least: 2 }, &evidence(vec![], vec![exchange(1, 2)], vec![]), false);
    let mut lost = evidence(vec![], vec![], vec![]);
    assert!(judge(&[], &lost)[0].holds);
    lost.lost.push((engine(0), "exit status: 101".to_owned()));
    let judged = judge(&[], &lost);
    assert!(!judged[0].holds && judged[0].seen.contains("engine-0"), "{judged:?}");
}
