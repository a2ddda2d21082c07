//! The cheapest endpoint, warm prefixes counted.

use super::{Affinity, AffinityName, Preference};
use crate::picker::cheapest;
use crate::scene::Scene;

/// Prefers the endpoint with the fewest expected milliseconds, ties settled: nothing is left to a picker.
#[derive(Debug)]
pub struct PrefixCost {
    /// Costs that differ by less than this, in ms, are the same.
    pub tie_ms: f64,
}

impl Affinity for PrefixCost {
    fn name(&self) -> AffinityName {
        AffinityName::PrefixCost
    }

    fn prefer(&self, scene: &Scene<'_>) -> Preference {
        let kept = scene.candidates.kept_list();
        let (at, reason) = cheapest(scene, &kept, self.tie_ms);
        Preference::one(at, reason)
    }
}
