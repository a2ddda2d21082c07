//! A replica's picture of the endpoints, published whole and never changed in place.

use std::sync::Arc;

use crate::EndpointId;
use crate::endpoint::{Endpoint, Role, Served, Serves, Usable};
use crate::pd::Pools;

/// The endpoints at one time, in the order of their ids, so that every replica enumerates alike.
#[derive(Debug, Default)]
pub struct View {
    /// The endpoints, by id.
    pub endpoints: Vec<Arc<Endpoint>>,
    /// Which of them can hand over to which; `None` where none has a role of its own.
    pub(crate) pools: Option<Pools>,
}

/// What there is too little of to serve requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// No endpoint can be used.
    Endpoint,
    /// None of this role is there (or can be used, where the others serve nothing by themselves).
    Role(Role),
}

impl View {
    /// A view of `endpoints`.
    pub(crate) fn new(mut endpoints: Vec<Arc<Endpoint>>) -> Self {
        endpoints.sort_unstable_by_key(|endpoint| endpoint.id);
        let divided = endpoints.iter().any(|endpoint| endpoint.spec.role != Role::Both);
        let pools = divided.then(|| Pools::of(&endpoints));
        Self { endpoints, pools }
    }

    /// The endpoint with this id.
    pub fn get(&self, id: EndpointId) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(self.position(id)?)
    }

    /// Where in the list it is.
    pub(crate) fn position(&self, id: EndpointId) -> Option<usize> {
        self.endpoints.binary_search_by_key(&id, |endpoint| endpoint.id).ok()
    }

    /// Whether some endpoint has a role of its own, so that requests may be split.
    pub fn has_roles(&self) -> bool {
        self.pools.is_some()
    }

    /// What is missing so that requests can be served. Prefill endpoints serve them whole for others that are lost,
    /// and not where there are no others.
    pub fn lacks(&self) -> Option<Lack> {
        let any = |wanted: fn(&Endpoint) -> bool| {
            self.endpoints.iter().any(|each| each.usable() != Usable::No && wanted(each))
        };
        if !any(|_| true) {
            return Some(Lack::Endpoint);
        }
        if self.endpoints.iter().all(|each| each.spec.role == Role::Prefill) {
            return Some(Lack::Role(Role::Decode));
        }
        if any(|each| each.spec.serves_whole()) {
            return None;
        }
        if !any(|each| each.spec.role == Role::Prefill) {
            return Some(Lack::Role(Role::Prefill));
        }
        (!any(|each| each.spec.role == Role::Decode)).then_some(Lack::Role(Role::Decode))
    }

    /// Whether some other endpoint in use can do what `endpoint` does, for all that it serves: any can do without
    /// one that prefills.
    pub(crate) fn has_another_for(&self, endpoint: &Endpoint) -> bool {
        let served = endpoint.served();
        let stands_in = |other: &Endpoint| match &*served {
            Served::Models(models) => models.iter().all(|model| other.serves(model) == Serves::Yes),
            Served::Unknown | Served::Any => true,
        };
        self.endpoints.iter().any(|other| {
            other.id != endpoint.id
                && other.usable() == Usable::Yes
                && (endpoint.spec.role == Role::Prefill
                    || other.spec.role == endpoint.spec.role
                    || other.spec.role == Role::Both)
                && stands_in(other)
        })
    }

    /// The names of all models that some endpoint is known to serve, sorted.
    pub fn models(&self) -> Vec<String> {
        let mut models: Vec<String> = Vec::new();
        for endpoint in &self.endpoints {
            if let Served::Models(served) = &*endpoint.served() {
                models.extend(served.iter().cloned());
            }
        }
        models.sort_unstable();
        models.dedup();
        models
    }
}
