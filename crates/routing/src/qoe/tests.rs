use proptest::prelude::*;

use super::*;

/// TTFT* 1 s and 5 tokens per second.
const SLO: Slo = Slo { ttft_ms: 1_000.0, tpot_ms: 200.0, total_ms: None };

fn digest(arrivals_ms: impl IntoIterator<Item = f64>) -> Digestion {
    let mut digestion = Digestion::new(&SLO, 1);
    arrivals_ms.into_iter().for_each(|at_ms| digestion.arrived(at_ms, 1));
    digestion
}

fn paced(count: u32, first_ms: f64, gap_ms: f64) -> impl Iterator<Item = f64> {
    (0..count).map(move |n| first_ms + f64::from(n) * gap_ms)
}

#[test]
fn quality_is_the_ratio_of_areas() {
    let check = |what: &str, arrivals_ms: Vec<f64>, want: f64| {
        let qoe = digest(arrivals_ms).qoe(None).unwrap();
        assert!((qoe - want).abs() < 5e-5, "{what}: {qoe} instead of {want}");
    };
    check("on time", paced(20, 1_000.0, 200.0).collect(), 1.0);
    check("late, then on pace", paced(20, 3_000.0, 200.0).collect(), 0.5);
    let stalled = paced(10, 1_000.0, 200.0).chain(paced(10, 2_800.0 + 5_200.0, 200.0));
    check("a stall half way", stalled.collect(), 0.6429);
    check("half the speed", paced(20, 1_000.0, 400.0).collect(), 0.6724);
    check("all at once, in time", vec![1_000.0; 20], 1.0);
    check("before anything was expected", vec![10.0], 1.0);
    // One token, one ramp too late: half a token's ramp of 1 and a half.
    check("one token, late", vec![1_200.0], 0.5 / 1.5);
    // Early tokens make up for a stall.
    check(
        "far ahead, then a stall it outlasts",
        paced(10, 0.0, 20.0).chain(paced(10, 2_000.0, 20.0)).collect(),
        1.0,
    );
}

#[test]
fn pieces_of_several_tokens_are_read_for_as_long_as_their_tokens_take() {
    // Ten pieces, 2 s apart: ten tokens each at exactly the pace expected, read out by when the next comes.
    let pieces = digest(paced(10, 1_000.0, 2_000.0));
    let check = |tokens, least: f64, most: f64| {
        let qoe = pieces.qoe(tokens).unwrap();
        assert!((least..=most).contains(&qoe), "{tokens:?}: {qoe}");
    };
    let as_tokens = pieces.qoe(None).unwrap();
    check(Some(1), as_tokens, as_tokens);
    check(Some(11), as_tokens, as_tokens);
    check(Some(101), 1.0, 1.0);
    check(Some(86), as_tokens, 1.0);
    check(Some(1_000_000), 0.999, 1.0);
    assert!(as_tokens < 0.6, "{as_tokens}");
    // What is followed is exact: the same tokens, one by one.
    for (index, tokens) in TOKENS_PER_PIECE.iter().enumerate() {
        let arrivals = [1_500.0, 2_000.0, 9_000.0, 9_100.0, 16_000.0];
        let count = *tokens as u32;
        let each = digest(arrivals.iter().flat_map(|at_ms| (0..count).map(move |_| *at_ms)));
        let whole = digest(arrivals).qoe(Some(5 * count + 1)).unwrap();
        assert!((whole - each.qoe(None).unwrap()).abs() < 1e-9, "{index}: {whole}");
    }
}

#[test]
fn before_the_first_token_there_is_no_quality() {
    let mut digestion = Digestion::new(&SLO, 1);
    digestion.arrived(9_000.0, 0);
    assert_eq!((digestion.qoe(None), digestion.ttft_ms(), digestion.span_ms()), (None, None, None));
}

#[test]
fn several_samples_in_one_stream_are_expected_at_several_times_the_pace() {
    let mut two = Digestion::new(&SLO, 2);
    paced(20, 1_000.0, 200.0).for_each(|at_ms| two.arrived(at_ms, 2));
    assert!(two.qoe(None).unwrap() > 0.999);
    let mut alternating = Digestion::new(&SLO, 2);
    paced(40, 1_000.0, 200.0).for_each(|at_ms| alternating.arrived(at_ms, 1));
    assert!(alternating.qoe(None).unwrap() < 0.7);
}

