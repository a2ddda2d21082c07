//! The queue against its promises: order, fairness, bounds, and that nothing stays behind.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::qoe::ClassTargets;
use crate::request::{Priority, Slo};
use crate::{Moment, ReplicaId, SessionKey};

fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

fn entry(priority: Priority, arrived_ms: u64) -> Entry {
    Entry {
        arrived: at(arrived_ms),
        priority,
        slo: Slo::of(priority),
        output_tokens: 64,
        service: Service { first_token_ms: 150.0, tpot_ms: 12.0 },
        session: None,
        bytes: 100,
        pool: 0,
    }
}

fn of_session(name: &str, arrived_ms: u64) -> Entry {
    Entry { session: Some(session(name)), ..entry(Priority::Normal, arrived_ms) }
}

fn session(name: &str) -> SessionKey {
    SessionKey::of("x-session-id", name.as_bytes())
}

fn settings() -> AdmissionSettings {
    AdmissionSettings::default()
}

/// A queue of these, each joining when it arrives.
fn queue_of(entries: &[Entry]) -> Queue {
    let mut queue = Queue::default();
    for entry in entries {
        queue.join(*entry, &settings(), entry.arrived).unwrap();
    }
    queue
}

/// Everybody, in the order in which they go if all find room at `now`.
fn order(mut queue: Queue, now: Moment) -> Vec<Entry> {
    let holdings = Holdings::default();
    let mut order = Vec::new();
    while let Some(Next { ticket, .. }) = queue.next(&holdings, &[], &[], 0, now) {
        order.extend(queue.leave(ticket));
    }
    assert!(queue.is_empty());
    order
}

#[test]
fn of_equal_expectations_the_first_to_come_is_the_first_to_go() {
    let order = order(
        queue_of(&[entry(Priority::Low, 0), entry(Priority::Low, 5), entry(Priority::Low, 9)]),
        at(5_000),
    );
    assert_eq!(order.iter().map(|entry| entry.arrived).collect::<Vec<_>>(), [at(0), at(5), at(9)]);
}

#[test]
fn who_would_lose_more_goes_before_who_came_first() {
    let entries = [entry(Priority::Low, 0), entry(Priority::Normal, 10), entry(Priority::High, 20)];
    let classes: Vec<_> = order(queue_of(&entries), at(700)).iter().map(|entry| entry.priority).collect();
    assert_eq!(classes, [Priority::High, Priority::Normal, Priority::Low]);
}

#[test]
fn a_low_request_that_is_late_goes_before_a_high_one_that_has_time() {
    let with_time =
        Entry { slo: Slo { ttft_ms: 60_000.0, ..Slo::of(Priority::High) }, ..entry(Priority::High, 3_900) };
    let classes: Vec<_> = order(queue_of(&[entry(Priority::Low, 0), with_time]), at(4_000))
        .iter()
        .map(|entry| entry.priority)
        .collect();
    assert_eq!(classes, [Priority::Low, Priority::High]);
}

#[test]
fn what_has_lost_all_blocks_nobody_and_is_served_when_there_is_room() {
    let lost = Entry { output_tokens: 2, ..entry(Priority::High, 0) };
    let fresh = Entry { output_tokens: 2, ..entry(Priority::High, 59_500) };
    let low = Entry { output_tokens: 2, ..entry(Priority::Low, 59_000) };
    let arrived: Vec<_> =
        order(queue_of(&[lost, low, fresh]), at(60_000)).iter().map(|each| each.arrived).collect();
    assert_eq!(arrived, [at(59_500), at(59_000), at(0)]);
}

#[test]
fn a_session_with_more_than_its_share_lets_the_others_go_first() {
    let holdings = Arc::new(Holdings::default());
    let _held: Vec<_> = (0..4).map(|_| Held::new(&holdings, Some(session("greedy")))).collect();
    let queue = queue_of(&[of_session("greedy", 0), of_session("modest", 10)]);
    let next = queue.next(&holdings, &[], &[], 0, at(20)).unwrap().ticket;
    let (first, _) = queue.entries().next().unwrap();
    assert_ne!(next, first, "the greedy one came first and has four of four");
}

