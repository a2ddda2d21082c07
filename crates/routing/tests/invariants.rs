//! Invariants of ARCHITECTURE.md that are about load: who is charged, by whom, and for how long.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use routing::endpoint::{Endpoint, EndpointSpec};
use routing::facts::{LoadPush, LoadRow, Pulse};
use routing::reserve::{Begins, ChargeSize};
use routing::settings::Settings;
use routing::{EndpointId, Moment, ReplicaId, Reservation, Router};

const fn at(millis: u64) -> Moment {
    Moment::from_millis(millis)
}

/// A router over two endpoints.
fn router() -> Router {
    let router = Router::new(ReplicaId::new("own"), 1, Settings::default()).unwrap();
    let specs = ["http://e0:1", "http://e1:1"].map(|url| EndpointSpec::parse(url).unwrap().remove(0));
    router.set_endpoints(specs.to_vec(), at(0));
    router
}

fn endpoint(router: &Router) -> Arc<Endpoint> {
    Arc::clone(&router.view().endpoints[0])
}

/// What happens to a request.
#[derive(Clone, Debug)]
enum Step {
    /// It is charged; a prompt of a reply in one piece ends at a predicted time.
    Charge { prefill_tokens: u32, output_tokens: u32, prefill_ms: Option<u64> },
    /// Its decode leg is.
    ChargeDecode { output_tokens: u32 },
    /// The first token of the request with this number (modulo those held) is there.
    FirstToken(usize),
    /// It is over.
    Drop(usize),
    /// Time passes, and somebody reads the load.
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let charge = (0..1_000_000_u32, 0..5_000_u32, prop::option::of(0..400_u64)).prop_map(
        |(prefill_tokens, output_tokens, prefill_ms)| Step::Charge {
            prefill_tokens,
            output_tokens,
            prefill_ms,
        },
    );
    let step = prop_oneof![
        3 => charge,
        2 => (0..5_000_u32).prop_map(|output_tokens| Step::ChargeDecode { output_tokens }),
        2 => (0..100_usize).prop_map(Step::FirstToken),
        3 => (0..100_usize).prop_map(Step::Drop),
        1 => (1..500_u64).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 0..60)
}

proptest! {
    /// I-06, against a plain list of what is held.
    #[test]
    fn a_charge_is_what_is_held_and_nothing_once_all_is_given_back(steps in steps()) {
        let router = router();
        let endpoint = endpoint(&router);
        let mut held: Vec<(Reservation, ChargeSize, bool)> = Vec::new();
        let mut now_ms = 1;
        for step in steps {
            match step {
                Step::Charge { prefill_tokens, output_tokens, prefill_ms } => {
                    let prefill_ends = prefill_ms.map(|ms| at(now_ms).plus(Duration::from_millis(ms)));
                    let size = ChargeSize { prefill_tokens, output_tokens, prefill_ends, ..ChargeSize::default() };
                    let seen = endpoint.load(at(now_ms)).own;
                    let charged = Reservation::try_new(&endpoint, seen, size);
                    held.push((charged.expect("nobody came between"), size, false));
                }
                Step::ChargeDecode { output_tokens } => {
                    let size = ChargeSize { output_tokens, begins: Begins::Decoding, ..ChargeSize::default() };
                    held.push((Reservation::new(&endpoint, size), size, true));
                }
                Step::FirstToken(which) if !held.is_empty() => {
                    let which = which % held.len();
                    held[which].0.first_token();
                    held[which].2 = true;
                }
                Step::Drop(which) if !held.is_empty() => drop(held.swap_remove(which % held.len())),
                Step::FirstToken(_) | Step::Drop(_) => {}
                Step::Wait(millis) => now_ms += millis,
            }
            let load = endpoint.load(at(now_ms));
            let decodes = |(_, size, first): &&(Reservation, ChargeSize, bool)| {
                *first || size.prefill_ends.is_some_and(|ends| ends <= at(now_ms))
            };
            let decode: u64 = held.iter().filter(decodes).map(|(_, size, _)| u64::from(size.output_tokens)).sum();
            let prefill = held.iter().filter(|each| !decodes(each));
            let prefill: u64 = prefill.map(|(_, size, _)| u64::from(size.prefill_tokens)).sum();
            prop_assert_eq!(load.own.running() as usize, held.len());
            prop_assert_eq!(load.own.prefill_tokens(), prefill);
            prop_assert_eq!(load.decode_tokens, decode);
        }
        held.clear();
        let load = endpoint.load(at(now_ms + 60_000));
        prop_assert_eq!((load.running, load.prefill_tokens, load.decode_tokens), (0, 0, 0));
    }

    /// I-02 and I-03: the newest word of each replica stands, though pulses come late, behind newer pushes and
    /// pulses. (Pushes don't: the gossip hands on none that is older than what it handed on before.)
    #[test]
    fn the_newest_word_of_each_replica_stands_however_late_its_pulses_come(
        words in prop::collection::vec((0..2_usize, prop::option::of(0..10_u64), 0..9_u32), 1..40),
    ) {
        let router = router();
        let endpoint = endpoint(&router);
        let origins = ["a", "b"].map(ReplicaId::new);
        let mut words: Vec<_> = (1_u64..).zip(words).collect();
        let newest = |origin: usize| {
            words.iter().rev().find(|(_, word)| word.0 == origin).map_or(0, |(_, word)| word.2)
        };
        let expected = [newest(0), newest(1)];
        words.sort_by_key(|(version, (_, late, _))| version + late.unwrap_or(0));
        for (version, (origin, late, running)) in words {
            say(&router, &origins[origin], endpoint.id, late.is_some(), running, version);
        }
        let by_replica = endpoint.running_by_replica();
        let of = |origin: &ReplicaId| by_replica.iter().find(|(id, _)| id == origin).map_or(0, |(_, n)| *n);
        prop_assert_eq!([of(&origins[0]), of(&origins[1])], expected);
        prop_assert_eq!(endpoint.running(at(1)), expected[0] + expected[1]);
    }
}

