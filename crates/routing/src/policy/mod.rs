//! Policies: what a name in the configuration stands for.

use crate::request::{Beginning, BeginningHash};
use crate::settings::{Fault, names};
use serde::{Deserialize, Serialize};

mod pd;
mod plan;

pub use pd::{PdCostSettings, PdLoadAwareSettings, PdQoeSettings, SplitMode};
pub(crate) use plan::Plan;

names! {
    /// The policies there are.
    PolicyName {
        /// The fewest expected milliseconds.
        Cost = "cost",
        /// The longest matched prefix; ties and misses go to the least loaded.
        PrefixLongest = "prefix-longest",
        /// The hash of the first characters on a consistent ring.
        PrefixRing = "prefix-ring",
        /// The holder of a good match while loads are even, else the least loaded.
        CacheAware = "cache-aware",
        /// The session key on a consistent ring.
        Session = "session",
        /// One after the other.
        RoundRobin = "round-robin",
        /// By lot.
        Random = "random",
        /// The fewest requests in flight.
        LeastLoad = "least-load",
        /// The less loaded of two drawn by lot.
        PowerOfTwo = "power-of-two",
        /// The fewest expected milliseconds over pairs and over not splitting. Without roles: `cost`.
        PdCost = "pd-cost",
        /// Prefill by match within the usual load, decode by the fewest in flight.
        PdLoadAware = "pd-load-aware",
        /// The pair with the best predicted quality of experience. Without roles: `cost`.
        PdQoe = "pd-qoe",
    }
}

impl PolicyName {
    /// Whether choices depend on where earlier prompts went.
    pub const fn follows_placements(self) -> bool {
        match self {
            Self::Cost
            | Self::PrefixLongest
            | Self::CacheAware
            | Self::PdCost
            | Self::PdLoadAware
            | Self::PdQoe => true,
            Self::PrefixRing
            | Self::Session
            | Self::RoundRobin
            | Self::Random
            | Self::LeastLoad
            | Self::PowerOfTwo => false,
        }
    }

    /// Whether it chooses a prefill and a decode endpoint together, and so can't stand for one of them.
    pub const fn is_joint(self) -> bool {
        matches!(self, Self::PdCost | Self::PdLoadAware | Self::PdQoe)
    }

    /// Whether replicas that see the same are to choose the same: not where lots or turns decide.
    pub const fn is_agreed(self) -> bool {
        match self {
            Self::Cost
            | Self::PrefixLongest
            | Self::PrefixRing
            | Self::CacheAware
            | Self::PdCost
            | Self::PdQoe => true,
            Self::Session
            | Self::RoundRobin
            | Self::Random
            | Self::LeastLoad
            | Self::PowerOfTwo
            | Self::PdLoadAware => false,
        }
    }
}

/// The numbers of all policies, `[policy.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct PolicyTables {
    /// `[policy.cost]`
    pub cost: CostSettings,
    /// `[policy.prefix-longest]`
    pub prefix_longest: PrefixLongestSettings,
    /// `[policy.prefix-ring]`
    pub prefix_ring: PrefixRingSettings,
    /// `[policy.cache-aware]`
    pub cache_aware: CacheAwareSettings,
    /// `[policy.pd-cost]`
    pub pd_cost: PdCostSettings,
    /// `[policy.pd-load-aware]`
    pub pd_load_aware: PdLoadAwareSettings,
    /// `[policy.pd-qoe]`
    pub pd_qoe: PdQoeSettings,
}

/// `[policy.cost]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CostSettings {
    /// Costs that differ by less than this are the same, in ms. Default 2.
    pub tie_ms: f64,
    /// Weight of waiting for others' prompts. Default 1.
    pub wait_weight: f64,
    /// Weight of computing what is not warm. Default 3: what an engine computes anew also delays all that come
    /// behind it, which at a load of two thirds is twice what the request itself waits for it.
    pub prefill_weight: f64,
    /// Weight of slower decoding, the request's own and what it costs the others there. Default 0.1: most
    /// requests end long before the tokens they may ask for.
    pub decode_weight: f64,
    /// Cost of a full KV cache, in ms. Default 100: about what a preempted request costs, and little against
    /// a queue, for usage moves with every request and is only looked at now and then.
    pub kv_pressure_ms: f64,
    /// Prompt tokens that a request which waits in the engine and came past the routers is taken for.
    /// Default 512.
    pub waiting_request_tokens: f64,
}