#[test]
fn a_session_that_is_alone_may_have_everything() {
    let holdings = Arc::new(Holdings::default());
    let _held: Vec<_> = (0..40).map(|_| Held::new(&holdings, Some(session("alone")))).collect();
    assert!(queue_of(&[of_session("alone", 0)]).next(&holdings, &[], &[], 0, at(20)).is_some());
}

#[test]
fn what_a_session_has_through_other_replicas_counts() {
    let holdings = Holdings::default();
    let greedy = holdings::bucket_of(session("greedy"));
    let queue = queue_of(&[of_session("greedy", 0), of_session("modest", 10)]);
    let first = |holdings: &Holdings| queue.next(holdings, &[], &[], 0, at(20)).unwrap().ticket;
    let (came_first, _) = queue.entries().next().unwrap();
    assert_eq!(first(&holdings), came_first);
    holdings.set_elsewhere(4, [(greedy, 1), (greedy, 3)]);
    assert_ne!(first(&holdings), came_first);
}

#[test]
fn pools_without_room_are_passed_over() {
    let other = Entry { pool: 7, ..entry(Priority::Low, 5) };
    let queue = queue_of(&[entry(Priority::High, 0), other]);
    let next = queue.next(&Holdings::default(), &[0], &[], 0, at(2_000)).unwrap();
    assert_eq!(next.pool, 7);
    assert_eq!(queue.next(&Holdings::default(), &[0, 7], &[], 0, at(2_000)), None);
}

#[test]
fn a_full_queue_refuses_equals_and_lets_the_higher_push_out_the_lowest_and_latest() {
    let settings = AdmissionSettings { queue_requests_max: 3, ..settings() };
    let mut queue = Queue::default();
    let mut join = |entry: Entry| queue.join(entry, &settings, entry.arrived);
    let (normal, _) = join(entry(Priority::Normal, 0)).unwrap();
    let (_, _) = join(entry(Priority::Low, 1)).unwrap();
    let (latest, _) = join(entry(Priority::Low, 2)).unwrap();
    assert_eq!(join(entry(Priority::Low, 3)), Err(Shed::QueueFull));
    let (_, pushed_out) = join(entry(Priority::High, 4)).unwrap();
    assert_eq!(pushed_out, [latest]);
    join(entry(Priority::High, 5)).unwrap();
    let (_, pushed_out) = join(entry(Priority::High, 6)).unwrap();
    assert_eq!(pushed_out, [normal]);
    assert_eq!(join(entry(Priority::High, 7)), Err(Shed::QueueFull));
}

#[test]
fn bodies_have_a_bound_of_their_own() {
    let settings = AdmissionSettings { queue_bytes_max: 250, ..settings() };
    let mut queue = Queue::default();
    queue.join(entry(Priority::Low, 0), &settings, at(0)).unwrap();
    queue.join(entry(Priority::Low, 1), &settings, at(1)).unwrap();
    assert_eq!(queue.join(entry(Priority::Low, 2), &settings, at(2)), Err(Shed::QueueBytes));
    let large = Entry { bytes: 200, ..entry(Priority::High, 3) };
    assert_eq!(queue.join(large, &settings, at(3)).unwrap().1.len(), 2);
    assert_eq!(queue.bytes(), 200);
    let too_large = Entry { bytes: 300, ..entry(Priority::High, 4) };
    assert_eq!(queue.join(too_large, &settings, at(4)), Err(Shed::QueueBytes));
    assert_eq!(queue.len(), 1, "nobody is pushed out for one that does not fit");
}

#[test]
fn nobody_waits_longer_than_the_limit() {
    let mut queue = queue_of(&[entry(Priority::High, 0), entry(Priority::Low, 500)]);
    let limit = Duration::from_secs(1);
    assert_eq!(queue.next_expiry(limit), Some(at(1_000)));
    assert_eq!(queue.expire(limit, at(999)).len(), 0);
    assert_eq!(queue.expire(limit, at(1_000)).len(), 1);
    assert_eq!(queue.retry_after_ms(at(1_400)), 1_000);
    assert_eq!(queue.expire(limit, at(1_500)).len(), 1);
    assert_eq!(queue.next_expiry(limit), None);
}

