use proptest::prelude::*;

use super::*;

/// An engine of a known speed, and a replica that learns it.
struct Script {
    learned: LearnedSpeed,
    now_ms: u64,
}

impl Script {
    fn new() -> Self {
        Self { learned: LearnedSpeed::new(Speed::default()), now_ms: 0 }
    }

    /// Serves `count` streams of 1,000 uncached tokens, `every_ms`, at `us_per_token` and `itl_us`.
    fn serve(&mut self, count: u32, every_ms: u64, us_per_token: f64, itl_us: f64) -> &mut Self {
        for _ in 0..count {
            self.now_ms += every_ms;
            let first_byte_ms = 30.0 + us_per_token;
            let served = LegSample {
                first_byte_ms: Some(first_byte_ms),
                leg_ms: first_byte_ms + 99.0 * itl_us / 1_000.0,
                uncached_tokens: 1_000,
                ahead_tokens: 0,
                output_tokens: Some(100),
            };
            self.learned.learn(&served, Moment::from_millis(self.now_ms));
        }
        self
    }

    #[track_caller]
    fn check(&mut self, us_per_token: f32, itl_us: f32) {
        let speed = self.learned.speed(Moment::from_millis(self.now_ms));
        let near = |got: f32, want: f32| (got / want - 1.0).abs() < 0.01;
        assert!(near(speed.prefill_us_per_token, us_per_token), "{speed:?}, want {us_per_token}");
        assert!(near(speed.itl_us, itl_us), "{speed:?}, want {itl_us}");
    }
}

#[test]
fn the_prior_holds_until_two_requests_say_otherwise() {
    Script::new().check(250.0, 12_000.0);
    Script::new().serve(2, 100, 500.0, 24_000.0).check(500.0, 24_000.0);
}

#[test]
fn a_few_odd_samples_change_nothing() {
    let mut script = Script::new();
    script.serve(20, 100, 300.0, 10_000.0).serve(5, 100, 1_900.0, 90_000.0).check(300.0, 10_000.0);
    let mut rare = Script::new();
    rare.serve(20, 60_000, 300.0, 10_000.0).serve(1, 60_000, 1_900.0, 90_000.0).check(300.0, 10_000.0);
}

#[test]
fn an_engine_that_slows_to_a_third_is_known_for_it_within_three_seconds() {
    for every_ms in [20, 100, 500, 1_000] {
        let mut script = Script::new();
        script.serve((20_000 / every_ms) as u32, every_ms, 250.0, 12_000.0).check(250.0, 12_000.0);
        script.serve((3_000 / every_ms) as u32, every_ms, 750.0, 36_000.0).check(750.0, 36_000.0);
    }
}

#[test]
fn an_instant_engine_and_a_stuck_one_stay_within_eight_times_the_prior() {
    Script::new().serve(50, 100, 0.0, 0.0).check(250.0 / 256.0, 12_000.0 / 256.0);
    Script::new().serve(50, 100, 1e6, 1e9).check(250.0 * 8.0, 12_000.0 * 8.0);
}

#[test]
fn requests_behind_others_tell_the_same_speed_as_requests_alone() {
    let mut script = Script::new();
    for n in 0..20 {
        let ahead_tokens = n * 500;
        let first_byte_ms = 30.0 + 0.4 * f64::from(1_000 + ahead_tokens);
        let served = LegSample {
            first_byte_ms: Some(first_byte_ms),
            leg_ms: first_byte_ms,
            uncached_tokens: 1_000,
            ahead_tokens,
            output_tokens: None,
        };
        script.learned.learn(&served, Moment::from_millis(u64::from(n) * 100));
    }
    script.check(400.0, 12_000.0);
}