#[test]
fn each_class_has_its_own_targets() {
    let targets = ClassTargets::default();
    for (priority, ttft_ms, tpot_ms) in
        [(Priority::High, 1_000.0, 50.0), (Priority::Normal, 2_000.0, 50.0), (Priority::Low, 3_000.0, 100.0)]
    {
        assert_eq!(targets.of(priority), Slo { ttft_ms, tpot_ms, total_ms: None });
    }
}

#[test]
fn a_request_is_judged_by_what_it_expected_and_how_it_ended() {
    use Target::{Met, Missed};
    let on_time = digest(paced(20, 1_000.0, 200.0));
    let slow = digest(paced(20, 1_000.0, 400.0));
    let slo = Slo { total_ms: Some(6_000.0), ..SLO };
    let check = |end,
                 stream,
                 digestion: Option<&Digestion>,
                 total_ms: f64,
                 want: [Option<Target>; 3],
                 qoe: Option<f64>| {
        let first_byte_ms = (total_ms > 0.0).then_some(999.0);
        let seen = Seen { end, stream, digestion, first_byte_ms, output_tokens: None, samples: 1, total_ms };
        let fared = seen.judge(&slo);
        assert_eq!([fared.ttft, fared.tpot, fared.e2e], want, "{seen:?}");
        let near = |a: Option<f64>, b: Option<f64>| a.zip(b).map_or(a == b, |(a, b)| (a - b).abs() < 1e-4);
        assert!(near(fared.qoe, qoe), "{seen:?}: {:?}", fared.qoe);
    };
    check(End::Answered, true, Some(&on_time), 5_000.0, [Some(Met), Some(Met), Some(Met)], Some(1.0));
    check(End::Answered, true, Some(&slow), 9_000.0, [Some(Met), Some(Missed), Some(Missed)], Some(0.6724));
    check(End::Answered, true, None, 5_000.0, [Some(Met), None, Some(Met)], None);
    check(End::Answered, false, None, 6_001.0, [None, None, Some(Missed)], None);
    // What failed has missed what it had not reached.
    check(End::Failed, true, Some(&on_time), 5_000.0, [Some(Met), Some(Missed), Some(Missed)], Some(0.0));
    check(End::Failed, true, None, 0.0, [Some(Missed), Some(Missed), Some(Missed)], Some(0.0));
    check(End::Failed, false, None, 0.0, [None, None, Some(Missed)], None);
    // Who left has seen what came until then.
    check(End::Void, true, Some(&slow), 5_000.0, [Some(Met), Some(Missed), None], Some(0.6724));
    check(End::Void, true, None, 0.0, [None, None, None], None);
}

#[test]
fn the_pace_is_by_the_engine_s_count_of_tokens_where_it_has_one_and_per_sample() {
    let check = |output_tokens, samples, want: Option<f64>| {
        let digestion = digest(paced(5, 1_000.0, 400.0));
        let seen = Seen {
            end: End::Answered,
            stream: true,
            digestion: Some(&digestion),
            first_byte_ms: None,
            output_tokens,
            samples,
            total_ms: 2_600.0,
        };
        assert_eq!(seen.tpot_ms(), want, "{output_tokens:?} {samples}");
        assert_eq!(seen.judge(&SLO).qoe, digestion.qoe(output_tokens));
    };
    check(None, 1, Some(400.0));
    check(Some(17), 1, Some(100.0));
    assert!(digest(paced(5, 1_000.0, 400.0)).qoe(Some(17)) > digest(paced(5, 1_000.0, 400.0)).qoe(None));
    check(Some(18), 2, Some(200.0));
    check(None, 5, None);
}

/// Arrivals in order, in chunks of several tokens.
fn chunks() -> impl Strategy<Value = Vec<(f64, u32)>> {
    let chunk = (0_u32..3_000, 1_u32..6);
    prop::collection::vec(chunk, 1..40).prop_map(|chunks| {
        let mut at = 0;
        let next = |(gap, tokens)| {
            at += gap;
            (f64::from(at), tokens)
        };
        chunks.into_iter().map(next).collect()
    })
}

