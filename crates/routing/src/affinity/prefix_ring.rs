//! The home that a consistent ring gives to the first characters of the prompt.

use super::{Affinity, AffinityName, Preference};
use crate::EndpointId;
use crate::decision::Reason;
use crate::policy::PrefixRingSettings;
use crate::ring::SharedRing;
use crate::scene::Scene;
use crate::view::View;

/// Sends prompts that begin alike to one endpoint, by hash alone. With a bound it is consistent hashing with
/// bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016): an endpoint that would carry more than `bound`
/// times the mean passes the prompt on to the next on the ring.
pub struct PrefixRing {
    ring: SharedRing<EndpointId>,
    bound: Option<f64>,
}

impl PrefixRing {
    /// The affinity with these numbers.
    pub fn new(settings: &PrefixRingSettings) -> Self {
        Self { ring: SharedRing::default(), bound: settings.bound }
    }
}

impl Affinity for PrefixRing {
    fn name(&self) -> AffinityName {
        AffinityName::PrefixRing
    }

    fn prefer(&self, scene: &Scene<'_>) -> Preference {
        let Some(key) = scene.request.beginning else { return Preference::Any };
        let kept = scene.candidates.kept().count();
        let running: u64 = scene.candidates.kept().map(|each| u64::from(each.load.running)).sum();
        let limit =
            self.bound.map_or(f64::INFINITY, |bound| (bound * (running + 1) as f64 / kept as f64).ceil());
        let ring = self.ring.load();
        let mut home = None;
        for position in ring.walk(key).filter_map(|id| scene.kept_position(*id)) {
            let has_room = f64::from(scene.running(position)) < limit;
            if has_room {
                let reason = if home.is_none() { Reason::RingHome } else { Reason::RingBounded };
                return Preference::one(position, reason);
            }
            home = home.or(Some(position));
        }
        home.map_or(Preference::Any, |home| Preference::one(home, Reason::RingHome))
    }

    fn endpoints_changed(&self, view: &View) {
        let members: Vec<EndpointId> = view.endpoints.iter().map(|endpoint| endpoint.id).collect();
        self.ring.set_members(&members);
    }
}
