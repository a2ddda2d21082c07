//! Leaves out endpoints whose KV cache is nearly full.

use serde::{Deserialize, Serialize};

use super::{EndpointFilter, FilterName, Kept};
use crate::candidates::Candidates;
use crate::request::RequestShape;
use crate::view::View;

/// `[filter.kv-pressure]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvPressureSettings {
    /// The share of KV blocks in use, 0 to 1, that is still kept. Default 0.9: engines begin to preempt
    /// shortly above.
    pub kv_ratio_max: f64,
}

impl Default for KvPressureSettings {
    fn default() -> Self {
        Self { kv_ratio_max: 0.9 }
    }
}

/// Keeps the endpoints whose KV usage is at or below a limit, and those whose usage is not known.
#[derive(Debug)]
pub struct KvPressure {
    kv_ratio_max: f64,
}

impl KvPressure {
    /// The filter with these numbers.
    pub fn new(settings: &KvPressureSettings) -> Self {
        Self { kv_ratio_max: settings.kv_ratio_max }
    }
}

impl EndpointFilter for KvPressure {
    fn name(&self) -> FilterName {
        FilterName::KvPressure
    }

    fn keep(&self, candidates: &Candidates<'_>, _view: &View, _request: &RequestShape) -> Kept {
        candidates
            .all()
            .iter()
            .map(|candidate| {
                candidate.load.glance.kv_ratio.is_none_or(|ratio| f64::from(ratio) <= self.kv_ratio_max)
            })
            .collect()
    }
}
