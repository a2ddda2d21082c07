//! The endpoints that a request could go to, with everything that choosing among them reads.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::EndpointId;
use crate::endpoint::{Endpoint, Load, Role, Serves, Usable};
use crate::endpoint_filter::FilterName;
use crate::request::{RequestShape, Route};
use crate::view::View;
use crate::{Moment, decision::Refusal};

/// What a client is told to wait when nobody is ready, in ms: about the time of a readmission.
pub const RETRY_AFTER_MS: u64 = 1_000;

/// One endpoint that a request could go to.
#[derive(Clone, Debug)]
pub struct Candidate<'v> {
    /// Which.
    pub endpoint: &'v Arc<Endpoint>,
    /// Its load when the choice began.
    pub load: Load,
    /// How many leading blocks of the prompt were placed there, however long ago.
    pub noted_blocks: u32,
    /// How many of those are believed warm still.
    pub warm_blocks: u32,
    /// The filter that left it out, if one did.
    pub dropped_by: Option<FilterName>,
}

impl<'v> Candidate<'v> {
    /// An endpoint as it is now; what it holds of the prompt is not known yet.
    pub(crate) fn new(endpoint: &'v Arc<Endpoint>, now: Moment) -> Self {
        Self { endpoint, load: endpoint.load(now), noted_blocks: 0, warm_blocks: 0, dropped_by: None }
    }

    /// Requests that wait in the engine, by its own fresh figure.
    pub fn queue(&self) -> Option<u32> {
        self.load.glance.waiting
    }
}

/// The candidates of one request, in the order of their ids.
#[derive(Clone, Debug, Default)]
pub struct Candidates<'v> {
    all: Vec<Candidate<'v>>,
}

impl<'v> Candidates<'v> {
    /// All, those that filters left out included.
    pub fn all(&self) -> &[Candidate<'v>] {
        &self.all
    }

    /// Those that no filter left out.
    pub fn kept(&self) -> impl Iterator<Item = &Candidate<'v>> {
        self.all.iter().filter(|candidate| candidate.dropped_by.is_none())
    }

    /// Their positions among all.
    pub fn kept_positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.all.iter().enumerate().filter(|(_, each)| each.dropped_by.is_none()).map(|(at, _)| at)
    }

    pub(crate) fn all_mut(&mut self) -> &mut [Candidate<'v>] {
        &mut self.all
    }

    /// Marks as left out by `filter` those of the remaining that `kept` does not keep; does nothing and
    /// says false if none would remain.
    pub(crate) fn drop_unless(&mut self, kept: &[bool], filter: FilterName) -> bool {
        let keeps = |(each, kept): (&Candidate<'_>, &bool)| each.dropped_by.is_none() && *kept;
        if !self.all.iter().zip(kept).any(keeps) {
            return false;
        }
        for (candidate, kept) in self.all.iter_mut().zip(kept) {
            if !kept && candidate.dropped_by.is_none() {
                candidate.dropped_by = Some(filter);
            }
        }
        true
    }

    /// The endpoints of `view` that serve the request and are in use, within `scope`: the best standing that
    /// is left. Roles are not looked at: `pd::Sides` does that where there are any.
    ///
    /// # Errors
    /// Why there is none.
    pub fn gather(
        view: &'v View,
        request: &RequestShape,
        scope: &Scope<'_>,
        now: Moment,
    ) -> Result<Self, Refusal> {
        let serving = Serving::of(view, request, scope.default_model)?;
        let ready = serving.ready(scope, now, |_| true);
        if ready.is_empty() {
            return Err(serving.nobody_ready(scope, None));
        }
        Ok(Self::of(ready, now))
    }

    pub(crate) fn of(endpoints: impl IntoIterator<Item = &'v Arc<Endpoint>>, now: Moment) -> Self {
        Self { all: endpoints.into_iter().map(|endpoint| Candidate::new(endpoint, now)).collect() }
    }

    /// Those at some positions alone, and what belongs to each.
    pub(crate) fn at<T: Copy>(&self, positions: &[usize], of_each: &[T]) -> (Self, SmallVec<[T; 8]>) {
        let all = positions.iter().map(|at| self.all[*at].clone()).collect();
        (Self { all }, positions.iter().map(|at| of_each[*at]).collect())
    }
}

