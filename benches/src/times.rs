//! Times of single calls, and their percentiles.

use std::time::Instant;

/// Times in ns, in order.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<u64>);

impl Times {
    /// The clock's own cost, about 30 ns, is in each.
    pub fn of(count: usize, mut call: impl FnMut(usize)) -> Self {
        let time = |at| {
            let start = Instant::now();
            call(at);
            start.elapsed().as_nanos() as u64
        };
        (0..count).map(time).collect()
    }

    /// The time that `share`, 0 to 1, of the calls took at most, in us; 0 without calls.
    pub fn at_us(&self, share: f64) -> f64 {
        let place = (self.0.len() as f64 * share) as usize;
        self.0.get(place.min(self.0.len().saturating_sub(1))).map_or(0.0, |ns| *ns as f64 / 1_000.0)
    }
}

impl FromIterator<u64> for Times {
    fn from_iter<I: IntoIterator<Item = u64>>(times: I) -> Self {
        let mut times: Vec<u64> = times.into_iter().collect();
        times.sort_unstable();
        Self(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_calls_in_order_of_their_times() {
        let times: Times = (1..=100).rev().map(|us| us * 1_000).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| times.at_us(share)), [1.0, 51.0, 100.0, 100.0]);
        assert_eq!(Times::default().at_us(0.5), 0.0);
    }
}
