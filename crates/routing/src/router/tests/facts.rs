//! What replicas tell each other, and what it adds up to.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::SessionKey;
use crate::facts::{LedgerRecord, LoadPush, LoadRow, Pulse};

fn row(number: usize, running: u32, prefill_tokens: u32) -> LoadRow {
    LoadRow { endpoint: id(number), running, prefill_tokens, decode_tokens: 0, placed_tokens: 0 }
}

fn pulse(epoch: u64, version: u64, load: Vec<LoadRow>) -> Pulse {
    Pulse { epoch, version, load, ..Pulse::default() }
}

fn carried(router: &Router, number: usize) -> (u32, u64) {
    let load = router.view().get(id(number)).unwrap().load(at(10));
    (load.running, load.prefill_tokens)
}

#[test]
fn an_older_report_never_replaces_a_newer_one_and_a_new_life_begins_with_nothing() {
    let router = router(2, Settings::default());
    let from = ReplicaId::new("b");
    let push = |epoch, version, rows| LoadPush { epoch, version, rows };
    router.merge_pulse(&from, &pulse(5, 10, vec![row(0, 3, 300), row(1, 1, 0)]), at(1));
    router.merge_pulse(&from, &pulse(5, 9, vec![row(0, 9, 900)]), at(2));
    assert_eq!((carried(&router, 0), carried(&router, 1)), ((3, 300), (1, 0)));
    // A push says nothing of endpoints without a row in it.
    router.merge_load(&from, &push(5, 12, vec![row(0, 4, 400)]), at(3));
    assert_eq!((carried(&router, 0), carried(&router, 1)), ((4, 400), (1, 0)));
    // A pulse that began before the push and comes after it does not undo it, and is news for the rest.
    router.merge_pulse(&from, &pulse(5, 11, vec![row(0, 3, 300)]), at(4));
    assert_eq!((carried(&router, 0), carried(&router, 1)), ((4, 400), (0, 0)));
    router.merge_load(&from, &push(5, 13, vec![row(0, 0, 0)]), at(5));
    router.merge_pulse(&from, &pulse(5, 12, vec![row(0, 4, 400)]), at(6));
    assert_eq!(carried(&router, 0), (0, 0), "gone is newer than there");
    router.merge_load(&from, &push(5, 14, vec![row(0, 2, 0)]), at(7));
    router.merge_pulse(&from, &pulse(6, 1, vec![row(1, 1, 0)]), at(8));
    assert_eq!((carried(&router, 0), carried(&router, 1)), ((0, 0), (1, 0)), "the replica was restarted");
    router.merge_load(&from, &push(5, 99, vec![row(0, 9, 0)]), at(9));
    assert_eq!(carried(&router, 0), (0, 0), "its last life is over");
}

#[test]
fn one_more_prompt_that_waits_does_not_make_the_engine_begin_anew_whoever_sent_it() {
    let router = router(1, Settings::default());
    let head_ms = |ms| router.view().get(id(0)).unwrap().load(at(ms)).head_ms;
    let tell = |from: &str, version, prefill_tokens, ms| {
        let push = LoadPush { epoch: 1, version, rows: vec![row(0, 1, prefill_tokens)] };
        router.merge_load(&ReplicaId::new(from), &push, at(ms));
    };
    assert_eq!(head_ms(50), 0.0, "nothing is to be computed");
    tell("b", 1, 1_000, 100);
    tell("c", 1, 500, 300);
    assert_eq!(head_ms(400), 300.0, "it is at the first of two");
    tell("b", 2, 0, 450);
    assert_eq!(head_ms(500), 50.0, "it is at the second");
    tell("c", 2, 0, 600);
    assert_eq!(head_ms(700), 0.0, "nothing is left");
}

#[test]
fn load_counts_by_replica_and_goes_with_it() {
    let router = router(2, Settings::default());
    let _own = choose(&router, &shape(&router, "x"), at(1));
    router.merge_pulse(&ReplicaId::new("b"), &pulse(1, 1, vec![row(0, 100, 0)]), at(1));
    router.merge_pulse(&ReplicaId::new("c"), &pulse(1, 1, vec![row(0, 7, 0)]), at(1));
    let endpoint = std::sync::Arc::clone(router.view().get(id(0)).unwrap());
    let by_replica = [(ReplicaId::new("b"), 100), (ReplicaId::new("c"), 7)];
    assert_eq!(endpoint.running_by_replica(), by_replica);
    assert_eq!(endpoint.running(at(2)), 107 + endpoint.own_running(at(2)));
    let elsewhere = router.explain(&shape(&router, "y"), at(2), &mut rng()).unwrap();
    assert_eq!(elsewhere.chosen, id(1), "others' load is avoided like the own");
    router.replica_gone(&ReplicaId::new("b"));
    assert_eq!(endpoint.running_by_replica(), by_replica[1..]);
}

