//! What an operator can set of the core: plain data, checked as a whole.
//!
//! [`Settings::faults`] names every fault at once with its key, its value and what would do, so that a
//! configuration is taken or refused in one piece.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::admission::AdmissionSettings;
use crate::affinity::AffinityName;
use crate::endpoint::BreakerConfig;
use crate::endpoint_filter::{FilterName, FilterTables};
use crate::policy::{PolicyName, PolicyTables, SplitMode};
use crate::rates::Speed;
use crate::request::{ShapeRules, TARGET_MS_MAX};

/// One fault in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key} = {value}: allowed: {allowed}")]
pub struct Fault {
    /// The key as it is written in the configuration, `policy.cost.tie_ms`.
    pub key: String,
    /// What was given.
    pub value: String,
    /// What would do.
    pub allowed: String,
}

impl Fault {
    /// A fault in `key`.
    pub fn new(key: &str, value: impl fmt::Display, allowed: impl Into<String>) -> Self {
        Self { key: key.to_owned(), value: value.to_string(), allowed: allowed.into() }
    }
}

/// A name that is none of those allowed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{value}` is unknown; allowed: {allowed}")]
pub struct UnknownName {
    /// What was given.
    pub value: String,
    /// All names, with commas between them.
    pub allowed: String,
}

/// Implements what every set of configured names needs: the list of all, text both ways, serde as text.
macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($(#[$each:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$each])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// All of them, in the order in which they are listed to people.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name in configuration, JSON and labels.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::settings::UnknownName;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.iter().copied().find(|name| name.as_str() == text).ok_or_else(|| {
                    let allowed: Vec<&str> = Self::ALL.iter().map(|name| name.as_str()).collect();
                    $crate::settings::UnknownName { value: text.to_owned(), allowed: allowed.join(", ") }
                })
            }
        }
    };
}
pub(crate) use names;

/// Everything that can be set of one replica's core.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How to choose. Default `cost`, which is `pd-cost` where endpoints have roles.
    pub policy: PolicyName,
    /// Where endpoints have roles: how to choose the one that prefills, if not as `policy` says. Not a policy
    /// that chooses both.
    pub prefill_policy: Option<PolicyName>,
    /// Where endpoints have roles: how to choose the one that decodes or serves whole, likewise.
    pub decode_policy: Option<PolicyName>,
    /// Where endpoints have roles: when to split. Default auto.
    pub split: SplitMode,
    /// An affinity to put before the policy's pick in the place of its own. Default: the policy's own.
    pub affinity: Option<AffinityName>,
    /// The endpoint filters, in the order in which they run. Default: none.
    pub filters: Vec<FilterName>,
    /// The numbers of each policy, `[policy.NAME]`.
    pub policy_tables: PolicyTables,
    /// The numbers of each filter, `[filter.NAME]`.
    pub filter_tables: FilterTables,
    /// How requests are read. Its `block_bytes` gives way to the policy's `chunk_chars` where that policy
    /// has one: see [`Settings::rules`].
    pub rules: ShapeRules,
    /// What endpoints are taken for until they are known.
    pub speed: SpeedPrior,
    /// When endpoints are left alone.
    pub breaker: BreakerConfig,
    /// Memory for the prefix index, in bytes. Default 256 MiB: over ten million blocks.
    pub index_bytes_max: usize,
    /// Sessions remembered. Default 100,000; the oldest leave.
    pub session_table_max: usize,
    /// Who waits when every endpoint is busy, and for how long.
    pub admission: AdmissionSettings,
    /// Ledger records that wait to be told. Default 65,536: a few seconds of the heaviest load; beyond it
    /// the oldest are not told and others learn of them by a snapshot.
    pub ledger_queue_max: usize,
}

/// What an endpoint is taken for until its own speed is known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpeedPrior {
    /// Microseconds per uncached prompt token. Default 250: an 8B model on an H100.
    pub prefill_us_per_token: f32,
    /// Microseconds between output tokens. Default 12,000, the same.
    pub itl_us: f32,
    /// Microseconds that a first token takes beyond its prompt's. Default 30,000, the same.
    pub base_us: f32,
}

impl Default for SpeedPrior {
    fn default() -> Self {
        Self::from(Speed::default())
    }
}

impl From<Speed> for SpeedPrior {
    fn from(speed: Speed) -> Self {
        Self {
            prefill_us_per_token: speed.prefill_us_per_token,
            itl_us: speed.itl_us,
            base_us: speed.base_us,
        }
    }
}

