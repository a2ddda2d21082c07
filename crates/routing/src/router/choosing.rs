//! Choosing an endpoint: what a request is, who could serve it, and what it costs where.

use std::cell::RefCell;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::charging::DecidedLeg;
use super::{Active, Rng, Router};
use crate::admission::Gate;
use crate::candidates::{Candidate, Candidates, Scope};
use crate::cost::{Cost, Costs, weigh};
use crate::decision::{CandidateCost, Chosen, Decision, Part, Refusal};
use crate::endpoint::{Endpoint, Inserted};
use crate::endpoint_filter::FilterName;
use crate::heard::Lately;
use crate::prefix::WarmDepths;
use crate::rates::Speed;
use crate::rendezvous::TopTwo;
use crate::request::RequestShape;
use crate::roster::Roster;
use crate::scene::Scene;
use crate::view::View;
use crate::{BlockHash, EndpointId, Moment};

/// Turns of a session that may be over without a word of it here. It goes on when it was answered, which is before
/// others say so, and must not flee from itself. 2: with a third replica the turn before may be untold too. A session
/// that asks several things at once is held at its home a little more strongly, but finds no more room there than others.
const TURNS_UNTOLD: usize = 2;
/// Tokens that must have been placed at an endpoint on average before it says anything that one has fewer.
const PLACED_MEAN_MIN: u32 = 16_384;
/// Times the mean of placed tokens from which on warmth is worth less to what begins anew. 1.2: what chance makes of
/// equal homes mostly stays below. In the simulated headline this keeps the busiest of four endpoints within 1.33 of
/// the mean in 96 of 96 runs (without: in 87), for a tenth more time to first token.
const OVERUSED_FROM: f64 = 1.2;

/// What choosing fills anew for each request and keeps the memory of.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) warm: WarmDepths,
    pub(super) conversation: WarmDepths,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// What is to be decided.
pub(super) struct Asked<'a> {
    pub(super) shape: &'a RequestShape,
    /// Endpoints that have failed it already.
    pub(super) tried: &'a [EndpointId],
    /// Where the request itself is charged already, and with how many prompt tokens.
    pub(super) charged: Option<(EndpointId, u32)>,
    /// What an endpoint must have for it, if it is to wait where none has.
    pub(super) gate: Option<Gate>,
}

/// What a decision came to, before anything is charged.
pub(super) struct Decided {
    pub(super) decision: Decision,
    /// Where the request goes, or the decode leg of a split one.
    pub(super) leg: DecidedLeg,
    /// Where the prefill leg of a split one goes.
    pub(super) prefill: Option<DecidedLeg>,
}

impl Decided {
    pub(super) fn chosen(&self) -> EndpointId {
        self.decision.chosen
    }
}

/// What every stage of one choice goes by.
pub(super) struct Ground<'a> {
    pub(super) asked: &'a Asked<'a>,
    pub(super) view: &'a View,
    pub(super) active: &'a Active,
    pub(super) session_home: Option<EndpointId>,
    pub(super) model: u64,
    pub(super) prompt_tokens: u32,
    pub(super) now: Moment,
}

impl Router {
    /// Chooses the endpoint for a request, among those not `tried`, charges it and notes the placement.
    ///
    /// The charge is made only if the endpoint's own charge is still what the decision read; else it is
    /// decided anew. Keep the reservation until the last byte.
    ///
    /// # Errors
    /// Why no endpoint can be chosen.
    pub fn choose(
        &self,
        shape: &RequestShape,
        tried: &[EndpointId],
        now: Moment,
        rng: &mut Rng,
    ) -> Result<Chosen, Refusal> {
        self.charge(shape, now, || self.decide(&Asked { shape, tried, charged: None, gate: None }, now, rng))
    }

    /// Chooses another endpoint for the decode leg of a split request whose prompt `prefill` has computed, among
    /// those not `tried`: the first one failed before its first token. What is chosen has no prefill leg.
    ///
    /// # Errors
    /// Why there is none. The request can still be chosen for anew.
    pub fn choose_decode_again(
        &self,
        shape: &RequestShape,
        prefill: EndpointId,
        tried: &[EndpointId],
        now: Moment,
        rng: &mut Rng,
    ) -> Result<Chosen, Refusal> {
        let asked = Asked { shape, tried, charged: None, gate: None };
        self.charge(shape, now, || {
            SCRATCH.with_borrow_mut(|scratch| self.decide_decode_again(scratch, &asked, prefill, now, rng))
        })
    }

