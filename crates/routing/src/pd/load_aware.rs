//! The load-aware prefill choice: the best match among those that carry no more than usual.

use rand::Rng as _;

use crate::decision::Reason;
use crate::policy::PdLoadAwareSettings;
use crate::router::Rng;

/// What is known of one endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Share of the prompt that is warm there, 0 to 1.
    pub(crate) match_ratio: f64,
    /// Requests in flight through all replicas; `None` of an endpoint that nobody has heard of.
    pub(crate) running: Option<u32>,
}

/// The position of the row to take, of at least one. Where loads differ by more than the settings allow, one
/// of the least loaded by lot; else by match, then by load, the first that is not above the mean by more than
/// some standard deviations. An endpoint without a figure counts as the mean.
pub(crate) fn within_load(rows: &[Row], settings: &PdLoadAwareSettings, rng: &mut Rng) -> (usize, Reason) {
    let known: Vec<u32> = rows.iter().filter_map(|row| row.running).collect();
    if let (Some(least), Some(most)) = (known.iter().min(), known.iter().max())
        && most - least > settings.imbalance_abs
    {
        let positions = rows.iter().enumerate();
        let of_least: Vec<usize> =
            positions.filter(|(_, row)| row.running == Some(*least)).map(|(at, _)| at).collect();
        return (lot(&of_least, rng), Reason::ImbalancedLeastLoad);
    }
    let (mean, sigma) = mean_and_sigma(&known);
    let load = |at: usize| rows[at].running.map_or(mean, f64::from);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by(|a, b| {
        let by_match = rows[*b].match_ratio.total_cmp(&rows[*a].match_ratio);
        by_match.then(load(*a).total_cmp(&load(*b)))
    });
    let usual = mean + settings.sigma_factor * sigma;
    let Some(first) = order.iter().copied().find(|at| load(*at) <= usual) else {
        // The least is never above the mean, unless by rounding.
        return (lot(&order, rng), Reason::FallbackRandom);
    };
    // Equals are drawn from by lot, so that they don't all go to the first.
    let alike = |at: &usize| rows[*at].match_ratio == rows[first].match_ratio && load(*at) == load(first);
    let equals: Vec<usize> = order.into_iter().filter(alike).collect();
    (lot(&equals, rng), Reason::MatchWithinLoad)
}

fn lot(among: &[usize], rng: &mut Rng) -> usize {
    among.get(rng.random_range(0..among.len().max(1))).copied().unwrap_or(0)
}

/// Mean and sample standard deviation, which is 0 for fewer than two.
fn mean_and_sigma(values: &[u32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count.max(1.0);
    let squares: f64 = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum();
    (mean, if values.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;

    fn check(rows: &[(f64, Option<u32>)], want: &[usize], reason: Reason) {
        let rows: Vec<Row> = rows
            .iter()
            .map(|(match_ratio, running)| Row { match_ratio: *match_ratio, running: *running })
            .collect();
        let mut rng = Rng::seed_from_u64(3);
        let mut seen = vec![false; rows.len()];
        for _ in 0..50 {
            let (at, why) = within_load(&rows, &PdLoadAwareSettings::default(), &mut rng);
            assert_eq!(why, reason, "{rows:?}");
            seen[at] = true;
        }
        let got: Vec<usize> = (0..rows.len()).filter(|at| seen[*at]).collect();
        assert_eq!(got, want, "{rows:?}");
    }

    fn cold(running: &[u32]) -> Vec<(f64, Option<u32>)> {
        running.iter().map(|running| (0.0, Some(*running))).collect()
    }

    #[test]
    fn uneven_loads_send_it_to_the_least_loaded() {
        check(&cold(&[1, 10, 6, 12]), &[0], Reason::ImbalancedLeastLoad);
        check(&cold(&[10, 1, 4, 3]), &[1], Reason::ImbalancedLeastLoad);
        // Whatever is warm elsewhere, and by lot among several.
        check(&[(1.0, Some(12)), (0.0, Some(2)), (0.0, Some(2))], &[1, 2], Reason::ImbalancedLeastLoad);
    }

    #[test]
    fn a_spread_of_nine_is_uneven_and_one_of_eight_is_not() {
        check(&[(1.0, Some(9)), (0.0, Some(0)), (0.5, Some(9))], &[1], Reason::ImbalancedLeastLoad);
        check(&[(1.0, Some(8)), (0.0, Some(0)), (0.5, Some(8))], &[0], Reason::MatchWithinLoad);
        for even in [[9, 10, 8, 12], [6, 1, 4, 3]] {
            let least = even.iter().enumerate().min_by_key(|(_, running)| **running).unwrap().0;
            check(&cold(&even), &[least], Reason::MatchWithinLoad);
        }
    }

    #[test]
    fn the_best_match_is_passed_over_when_it_runs_more_than_the_mean_and_one_sigma() {
        // Mean 2.5, sigma 3.
        check(
            &[(1.0, Some(7)), (0.4, Some(1)), (0.2, Some(1)), (0.0, Some(1))],
            &[1],
            Reason::MatchWithinLoad,
        );
        // Mean 4, sigma 2.6.
        check(&[(1.0, Some(6)), (0.4, Some(1)), (0.2, Some(5))], &[0], Reason::MatchWithinLoad);
        check(&[(0.0, Some(7))], &[0], Reason::MatchWithinLoad);
    }

    #[test]
    fn an_endpoint_that_nobody_has_heard_of_counts_as_the_mean() {
        check(&[(0.0, None), (0.0, Some(1)), (0.0, Some(5))], &[1], Reason::MatchWithinLoad);
        check(&[(0.9, None), (0.0, Some(1)), (0.0, Some(5))], &[0], Reason::MatchWithinLoad);
        check(&[(0.0, None), (0.0, Some(0)), (0.0, Some(9))], &[1], Reason::ImbalancedLeastLoad);
        check(&[(0.0, None), (0.0, None)], &[0, 1], Reason::MatchWithinLoad);
    }
}
