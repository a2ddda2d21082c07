//! The numbers of the policies that split requests.

use serde::{Deserialize, Serialize};

use crate::settings::names;

names! {
    /// When a request is split into a prefill and a decode leg, where endpoints have roles.
    SplitMode {
        /// When the pair costs less than one endpoint alone.
        Auto = "auto",
        /// Whenever there is a pair.
        Always = "always",
        /// Never: prefill endpoints get nothing while another is left.
        Never = "never",
    }
}

/// `[policy.pd-cost]`: what every policy goes by in asking whether to split; the weights of waiting, computing
/// and decoding are those of `[policy.cost]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PdCostSettings {
    /// Uncached prompt tokens from which a split is thought of. Default 512: fewer ride along with a step of an
    /// engine that decodes and delay nobody much; and of a chat's next turn as many may seem cold, for the answer
    /// before it and a part of a block are not known to be warm.
    pub split_tokens_min: u32,
    /// Time that the KV of a prompt token takes from engine to engine until that was measured, in
    /// microseconds. Default 5: 128 KiB over a 200 Gb/s port.
    pub transfer_us_per_token: f32,
    /// What a handoff costs whatever its size, in ms. Default 10: the engines' greeting, and a step of decode.
    pub handoff_ms: f64,
    /// What a handoff between two zones costs more, in ms. Default 10.
    pub zone_ms: f64,
    /// Share of their time, 0 to 1, that those who decode at an endpoint lose while it computes a prompt.
    /// Default 0.75: they go on at a quarter of their pace.
    pub slowdown: f64,
    /// Requests taken to decode at an endpoint beside those in flight there: those that come while the prompt
    /// is computed. Default 2.
    pub decodes_expected: f64,
}

impl Default for PdCostSettings {
    fn default() -> Self {
        Self {
            split_tokens_min: 512,
            transfer_us_per_token: 5.0,
            handoff_ms: 10.0,
            zone_ms: 10.0,
            slowdown: 0.75,
            decodes_expected: 2.0,
        }
    }
}

impl PdCostSettings {
    pub(super) fn ranges(&self, range: &mut impl FnMut(&str, f64, f64, f64)) {
        range("policy.pd-cost.split_tokens_min", f64::from(self.split_tokens_min), 0.0, 1e6);
        range("policy.pd-cost.transfer_us_per_token", f64::from(self.transfer_us_per_token), 0.01, 1e5);
        range("policy.pd-cost.handoff_ms", self.handoff_ms, 0.0, 1e4);
        range("policy.pd-cost.zone_ms", self.zone_ms, 0.0, 1e4);
        range("policy.pd-cost.slowdown", self.slowdown, 0.0, 1.0);
        range("policy.pd-cost.decodes_expected", self.decodes_expected, 0.0, 1e3);
    }
}

/// `[policy.pd-load-aware]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PdLoadAwareSettings {
    /// Prefill endpoints are unevenly loaded when most minus least in flight is above this. Default 8.
    pub imbalance_abs: u32,
    /// A prefill endpoint is passed over when it runs more than the mean plus this many standard deviations.
    /// Default 1.
    pub sigma_factor: f64,
}

impl Default for PdLoadAwareSettings {
    fn default() -> Self {
        Self { imbalance_abs: 8, sigma_factor: 1.0 }
    }
}

impl PdLoadAwareSettings {
    pub(super) fn ranges(&self, range: &mut impl FnMut(&str, f64, f64, f64)) {
        range("policy.pd-load-aware.imbalance_abs", f64::from(self.imbalance_abs), 0.0, 1e6);
        range("policy.pd-load-aware.sigma_factor", self.sigma_factor, 0.0, 100.0);
    }
}

/// `[policy.pd-qoe]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PdQoeSettings {
    /// Pairs whose predicted quality is within this of the best are settled by their scores. Default 0.01.
    pub tie_qoe: f64,
}

impl Default for PdQoeSettings {
    fn default() -> Self {
        Self { tie_qoe: 0.01 }
    }
}

impl PdQoeSettings {
    pub(super) fn ranges(&self, range: &mut impl FnMut(&str, f64, f64, f64)) {
        range("policy.pd-qoe.tie_qoe", self.tie_qoe, 0.0, 1.0);
    }
}