/// An engine that prefills in order of arrival, at `us_per_token` until `slow_from_ms` and a third as fast
/// from then on; what its replica believes at each first byte.
fn queueing_engine(seed: u64, load: f64, us_per_token: f64, slow_from_ms: f64) -> Vec<(f64, f32)> {
    use rand::{Rng, SeedableRng};
    let mut rng = rand::rngs::SmallRng::seed_from_u64(seed);
    let mut learned = LearnedSpeed::new(Speed::default());
    let mut waiting: Vec<(f64, u32)> = Vec::new();
    let (mut now_ms, mut free_at_ms) = (0.0_f64, 0.0_f64);
    let mut firsts = Vec::new();
    while now_ms < 20_000.0 {
        now_ms += -rng.random::<f64>().ln() * us_per_token / load;
        let uncached_tokens = rng.random_range(200..1_800);
        waiting.retain(|(first_ms, _)| *first_ms > now_ms);
        let ahead_tokens = waiting.iter().map(|(_, tokens)| tokens).sum();
        let begins_ms = free_at_ms.max(now_ms);
        let slowness = if begins_ms >= slow_from_ms { 3.0 } else { 1.0 };
        free_at_ms = begins_ms + slowness * us_per_token / 1_000.0 * f64::from(uncached_tokens);
        let first_ms = free_at_ms + 30.0;
        waiting.push((first_ms, uncached_tokens));
        let first_byte_ms = Some(first_ms - now_ms);
        let leg_ms = first_ms - now_ms;
        let sample = LegSample { first_byte_ms, leg_ms, uncached_tokens, ahead_tokens, output_tokens: None };
        firsts.push((first_ms, sample));
    }
    let learn = |(first_ms, sample): (f64, LegSample)| {
        let now = Moment::from_micros((first_ms * 1_000.0) as u64);
        learned.learn(&sample, now);
        (first_ms, learned.speed(now).prefill_us_per_token)
    };
    firsts.into_iter().map(learn).collect()
}

#[test]
fn a_queueing_engine_is_learned_as_well_as_equal_engines_must_be_to_be_taken_for_equal() {
    for (seed, load) in [(1, 0.3), (2, 0.6), (3, 0.8), (4, 0.95)] {
        let believed = queueing_engine(seed, load, 400.0, f64::INFINITY);
        let (_, at_last) = *believed.last().unwrap();
        assert!((400.0 / 1.3..400.0 * 1.3).contains(&at_last), "{at_last} at load {load}");
    }
}

#[test]
fn a_queueing_engine_that_slows_to_a_third_is_known_for_it_within_seconds() {
    for seed in 1..6 {
        let believed = queueing_engine(seed, 0.5, 250.0, 10_000.0);
        let known = believed.iter().find(|(ms, us)| *ms > 10_000.0 && *us > 500.0).map(|(ms, _)| *ms);
        assert!(known.is_some_and(|ms| ms < 15_000.0), "{known:?}, seed {seed}");
    }
}

#[test]
fn replies_in_one_piece_tell_the_decode_speed_and_very_short_ones_the_prefill_speed() {
    let mut script = Script::new();
    for n in 0..10 {
        let whole = LegSample {
            first_byte_ms: None,
            leg_ms: 30.0 + 250.0 + 200.0 * 20.0,
            uncached_tokens: 1_000,
            ahead_tokens: 0,
            output_tokens: Some(201),
        };
        script.learned.learn(&whole, Moment::from_millis(n * 100));
    }
    script.check(250.0, 20_000.0);
    for n in 10..20 {
        let one_token = LegSample {
            first_byte_ms: None,
            leg_ms: 30.0 + 600.0,
            uncached_tokens: 1_000,
            ahead_tokens: 0,
            output_tokens: Some(1),
        };
        script.learned.learn(&one_token, Moment::from_millis(n * 100));
    }
    script.check(600.0, 20_000.0);
}

#[test]
fn the_fixed_part_of_a_first_token_is_learned_from_warm_requests() {
    let mut script = Script::new();
    for n in 0..20 {
        let warm = n % 2 == 0;
        let uncached_tokens = if warm { 10 } else { 1_000 };
        let first_byte_ms = 100.0 + 0.25 * f64::from(uncached_tokens);
        let served = LegSample {
            first_byte_ms: Some(first_byte_ms),
            leg_ms: first_byte_ms,
            uncached_tokens,
            ahead_tokens: 0,
            output_tokens: None,
        };
        script.learned.learn(&served, Moment::from_millis(n * 100));
    }
    let base_us = script.learned.speed(Moment::from_millis(2_000)).base_us;
    assert!((base_us - 100_000.0).abs() < 2_000.0, "{base_us}");
}

