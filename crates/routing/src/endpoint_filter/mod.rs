//! Endpoint filters: which candidates are left out before anything is weighed.
//!
//! Filters run in the configured order. One that would leave nothing is undone and named in the decision;
//! the others still run. A filter only ever looks at candidates that the ones before it kept.

mod kv_pressure;
mod latency_outlier;
mod queue_percentile;

use serde::{Deserialize, Serialize};

use crate::candidates::Candidates;
use crate::request::RequestShape;
use crate::settings::{Fault, names};
use crate::view::View;

pub use kv_pressure::{KvPressure, KvPressureSettings};
pub use latency_outlier::{LatencyOutlier, LatencyOutlierSettings};
pub use queue_percentile::{QueuePercentile, QueuePercentileSettings};

/// Leaves candidates out.
pub trait EndpointFilter: Send + Sync {
    /// The name that decisions carry.
    fn name(&self) -> FilterName;

    /// Which of `candidates` stay, one flag a candidate, in their order. It must not depend on that order,
    /// and a candidate of which a figure is not known stays.
    fn keep(&self, candidates: &Candidates<'_>, view: &View, request: &RequestShape) -> Kept;
}

/// What a filter keeps: one flag a candidate, in the order of the candidates.
pub type Kept = smallvec::SmallVec<[bool; 32]>;

names! {
    /// The filters there are.
    FilterName {
        /// Leaves out those whose queue is above a percentile of all queues.
        QueuePercentile = "queue-percentile",
        /// Leaves out those whose KV cache is nearly full.
        KvPressure = "kv-pressure",
        /// Leaves out those much slower than the rest.
        LatencyOutlier = "latency-outlier",
    }
}

/// The numbers of all filters, `[filter.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct FilterTables {
    /// `[filter.queue-percentile]`
    pub queue_percentile: QueuePercentileSettings,
    /// `[filter.kv-pressure]`
    pub kv_pressure: KvPressureSettings,
    /// `[filter.latency-outlier]`
    pub latency_outlier: LatencyOutlierSettings,
}

impl FilterTables {
    pub(crate) fn faults(&self, faults: &mut Vec<Fault>) {
        let mut range = |key: &str, value: f64, min: f64, max: f64| {
            if !(min..=max).contains(&value) {
                faults.push(Fault::new(key, value, format!("{min} to {max}")));
            }
        };
        range("filter.queue-percentile.percentile", self.queue_percentile.percentile, 0.0, 1.0);
        range("filter.kv-pressure.kv_ratio_max", self.kv_pressure.kv_ratio_max, 0.0, 1.0);
        range("filter.latency-outlier.sigma_factor", self.latency_outlier.sigma_factor, 0.0, 100.0);
    }

    pub(crate) fn build(&self, filter: FilterName) -> Box<dyn EndpointFilter> {
        match filter {
            FilterName::QueuePercentile => Box::new(QueuePercentile::new(&self.queue_percentile)),
            FilterName::KvPressure => Box::new(KvPressure::new(&self.kv_pressure)),
            FilterName::LatencyOutlier => Box::new(LatencyOutlier::new(&self.latency_outlier)),
        }
    }
}
