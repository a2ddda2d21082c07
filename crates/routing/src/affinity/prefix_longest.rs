//! The holder of the longest prefix.

use super::{Affinity, AffinityName, Preference};
use crate::decision::Reason;
use crate::scene::Scene;

/// Prefers the endpoints that hold the most leading blocks, if that is enough of the prompt.
#[derive(Debug, Default)]
pub struct PrefixLongest {
    /// Share of the prompt, 0 to 1, that must be warm; the share itself is enough only if it is above this.
    pub match_ratio_min: f64,
}

impl Affinity for PrefixLongest {
    fn name(&self) -> AffinityName {
        AffinityName::PrefixLongest
    }

    fn prefer(&self, scene: &Scene<'_>) -> Preference {
        let warm = |at: usize| scene.candidates.all()[at].warm_blocks;
        let deepest = scene.candidates.kept_positions().map(warm).max().unwrap_or(0);
        let bytes = f64::from(deepest) * f64::from(scene.request.block_bytes);
        let ratio = bytes / (scene.request.prompt_bytes as f64).max(1.0);
        if deepest == 0 || ratio <= self.match_ratio_min {
            return Preference::Any;
        }
        let holders = scene.candidates.kept_positions().filter(|at| warm(*at) == deepest).collect();
        Preference::Among { positions: holders, reason: Reason::PrefixHolder }
    }
}