/// `origin` says, in a whole pulse or a push, how many requests it runs at the endpoint.
fn say(router: &Router, origin: &ReplicaId, id: EndpointId, whole: bool, running: u32, version: u64) {
    let row = LoadRow { endpoint: id, running, prefill_tokens: running, decode_tokens: 0, placed_tokens: 0 };
    if whole {
        let load = if running > 0 { vec![row] } else { vec![] };
        router.merge_pulse(origin, &Pulse { epoch: 1, version, load, ..Pulse::default() }, at(1));
    } else {
        router.merge_load(origin, &LoadPush { epoch: 1, version, rows: vec![row] }, at(1));
    }
}

/// I-05: of all who read the same load one is charged.
#[test]
fn of_many_threads_that_want_the_only_free_place_one_gets_it() {
    let router = router();
    let endpoint = endpoint(&router);
    let (holders, most, taken) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..2_000 {
                    let seen = endpoint.load(at(1)).own;
                    if seen.running() > 0 {
                        continue;
                    }
                    let size = ChargeSize { prefill_tokens: 7, output_tokens: 3, ..ChargeSize::default() };
                    if let Some(held) = Reservation::try_new(&endpoint, seen, size) {
                        most.fetch_max(holders.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        taken.fetch_add(1, Ordering::SeqCst);
                        std::hint::spin_loop();
                        holders.fetch_sub(1, Ordering::SeqCst);
                        drop(held);
                    }
                }
            });
        }
    });
    assert_eq!(most.load(Ordering::SeqCst), 1);
    assert!(taken.load(Ordering::SeqCst) > 0);
    assert_eq!(endpoint.load(at(1)).running, 0);
}

/// I-12: a dead replica's load goes with it, and what it said before its death does not bring it back.
#[test]
fn the_load_of_a_dead_replica_is_gone_and_an_older_pulse_does_not_bring_it_back() {
    let router = router();
    let endpoint = endpoint(&router);
    let (dead, live) = (ReplicaId::new("dead"), ReplicaId::new("live"));
    say(&router, &dead, endpoint.id, true, 4, 2);
    say(&router, &live, endpoint.id, true, 3, 2);
    assert_eq!(endpoint.running(at(1)), 7);
    router.replica_gone(&dead);
    assert_eq!(endpoint.running(at(1)), 3);
    say(&router, &dead, endpoint.id, true, 4, 1);
    assert_eq!(endpoint.running(at(1)), 3);
}