    /// Whether the request is a chat that goes on while nothing is known here of where it was answered: the
    /// word of the replica that its last turn went through is probably on its way, and worth a moment.
    pub fn awaits_word(&self, shape: &RequestShape) -> bool {
        let Some(conversation) = shape.conversation.filter(|_| shape.goes_on && shape.session.is_none())
        else {
            return false;
        };
        self.active.load().plan(&self.view.load()).name.follows_placements()
            && self.replicas.load().members().len() > 1
            && SCRATCH.with_borrow_mut(|scratch| {
                let homes = &mut scratch.conversation;
                self.index.warm_depths(&[BlockHash::from_raw(conversation)], homes);
                homes.deepest() == 0
            })
    }

    /// What would be chosen now, without charging or noting anything.
    ///
    /// # Errors
    /// Why no endpoint can be chosen.
    pub fn explain(&self, shape: &RequestShape, now: Moment, rng: &mut Rng) -> Result<Decision, Refusal> {
        let asked = Asked { shape, tried: &[], charged: None, gate: None };
        self.decide(&asked, now, rng).map(|decided| decided.decision)
    }

    pub(super) fn decide(&self, asked: &Asked<'_>, now: Moment, rng: &mut Rng) -> Result<Decided, Refusal> {
        SCRATCH.with_borrow_mut(|scratch| self.decide_with(scratch, asked, now, rng))
    }

    fn decide_with(
        &self,
        scratch: &mut Scratch,
        asked: &Asked<'_>,
        now: Moment,
        rng: &mut Rng,
    ) -> Result<Decided, Refusal> {
        let view = self.view.load();
        let active = self.active.load();
        let ground = self.ground(asked, &view, &active, now);
        let scope = self.scope(&ground)?;
        let shape = asked.shape;
        let (rosters, number) = self.rosters(&view, shape, &scope, now)?;
        let roster = rosters.get(number);
        if let Some(pools) = &view.pools
            && roster.has_roles()
        {
            return self.decide_with_roles(scratch, &ground, &scope, roster, pools, rng);
        }
        if let Some(shortlist) = self.shortlist(scratch, roster, &scope, &ground) {
            match self.decide_among(shortlist, scratch, &ground, rng) {
                // Whether anybody has room only all can tell.
                Err(Refusal::Overloaded { .. }) => {}
                decided => return decided,
            }
        }
        self.decide_among_all(scratch, roster, &scope, &ground, rng)
    }

    /// Decides where none has a role, among all that could serve the request.
    pub(super) fn decide_among_all(
        &self,
        scratch: &mut Scratch,
        roster: &Roster,
        scope: &Scope<'_>,
        ground: &Ground<'_>,
        rng: &mut Rng,
    ) -> Result<Decided, Refusal> {
        let candidates = Candidates::gather(roster, scope, ground.now)?;
        self.look_up(scratch, ground.asked.shape);
        self.decide_among(candidates, scratch, ground, rng)
    }

    /// Decides among endpoints of which is looked up already what they hold.
    fn decide_among(
        &self,
        mut candidates: Candidates<'_>,
        scratch: &Scratch,
        ground: &Ground<'_>,
        rng: &mut Rng,
    ) -> Result<Decided, Refusal> {
        let plan = &ground.active.plan;
        self.get_to_know(&mut candidates, scratch, ground);
        let reverted = plan.filter(&mut candidates, ground.view, ground.asked.shape);
        let mut costs = self.weigh(&candidates, ground);
        if let Some(gate) = &ground.asked.gate {
            (candidates, costs) = gate.narrow(candidates, costs, ground.now)?;
        }
        let (at, reason) = plan.pick(&ground.scene(&candidates, &costs, scratch), rng);
        Ok(Decided {
            decision: Decision {
                policy: plan.name.as_str(),
                reason,
                chosen: candidates.all()[at].endpoint.id,
                candidates: told(&candidates, &costs),
                reverted,
                split: None,
            },
            leg: self.leg(&candidates.all()[at], &costs[at], Part::Whole, ground),
            prefill: None,
        })
    }