#[test]
fn what_was_on_its_way_when_a_replica_died_counts_only_if_it_lives() {
    let router = router(2, Settings::default());
    let from = ReplicaId::new("b");
    let push = |epoch, version, rows| LoadPush { epoch, version, rows };
    router.merge_pulse(&from, &pulse(5, 10, vec![row(0, 3, 300)]), at(1));
    router.replica_gone(&from);
    // Both are newer than all that was heard of it.
    router.merge_load(&from, &push(5, 11, vec![row(0, 4, 400)]), at(2));
    router.merge_pulse(&from, &pulse(5, 12, vec![row(0, 4, 400), row(1, 1, 0), row(2, 7, 0)]), at(3));
    assert_eq!((carried(&router, 0), carried(&router, 1)), ((0, 0), (0, 0)));
    router.set_endpoints((0..3).map(spec).collect(), at(4));
    assert_eq!(carried(&router, 2), (0, 0), "nor at an endpoint that comes later");
    // It was only silent: it has said what it carries before it is known to live.
    router.replica_back(&from, at(5));
    assert_eq!((carried(&router, 0), carried(&router, 1), carried(&router, 2)), ((4, 400), (1, 0), (7, 0)));
    // A new life counts at once, whatever became of the last one.
    router.replica_gone(&from);
    router.merge_load(&from, &push(6, 1, vec![row(1, 2, 0)]), at(6));
    assert_eq!((carried(&router, 0), carried(&router, 1)), ((0, 0), (2, 0)));
}

#[test]
fn an_endpoint_that_is_added_late_carries_what_was_told_of_it_before() {
    let router = router(1, Settings::default());
    router.merge_pulse(&ReplicaId::new("b"), &pulse(1, 1, vec![row(1, 5, 50)]), at(1));
    router.set_endpoints((0..2).map(spec).collect(), at(2));
    assert_eq!(carried(&router, 1), (5, 50));
}

#[derive(Clone, Debug)]
struct Report {
    from: usize,
    rows: Vec<(usize, u32, u32)>,
    whole: bool,
}

