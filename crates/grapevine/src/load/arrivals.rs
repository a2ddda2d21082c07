//! When requests start: recorded times spread inside their quantum, and Poisson arrivals.

use std::time::Duration;

use super::text::Numbers;

/// The longest time over which requests of one recorded moment are spread: the Mooncake conversation trace
/// was recorded in steps of 3 s.
pub const SPREAD_MAX: Duration = Duration::from_secs(3);

/// Spreads times that were recorded alike.
///
/// `recorded` is in order. The `k` requests of one moment get one place each in `k` equal parts of the time to
/// the next moment (at most [`SPREAD_MAX`]), at random inside the part: even, seeded, never out of order.
pub fn spread(recorded: &[Duration], seed: u64) -> Vec<Duration> {
    let mut numbers = Numbers::new(seed);
    let mut times = Vec::with_capacity(recorded.len());
    while let Some(moment) = recorded.get(times.len()).copied() {
        let group = recorded[times.len()..].partition_point(|at| *at == moment);
        let next = recorded.get(times.len() + group);
        let window = next.map_or(SPREAD_MAX, |next| (*next - moment).min(SPREAD_MAX));
        let part = window / u32::try_from(group).unwrap_or(u32::MAX);
        for place in 0..group {
            let offset_ns = part.as_nanos() as f64 * (place as f64 + numbers.unit());
            times.push(moment + Duration::from_nanos(offset_ns as u64));
        }
    }
    times
}

/// Poisson arrivals: endless times from the start, with exponential gaps.
#[derive(Debug, Clone)]
pub struct Poisson {
    numbers: Numbers,
    mean_gap_s: f64,
    at_s: f64,
}

impl Poisson {
    /// `per_second` arrivals a second on average, above 0.
    pub fn new(per_second: f64, seed: u64) -> Self {
        Self { numbers: Numbers::new(seed), mean_gap_s: 1.0 / per_second, at_s: 0.0 }
    }

    /// The next arrival, from the start. Times beyond what a `Duration` holds stay at its end.
    pub fn next_arrival(&mut self) -> Duration {
        self.at_s -= (1.0 - self.numbers.unit()).ln() * self.mean_gap_s;
        Duration::try_from_secs_f64(self.at_s).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(times: &[u64]) -> Vec<Duration> {
        times.iter().copied().map(Duration::from_millis).collect()
    }

    #[test]
    fn requests_of_one_moment_are_spread_evenly_inside_their_three_seconds() {
        let recorded = ms(&[[0; 30], [3000; 30], [5999; 30]].concat());
        let times = spread(&recorded, 1);
        let parts: Vec<Duration> = times[..30].to_vec();
        for (place, at) in parts.iter().enumerate() {
            let part = Duration::from_millis(100);
            assert!(*at >= part * place as u32 && *at < part * (place as u32 + 1), "place {place} at {at:?}");
        }
        assert!(times[59] < Duration::from_millis(5999), "the second group ends before the third");
        assert!(times[89] < Duration::from_millis(8999), "the last group has three seconds");
        assert_ne!(times, spread(&recorded, 2), "another seed, other places");
        assert_eq!(times, spread(&recorded, 1));
    }

    #[test]
    fn poisson_arrivals_have_the_asked_rate_and_its_irregularity() {
        let mut poisson = Poisson::new(50.0, 9);
        let times: Vec<f64> = (0..20_000).map(|_| poisson.next_arrival().as_secs_f64()).collect();
        let rate = 20_000.0 / times[19_999];
        assert!((rate - 50.0).abs() < 1.5, "rate {rate}");
        // An exponential gap is longer than its mean with probability 1/e.
        let long = times.windows(2).filter(|pair| pair[1] - pair[0] > 1.0 / 50.0).count() as f64 / 19_999.0;
        assert!((long - 0.368).abs() < 0.02, "share of long gaps {long}");
    }

    proptest! {
        #[test]
        fn spreading_keeps_order_and_delays_nobody_past_the_next_moment(
            gaps in proptest::collection::vec(prop_oneof![Just(0u64), 1u64..6000], 1..60), seed: u64,
        ) {
            let mut clock = 0;
            let recorded = ms(&gaps.iter().map(|gap| { clock += gap; clock }).collect::<Vec<_>>());
            let times = spread(&recorded, seed);
            prop_assert_eq!(times.len(), recorded.len());
            prop_assert!(times.is_sorted());
            for (index, at) in times.iter().enumerate() {
                prop_assert!(*at >= recorded[index] && *at < recorded[index] + SPREAD_MAX);
                if let Some(next) = recorded.iter().find(|next| **next > recorded[index]) {
                    prop_assert!(at < next);
                }
            }
        }
    }
}