/// The endpoints that serve the model that a request means, in use or not.
pub(crate) struct Serving<'v> {
    model: Option<String>,
    endpoints: SmallVec<[&'v Arc<Endpoint>; 16]>,
}

impl<'v> Serving<'v> {
    /// # Errors
    /// If there is none, or the model is not clear.
    pub(crate) fn of(
        view: &'v View,
        request: &RequestShape,
        default_model: Option<&str>,
    ) -> Result<Self, Refusal> {
        if view.endpoints.is_empty() {
            return Err(Refusal::NoEndpointConfigured);
        }
        let model = wanted_model(view, request, default_model)?;
        let mut endpoints = SmallVec::new();
        let mut unknown = false;
        for endpoint in &view.endpoints {
            match model.as_deref().map_or(Serves::Yes, |model| endpoint.serves(model)) {
                Serves::Yes => endpoints.push(endpoint),
                Serves::Unknown => unknown = true,
                Serves::No => {}
            }
        }
        match model {
            Some(model) if endpoints.is_empty() && !unknown => Err(Refusal::ModelUnknown { model }),
            model if endpoints.is_empty() => Err(not_ready(model, None)),
            model => Ok(Self { model, endpoints }),
        }
    }

    /// Whether one of them has a role of its own. Where none has, they are whole engines, and hand nothing over.
    pub(crate) fn has_roles(&self) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.spec.role != Role::Both)
    }

    /// All, by id.
    pub(crate) fn endpoints(&self) -> &[&'v Arc<Endpoint>] {
        &self.endpoints
    }

    /// Those within `scope` of which `wanted` holds, with the best standing that is left.
    pub(crate) fn ready(
        &self,
        scope: &Scope<'_>,
        now: Moment,
        wanted: impl Fn(&Endpoint) -> bool,
    ) -> SmallVec<[&'v Arc<Endpoint>; 8]> {
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
    ) -> SmallVec<[&'v Arc<Endpoint>; 8]> {
        let within = |endpoint: &Endpoint| {
            !scope.tried.contains(&endpoint.id) && scope.only.is_none_or(|only| only == endpoint.id)
        };
        self.endpoints
            .iter()
            .copied()
            .filter(|each| each.usable_at(now) >= least && wanted(each) && within(each))
            .collect()
    }

    /// The refusal when nobody of them can be chosen: for want of a role, if it is that.
    pub(crate) fn nobody_ready(&self, scope: &Scope<'_>, missing_role: Option<Role>) -> Refusal {
        match scope.tried {
            [] => not_ready(self.model.clone(), missing_role),
            _ => Refusal::AllTried,
        }
    }
}

const fn not_ready(model: Option<String>, missing_role: Option<Role>) -> Refusal {
    Refusal::NoEndpointReady { model, missing_role, retry_after_ms: RETRY_AFTER_MS }
}

/// What narrows the choice beside the request itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scope<'a> {
    /// The model meant by a request that names none.
    pub default_model: Option<&'a str>,
    /// The only endpoint that will do, if the request is bound to one.
    pub only: Option<EndpointId>,
    /// Endpoints that have failed it already.
    pub tried: &'a [EndpointId],
}

/// The model that the request means; `None` where it does not matter.
fn wanted_model(
    view: &View,
    request: &RequestShape,
    default_model: Option<&str>,
) -> Result<Option<String>, Refusal> {
    if let Some(model) = request.model.as_deref().or(default_model) {
        return Ok(Some(model.to_owned()));
    }
    if request.route == Route::Other {
        return Ok(None);
    }
    let mut served = view.models();
    match served.len() {
        0 => Ok(None),
        1 => Ok(served.pop()),
        _ => Err(Refusal::ModelRequired { served }),
    }
}
