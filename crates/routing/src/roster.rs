//! Who serves what a request means, in use or not: found once for all requests that mean the same, and anew when
//! the endpoints or what they serve change. Asking each endpoint at each request takes a fifth of a decision.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::candidates::{Fleet, RETRY_AFTER_MS, Scope};
use crate::decision::Refusal;
use crate::endpoint::{Endpoint, Role, Serves, Usable};
use crate::prefix::Slot;
use crate::request::{RequestShape, Route};
use crate::view::View;
use crate::{EndpointId, Moment};

/// Rosters that are kept. Clients may name any model where an endpoint serves any; beyond these it is begun anew.
const ROSTERS_MAX: usize = 32;

/// The endpoints that serve what some requests mean, by id.
#[derive(Debug)]
pub(crate) struct Roster {
    wanted: Wanted<String>,
    /// The model that is meant, if it matters.
    model: Option<String>,
    endpoints: Vec<Arc<Endpoint>>,
    ids: Vec<EndpointId>,
    /// Where each is, by its slot; [`NOWHERE`] for those of others.
    by_slot: Vec<u32>,
    has_roles: bool,
    /// Tokens placed lately at one of those in use, on average: the bits of a number.
    placed_mean: AtomicU64,
}

/// The position of an endpoint that is not in a roster.
const NOWHERE: u32 = u32::MAX;

/// What requests ask for that mean the same.
#[derive(Debug)]
struct Wanted<T> {
    /// The model that they name, or are taken to.
    model: Option<T>,
    /// Whether it matters that they name none.
    any: bool,
}

impl<'a> Wanted<&'a str> {
    fn of(request: &'a RequestShape, default_model: Option<&'a str>) -> Self {
        let model = request.model.as_deref().or(default_model);
        Self { model, any: model.is_none() && request.route == Route::Other }
    }

    fn is(&self, other: &Wanted<String>) -> bool {
        self.any == other.any && self.model == other.model.as_deref()
    }
}

impl Roster {
    /// # Errors
    /// If nobody serves it, or the model is not clear.
    fn of(view: &View, wanted: &Wanted<&str>, now: Moment) -> Result<Self, Refusal> {
        if view.endpoints.is_empty() {
            return Err(Refusal::NoEndpointConfigured);
        }
        let model = meant(view, wanted)?;
        let mut endpoints = Vec::new();
        let mut unknown = false;
        for endpoint in &view.endpoints {
            match model.as_deref().map_or(Serves::Yes, |model| endpoint.serves(model)) {
                Serves::Yes => endpoints.push(Arc::clone(endpoint)),
                Serves::Unknown => unknown = true,
                Serves::No => {}
            }
        }
        match model {
            Some(model) if endpoints.is_empty() && !unknown => Err(Refusal::ModelUnknown { model }),
            model if endpoints.is_empty() => Err(not_ready(model, None)),
            model => {
                let roster = Self {
                    wanted: Wanted { model: wanted.model.map(str::to_owned), any: wanted.any },
                    model,
                    ids: endpoints.iter().map(|endpoint| endpoint.id).collect(),
                    by_slot: by_slot(&endpoints),
                    has_roles: endpoints.iter().any(|endpoint| endpoint.spec.role != Role::Both),
                    endpoints,
                    placed_mean: AtomicU64::new(0),
                };
                roster.measure_placed(now);
                Ok(roster)
            }
        }
    }

    /// Works out anew how much was placed at one of them lately.
    pub(crate) fn measure_placed(&self, now: Moment) {
        let usable = || self.endpoints.iter().filter(|each| each.usable_at(now) == Usable::Yes);
        let placed: f64 = usable().map(|each| f64::from(each.placed_tokens(now))).sum();
        let mean = placed / usable().count().max(1) as f64;
        self.placed_mean.store(mean.to_bits(), Ordering::Relaxed);
    }

    /// All together.
    pub(crate) fn fleet(&self) -> Fleet {
        let placed_mean = f64::from_bits(self.placed_mean.load(Ordering::Relaxed));
        Fleet { endpoints: self.endpoints.len(), placed_mean }
    }

    /// The position of the endpoint with a slot.
    pub(crate) fn at_slot(&self, slot: Slot) -> Option<usize> {
        self.by_slot.get(usize::from(slot.number())).filter(|at| **at != NOWHERE).map(|at| *at as usize)
    }

    /// The position of an endpoint.
    pub(crate) fn position(&self, id: EndpointId) -> Option<usize> {
        self.ids.binary_search(&id).ok()
    }

    /// The positions of all, beginning with the one whose id follows `key`, and around.
    pub(crate) fn around(&self, key: u64) -> impl Iterator<Item = usize> + use<> {
        let first = self.ids.partition_point(|id| id.raw() < key);
        (first..self.ids.len()).chain(0..first)
    }

