//! Whom a request is weighed at where very many could serve it (docs/adr/0017).
//!
//! Weighing takes some 80 ns an endpoint, and next to none of ten thousand can be the choice: only whoever holds
//! something of the prompt, and of the others the cheapest. So of a large fleet these are weighed: those that hold the
//! prompt, where its session or conversation lives, and a few of its neighbours, the endpoints whose ids follow the
//! prompt's key. Ids and keys are hashes, so the neighbours are a fair sample that all replicas draw alike.

use std::cmp::Reverse;
use std::sync::Arc;

use smallvec::SmallVec;

use super::Router;
use super::choosing::{Ground, Scratch};
use crate::candidates::{Candidate, Candidates, Scope};
use crate::cost::cold_ms;
use crate::endpoint::{Endpoint, Usable};
use crate::policy::CostSettings;
use crate::prefix::Slot;
use crate::rates::Speed;
use crate::rendezvous::score;
use crate::request::RequestShape;
use crate::roster::Roster;
use crate::{BlockHash, Moment};

/// Up to so many endpoints all are weighed. 64: that takes some 6 us, and fewer would not be a fair sample.
pub(super) const WEIGHED_ALL_MAX: usize = 64;

/// Neighbours that are looked at. 64: where 19 of 20 endpoints are busy, one is idle among them in 26 of 27 cases.
const NEIGHBOURS: usize = 64;

/// Of the neighbours that are looked at, how many that rank highest for the prompt's key are weighed. The first two
/// are its homes while it is nowhere; filters may leave them out.
const RANKED: usize = 4;

/// And how many of the cheapest.
const CHEAPEST: usize = 8;

/// Endpoints that hold the prompt to one depth, all of which are weighed. More are a crowd, of which some are looked
/// at like neighbours: so many are no matter of warmth any more.
const HOLDERS_MAX: usize = 32;

/// A crowd is looked at if it is smaller than this part of the fleet: of a larger one enough are among the neighbours.
const CROWD_PART: usize = 4;

/// Positions in a roster.
type Positions = SmallVec<[usize; 64]>;

/// One that was looked at.
#[derive(Clone, Copy)]
struct Seen {
    at: usize,
    /// How highly the prompt's key ranks it.
    rank: u64,
    /// What it would cost if it held nothing, in steps of what counts as the same.
    cold_steps: u64,
}

/// How endpoints are looked at.
struct Look<'a> {
    endpoints: &'a [Arc<Endpoint>],
    key: u64,
    request: &'a RequestShape,
    prompt_tokens: u32,
    prior: Speed,
    weights: &'a CostSettings,
    steps_per_ms: f64,
    now: Moment,
}

impl<'a> Look<'a> {
    fn new(roster: &'a Roster, key: u64, ground: &'a Ground<'_>) -> Self {
        let settings = &ground.active.settings;
        let weights = &settings.policy_tables.cost;
        Self {
            endpoints: roster.endpoints(),
            key,
            request: ground.asked.shape,
            prompt_tokens: ground.prompt_tokens,
            prior: settings.speed.into(),
            weights,
            // Where nothing counts as the same, steps of a microsecond.
            steps_per_ms: 1.0 / weights.tie_ms.max(1e-3),
            now: ground.now,
        }
    }

    fn at(&self, at: usize) -> Seen {
        let endpoint = &self.endpoints[at];
        let load = endpoint.load(self.now);
        let cold_ms = cold_ms(&load, self.request, self.prompt_tokens, &self.prior, self.weights);
        Seen { at, rank: score(self.key, endpoint.id), cold_steps: (cold_ms * self.steps_per_ms) as u64 }
    }
}

