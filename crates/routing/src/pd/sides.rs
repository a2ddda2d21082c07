//! Who could do which part of a request.

use smallvec::SmallVec;

use crate::Moment;
use crate::candidates::{Candidates, Scope};
use crate::decision::{Refusal, SplitReason};
use crate::endpoint::{Endpoint, Role, Usable};
use crate::policy::SplitMode;
use crate::request::{PromptUnit, RequestShape, Route};
use crate::roster::Roster;

/// Prefill endpoints that may fail a request before it is served whole. 2: the second tells whether the first was
/// at fault, and no third is put at risk.
pub const PREFILL_TRIES_MAX: usize = 2;

/// The connector whose decode leg takes over the first sequence of a prefill alone, as vLLM does.
const CONNECTOR_OF_ONE: &str = "vllm-nixl";

/// The endpoints for a request where some have roles.
pub(crate) struct Sides<'v> {
    roster: &'v Roster,
    /// Where it can be served whole, or decode.
    pub(crate) whole: Candidates<'v>,
    /// Whether those are prefill endpoints, for want of any other.
    borrowed: bool,
}

impl<'v> Sides<'v> {
    /// # Errors
    /// Why nobody can serve it.
    pub(crate) fn gather(roster: &'v Roster, scope: &Scope<'_>, now: Moment) -> Result<Self, Refusal> {
        let mut ready = roster.ready(scope, now, |each| each.spec.role != Role::Prefill);
        let borrowed = ready.is_empty();
        if borrowed {
            // A pool that is lost is no outage. One that never was is a fault of the configuration, and said.
            if roster.endpoints().iter().all(|each| each.spec.role == Role::Prefill) {
                return Err(roster.nobody_ready(scope, Some(Role::Decode)));
            }
            ready = roster.ready(scope, now, |_| true);
        }
        if ready.is_empty() {
            return Err(roster.nobody_ready(scope, None));
        }
        Ok(Self { roster, whole: Candidates::of(ready, now), borrowed })
    }

    /// Those that could serve it alone. None where all of them refuse what is not split, and so do pairs' own engines
    /// when the other side is lost.
    pub(crate) fn able_alone(&self) -> SmallVec<[usize; 16]> {
        let serves = |at: &usize| self.whole.all()[*at].endpoint.spec.serves_whole();
        self.whole.kept_positions().filter(serves).collect()
    }

    /// Why a request that only a pair could serve is served by nobody, if it is not split for this reason.
    pub(crate) fn refusal(&self, scope: &Scope<'_>, reason: SplitReason) -> Refusal {
        let missing = match reason {
            SplitReason::PrefillFailed => return Refusal::AllTried,
            SplitReason::NoDecodeEndpoint => Role::Decode,
            _ => Role::Prefill,
        };
        self.roster.nobody_ready(scope, Some(missing))
    }

    /// Whether a split is thinkable at all.
    ///
    /// # Errors
    /// Why it is not.
    pub(crate) fn may_split(&self, request: &RequestShape, mode: SplitMode) -> Result<(), SplitReason> {
        match mode {
            SplitMode::Never => Err(SplitReason::Never),
            _ if !can_be_split(request) => Err(SplitReason::Unsplittable),
            _ if self.borrowed => Err(SplitReason::NoDecodeEndpoint),
            SplitMode::Auto | SplitMode::Always => Ok(()),
        }
    }

    /// Who could prefill for others.
    ///
    /// # Errors
    /// Why nobody can.
    pub(crate) fn prefill(
        &self,
        request: &RequestShape,
        scope: &Scope<'_>,
        mode: SplitMode,
        now: Moment,
    ) -> Result<Candidates<'v>, SplitReason> {
        let endpoints = self.roster.endpoints().iter();
        let failed = endpoints
            .filter(|each| each.spec.role == Role::Prefill && scope.tried.contains(&each.id))
            .count();
        if failed >= PREFILL_TRIES_MAX {
            return Err(SplitReason::PrefillFailed);
        }
        // A request that is bound to one endpoint is so for its answer.
        let scope = Scope { only: None, ..*scope };
        // Whom nobody has heard of yet is not asked to do what others can do alone.
        let least = if mode == SplitMode::Always { Usable::IfNobodyElse } else { Usable::Yes };
        let whole = request.samples_streamed() > 1 || request.undivided;
        let fits = |each: &Endpoint| !whole || each.spec.connector() != CONNECTOR_OF_ONE;
        let wanted = |each: &Endpoint| each.spec.role != Role::Decode;
        let usable = self.roster.usable(&scope, least, now, wanted);
        match (usable.is_empty(), failed) {
            (true, 0) => return Err(SplitReason::NoPrefillEndpoint),
            (true, _) => return Err(SplitReason::PrefillFailed),
            (false, _) => {}
        }
        let able = Candidates::of(usable.into_iter().filter(|each| fits(each)), now);
        if able.all().is_empty() { Err(SplitReason::Unsplittable) } else { Ok(able) }
    }
}

/// Whether there is a prompt to compute and an answer to decode, by a face that engines split.
fn can_be_split(request: &RequestShape) -> bool {
    matches!(request.route, Route::ChatCompletions | Route::Completions) && request.unit != PromptUnit::None
}