impl Default for CostSettings {
    fn default() -> Self {
        Self {
            tie_ms: 2.0,
            wait_weight: 1.0,
            prefill_weight: 3.0,
            decode_weight: 0.1,
            kv_pressure_ms: 100.0,
            waiting_request_tokens: 512.0,
        }
    }
}

/// `[policy.prefix-longest]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefixLongestSettings {
    /// Bytes of prompt per hashed chunk. Default 128.
    pub chunk_chars: usize,
}

impl Default for PrefixLongestSettings {
    fn default() -> Self {
        Self { chunk_chars: 128 }
    }
}

/// `[policy.prefix-ring]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefixRingSettings {
    /// How many leading bytes of the prompt are hashed. Default 512.
    pub prefix_chars: usize,
    /// How. Default xxhash.
    pub hash: BeginningHash,
    /// How many times the mean load the home may carry before the next on the ring is taken; unset: any.
    pub bound: Option<f64>,
}

impl Default for PrefixRingSettings {
    fn default() -> Self {
        Self { prefix_chars: 512, hash: BeginningHash::Xxhash, bound: None }
    }
}

impl PrefixRingSettings {
    /// How requests are to be read for it.
    pub const fn beginning(&self) -> Beginning {
        Beginning { bytes: self.prefix_chars, hash: self.hash }
    }
}

/// `[policy.cache-aware]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheAwareSettings {
    /// Loads are uneven when most minus least is above this, and the ratio below is passed too. Default 64.
    pub imbalance_abs: u32,
    /// Loads are uneven when most is above this many times least. Default 1.5.
    pub imbalance_ratio: f64,
    /// Share of the prompt, 0 to 1, that a holder must have to be preferred. Default 0.3.
    pub match_ratio_min: f64,
}

impl Default for CacheAwareSettings {
    fn default() -> Self {
        Self { imbalance_abs: 64, imbalance_ratio: 1.5, match_ratio_min: 0.3 }
    }
}

impl PolicyTables {
    /// The block size that `policy` asks for, in bytes.
    pub fn chunk_chars(&self, policy: PolicyName) -> Option<usize> {
        (policy == PolicyName::PrefixLongest).then_some(self.prefix_longest.chunk_chars)
    }

    pub(crate) fn faults(&self, faults: &mut Vec<Fault>) {
        let mut range = |key: &str, value: f64, min: f64, max: f64| {
            if !(min..=max).contains(&value) {
                faults.push(Fault::new(key, value, format!("{min} to {max}")));
            }
        };
        range("policy.cost.tie_ms", self.cost.tie_ms, 0.0, 1_000.0);
        range("policy.cost.wait_weight", self.cost.wait_weight, 0.0, 100.0);
        range("policy.cost.prefill_weight", self.cost.prefill_weight, 0.0, 100.0);
        range("policy.cost.decode_weight", self.cost.decode_weight, 0.0, 100.0);
        range("policy.cost.kv_pressure_ms", self.cost.kv_pressure_ms, 0.0, 1e6);
        range("policy.cost.waiting_request_tokens", self.cost.waiting_request_tokens, 0.0, 1e6);
        range("policy.prefix-longest.chunk_chars", self.prefix_longest.chunk_chars as f64, 16.0, 65_536.0);
        range("policy.prefix-ring.prefix_chars", self.prefix_ring.prefix_chars as f64, 1.0, 65_536.0);
        if let Some(bound) = self.prefix_ring.bound {
            range("policy.prefix-ring.bound", bound, 1.0, 100.0);
        }
        range("policy.cache-aware.imbalance_abs", f64::from(self.cache_aware.imbalance_abs), 0.0, 1e6);
        range("policy.cache-aware.imbalance_ratio", self.cache_aware.imbalance_ratio, 1.0, 1e6);
        range("policy.cache-aware.match_ratio_min", self.cache_aware.match_ratio_min, 0.0, 1.0);
        self.pd_cost.ranges(&mut range);
        self.pd_load_aware.ranges(&mut range);
        self.pd_qoe.ranges(&mut range);
    }
}