impl From<SpeedPrior> for Speed {
    fn from(prior: SpeedPrior) -> Self {
        Self {
            prefill_us_per_token: prior.prefill_us_per_token,
            itl_us: prior.itl_us,
            base_us: prior.base_us,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            policy: PolicyName::Cost,
            prefill_policy: None,
            decode_policy: None,
            split: SplitMode::Auto,
            affinity: None,
            filters: Vec::new(),
            policy_tables: PolicyTables::default(),
            filter_tables: FilterTables::default(),
            rules: ShapeRules::default(),
            speed: SpeedPrior::default(),
            breaker: BreakerConfig::default(),
            index_bytes_max: 256 << 20,
            session_table_max: 100_000,
            admission: AdmissionSettings::default(),
            ledger_queue_max: 65_536,
        }
    }
}

/// The least that a class can expect to wait for a token, in ms.
pub const TARGET_MS_MIN: f64 = 0.1;

/// The smallest index that is worth having, in bytes.
pub const INDEX_BYTES_MIN: usize = 1 << 20;

/// The longest queue that can be set: going through it takes a millisecond.
pub const QUEUE_REQUESTS_MAX: u64 = 16_384;

impl Settings {
    /// The rules by which requests are read under the chosen policy. One index serves all policies, so its
    /// block size is the policy's `chunk_chars` where the policy has one and `rules.block_bytes` elsewhere;
    /// a change of policy that changes the size begins with a cold index.
    pub fn rules(&self) -> ShapeRules {
        let mut rules = self.rules.clone();
        let policies = || [Some(self.policy), self.prefill_policy, self.decode_policy].into_iter().flatten();
        if let Some(chunk_chars) = policies().find_map(|policy| self.policy_tables.chunk_chars(policy)) {
            rules.block_bytes = chunk_chars;
        }
        let ring = policies().any(|policy| policy == PolicyName::PrefixRing)
            || self.affinity == Some(AffinityName::PrefixRing);
        rules.beginning = ring.then(|| self.policy_tables.prefix_ring.beginning());
        rules
    }

    /// All that is wrong with the settings; empty when they can be used.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        self.policy_tables.faults(&mut faults);
        self.filter_tables.faults(&mut faults);
        let mut range = |key: &str, value: f64, min: f64, max: f64| {
            if !(min..=max).contains(&value) {
                faults.push(Fault::new(key, value, format!("{min} to {max}")));
            }
        };
        range("speed.prefill_us_per_token", f64::from(self.speed.prefill_us_per_token), 1.0, 1e6);
        range("speed.itl_us", f64::from(self.speed.itl_us), 10.0, 1e7);
        range("speed.base_us", f64::from(self.speed.base_us), 0.0, 1e7);
        range("prefix.block_bytes", self.rules.block_bytes as f64, 16.0, 65_536.0);
        range("prefix.bytes_per_token", self.rules.bytes_per_token, 0.25, 64.0);
        let targets = &self.rules.targets;
        let classes = [("high", targets.high), ("normal", targets.normal), ("low", targets.low)];
        for (class, slo) in classes {
            for (target, ms) in [("ttft_ms", slo.ttft_ms), ("tpot_ms", slo.tpot_ms)] {
                range(&format!("targets.{class}.{target}"), ms, TARGET_MS_MIN, TARGET_MS_MAX);
            }
        }
        range("limits.index_bytes_max", self.index_bytes_max as f64, INDEX_BYTES_MIN as f64, 1e12);
        range("limits.session_table_max", self.session_table_max as f64, 1.0, 1e8);
        range(
            "queue_requests_max",
            f64::from(self.admission.queue_requests_max),
            0.0,
            QUEUE_REQUESTS_MAX as f64,
        );
        range("limits.ledger_queue_max", self.ledger_queue_max as f64, 1.0, 1e7);
        for (key, policy) in [("prefill_policy", self.prefill_policy), ("decode_policy", self.decode_policy)]
        {
            if let Some(policy) = policy.filter(|policy| policy.is_joint()) {
                let apart = PolicyName::ALL.iter().filter(|policy| !policy.is_joint());
                let allowed: Vec<&str> = apart.map(|policy| policy.as_str()).collect();
                faults.push(Fault::new(key, policy, allowed.join(", ")));
            }
        }
        for (at, filter) in self.filters.iter().enumerate() {
            if self.filters[..at].contains(filter) {
                faults.push(Fault::new("endpoint_filters", filter, "each filter at most once"));
            }
        }
        faults
    }
}
