//! Leaves out endpoints that are much slower than the rest.

use serde::{Deserialize, Serialize};

use super::{EndpointFilter, FilterName, Kept};
use crate::candidates::Candidates;
use crate::request::RequestShape;
use crate::view::View;

/// `[filter.latency-outlier]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LatencyOutlierSettings {
    /// How many deviations above the median is still kept. Default 3.
    pub sigma_factor: f64,
}

impl Default for LatencyOutlierSettings {
    fn default() -> Self {
        Self { sigma_factor: 3.0 }
    }
}

/// Slower than the median by less than this share is never an outlier, however alike the others are: the
/// learned figures themselves are no better than that.
const ALIKE_RATIO: f64 = 0.1;

/// Scales the median absolute deviation to the standard deviation of normal data.
const MAD_TO_SIGMA: f64 = 1.482_6;

/// Keeps the endpoints whose learned time per prompt token and per output token are both at or below
/// median + factor x deviation of all candidates. The deviation is the median absolute one, scaled: with
/// few endpoints the outlier itself would widen a plain sigma beyond its reach.
#[derive(Debug)]
pub struct LatencyOutlier {
    sigma_factor: f64,
}

impl LatencyOutlier {
    /// The filter with these numbers.
    pub fn new(settings: &LatencyOutlierSettings) -> Self {
        Self { sigma_factor: settings.sigma_factor }
    }
}

impl EndpointFilter for LatencyOutlier {
    fn name(&self) -> FilterName {
        FilterName::LatencyOutlier
    }

    fn keep(&self, candidates: &Candidates<'_>, _view: &View, _request: &RequestShape) -> Kept {
        let prefill = |candidate: &crate::candidates::Candidate<'_>| {
            f64::from(candidate.load.speed.prefill_us_per_token)
        };
        let itl = |candidate: &crate::candidates::Candidate<'_>| f64::from(candidate.load.speed.itl_us);
        let prefill_max = limit(candidates.kept().map(prefill).collect(), self.sigma_factor);
        let itl_max = limit(candidates.kept().map(itl).collect(), self.sigma_factor);
        candidates.all().iter().map(|each| prefill(each) <= prefill_max && itl(each) <= itl_max).collect()
    }
}

/// The largest value that is no outlier among `values`.
fn limit(mut values: Vec<f64>, sigma_factor: f64) -> f64 {
    let middle = median(&mut values);
    let mut deviations: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    let sigma = median(&mut deviations) * MAD_TO_SIGMA;
    middle + (sigma_factor * sigma).max(middle * ALIKE_RATIO)
}

/// The median; 0 of nothing. Of an even number of values it is the lower of the middle two, so that of
/// two endpoints the slower can be the outlier.
fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: &[f64], kept: &[bool]) {
        let limit = limit(values.to_vec(), 3.0);
        let got: Vec<bool> = values.iter().map(|value| *value <= limit).collect();
        assert_eq!(got, kept, "{values:?} with limit {limit}");
    }

    #[test]
    fn the_slow_one_is_left_out_and_small_differences_are_not() {
        check(&[100.0, 102.0, 98.0, 400.0], &[true, true, true, false]);
        check(&[100.0, 100.0, 100.0, 105.0], &[true, true, true, true]);
        check(&[100.0, 800.0], &[true, false]);
        check(&[100.0], &[true]);
    }
}
