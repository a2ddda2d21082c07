//! The endpoints that a request could go to, with everything that choosing among them reads.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::EndpointId;
use crate::endpoint::{Endpoint, Load};
use crate::endpoint_filter::FilterName;
use crate::reserve::PackedCharge;
use crate::roster::Roster;
use crate::tie::Positions;
use crate::{Moment, decision::Refusal};

/// What a client is told to wait when nobody is ready, in ms: about the time of a readmission.
pub const RETRY_AFTER_MS: u64 = 1_000;

/// One endpoint that a request could go to.
#[derive(Clone, Debug)]
pub struct Candidate<'v> {
    /// Which.
    pub endpoint: &'v Arc<Endpoint>,
    /// Its load when the choice began, without what is taken for over.
    pub load: Load,
    /// What is in flight there, with what is only supposed to be over: what has room goes by this.
    pub(crate) in_flight: PackedCharge,
    /// How many leading blocks of the prompt were placed there, however long ago.
    pub noted_blocks: u32,
    /// How many of those are believed warm still.
    pub warm_blocks: u32,
    /// Whether the prompt's key ranks it: of a large fleet only its neighbours.
    pub is_ranked: bool,
    /// The filter that left it out, if one did.
    pub dropped_by: Option<FilterName>,
}

impl<'v> Candidate<'v> {
    /// An endpoint as it is now; what it holds of the prompt is not known yet.
    pub(crate) fn new(endpoint: &'v Arc<Endpoint>, now: Moment) -> Self {
        let load = endpoint.load(now);
        Self {
            endpoint,
            load,
            in_flight: load.in_flight(),
            noted_blocks: 0,
            warm_blocks: 0,
            is_ranked: true,
            dropped_by: None,
        }
    }

    /// Leaves out of its load a request of another replica that is known to be over.
    pub(crate) fn is_without(&mut self, prefill_tokens: u32, output_tokens: u32) {
        self.load.without_one(prefill_tokens, output_tokens);
        self.in_flight = self.load.in_flight();
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
    fleet: Option<Fleet>,
}

/// What is known of all endpoints that some were chosen from to be weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fleet {
    /// How many there are.
    pub(crate) endpoints: usize,
    /// Tokens that were placed at one lately, on average.
    pub(crate) placed_mean: f64,
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

    /// The same as a list.
    pub(crate) fn kept_list(&self) -> Positions {
        let mut kept = Positions::with_capacity(self.all.len());
        kept.extend(self.kept_positions());
        kept
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

    /// The endpoints of a roster that are in use, within `scope`: the best standing that is left. Roles are not
    /// looked at: `pd::Sides` does that where there are any.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn gather(roster: &'v Roster, scope: &Scope<'_>, now: Moment) -> Result<Self, Refusal> {
        let ready = roster.ready(scope, now, |_| true);
        if ready.is_empty() {
            return Err(roster.nobody_ready(scope, None));
        }
        Ok(Self::of(ready, now))
    }

    pub(crate) fn of(endpoints: impl IntoIterator<Item = &'v Arc<Endpoint>>, now: Moment) -> Self {
        let all = endpoints.into_iter().map(|endpoint| Candidate::new(endpoint, now)).collect();
        Self { all, fleet: None }
    }

    /// Some of a fleet, in the order of their ids.
    pub(crate) const fn of_fleet(all: Vec<Candidate<'v>>, fleet: Fleet) -> Self {
        Self { all, fleet: Some(fleet) }
    }

    /// The fleet that these are a few of; `None` if they are all.
    pub(crate) const fn fleet(&self) -> Option<Fleet> {
        self.fleet
    }

    /// Those at some positions alone, and what belongs to each.
    pub(crate) fn at<T: Copy>(&self, positions: &[usize], of_each: &[T]) -> (Self, SmallVec<[T; 8]>) {
        let all = positions.iter().map(|at| self.all[*at].clone()).collect();
        (Self { all, fleet: self.fleet }, positions.iter().map(|at| of_each[*at]).collect())
    }
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

impl Scope<'_> {
    /// Whether the request may go to this endpoint.
    pub(crate) fn includes(&self, endpoint: EndpointId) -> bool {
        !self.tried.contains(&endpoint) && self.only.is_none_or(|only| only == endpoint)
    }
}