fn report() -> impl Strategy<Value = Report> {
    let rows = prop::collection::btree_map(0_usize..4, (0_u32..50, 0_u32..5_000), 0..4);
    (0_usize..2, rows, any::<bool>()).prop_map(|(from, rows, whole)| Report {
        from,
        rows: rows.into_iter().map(|(number, (running, tokens))| (number, running, tokens)).collect(),
        whole,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn any_interleaving_of_two_origins_reports_gives_the_sum_of_their_last_words(
        reports in prop::collection::vec(report(), 1..24),
        late in prop::collection::vec(any::<bool>(), 24),
    ) {
        let router = router(4, Settings::default());
        let origins = [ReplicaId::new("b"), ReplicaId::new("c")];
        let mut state = [[(0_u32, 0_u32); 4]; 2];
        let mut delayed = Vec::new();
        let tell = |from: usize, version: u64, whole: bool, rows: Vec<LoadRow>| {
            if whole {
                router.merge_pulse(&origins[from], &pulse(1, version, rows), at(1));
            } else {
                router.merge_load(&origins[from], &LoadPush { epoch: 1, version, rows }, at(1));
            }
        };
        for ((version, report), late) in (1..).zip(&reports).zip(late) {
            if report.whole {
                state[report.from] = [(0, 0); 4];
            }
            for (number, running, tokens) in &report.rows {
                state[report.from][*number] = (*running, *tokens);
            }
            let rows = report.rows.iter().map(|(number, running, tokens)| row(*number, *running, *tokens));
            let rows: Vec<LoadRow> = rows.filter(|row| !report.whole || row.running > 0).collect();
            for (number, running, _) in &report.rows {
                if report.whole && *running == 0 {
                    state[report.from][*number] = (0, 0);
                }
            }
            // A late one comes after all that were sent after it; a whole one then is followed by its
            // origin's next whole one, which is sent in any case below.
            if late {
                delayed.push((report.from, version, report.whole, rows));
            } else {
                tell(report.from, version, report.whole, rows);
            }
        }
        for (from, version, whole, rows) in delayed {
            tell(from, version, whole, rows);
        }
        let last = reports.len() as u64 + 1;
        for (from, rows) in state.iter().enumerate() {
            let rows = (0..4).map(|number| row(number, rows[number].0, rows[number].1));
            tell(from, last, true, rows.filter(|row| row.running + row.prefill_tokens > 0).collect());
        }
        for (number, (b, c)) in state[0].iter().zip(&state[1]).enumerate() {
            prop_assert_eq!(carried(&router, number), (b.0 + c.0, u64::from(b.1 + c.1)));
        }
    }
}

/// Hands all that `from` has to tell to `to`.
fn exchange(from: &Router, to: &[&Router], now: Moment) {
    let records = from.take_ledger(usize::MAX);
    let pulse = from.pulse(now);
    for to in to {
        to.merge_ledger(&records, now);
        to.merge_pulse(from.own(), &pulse, now);
    }
}

#[test]
fn what_one_replica_placed_is_warm_for_all_and_equal_views_give_equal_choices() {
    let routers = ["a", "b", "c"].map(|name| router_named(name, 4, Settings::default()));
    let tenant = |number: usize| text("system", 2_048) + &text(&format!("tenant {number}"), 6_144);
    for number in 0..60_usize {
        let one = &routers[number % 3];
        let prompt = tenant(number % 12) + &text(&format!("turn {number}"), 600);
        drop(choose(one, &shape(one, &prompt), at(number as u64 * 50)));
        let others: Vec<&Router> = routers.iter().filter(|each| each.own() != one.own()).collect();
        exchange(one, &others, at(number as u64 * 50 + 10));
    }
    for one in &routers {
        let others: Vec<&Router> = routers.iter().filter(|each| each.own() != one.own()).collect();
        exchange(one, &others, at(4_000));
    }
    let mut same = 0;
    for number in 0..200_usize {
        let prompt = tenant(number % 15) + &text(&format!("question {number}"), 800);
        let shape = shape(&routers[0], &prompt);
        let decisions = routers.each_ref().map(|each| each.explain(&shape, at(4_001), &mut rng()).unwrap());
        for decision in &decisions {
            let warm = |d: &crate::Decision| d.candidates.iter().map(|c| c.warm_tokens).collect::<Vec<_>>();
            assert_eq!(warm(decision), warm(&decisions[0]), "question {number}");
        }
        same += usize::from(decisions.iter().all(|each| each.chosen == decisions[0].chosen));
    }
    assert!(same >= 198, "{same} of 200 choices are the same on all three");
}

#[test]
fn a_joiner_learns_placements_pins_and_changes_from_a_snapshot() {
    let old = router(3, Settings::default());
    let prompts: Vec<_> = (0..30).map(|n| shape(&old, &text(&format!("{n}"), 5_000))).collect();
    prompts.iter().for_each(|prompt| drop(choose(&old, prompt, at(1))));
    let key = SessionKey::of("x-session-id", b"s");
    old.pin(key, id(1), at(2));
    old.administer(id(7), crate::facts::AdminOperation::Add(spec(7)), at(2)).unwrap();
    let new = router_named("b", 3, Settings::default());
    let mut cursor = None;
    loop {
        let (records, next) = old.snapshot_page(cursor, 40);
        new.merge_snapshot(&records, at(3));
        cursor = next;
        if cursor.is_none() {
            break;
        }
    }
    for prompt in &prompts {
        for number in 0..3 {
            assert_eq!(warm_tokens(&new, prompt, number, at(4)), warm_tokens(&old, prompt, number, at(4)));
        }
    }
    assert_eq!(new.session(key).home().unwrap().endpoint, id(1));
    assert_eq!(new.admin_facts(), old.admin_facts());
    assert!(new.view().get(id(7)).is_some());
}

#[test]
fn a_restarted_engine_is_cold_for_every_replica() {
    let (a, b) = (router_named("a", 1, Settings::default()), router_named("b", 1, Settings::default()));
    let prompt = shape(&a, &text("warm", 4_000));
    drop(choose(&a, &prompt, at(1)));
    exchange(&a, &[&b], at(1));
    a.observe(&look(0, 0, 100), at(2));
    b.observe(&look(0, 0, 100), at(2));
    assert!(warm_tokens(&b, &prompt, 0, at(3)) > 0);
    assert_eq!(a.observe(&look(0, 0, 101), at(10)).restarted, [id(0)]);
    assert_eq!(warm_tokens(&a, &prompt, 0, at(11)), 0);
    exchange(&a, &[&b], at(11));
    assert_eq!(warm_tokens(&b, &prompt, 0, at(12)), 0);
}

#[test]
fn records_that_wait_to_be_told_are_bounded_and_those_lost_are_counted() {
    let router = router(1, Settings { ledger_queue_max: 10, ..Settings::default() });
    for number in 0..25 {
        drop(choose(&router, &shape(&router, &text(&format!("{number}"), 1_000)), at(1)));
    }
    // 25 placements and one sample of a choice.
    assert_eq!(router.stats().ledger_overflow, 16);
    assert_eq!(router.take_ledger(4).len(), 4);
    assert_eq!(router.take_ledger(100).len(), 6);
}

#[test]
fn only_what_is_new_is_told() {
    let router = router(1, Settings::default());
    let told = || {
        let records = router.take_ledger(usize::MAX);
        let blocks = |record: &LedgerRecord| match record {
            LedgerRecord::Place { blocks, .. } => blocks.len(),
            _ => 0,
        };
        records.iter().map(blocks).sum::<usize>()
    };
    let first = text("chat", 4_096);
    drop(choose(&router, &shape(&router, &first), at(1)));
    assert_eq!(told(), 8);
    drop(choose(&router, &shape(&router, &first), at(2)));
    assert_eq!(told(), 0);
    let next = first + &text("more", 1_024);
    drop(choose(&router, &shape(&router, &next), at(3)));
    assert_eq!(told(), 3, "the new two and the one before them");
}

#[test]
fn a_records_endpoint_that_is_not_configured_here_is_ignored_and_counted() {
    let router = router(1, Settings::default());
    let stranger = LedgerRecord::Pin { key: SessionKey::of("h", b"s"), endpoint: id(9) };
    assert_eq!(router.merge_ledger(&[stranger], at(1)).ignored, 1);
    assert_eq!(router.stats().ledger_unknown_endpoint, 1);
}

#[test]
fn a_moved_session_is_told_and_found_by_others() {
    let (a, b) = (router_named("a", 4, Settings::default()), router_named("b", 4, Settings::default()));
    let body = json!({"model": "m", "prompt": "hi"});
    let shape = shape_with(&a, &body, &[("x-session-id", "s-1")]);
    let chosen = choose(&a, &shape, at(1)).endpoint.id;
    exchange(&a, &[&b], at(1));
    let home = b.session(shape.session.unwrap()).home().unwrap().endpoint;
    assert_eq!(home, chosen);
    // Nothing of so short a prompt is warm anywhere; the pin alone settles it.
    let decision = b.explain(&shape, at(2), &mut rng()).unwrap();
    assert_eq!((decision.chosen, decision.reason), (home, crate::Reason::TieSession));
}

#[test]
fn a_session_does_not_flee_from_turns_that_are_over_without_a_word_of_it() {
    let (a, b) = (router_named("a", 4, Settings::default()), router_named("b", 4, Settings::default()));
    let turn = |router: &Router, text: &str| {
        let body = json!({"model": "m", "prompt": text});
        shape_with(router, &body, &[("x-session-id", "s-1")])
    };
    let home = a.explain(&turn(&a, "first"), at(1), &mut rng()).unwrap().chosen;
    // What another replica counts there stands in for the turns: they are over, but nobody has said so. Once the home
    // is known here, and once it is not.
    for pinned in [false, true] {
        if pinned {
            a.pin(turn(&a, "first").session.unwrap(), home, at(1));
        }
        for running in 0..4 {
            let row = LoadRow {
                endpoint: home,
                running,
                prefill_tokens: 2 * running,
                decode_tokens: 16 * running,
                placed_tokens: 0,
            };
            let version = u64::from(running) + if pinned { 10 } else { 1 };
            a.merge_load(&ReplicaId::new("c"), &LoadPush { epoch: 1, version, rows: vec![row] }, at(2));
            let chosen = a.explain(&turn(&a, "and then"), at(2), &mut rng()).unwrap().chosen;
            assert_eq!(chosen == home, running <= 2, "{running} running, pinned: {pinned}");
        }
    }
    // A replica that has heard nothing comes to the same.
    assert_eq!(b.explain(&turn(&b, "and then"), at(2), &mut rng()).unwrap().chosen, home);
}

#[test]
fn a_prompt_too_short_for_a_block_comes_back_to_where_it_went_through_any_replica() {
    let (a, b) = (router_named("a", 4, Settings::default()), router_named("b", 4, Settings::default()));
    let prompt = shape(&a, "What is the capital of France?");
    assert!(prompt.blocks.is_empty());
    let by_hash = a.explain(&prompt, at(1), &mut rng()).unwrap().chosen;
    // Its hash would send it elsewhere than where it is sent.
    let placed = a.choose(&prompt, &[by_hash], at(1), &mut rng()).unwrap();
    let home = placed.endpoint.id;
    let footing = placed.footing;
    drop(placed);
    exchange(&a, &[&b], at(2));
    for router in [&a, &b] {
        let decision = router.explain(&prompt, at(3), &mut rng()).unwrap();
        assert_eq!((decision.chosen, decision.reason), (home, crate::Reason::TieSession));
    }
    // A placement that failed is forgotten.
    a.withdraw(&prompt, &footing);
    exchange(&a, &[&b], at(4));
    for router in [&a, &b] {
        assert_eq!(router.explain(&prompt, at(5), &mut rng()).unwrap().chosen, by_hash);
    }
}

#[test]
fn only_a_chat_that_goes_on_and_is_unknown_here_waits_for_another_replicas_word() {
    let (a, b) = (router_named("a", 4, Settings::default()), router_named("b", 4, Settings::default()));
    let said = |text: &str| json!({"role": "user", "content": text});
    let first = json!({"model": "m", "messages": [said("Hello")]});
    let answer = json!({"role": "assistant", "content": "Hi"});
    let second = json!({"model": "m", "messages": [said("Hello"), answer, said("Go on")]});
    let read = |router: &Router, body: &serde_json::Value| {
        let headers: [(&str, &str); 0] = [];
        RequestShape::read(Route::ChatCompletions, &headers, body.to_string().as_bytes(), &router.rules())
            .unwrap()
    };
    let (first, second) = (read(&a, &first), read(&b, &second));
    assert!(!b.awaits_word(&second), "a replica that is alone waits for nobody");
    b.set_replicas(&[ReplicaId::new("a")]);
    assert!(!b.awaits_word(&first), "a new chat was answered nowhere");
    assert!(b.awaits_word(&second));
    drop(choose(&a, &first, at(1)));
    exchange(&a, &[&b], at(1));
    assert!(!b.awaits_word(&second));
}

#[test]
fn some_choices_are_told_and_others_say_whether_they_would_have_made_them() {
    let (a, b) = (router_named("a", 4, Settings::default()), router_named("b", 4, Settings::default()));
    assert_eq!(b.stats().disagreement_ratio(), None);
    for number in 0..640_u64 {
        drop(choose(&a, &shape(&a, &text(&format!("{}", number % 20), 3_000)), at(number * 20)));
        exchange(&a, &[&b], at(number * 20 + 5));
    }
    assert_eq!(b.stats().decisions_compared, 20);
    assert_eq!(b.stats().disagreement_ratio(), Some(0.0), "{:?}", b.stats());
    // A replica that hears nothing of a load that the other avoids would choose otherwise.
    let busy = router_named("c", 4, Settings::default());
    let warm = shape(&busy, &text("warm", 8_000));
    let home = choose(&busy, &warm, at(1)).endpoint.id;
    let rows = vec![LoadRow { endpoint: home, prefill_tokens: 90_000, ..row(0, 40, 0) }];
    busy.merge_pulse(&ReplicaId::new("d"), &pulse(1, 1, rows), at(2));
    let lone = router_named("e", 4, Settings::default());
    lone.merge_ledger(&busy.take_ledger(usize::MAX), at(2));
    for _ in 0..64 {
        drop(choose(&busy, &warm, at(3)));
    }
    let samples: Vec<_> = busy
        .take_ledger(usize::MAX)
        .into_iter()
        .filter(|record| matches!(record, LedgerRecord::Sample(_)))
        .collect();
    let before = lone.stats();
    lone.merge_ledger(&samples, at(4));
    let after = lone.stats();
    assert_eq!(after.decisions_compared - before.decisions_compared, 2);
    assert_eq!(after.decisions_disagreed - before.decisions_disagreed, 2);
}

#[test]
fn what_is_kept_of_other_replicas_is_bounded_and_the_idle_make_room() {
    let router = router(1, Settings::default());
    let name = |number: usize| ReplicaId::new(&format!("replica-{number:05}"));
    router.merge_pulse(&name(0), &pulse(1, 1, vec![row(0, 3, 0)]), at(1));
    for number in 1..3_000 {
        router.merge_pulse(&name(number), &pulse(1, 1, Vec::new()), at(1));
    }
    assert_eq!(router.origins.lock().len(), crate::liveness::REPLICAS_MAX);
    assert_eq!(carried(&router, 0).0, 3, "who carries something is not forgotten");
    router.merge_pulse(&name(5_000), &pulse(1, 1, vec![row(0, 2, 0)]), at(2));
    assert_eq!(carried(&router, 0).0, 5);
}