impl Router {
    /// The candidates for a request, if they are to be a few of very many, with what is warm looked up; `None` if all
    /// are to be weighed.
    pub(super) fn shortlist<'v>(
        &self,
        scratch: &mut Scratch,
        roster: &'v Roster,
        scope: &Scope<'_>,
        ground: &Ground<'_>,
    ) -> Option<Candidates<'v>> {
        if roster.endpoints().len() <= WEIGHED_ALL_MAX || !ground.active.plan.is_by_cost() {
            return None;
        }
        let shape = ground.asked.shape;
        self.look_up_few(scratch, shape);
        let is_open = |at: &usize| {
            let endpoint = &roster.endpoints()[*at];
            endpoint.usable_at(ground.now) == Usable::Yes && scope.includes(endpoint.id)
        };
        let at_slots = |slots: &mut dyn Iterator<Item = Slot>| -> Positions {
            slots.filter_map(|slot| roster.at_slot(slot)).filter(is_open).collect()
        };
        let mut chosen = at_slots(&mut scratch.warm.iter().map(|(slot, _)| slot));
        let deepest = chosen.iter().map(|at| {
            let endpoint = &roster.endpoints()[*at];
            self.still_warm(endpoint, self.noted(endpoint, &scratch.warm, shape), shape)
        });
        let crowd = scratch.warm.crowds().first();
        let deepest = deepest.max().or(crowd.map(|crowd| crowd.depth)).unwrap_or(0);
        let key = shape.first_cold_block(deepest);
        let look = Look::new(roster, key, ground);

        chosen.extend(at_slots(&mut scratch.conversation.iter().map(|(slot, _)| slot)));
        chosen.extend(ground.session_home.and_then(|home| roster.position(home)).filter(is_open));
        if let Some(crowd) = crowd.filter(|crowd| crowd.holders < roster.endpoints().len() / CROWD_PART) {
            let block = shape.blocks[crowd.depth as usize - 1];
            let some = self.index.some_holders(block, key, NEIGHBOURS);
            let some = at_slots(&mut some.into_iter()).into_iter();
            chosen.extend(few_of(some.map(|at| look.at(at)).collect()));
        }
        // One that is bound to an endpoint has no neighbour but that.
        let (from, count) = scope.only.map_or((key, NEIGHBOURS), |only| (only.raw(), 1));
        let neighbours = roster.around(from).filter(is_open).take(count);
        let neighbours = few_of(neighbours.map(|at| look.at(at)).collect());
        chosen.extend(neighbours.iter().copied());
        if chosen.is_empty() {
            return None;
        }
        chosen.sort_unstable();
        chosen.dedup();
        let candidate = |at: usize| Candidate {
            is_ranked: neighbours.contains(&at),
            ..Candidate::new(&roster.endpoints()[at], ground.now)
        };
        Some(Candidates::of_fleet(chosen.into_iter().map(candidate).collect(), roster.fleet()))
    }

    /// Finds in the index who holds what of the prompt, where too many to be weighed may.
    fn look_up_few(&self, scratch: &mut Scratch, shape: &RequestShape) {
        self.index.warm_depths_of_few(&shape.blocks, HOLDERS_MAX, &mut scratch.warm);
        let conversation = shape.conversation.map(BlockHash::from_raw);
        self.index.warm_depths_of_few(conversation.as_slice(), HOLDERS_MAX, &mut scratch.conversation);
    }

    /// Works out anew how much was placed lately in large fleets.
    pub(super) fn measure_placed(&self, now: Moment) {
        for roster in self.rosters.load().all().filter(|each| each.endpoints().len() > WEIGHED_ALL_MAX) {
            roster.measure_placed(now);
        }
    }
}

/// The positions of those that rank highest, and of the cheapest of the others.
fn few_of(mut seen: SmallVec<[Seen; NEIGHBOURS]>) -> Positions {
    let ranked = RANKED.min(seen.len());
    if ranked < seen.len() {
        seen.select_nth_unstable_by_key(ranked, |one| Reverse(one.rank));
    }
    let (first, others) = seen.split_at_mut(ranked);
    let cheapest = CHEAPEST.min(others.len());
    if cheapest < others.len() {
        others.select_nth_unstable_by_key(cheapest, |one| (one.cold_steps, Reverse(one.rank)));
    }
    first.iter().chain(&others[..cheapest]).map(|one| one.at).collect()
}
