//! Charges: made with the choice, moved, given back, and never more or less.

use std::sync::Barrier;

use proptest::prelude::*;
use rand::SeedableRng as _;

use super::*;
use crate::policy::PolicyName;

fn with_policy(policy: PolicyName) -> Settings {
    Settings { policy, ..Settings::default() }
}

fn running(router: &Router, now: Moment) -> Vec<u32> {
    router.view().endpoints.iter().map(|endpoint| endpoint.running(now)).collect()
}

#[test]
fn sixty_four_threads_that_choose_at_once_spread_within_one() {
    let router = router(8, with_policy(PolicyName::LeastLoad));
    let shape = shape(&router, "hello");
    let barrier = Barrier::new(64);
    let held = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..64_u64)
            .map(|seed| {
                let (router, shape, barrier) = (&router, &shape, &barrier);
                scope.spawn(move || {
                    let mut rng = crate::Rng::seed_from_u64(seed);
                    barrier.wait();
                    let choose = |_| router.choose(shape, &[], at(1), &mut rng).unwrap();
                    (0..5).map(choose).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(running(&router, at(1)), [40; 8]);
    drop(held);
    assert_eq!(running(&router, at(1)), [0; 8]);
    assert_eq!(router.stats().reserve_forced, 0);
}

#[test]
fn a_burst_between_two_scrapes_spreads() {
    for policy in [PolicyName::LeastLoad, PolicyName::Cost, PolicyName::PrefixLongest] {
        let router = router(4, with_policy(policy));
        (0..4).for_each(|number| drop(router.observe(&look(number, 0, 0), at(1))));
        let held: Vec<_> = (0..100)
            .map(|number| choose(&router, &shape(&router, &text(&format!("{number}"), 2_000)), at(2)))
            .collect();
        let running = running(&router, at(2));
        let spread = running.iter().max().unwrap() - running.iter().min().unwrap();
        assert!(spread <= 3, "{policy}: {running:?}");
        drop(held);
    }
}

#[test]
fn a_charge_lives_until_the_last_byte_and_turns_to_decode_with_the_first() {
    let router = router(1, Settings::default());
    let chosen = choose(&router, &shape(&router, &text("a", 4_000)), at(1));
    let load = |now| chosen.endpoint.load(now);
    assert_eq!((load(at(1)).running, load(at(1)).prefill_tokens), (1, 1_000));
    assert_eq!(load(at(60_000)).prefill_tokens, 1_000, "a stream's first token is seen, not guessed");
    chosen.reservation.first_token();
    chosen.reservation.first_token();
    assert_eq!((load(at(2)).running, load(at(2)).prefill_tokens, load(at(2)).decode_tokens), (1, 0, 16));
    let endpoint = std::sync::Arc::clone(&chosen.endpoint);
    drop(chosen);
    let load = endpoint.load(at(3));
    assert_eq!((load.running, load.prefill_tokens, load.decode_tokens), (0, 0, 0));
}

#[test]
fn a_reply_in_one_piece_is_charged_as_decoding_once_its_prompt_should_be_done() {
    let router = router(1, Settings::default());
    let body = serde_json::json!({"model": "m", "prompt": text("a", 4_000), "max_tokens": 16});
    let chosen = choose(&router, &shape_of(&router, &body), at(1));
    let parts = |now: Moment| {
        let load = chosen.endpoint.load(now);
        (load.running, load.prefill_tokens, load.decode_tokens)
    };
    // 1,000 tokens at 250 us each.
    assert_eq!(parts(at(250)), (1, 1_000, 0));
    assert_eq!(parts(at(252)), (1, 0, 16));
    let endpoint = std::sync::Arc::clone(&chosen.endpoint);
    drop(chosen);
    assert_eq!(endpoint.running(at(253)), 0);
    assert_eq!(endpoint.load(at(253)).decode_tokens, 0);
}

#[derive(Clone, Debug)]
enum Step {
    Choose { prompt_bytes: usize, stream: bool },
    FirstToken(usize),
    Drop(usize),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_usize..6_000, any::<bool>())
            .prop_map(|(prompt_bytes, stream)| Step::Choose { prompt_bytes, stream }),
        any::<usize>().prop_map(Step::FirstToken),
        any::<usize>().prop_map(Step::Drop),
        (0_u64..2_000).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn charges_are_those_of_what_is_held_and_return_to_zero_in_any_order(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let router = router(3, Settings::default());
        let mut held: Vec<Chosen> = Vec::new();
        let mut now = 1;
        for (count, step) in steps.into_iter().enumerate() {
            match step {
                Step::Choose { prompt_bytes, stream } => {
                    let prompt = text(&format!("{count}"), prompt_bytes.max(1));
                    let body = serde_json::json!({"model": "m", "prompt": prompt, "stream": stream});
                    held.push(choose(&router, &shape_of(&router, &body), at(now)));
                }
                Step::FirstToken(which) => {
                    if let Some(chosen) = held.get(which % held.len().max(1)) {
                        chosen.reservation.first_token();
                    }
                }
                Step::Drop(which) if !held.is_empty() => drop(held.swap_remove(which % held.len())),
                Step::Drop(_) => {}
                Step::Pass(ms) => now += ms,
            }
            prop_assert_eq!(running(&router, at(now)).iter().sum::<u32>() as usize, held.len());
        }
        held.clear();
        for endpoint in &router.view().endpoints {
            let load = endpoint.load(at(now));
            prop_assert_eq!((load.running, load.prefill_tokens, load.decode_tokens), (0, 0, 0));
        }
        // Predicted prefill ends of requests that are over change nothing when they come.
        for endpoint in &router.view().endpoints {
            let load = endpoint.load(at(now + 600_000));
            prop_assert_eq!((load.running, load.prefill_tokens, load.decode_tokens), (0, 0, 0));
        }
    }
}
