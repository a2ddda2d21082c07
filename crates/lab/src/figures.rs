//! What came of a run.

use std::fmt;

use serde::Serialize;

/// The figures of one run, or the mean of several.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Requests that the figures are of.
    pub requests: usize,
    /// Of those, how many an engine refused: they did not fit into its KV cache.
    pub refused: usize,
    /// Prompt tokens found in the engines' caches, 0 to 1.
    pub hit_rate: f64,
    /// From a request's sending to its first token, in ms.
    pub ttft_mean_ms: f64,
    /// What half of them stay below.
    pub ttft_p50_ms: f64,
    /// What 99 of 100 stay below.
    pub ttft_p99_ms: f64,
    /// From a request's sending to its last token, in ms.
    pub e2e_mean_ms: f64,
    /// Requests at the busiest engine over the mean.
    pub busiest_over_mean: f64,
    /// Prompt tokens computed at the engine that computed most over the mean.
    pub busiest_work_over_mean: f64,
    /// Requests that each engine was sent; empty in a mean of several runs.
    pub served: Vec<usize>,
    /// Of chats only.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub chats: Option<Chats>,
    /// What replicas told each other in the whole run.
    pub told: Told,
}

/// Figures of chats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Chats {
    /// Follow-up turns at the engine of their chat's first turn, 0 to 1.
    pub follow_ups_at_home: f64,
    /// Requests at the engine that serves most of their tenant's, 0 to 1.
    pub tenants_at_home: f64,
}

/// Words sent from replica to replica, each counted for every hearer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Told {
    /// Pushes.
    pub pushes: u64,
    /// Load rows in them.
    pub rows: u64,
    /// Blocks of placements in them.
    pub blocks: u64,
    /// Pulses.
    pub pulses: u64,
}

impl Figures {
    /// The mean of several runs.
    pub fn mean(all: &[Self]) -> Self {
        let mean = |part: &dyn Fn(&Self) -> f64| all.iter().map(part).sum::<f64>() / all.len().max(1) as f64;
        let chats = |part: fn(&Chats) -> f64| mean(&|each| each.chats.as_ref().map_or(0.0, part));
        let count = |part: fn(&Self) -> u64| mean(&|each| part(each) as f64).round() as u64;
        Self {
            requests: count(|each| each.requests as u64) as usize,
            refused: count(|each| each.refused as u64) as usize,
            hit_rate: mean(&|each| each.hit_rate),
            ttft_mean_ms: mean(&|each| each.ttft_mean_ms),
            ttft_p50_ms: mean(&|each| each.ttft_p50_ms),
            ttft_p99_ms: mean(&|each| each.ttft_p99_ms),
            e2e_mean_ms: mean(&|each| each.e2e_mean_ms),
            busiest_over_mean: mean(&|each| each.busiest_over_mean),
            busiest_work_over_mean: mean(&|each| each.busiest_work_over_mean),
            served: Vec::new(),
            chats: all.iter().any(|each| each.chats.is_some()).then(|| Chats {
                follow_ups_at_home: chats(|each| each.follow_ups_at_home),
                tenants_at_home: chats(|each| each.tenants_at_home),
            }),
            told: Told {
                pushes: count(|each| each.told.pushes),
                rows: count(|each| each.told.rows),
                blocks: count(|each| each.told.blocks),
                pulses: count(|each| each.told.pulses),
            },
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ttft {:.1} ms, p99 {:.0} ms, hit {:.3}, busiest {:.2}",
            self.ttft_mean_ms, self.ttft_p99_ms, self.hit_rate, self.busiest_over_mean,
        )?;
        if let Some(Chats { follow_ups_at_home, tenants_at_home }) = self.chats {
            write!(f, ", follow-ups at home {follow_ups_at_home:.3}, tenants {tenants_at_home:.3}")?;
        }
        Ok(())
    }
}

/// What is gathered while a run goes on.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) ttft_ns: Vec<u64>,
    pub(crate) e2e_ns: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) refused: usize,
    pub(crate) told: Told,
}

impl Tally {
    /// The figures, with what each engine was sent and computed.
    pub(crate) fn figures(mut self, served: Vec<usize>, computed: &[u64], chats: Option<Chats>) -> Figures {
        self.ttft_ns.sort_unstable();
        let answered = self.ttft_ns.len();
        let quantile = |share: f64| {
            let at = ((answered as f64 * share) as usize).min(answered.saturating_sub(1));
            self.ttft_ns.get(at).map_or(0.0, |ns| *ns as f64 / 1e6)
        };
        let total: u64 = self.ttft_ns.iter().sum();
        let per_answer = |ns: u64| ns as f64 / answered.max(1) as f64 / 1e6;
        Figures {
            requests: answered + self.refused,
            refused: self.refused,
            hit_rate: self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64,
            ttft_mean_ms: per_answer(total),
            ttft_p50_ms: quantile(0.5),
            ttft_p99_ms: quantile(0.99),
            e2e_mean_ms: per_answer(self.e2e_ns),
            busiest_over_mean: over_mean(served.iter().map(|count| *count as f64)),
            busiest_work_over_mean: over_mean(computed.iter().map(|tokens| *tokens as f64)),
            served,
            chats,
            told: self.told,
        }
    }
}

/// The greatest over the mean; 1 where all are zero.
fn over_mean(all: impl Iterator<Item = f64> + Clone) -> f64 {
    let greatest = all.clone().fold(0.0, f64::max);
    let (sum, count) = all.fold((0.0, 0.0), |(sum, count), each| (sum + each, count + 1.0));
    if sum > 0.0 { greatest * count / sum } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_what_was_tallied() {
        let tally = Tally {
            ttft_ns: (1..=200).rev().map(|ms| ms * 1_000_000).collect(),
            e2e_ns: 200 * 300_000_000,
            prompt_tokens: 1_000,
            cached_tokens: 250,
            ..Tally::default()
        };
        let figures = tally.figures(vec![150, 50], &[300, 450], None);
        let expected = Figures {
            requests: 200,
            hit_rate: 0.25,
            ttft_mean_ms: 100.5,
            ttft_p50_ms: 101.0,
            ttft_p99_ms: 199.0,
            e2e_mean_ms: 300.0,
            busiest_over_mean: 1.5,
            busiest_work_over_mean: 1.2,
            served: vec![150, 50],
            ..Figures::default()
        };
        assert_eq!(figures, expected);
    }
}
