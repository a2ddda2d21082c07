//! No preference.

use super::{Affinity, AffinityName, Preference};
use crate::scene::Scene;

/// Leaves all to the picker.
#[derive(Debug)]
pub struct NoAffinity;

impl Affinity for NoAffinity {
    fn name(&self) -> AffinityName {
        AffinityName::None
    }

    fn prefer(&self, _scene: &Scene<'_>) -> Preference {
        Preference::Any
    }
}