    /// Whether one of them has a role of its own. Where none has, they are whole engines, and hand nothing over.
    pub(crate) const fn has_roles(&self) -> bool {
        self.has_roles
    }

    /// All, by id.
    pub(crate) fn endpoints(&self) -> &[Arc<Endpoint>] {
        &self.endpoints
    }

    /// Those within `scope` of which `wanted` holds, with the best standing that is left.
    pub(crate) fn ready(
        &self,
        scope: &Scope<'_>,
        now: Moment,
        wanted: impl Fn(&Endpoint) -> bool,
    ) -> SmallVec<[&Arc<Endpoint>; 8]> {
        for least in [Usable::Yes, Usable::IfNobodyElse] {
            let ready = self.usable(scope, least, now, &wanted);
            if !ready.is_empty() {
                return ready;
            }
        }
        SmallVec::new()
    }

    /// Those within `scope` of which `wanted` holds, with at least this standing.
    pub(crate) fn usable(
        &self,
        scope: &Scope<'_>,
        least: Usable,
        now: Moment,
        wanted: impl Fn(&Endpoint) -> bool,
    ) -> SmallVec<[&Arc<Endpoint>; 8]> {
        let mut usable = SmallVec::with_capacity(self.endpoints.len());
        usable.extend(
            self.endpoints
                .iter()
                .filter(|each| each.usable_at(now) >= least && wanted(each) && scope.includes(each.id)),
        );
        usable
    }

    /// The refusal when nobody of them can be chosen: for want of a role, if it is that.
    pub(crate) fn nobody_ready(&self, scope: &Scope<'_>, missing_role: Option<Role>) -> Refusal {
        match scope.tried {
            [] => not_ready(self.model.clone(), missing_role),
            _ => Refusal::AllTried,
        }
    }
}

fn by_slot(endpoints: &[Arc<Endpoint>]) -> Vec<u32> {
    let slots = endpoints.iter().map(|each| usize::from(each.slot.number()) + 1).max().unwrap_or(0);
    let mut by_slot = vec![NOWHERE; slots];
    for (at, endpoint) in endpoints.iter().enumerate() {
        // There are no more than slots, which are numbered with 16 bits.
        by_slot[usize::from(endpoint.slot.number())] = at as u32;
    }
    by_slot
}

const fn not_ready(model: Option<String>, missing_role: Option<Role>) -> Refusal {
    Refusal::NoEndpointReady { model, missing_role, retry_after_ms: RETRY_AFTER_MS }
}

/// The model that is meant; `None` where it does not matter.
fn meant(view: &View, wanted: &Wanted<&str>) -> Result<Option<String>, Refusal> {
    if wanted.model.is_some() || wanted.any {
        return Ok(wanted.model.map(str::to_owned));
    }
    let mut served = view.models();
    match served.len() {
        0 => Ok(None),
        1 => Ok(served.pop()),
        _ => Err(Refusal::ModelRequired { served }),
    }
}

/// The rosters of one view while its endpoints serve what they do. Changed by replacing it.
#[derive(Debug, Default)]
pub(crate) struct Rosters {
    view: Arc<View>,
    /// How often what is served had changed before.
    changes: u64,
    rosters: Vec<Arc<Roster>>,
}

/// Where among the rosters one is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RosterNumber(usize);

impl Rosters {
    /// Where the roster for the request is; `None` if it is not known, or may not be right any more.
    pub(crate) fn find(
        &self,
        view: &Arc<View>,
        changes: u64,
        request: &RequestShape,
        scope: &Scope<'_>,
    ) -> Option<RosterNumber> {
        if !Arc::ptr_eq(&self.view, view) || self.changes != changes {
            return None;
        }
        let wanted = Wanted::of(request, scope.default_model);
        self.rosters.iter().position(|roster| wanted.is(&roster.wanted)).map(RosterNumber)
    }

    /// These, as far as they are right, with the one for the request.
    ///
    /// # Errors
    /// If nobody serves it, or the model is not clear.
    pub(crate) fn with(
        &self,
        view: &Arc<View>,
        changes: u64,
        request: &RequestShape,
        scope: &Scope<'_>,
        now: Moment,
    ) -> Result<(Self, RosterNumber), Refusal> {
        let roster = Arc::new(Roster::of(view, &Wanted::of(request, scope.default_model), now)?);
        let mut rosters = Vec::new();
        if Arc::ptr_eq(&self.view, view) && self.changes == changes && self.rosters.len() < ROSTERS_MAX {
            rosters.clone_from(&self.rosters);
        }
        let number = RosterNumber(rosters.len());
        rosters.push(roster);
        Ok((Self { view: Arc::clone(view), changes, rosters }, number))
    }

    /// All.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Roster> {
        self.rosters.iter().map(|roster| &**roster)
    }

    /// The one with this number, which these rosters gave.
    pub(crate) fn get(&self, number: RosterNumber) -> &Roster {
        &self.rosters[number.0]
    }
}
