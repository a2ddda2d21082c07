//! Leaves out endpoints with a long queue in the engine.

use serde::{Deserialize, Serialize};

use super::{EndpointFilter, FilterName, Kept};
use crate::candidates::{Candidate, Candidates};
use crate::request::RequestShape;
use crate::view::View;

/// `[filter.queue-percentile]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QueuePercentileSettings {
    /// Which percentile of the queues is still kept, as a ratio 0 to 1. Default 0.9.
    pub percentile: f64,
}

impl Default for QueuePercentileSettings {
    fn default() -> Self {
        Self { percentile: 0.9 }
    }
}

/// Keeps the endpoints whose engine queue is at or below a percentile, by linear interpolation, of the
/// queues of all candidates that have a fresh figure. Those without one are kept.
#[derive(Debug)]
pub struct QueuePercentile {
    percentile: f64,
}

impl QueuePercentile {
    /// The filter with these numbers.
    pub fn new(settings: &QueuePercentileSettings) -> Self {
        Self { percentile: settings.percentile }
    }
}

impl EndpointFilter for QueuePercentile {
    fn name(&self) -> FilterName {
        FilterName::QueuePercentile
    }

    fn keep(&self, candidates: &Candidates<'_>, _view: &View, _request: &RequestShape) -> Kept {
        let mut queues: Vec<u32> = candidates.kept().filter_map(Candidate::queue).collect();
        queues.sort_unstable();
        let Some(limit) = percentile(&queues, self.percentile) else {
            return candidates.all().iter().map(|_| true).collect();
        };
        candidates
            .all()
            .iter()
            .map(|candidate| candidate.queue().is_none_or(|queue| f64::from(queue) <= limit))
            .collect()
    }
}

/// The `ratio` percentile of sorted values, linearly interpolated between neighbours.
fn percentile(sorted: &[u32], ratio: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = ratio.clamp(0.0, 1.0) * last as f64;
    let below = at.floor() as usize;
    let (low, high) = (*sorted.get(below)?, *sorted.get((below + 1).min(last))?);
    Some(f64::from(low) + (f64::from(high) - f64::from(low)) * at.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(queues: &[u32], kept: &[bool]) {
        let mut sorted = queues.to_vec();
        sorted.sort_unstable();
        let limit = percentile(&sorted, 0.9).unwrap();
        let got: Vec<bool> = queues.iter().map(|&queue| f64::from(queue) <= limit).collect();
        assert_eq!(got, kept, "{queues:?} with limit {limit}");
    }

    #[test]
    fn only_queues_above_the_percentile_are_left_out() {
        check(&[0, 0, 0, 20], &[true, true, true, false]);
        check(&[5, 5, 5, 5], &[true, true, true, true]);
        check(&[7], &[true]);
        check(&[0, 1], &[true, false]);
    }

    #[test]
    fn without_a_figure_there_is_no_limit() {
        assert_eq!(percentile(&[], 0.9), None);
    }
}