#[test]
fn what_is_told_weighs_less_as_it_ages_and_then_is_not_told() {
    let endpoint = EndpointId::from_raw(1);
    let mut script = Script::new();
    script.serve(40, 50, 250.0, 12_000.0);
    let mut samples = |age_s: u64| {
        let now = Moment::from_millis(script.now_ms + age_s * 1_000);
        script.learned.row(endpoint, now).map(|row| row.prefill_samples)
    };
    assert_eq!([0, 15, 30, 60, 120].map(&mut samples), [Some(32), Some(16), Some(8), Some(2), None]);
}

fn known(rows: &[(f32, u16)]) -> Option<f32> {
    combine(rows.iter().copied(), 250.0).map(|known| known.figure)
}

#[test]
fn rows_of_several_replicas_are_weighed_by_their_samples() {
    assert_eq!(known(&[]), None);
    assert_eq!(known(&[(1_000.0, 0)]), None);
    let heavy = known(&[(250.0, 1), (500.0, 999)]).unwrap();
    assert!((heavy / 500.0 - 1.0).abs() < 0.05, "{heavy}");
    let wild = known(&[(f32::NAN, 8), (-1.0, 8), (f32::INFINITY, 8)]).unwrap();
    assert!((250.0 / 270.0..=250.0 * 8.5).contains(&wild), "{wild}");
}

#[test]
fn an_engine_is_taken_for_another_only_when_many_samples_say_so() {
    fn check(own: Option<(f32, f32)>, least: f32, most: f32) {
        let alike = Known { figure: 100.0, samples: 64.0 };
        let own = own.map(|(figure, samples)| Known { figure, samples });
        let believed = believed(&[Some(alike), Some(alike), own]).unwrap();
        assert!(believed[..2].iter().all(|us| (us - 100.0).abs() < 0.01), "{own:?}: {believed:?}");
        assert!((least..=most).contains(&believed[2]), "{own:?}: {believed:?}");
    }
    check(None, 99.9, 100.1);
    check(Some((200.0, 2.0)), 99.9, 100.1);
    check(Some((800.0, 2.0)), 99.9, 100.1);
    check(Some((800.0, 64.0)), 500.0, 800.0);
    check(Some((400.0, 256.0)), 350.0, 400.0);
    assert_eq!(believed(&[None, None]), None);
}

#[test]
fn nearly_equal_engines_are_taken_for_equal() {
    fn check(values: &[f32], want: &[f32]) {
        let mut snapped = values.to_vec();
        snap_to_median(&mut snapped, SNAP_FACTOR);
        assert_eq!(snapped, want);
    }
    check(&[], &[]);
    check(&[7.0], &[7.0]);
    check(&[100.0, 120.0, 90.0], &[100.0, 100.0, 100.0]);
    check(&[100.0, 100.0, 100.0, 300.0], &[100.0, 100.0, 100.0, 300.0]);
    check(&[100.0, 250.0], &[100.0, 250.0]);
}

proptest! {
    #[test]
    fn all_replicas_combine_rows_alike(
        rows in prop::collection::vec((10.0_f32..4_000.0, 0_u16..1_000), 0..12),
        turn in 0_usize..12,
    ) {
        let mut turned = rows.clone();
        if !turned.is_empty() {
            let by = turn % turned.len();
            turned.rotate_left(by);
        }
        prop_assert_eq!(known(&rows), known(&turned));
    }

    #[test]
    fn no_sample_takes_a_figure_beyond_its_clamp(
        samples in prop::collection::vec((any::<f64>(), any::<f64>(), any::<u32>(), any::<u32>(), any::<Option<u32>>(), any::<bool>()), 0..80),
    ) {
        let prior = Speed::default();
        let mut learned = LearnedSpeed::new(prior);
        for (at, (first, leg, uncached_tokens, ahead_tokens, output_tokens, stream)) in (0..).zip(samples) {
            let served = LegSample {
                first_byte_ms: stream.then_some(first), leg_ms: leg, uncached_tokens, ahead_tokens, output_tokens,
            };
            learned.learn(&served, Moment::from_millis(at * 40));
            let speed = learned.speed(Moment::from_millis(at * 40));
            for (got, prior) in [
                (speed.prefill_us_per_token, prior.prefill_us_per_token),
                (speed.itl_us, prior.itl_us),
                (speed.base_us, prior.base_us),
            ] {
                prop_assert!(got >= prior / 256.1 && got <= prior * 8.01, "{:?}", speed);
            }
        }
    }
}
