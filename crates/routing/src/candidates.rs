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

impl Candidate<'_> {
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

    /// The endpoints of `view` that serve the request and are in use, within `scope`.
    ///
    /// # Errors
    /// Why there is none.
    pub fn gather(
        view: &'v View,
        request: &RequestShape,
        scope: &Scope<'_>,
        now: Moment,
    ) -> Result<Self, Refusal> {
        if view.endpoints.is_empty() {
            return Err(Refusal::NoEndpointConfigured);
        }
        let wanted = wanted_model(view, request, scope.default_model)?;
        let not_ready = |missing_role| Refusal::NoEndpointReady {
            model: wanted.clone(),
            missing_role,
            retry_after_ms: RETRY_AFTER_MS,
        };
        let mut serving: SmallVec<[&Arc<Endpoint>; 16]> = SmallVec::new();
        let mut unknown = false;
        for endpoint in &view.endpoints {
            match wanted.as_deref().map_or(Serves::Yes, |model| endpoint.serves(model)) {
                Serves::Yes => serving.push(endpoint),
                Serves::Unknown => unknown = true,
                Serves::No => {}
            }
        }
        if serving.is_empty() {
            return Err(match wanted {
                Some(model) if !unknown => Refusal::ModelUnknown { model },
                _ => not_ready(None),
            });
        }
        let ready = ready(&serving, scope, now);
        if ready.is_empty() {
            let has_role = |role| serving.iter().any(|endpoint| endpoint.spec.role == role);
            let prefill_only = !has_role(Role::Both) && !has_role(Role::Decode);
            return Err(match scope.tried {
                [] => not_ready(prefill_only.then_some(Role::Decode)),
                _ => Refusal::AllTried,
            });
        }
        let candidate = |endpoint: &'v Arc<Endpoint>| Candidate {
            endpoint,
            load: endpoint.load(now),
            noted_blocks: 0,
            warm_blocks: 0,
            dropped_by: None,
        };
        Ok(Self { all: ready.into_iter().map(candidate).collect() })
    }
}

/// Those of `serving` that are taken: the best standing that is left, and whole engines before decode ones,
/// which can serve a whole request too (a prefill endpoint can't).
fn ready<'v>(
    serving: &[&'v Arc<Endpoint>],
    scope: &Scope<'_>,
    now: Moment,
) -> SmallVec<[&'v Arc<Endpoint>; 8]> {
    let within = |endpoint: &Endpoint| {
        !scope.tried.contains(&endpoint.id) && scope.only.is_none_or(|only| only == endpoint.id)
    };
    for least in [Usable::Yes, Usable::IfNobodyElse] {
        for role in [Role::Both, Role::Decode] {
            let ready: SmallVec<[&Arc<Endpoint>; 8]> = serving
                .iter()
                .copied()
                .filter(|each| each.spec.role == role && each.usable_at(now) >= least && within(each))
                .collect();
            if !ready.is_empty() {
                return ready;
            }
        }
    }
    SmallVec::new()
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