#[test]
fn the_soonest_class_that_comes_decides_when_to_hold_back() {
    let mix = Mix::default();
    let targets = ClassTargets::default();
    assert_eq!(mix.ttft_ms(&targets, at(0)), 2_000.0);
    mix.seen(Priority::Low, at(0));
    assert_eq!(mix.ttft_ms(&targets, at(0)), 3_000.0);
    mix.seen(Priority::High, at(1_000));
    assert_eq!(mix.ttft_ms(&targets, at(1_000)), 1_000.0);
    mix.seen(Priority::Low, at(12_000));
    assert_eq!(mix.ttft_ms(&targets, at(12_000)), 3_000.0);
}

/// What a replica tells of a queue of these at `now`, as others claim it.
fn claims(name: &str, entries: &[Entry], now: Moment) -> Vec<Claim> {
    let heads = queue_of(entries).told(&Holdings::default(), &[], 8, now);
    let row = crate::facts::QueueRow { heads, ..Default::default() };
    Claim::of(&ReplicaId::new(name), &row, now).collect()
}

fn next(entries: &[Entry], claims: &[Claim], now: Moment) -> Next {
    queue_of(entries).next(&Holdings::default(), &[], claims, number_of(&ReplicaId::new("own")), now).unwrap()
}

#[test]
fn of_replicas_that_all_know_who_waits_where_one_has_the_next_turn() {
    let now = at(5_000);
    let queues: Vec<Vec<Entry>> = (0_u64..5)
        .map(|replica| {
            let at = |class, after: u64| entry(class, 4_000 - 377 * replica % 1_000 + after);
            vec![at(Priority::Low, 0), at(Priority::High, 300 + replica), at(Priority::Normal, 400)]
        })
        .collect();
    let before = |own: usize, now| {
        let others = (0..queues.len()).filter(|other| *other != own);
        let claims: Vec<_> =
            others.flat_map(|other| claims(&format!("replica-{other}"), &queues[other], now)).collect();
        next(&queues[own], &claims, now).before
    };
    let mut turns: Vec<u32> = (0..queues.len()).map(|own| before(own, now)).collect();
    turns.sort_unstable();
    assert_eq!(turns, [0, 1, 2, 3, 4]);
}

#[test]
fn the_urgent_wait_for_nobody_patient_and_the_patient_for_all_of_the_urgent() {
    let now = at(2_000);
    let urgent = [entry(Priority::High, 1_800), entry(Priority::High, 1_900)];
    let patient = [entry(Priority::Low, 500), entry(Priority::Low, 600)];
    assert_eq!(next(&urgent, &claims("b", &patient, now), now).before, 0);
    assert_eq!(next(&patient, &claims("b", &urgent, now), now).before, 2);
}

#[test]
fn only_who_waits_for_the_same_endpoints_goes_before() {
    let now = at(2_000);
    let elsewhere = Entry { pool: 7, ..entry(Priority::High, 500) };
    assert_eq!(next(&[entry(Priority::Low, 900)], &claims("b", &[elsewhere], now), now).before, 0);
}

#[test]
fn a_session_takes_one_turn_at_a_time_through_all_replicas() {
    let now = at(2_000);
    let own = of_session("greedy", 900);
    assert_eq!(next(&[own], &claims("b", &[of_session("greedy", 500)], now), now).before, u32::MAX);
    assert_eq!(next(&[own], &claims("b", &[of_session("modest", 500)], now), now).before, 1);
    assert_eq!(next(&[own], &claims("b", &[of_session("greedy", 950)], now), now).before, 0);
}