/// The same by the definition: every ramp on its own, over a list of all arrivals.
fn by_definition(chunks: &[(f64, u32)]) -> f64 {
    let ramp = SLO.tpot_ms;
    let mut begins: Vec<f64> = Vec::new();
    for &(at, tokens) in chunks {
        for _ in 0..tokens {
            begins.push(begins.last().map_or(at, |last: &f64| at.max(last + ramp)));
        }
    }
    let count = begins.len() as f64;
    let end = begins.last().unwrap() + ramp;
    let taken_in: f64 = begins.iter().map(|begin| (end - begin) - ramp / 2.0).sum();
    let expected: f64 = (0..begins.len())
        .map(|n| {
            let since = (end - SLO.ttft_ms - n as f64 * ramp).max(0.0);
            if since < ramp { since * since / (2.0 * ramp) } else { since - ramp / 2.0 }
        })
        .sum();
    if expected == 0.0 { 1.0 } else { (taken_in / expected).clamp(0.0, count).min(1.0) }
}

fn qoe_of(chunks: &[(f64, u32)]) -> f64 {
    let mut digestion = Digestion::new(&SLO, 1);
    chunks.iter().for_each(|&(at_ms, tokens)| digestion.arrived(at_ms, tokens));
    digestion.qoe(None).unwrap()
}

proptest! {
    #[test]
    fn sums_give_what_a_list_of_all_arrivals_gives(chunks in chunks()) {
        let (sums, list) = (qoe_of(&chunks), by_definition(&chunks));
        prop_assert!((0.0..=1.0).contains(&sums));
        prop_assert!((sums - list).abs() < 1e-9, "{sums} {list}");
    }

    #[test]
    fn a_chunk_of_several_tokens_is_several_tokens_at_once(chunks in chunks()) {
        let apart: Vec<(f64, u32)> =
            chunks.iter().flat_map(|&(at, tokens)| (0..tokens).map(move |_| (at, 1))).collect();
        prop_assert!((qoe_of(&chunks) - qoe_of(&apart)).abs() < 1e-9);
    }

    #[test]
    fn a_stream_that_comes_earlier_as_a_whole_is_no_worse(chunks in chunks(), delay in 0_u32..20_000) {
        let later: Vec<(f64, u32)> =
            chunks.iter().map(|&(at, tokens)| (at + f64::from(delay), tokens)).collect();
        prop_assert!(qoe_of(&chunks) >= qoe_of(&later) - 1e-9);
    }

    /// The curves end with the last token; with that in its place each earlier arrival can only help.
    #[test]
    fn a_token_that_comes_earlier_lowers_nothing_while_the_end_stays(chunks in chunks(), which in any::<prop::sample::Index>(), share in 0.0..1.0_f64) {
        let mut earlier = chunks.clone();
        earlier.push((chunks[chunks.len() - 1].0 + 1e6, 1));
        let later = earlier.clone();
        let at = which.index(chunks.len());
        let before = if at == 0 { 0.0 } else { earlier[at - 1].0 };
        earlier[at].0 = before + share * (earlier[at].0 - before);
        prop_assert!(qoe_of(&earlier) >= qoe_of(&later) - 1e-9);
    }
}

#[test]
fn what_is_predicted_of_an_even_stream_is_what_is_measured_of_it() {
    let check = |first_ms: f64, gap_ms: f64, want: f64| {
        let qoe = predicted(&SLO, first_ms, gap_ms, 20);
        assert!((qoe - want).abs() < 5e-5, "{first_ms}, {gap_ms}: {qoe} instead of {want}");
        let measured = digest(paced(20, first_ms, gap_ms)).qoe(None).unwrap();
        assert!((qoe - measured).abs() < 1e-9, "{first_ms}, {gap_ms}: {qoe}, measured {measured}");
    };
    check(1_000.0, 200.0, 1.0);
    check(3_000.0, 200.0, 0.5);
    check(1_000.0, 400.0, 0.6724);
    check(500.0, 50.0, 1.0);
}
