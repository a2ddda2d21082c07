//! Everything that one choice reads, gathered once.

use crate::candidates::Candidates;
use crate::cost::Cost;
use crate::endpoint::Endpoint;
use crate::prefix::WarmDepths;
use crate::request::RequestShape;
use crate::{EndpointId, Moment};

/// What affinities and pickers see of a request and its candidates. Positions count over all candidates,
/// those that filters left out included.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// The request.
    pub request: &'a RequestShape,
    /// Where it could go.
    pub candidates: &'a Candidates<'a>,
    /// What it is expected to cost, candidate by candidate.
    pub costs: &'a [Cost],
    /// Where the request's explicit session is pinned.
    pub session_home: Option<EndpointId>,
    /// Which endpoints hold the request's conversation.
    pub conversation_homes: &'a WarmDepths,
    /// The key by which replicas rank endpoints alike for this prompt.
    pub rendezvous: u64,
    /// When.
    pub now: Moment,
}

impl Scene<'_> {
    /// The endpoint at a position.
    ///
    /// # Panics
    /// If there is no such position.
    pub fn endpoint(&self, at: usize) -> &Endpoint {
        self.candidates.all()[at].endpoint
    }

    /// The position of an endpoint that filters kept; `None` if it is none of them.
    pub fn kept_position(&self, id: EndpointId) -> Option<usize> {
        let all = self.candidates.all();
        let at = all.binary_search_by_key(&id, |each| each.endpoint.id).ok()?;
        all[at].dropped_by.is_none().then_some(at)
    }

    /// Requests in flight at the endpoint at a position, through all replicas.
    pub fn running(&self, at: usize) -> u32 {
        self.candidates.all()[at].load.running
    }
}