#[test]
fn of_two_turns_of_a_session_that_come_at_once_both_replicas_take_the_same_for_the_first() {
    let now = at(2_000);
    let before = |own: &str, (came, rivals): (u64, u64)| {
        let rival = if own == "a" { "b" } else { "a" };
        let claims = claims(rival, &[of_session("greedy", rivals)], now);
        let queue = queue_of(&[of_session("greedy", came)]);
        let next =
            queue.next(&Holdings::default(), &[], &claims, number_of(&ReplicaId::new(own)), now).unwrap();
        assert!(next.before == 0 || next.first == Some(claims[0].claimant), "whom it waits for is known");
        next.before
    };
    for apart_ms in [0, 1, 19] {
        // Each hears of the other's with a delay, and takes its own for the earlier.
        let both = ["a", "b"].map(|own| before(own, (900, 900 + apart_ms)));
        assert!(both == [0, u32::MAX] || both == [u32::MAX, 0], "{apart_ms}: {both:?}");
        let both = ["a", "b"].map(|own| before(own, (900 + apart_ms, 900)));
        assert!(both == [0, u32::MAX] || both == [u32::MAX, 0], "{apart_ms}: {both:?}");
    }
    for own in ["a", "b"] {
        assert_eq!(before(own, (900, 940)), 0, "the first to come");
        assert_eq!(before(own, (940, 900)), u32::MAX, "the second");
    }
}

#[test]
fn a_session_with_more_than_its_share_goes_after_those_that_wait_elsewhere() {
    let now = at(2_000);
    let holdings = Arc::new(Holdings::default());
    let _held: Vec<_> = (0..4).map(|_| Held::new(&holdings, Some(session("greedy")))).collect();
    holdings.set_elsewhere(4, [(1, 1), (2, 1), (3, 1), (4, 1)]);
    let queue = queue_of(&[Entry { priority: Priority::High, ..of_session("greedy", 0) }]);
    let modest = claims("b", &[entry(Priority::Low, 1_900)], now);
    assert_eq!(queue.next(&holdings, &[], &modest, 0, now).map(|next| next.before), Some(1));
}

#[test]
fn a_turn_that_is_not_taken_is_passed_over_and_one_that_is_taken_is_not() {
    let mut patience = Patience::default();
    let gone = claims("b", &[entry(Priority::High, 0)], at(100))[0];
    assert!(!patience.is_over(0, gone.claimant, at(100)));
    assert!(!patience.is_over(0, gone.claimant, at(130)));
    assert!(patience.counts(&gone));
    assert!(patience.is_over(0, gone.claimant, at(131)));
    assert!(!patience.counts(&gone));
    patience.hear(&[gone]);
    assert!(!patience.counts(&gone), "it says nothing new");
    let later = entry(Priority::High, 10);
    let mut busy = queue_of(&[entry(Priority::High, 0), later]);
    for moment in (200..400).step_by(20) {
        let told = busy.told(&Holdings::default(), &[], 8, at(moment));
        let row = crate::facts::QueueRow { heads: told, ..Default::default() };
        let claim = Claim::of(&ReplicaId::new("c"), &row, at(moment)).next().unwrap();
        assert!(!patience.is_over(0, claim.claimant, at(moment)), "each time it is another that waits");
        let ticket = busy.next(&Holdings::default(), &[], &[], 0, at(moment)).unwrap().ticket;
        busy.leave(ticket);
        busy.join(later, &settings(), at(moment)).unwrap();
    }
    patience.hear(&[]);
    assert!(patience.counts(&gone));
}

#[derive(Clone, Debug)]
enum Step {
    Join { class: u32, session: u8, bytes: u64 },
    Serve,
    End(usize),
    Leave(usize),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1_u32..4, 0_u8..6, 0_u64..400).prop_map(|(class, session, bytes)| Step::Join { class, session, bytes }),
        3 => Just(Step::Serve),
        2 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => (0_u64..3_000).prop_map(Step::Pass),
    ]
}

