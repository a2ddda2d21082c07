//! The session's home: where it is pinned, else where the ring puts its key.

use super::{Affinity, AffinityName, Pin, Preference};
use crate::EndpointId;
use crate::decision::Reason;
use crate::request::RequestShape;
use crate::ring::SharedRing;
use crate::scene::Scene;
use crate::view::View;

/// Sends all requests of a session to one endpoint. Without a key it has no preference.
#[derive(Default)]
pub struct SessionAffinity {
    ring: SharedRing<EndpointId>,
}

impl Affinity for SessionAffinity {
    fn name(&self) -> AffinityName {
        AffinityName::Session
    }

    fn prefer(&self, scene: &Scene<'_>) -> Preference {
        let Some(key) = scene.request.session else { return Preference::Any };
        if let Some(home) = scene.session_home.and_then(|home| scene.kept_position(home)) {
            return Preference::one(home, Reason::SessionHome);
        }
        let ring = self.ring.load();
        match ring.walk(key.raw()).find_map(|id| scene.kept_position(*id)) {
            Some(home) => Preference::one(home, Reason::SessionHome),
            None => Preference::Any,
        }
    }

    fn placed(&self, request: &RequestShape, endpoint: EndpointId) -> Pin {
        // All replicas compute the ring's home; only other homes must be told.
        let home = request.session.and_then(|key| self.ring.load().owner(key.raw()).copied());
        if home == Some(endpoint) { Pin::Needless } else { Pin::Needed }
    }

    fn endpoints_changed(&self, view: &View) {
        let members: Vec<EndpointId> = view.endpoints.iter().map(|endpoint| endpoint.id).collect();
        self.ring.set_members(&members);
    }
}