    pub(super) fn ground<'a>(
        &self,
        asked: &'a Asked<'a>,
        view: &'a View,
        active: &'a Active,
        now: Moment,
    ) -> Ground<'a> {
        let model = model_key(asked.shape);
        Ground {
            asked,
            view,
            active,
            session_home: self.session_home(asked.shape),
            model,
            prompt_tokens: self.token_sizes.prompt_tokens(model, asked.shape, &active.rules),
            now,
        }
    }

    pub(super) fn scope<'a>(&self, ground: &Ground<'a>) -> Result<Scope<'a>, Refusal> {
        Ok(Scope {
            default_model: ground.active.rules.default_model.as_deref(),
            only: self.maker_of_previous(ground.asked.shape)?,
            tried: ground.asked.tried,
        })
    }

    /// Finds in the index who holds what of the prompt.
    pub(super) fn look_up(&self, scratch: &mut Scratch, shape: &RequestShape) {
        self.index.warm_depths(&shape.blocks, &mut scratch.warm);
        let conversation = shape.conversation.map(BlockHash::from_raw);
        self.index.warm_depths(conversation.as_slice(), &mut scratch.conversation);
    }

    /// Tells each candidate what is believed warm there, and leaves out of its load what is known to be over.
    pub(super) fn get_to_know(
        &self,
        candidates: &mut Candidates<'_>,
        scratch: &Scratch,
        ground: &Ground<'_>,
    ) {
        let Asked { shape, charged, .. } = *ground.asked;
        let home = ground.session_home.or_else(|| presumed_home(candidates, shape));
        // Many hold as much as others: what was heard of prompts that ended there is looked up once.
        let mut heard = (0, Lately::new());
        for candidate in candidates.all_mut() {
            candidate.noted_blocks = self.noted(candidate.endpoint, &scratch.warm, shape);
            candidate.warm_blocks = self.still_warm(candidate.endpoint, candidate.noted_blocks, shape);
            if heard.0 != candidate.noted_blocks {
                heard = (candidate.noted_blocks, self.heard_of(candidate.noted_blocks, shape, ground.now));
            }
            let here = heard.1.iter().find(|(slot, _)| *slot == candidate.endpoint.slot);
            // A prompt that this one goes on from, and that another replica placed there a moment ago.
            if let Some((_, tokens)) = here.copied() {
                candidate.is_without(tokens, shape.output_tokens);
            } else if home == Some(candidate.endpoint.id) {
                for _ in 0..TURNS_UNTOLD {
                    candidate.load.without_one(shape.prompt_tokens, shape.output_tokens);
                }
            } else if shape.goes_on
                && candidate.noted_blocks == 0
                && scratch.conversation.at(candidate.endpoint.slot) > 0
            {
                // A chat too short for a block goes on when it was answered, which is before others say so.
                candidate.load.without_one(shape.prompt_tokens, shape.output_tokens);
            }
            if let Some((endpoint, tokens)) = charged
                && endpoint == candidate.endpoint.id
            {
                candidate.load.without_one(tokens, 0);
            }
        }
    }

    /// What serving the request whole costs at each candidate.
    pub(super) fn weigh(&self, candidates: &Candidates<'_>, ground: &Ground<'_>) -> Costs {
        let shape = ground.asked.shape;
        let depths: SmallVec<[u32; 32]> = candidates.kept().map(|each| each.warm_blocks).collect();
        let fleet = candidates.fleet();
        let endpoints = fleet.map_or(depths.len(), |fleet| fleet.endpoints);
        let common = self.shares.common_depth(ground.model, &shape.blocks, endpoints, |depth| match fleet {
            Some(_) => self.index.holders(shape.blocks[depth]),
            None => depths.iter().filter(|warm| **warm as usize > depth).count(),
        });
        let settings = &ground.active.settings;
        let prior: Speed = settings.speed.into();
        let weights = &settings.policy_tables.cost;
        let mut costs = weigh(candidates, shape, ground.prompt_tokens, common as u32, &prior, weights);
        if !shape.goes_on && depths.iter().any(|warm| *warm as usize > common) {
            even_out(&mut costs, candidates, weights.prefill_weight, &prior, ground.now);
        }
        costs
    }

    /// How many blocks were placed at an endpoint. Of the members of crowds, who are not listed, the index is asked.
    pub(super) fn noted(&self, endpoint: &Endpoint, warm: &WarmDepths, shape: &RequestShape) -> u32 {
        let listed = warm.at(endpoint.slot);
        let deeper = warm.crowds().iter().filter(|crowd| crowd.depth > listed).find(|crowd| {
            let last = shape.blocks.get(crowd.depth as usize - 1);
            last.is_some_and(|block| self.index.holds(*block, endpoint.slot))
        });
        deeper.map_or(listed, |crowd| crowd.depth)
    }

    /// How many of the blocks that were placed at an endpoint its engine is believed to have kept.
    pub(super) fn still_warm(&self, endpoint: &Endpoint, noted_blocks: u32, shape: &RequestShape) -> u32 {
        let noted = noted_blocks as usize;
        match (noted, endpoint.retention().horizon()) {
            (1.., Some(horizon)) => {
                let blocks = &shape.blocks[..noted.min(shape.blocks.len())];
                self.index.depth_since(blocks, endpoint.slot, horizon) as u32
            }
            _ => noted_blocks,
        }
    }

    /// What was heard lately of prompts that are this one's first `blocks` blocks.
    fn heard_of(&self, blocks: u32, shape: &RequestShape, now: Moment) -> Lately {
        let end = (blocks as usize).checked_sub(1).and_then(|at| shape.blocks.get(at));
        end.map_or(Lately::new(), |end| self.heard.lately(*end, now))
    }

    /// Tokens put into the candidate's cache since the deepest block noted there was wanted.
    pub(super) fn inserted_since(&self, candidate: &Candidate<'_>, shape: &RequestShape) -> Inserted {
        let deepest = (candidate.noted_blocks as usize).checked_sub(1).and_then(|at| shape.blocks.get(at));
        deepest
            .and_then(|block| self.index.touched(*block, candidate.endpoint.slot))
            .map_or(Inserted::default(), |at| candidate.endpoint.retention().inserted_since(at))
    }

    /// The endpoint that made the response that the request goes on from: nobody else has it.
    fn maker_of_previous(&self, shape: &RequestShape) -> Result<Option<EndpointId>, Refusal> {
        let Some(key) = shape.previous_response else { return Ok(None) };
        let maker = self.sessions.state(key).home().ok_or(Refusal::ResponseUnknown)?;
        Ok(Some(maker.endpoint))
    }

    /// Where the request's session is pinned.
    fn session_home(&self, shape: &RequestShape) -> Option<EndpointId> {
        shape.session.and_then(|key| self.sessions.state(key).home()).map(|home| home.endpoint)
    }
}