proptest! {
    /// Requests come, are served at eight places, end, leave and expire in any order.
    #[test]
    fn whatever_happens_the_bounds_hold_sessions_are_fair_and_nothing_stays(
        steps in proptest::collection::vec(step(), 1..300),
    ) {
        const PLACES: usize = 8;
        let settings = AdmissionSettings {
            queue_requests_max: 12, queue_bytes_max: 2_000, queue_wait_max: Duration::from_secs(5), ..settings()
        };
        let holdings = Arc::new(Holdings::default());
        let mut queue = Queue::default();
        let mut running: Vec<(u8, Held)> = Vec::new();
        let mut accounted = 0_u32;
        let mut joined = 0_u32;
        let mut now = at(0);
        let name = |number: u8| session(&format!("s{number}"));
        for step in steps {
            match step {
                Step::Join { class, session, bytes } => {
                    let priority = Priority::from_number(class).unwrap();
                    let entry = Entry { bytes, session: Some(name(session)), arrived: now, ..entry(priority, 0) };
                    joined += 1;
                    match queue.join(entry, &settings, now) {
                        Ok((_, pushed_out)) => accounted += pushed_out.len() as u32,
                        Err(_) => accounted += 1,
                    }
                }
                Step::Serve if running.len() < PLACES => {
                    let Some(Next { ticket, .. }) = queue.next(&holdings, &[], &[], 0, now) else { continue };
                    let waiting: Vec<SessionKey> = queue.entries().filter_map(|(_, each)| each.session).collect();
                    let served = queue.leave(ticket).unwrap().session.unwrap();
                    let number = (0..6).find(|number| name(*number) == served).unwrap();
                    let held = |key: SessionKey| running.iter().filter(|(each, _)| name(*each) == key).count();
                    let sessions = (0..6).map(name).filter(|key| held(*key) > 0 || waiting.contains(key)).count();
                    let share = ((running.len() + 1) as f64 / sessions as f64).max(1.0);
                    let least = waiting.iter().map(|key| held(*key)).min().unwrap();
                    let has = held(served) + 1;
                    prop_assert!(has as f64 <= share + 1.0 || held(served) == least, "{has} of a share of {share}");
                    running.push((number, Held::new(&holdings, Some(served))));
                    accounted += 1;
                }
                Step::Serve => {}
                Step::End(which) => {
                    if !running.is_empty() {
                        let at = which % running.len();
                        drop(running.swap_remove(at));
                    }
                }
                Step::Leave(which) => {
                    let tickets: Vec<Ticket> = queue.entries().map(|(ticket, _)| ticket).collect();
                    if !tickets.is_empty() {
                        queue.leave(tickets[which % tickets.len()]).unwrap();
                        accounted += 1;
                    }
                }
                Step::Pass(ms) => {
                    now = now.plus(Duration::from_millis(ms));
                    accounted += queue.expire(settings.queue_wait_max, now).len() as u32;
                    prop_assert!(queue.entries().all(|(_, each)| now.since(each.arrived) < settings.queue_wait_max));
                }
            }
            prop_assert!(queue.len() <= 12 && queue.bytes() <= 2_000);
            prop_assert_eq!(queue.bytes(), queue.entries().map(|(_, each)| each.bytes).sum::<u64>());
            prop_assert_eq!(holdings.running() as usize, running.len());
        }
        now = now.plus(Duration::from_secs(5));
        accounted += queue.expire(settings.queue_wait_max, now).len() as u32;
        drop(running);
        prop_assert_eq!((queue.len(), queue.bytes(), holdings.running()), (0, 0, 0));
        prop_assert_eq!(holdings.told(10), vec![]);
        prop_assert_eq!(accounted, joined, "each is served or refused or leaves, once");
    }
}

#[test]
fn sessions_that_wait_elsewhere_have_a_share_too() {
    let now = at(2_000);
    let holdings = Arc::new(Holdings::default());
    let _held: Vec<_> = (0..2).map(|_| Held::new(&holdings, Some(session("greedy")))).collect();
    // Two of four places, with nobody else but who has the other two: more than half of them is not its share.
    holdings.set_elsewhere(2, [(1, 2)]);
    let queue = queue_of(&[of_session("greedy", 0)]);
    let is_sated = |claims: &[Claim]| queue.told(&holdings, claims, 8, now)[0].is_sated;
    assert!(!is_sated(&[]));
    assert!(is_sated(&claims(
        "b",
        &[of_session("modest", 0), Entry { pool: 7, ..of_session("shy", 0) }],
        now
    )));
}
