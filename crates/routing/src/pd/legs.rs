//! What each leg of a split request costs, and what serving it whole does where others decode.

use crate::candidates::{Candidate, Candidates};
use crate::cost::{Cost, Costs};
use crate::endpoint::Role;
use crate::policy::{CostSettings, PdCostSettings};

/// What is known and configured of costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tariff<'a> {
    /// Weights.
    pub(crate) cost: &'a CostSettings,
    /// What splitting costs and saves.
    pub(crate) pd: &'a PdCostSettings,
    /// Time that the KV of a prompt token takes, as measured, in microseconds.
    pub(crate) transfer_us_per_token: f32,
}

impl Tariff<'_> {
    /// Adds to the costs of whole requests what they take from those who decode.
    pub(crate) fn whole(&self, candidates: &Candidates<'_>, costs: &Costs) -> Costs {
        self.each(candidates, costs, |candidate, cost| {
            cost.total_ms + self.taken_from_decodes_ms(candidate, cost)
        })
    }

    /// The costs of computing the prompt alone.
    pub(crate) fn prefill(&self, candidates: &Candidates<'_>, costs: &Costs) -> Costs {
        self.each(candidates, costs, |candidate, cost| {
            self.cost.wait_weight * cost.wait_ms
                + self.cost.prefill_weight * (cost.prefill_ms - cost.forgiven_ms)
                + cost.kv_ms
                + self.taken_from_decodes_ms(candidate, cost)
        })
    }

    /// The costs of decoding a prompt that is computed elsewhere: the handoff of what is not warm, the engine's
    /// own decodes, and what the prompts that it computes take from them.
    pub(crate) fn decode(&self, candidates: &Candidates<'_>, costs: &Costs) -> Costs {
        self.each(candidates, costs, |_, cost| {
            self.transfer_ms(cost.uncached_tokens)
                + self.cost.decode_weight * cost.decode_ms
                + self.pd.slowdown * self.cost.wait_weight * cost.wait_ms
                + cost.kv_ms
        })
    }

    /// What a handoff of so many tokens takes, in ms.
    pub(crate) fn transfer_ms(&self, tokens: u32) -> f64 {
        self.pd.handoff_ms + f64::from(tokens) * f64::from(self.transfer_us_per_token) / 1_000.0
    }

    /// What those who decode at a candidate lose while it computes this prompt, in ms. The first
    /// [`PdCostSettings::split_tokens_min`] tokens ride along with their steps.
    fn taken_from_decodes_ms(&self, candidate: &Candidate<'_>, cost: &Cost) -> f64 {
        if candidate.endpoint.spec.role == Role::Prefill || cost.uncached_tokens == 0 {
            return 0.0;
        }
        let slowing = f64::from(cost.uncached_tokens.saturating_sub(self.pd.split_tokens_min));
        let busy_ms = cost.prefill_ms * slowing / f64::from(cost.uncached_tokens);
        busy_ms * self.pd.slowdown * (f64::from(candidate.load.running) + self.pd.decodes_expected)
    }

    fn each(
        &self,
        candidates: &Candidates<'_>,
        costs: &Costs,
        total_ms: impl Fn(&Candidate<'_>, &Cost) -> f64,
    ) -> Costs {
        candidates
            .all()
            .iter()
            .zip(costs)
            .map(|(candidate, cost)| Cost { total_ms: total_ms(candidate, cost), ..*cost })
            .collect()
    }
}