/// Where a session goes of which nothing is known here, unless more is in the way there: whoever is first on the hash
/// that all replicas share. It may have gone there a moment ago through another one.
fn presumed_home(candidates: &Candidates<'_>, shape: &RequestShape) -> Option<EndpointId> {
    let mut top = TopTwo::new(shape.session?.raw());
    for candidate in candidates.kept().filter(|candidate| candidate.is_ranked) {
        top.offer(candidate.endpoint.id, candidate.endpoint.id);
    }
    top.first()
}

/// Evens out where what begins anew (no chat that goes on) is drawn to, so that prefixes which came to live together
/// by chance part again. Work that is done anew weighs more than its time because of what it delays: where less was
/// placed lately than elsewhere it delays less. And warmth where clearly more than its share was placed is worth less.
fn even_out(costs: &mut Costs, candidates: &Candidates<'_>, prefill_weight: f64, prior: &Speed, now: Moment) {
    let premium = (prefill_weight - 1.0).max(0.0);
    let placed: SmallVec<[f64; 8]> =
        candidates.all().iter().map(|each| f64::from(each.endpoint.placed_tokens(now))).collect();
    let mean = candidates
        .fleet()
        .map_or_else(|| placed.iter().sum::<f64>() / placed.len() as f64, |fleet| fleet.placed_mean);
    if mean < f64::from(PLACED_MEAN_MIN) {
        return;
    }
    // By the configured speed: what is learned strays, and with it what is even.
    let ms_per_token = f64::from(prior.prefill_us_per_token) / 1_000.0;
    for (cost, placed) in costs.iter_mut().zip(placed) {
        let used = placed / mean;
        let spare = (1.0 - used).max(0.0);
        let over = (used - OVERUSED_FROM).max(0.0);
        let warm_ms = f64::from(cost.warm_tokens) * ms_per_token;
        cost.total_ms += premium * (over * warm_ms - spare * (cost.prefill_ms - cost.forgiven_ms));
    }
}

/// What the blocks of one model's prompts are counted under.
pub(super) fn model_key(shape: &RequestShape) -> u64 {
    shape.model.as_deref().map_or(0, |model| xxh3_64(model.as_bytes()))
}

/// The candidates as decisions show them.
pub(super) fn told(candidates: &Candidates<'_>, costs: &[Cost]) -> SmallVec<[CandidateCost; 4]> {
    let told = |(candidate, cost): (&Candidate<'_>, &Cost)| CandidateCost {
        endpoint: candidate.endpoint.id,
        cost_ms: cost.total_ms,
        wait_ms: cost.wait_ms,
        warm_tokens: cost.warm_tokens,
        uncached_tokens: cost.uncached_tokens,
        running: candidate.load.running,
        dropped_by: candidate.dropped_by.map(FilterName::as_str),
    };
    candidates.all().iter().zip(costs).map(told).collect()
}

impl Ground<'_> {
    /// What pickers see of some candidates.
    pub(super) fn scene<'s>(
        &'s self,
        candidates: &'s Candidates<'s>,
        costs: &'s [Cost],
        scratch: &'s Scratch,
    ) -> Scene<'s> {
        let deepest = candidates.kept().map(|each| each.warm_blocks).max().unwrap_or(0);
        Scene {
            request: self.asked.shape,
            candidates,
            costs,
            session_home: self.session_home,
            conversation_homes: &scratch.conversation,
            rendezvous: self.asked.shape.first_cold_block(deepest),
            now: self.now,
        }
    }
}
