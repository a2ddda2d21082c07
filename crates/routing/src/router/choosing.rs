//! Choosing an endpoint and charging it, as one step.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use super::{Rng, Router};
use crate::affinity::Pin;
use crate::candidates::{Candidate, Candidates, Scope};
use crate::cost::{Cost, weigh};
use crate::decision::{CandidateCost, Chosen, Decision, Footing, Refusal};
use crate::endpoint::{Endpoint, PLACED_QUANTUM};
use crate::endpoint_filter::FilterName;
use crate::facts::LedgerRecord;
use crate::prefix::WarmDepths;
use crate::request::RequestShape;
use crate::reserve::{ChargeSize, PREFILL_PREDICTED_MAX, PackedCharge, Reservation};
use crate::scene::Scene;
use crate::session::Began;
use crate::{BlockHash, EndpointId, Moment};

/// How often a choice is made again because another request was charged in between. Each time somebody
/// else got on, so this many in a row are only seen with hundreds of threads; then the charge is made
/// anyway and counted.
const ATTEMPTS_MAX: u32 = 256;

/// Tokens put into an endpoint's cache after which it is worth telling others that blocks were wanted again
/// there, even if nothing is new: far less than any engine keeps.
const RETOLD_AFTER_TOKENS: u64 = 2_048;

/// What choosing fills anew for each request and keeps the memory of.
#[derive(Default)]
struct Scratch {
    warm: WarmDepths,
    conversation: WarmDepths,
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
}

/// What a decision came to, before anything is charged.
pub(super) struct Decided {
    decision: Decision,
    endpoint: Arc<Endpoint>,
    seen: PackedCharge,
    footing: Footing,
    cost: Cost,
}

impl Decided {
    pub(super) fn chosen(&self) -> EndpointId {
        self.endpoint.id
    }
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
        let mut attempts = 0;
        loop {
            let decided = self.decide(&Asked { shape, tried, charged: None }, now, rng)?;
            let size = charge_size(&decided, shape, now);
            attempts += 1;
            let reservation = if attempts < ATTEMPTS_MAX {
                Reservation::try_new(&decided.endpoint, decided.seen, size)
            } else {
                self.counters.reserve_forced.fetch_add(1, Ordering::Relaxed);
                Some(Reservation::new(&decided.endpoint, size))
            };
            let Some(reservation) = reservation else {
                self.counters.reserve_conflicts.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let Decided { decision, endpoint, mut footing, .. } = decided;
            self.sample(shape, &footing);
            self.note_placement(shape, &endpoint, &mut footing, now);
            self.news.ring();
            return Ok(Chosen { decision, endpoint, reservation, footing });
        }
    }

    /// Whether the request is a chat that goes on while nothing is known here of where it was answered: the
    /// word of the replica that its last turn went through is probably on its way, and worth a moment.
    pub fn awaits_word(&self, shape: &RequestShape) -> bool {
        let Some(conversation) = shape.conversation.filter(|_| shape.goes_on && shape.session.is_none())
        else {
            return false;
        };
        self.active.load().plan.name.follows_placements()
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
        self.decide(&Asked { shape, tried: &[], charged: None }, now, rng).map(|decided| decided.decision)
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
        let Asked { shape, tried, charged } = *asked;
        let view = self.view.load();
        let active = self.active.load();
        let plan = &active.plan;
        let scope = Scope {
            default_model: active.rules.default_model.as_deref(),
            only: self.maker_of_previous(shape)?,
            tried,
        };
        let mut candidates = Candidates::gather(&view, shape, &scope, now)?;
        let session_home = self.session_home(shape);
        self.index.warm_depths(&shape.blocks, &mut scratch.warm);
        for candidate in candidates.all_mut() {
            candidate.noted_blocks = scratch.warm.at(candidate.endpoint.slot);
            candidate.warm_blocks = self.still_warm(candidate, shape);
            if let Some(tokens) = self.asked_on(candidate, shape, now) {
                candidate.load.without_one(tokens, shape.output_tokens);
            } else if session_home == Some(candidate.endpoint.id) {
                // A session goes on when it was answered, which is before others say so; it must not flee from
                // itself. One that asks several things at once is held at its home a little more strongly.
                candidate.load.without_one(shape.prompt_tokens, shape.output_tokens);
            }
            if let Some((endpoint, tokens)) = charged
                && endpoint == candidate.endpoint.id
            {
                candidate.load.without_one(tokens, 0);
            }
        }
        let conversation = shape.conversation.map(BlockHash::from_raw);
        self.index.warm_depths(conversation.as_slice(), &mut scratch.conversation);
        let reverted = plan.filter(&mut candidates, &view, shape);
        let kept = candidates.kept().count();
        let model = model_key(shape);
        let common = self.shares.common_depth(model, &shape.blocks, kept, |depth| {
            candidates.kept().filter(|each| each.warm_blocks as usize > depth).count()
        });
        let prompt_tokens = self.token_sizes.prompt_tokens(model, shape, &active.rules);
        let prior = active.settings.speed.into();
        let costs = weigh(&candidates, shape, prompt_tokens, common as u32, &prior, &plan.cost);
        let deepest = candidates.kept().map(|each| each.warm_blocks).max().unwrap_or(0);
        let scene = Scene {
            request: shape,
            candidates: &candidates,
            costs: &costs,
            session_home,
            conversation_homes: &scratch.conversation,
            rendezvous: shape.first_cold_block(deepest),
            now,
        };
        let (at, reason) = plan.pick(&scene, rng);
        let chosen = &candidates.all()[at];
        let endpoint = Arc::clone(chosen.endpoint);
        Ok(Decided {
            decision: Decision {
                policy: plan.name.as_str(),
                reason,
                chosen: endpoint.id,
                candidates: candidates.all().iter().zip(&costs).map(told).collect(),
                reverted,
            },
            seen: chosen.load.own,
            footing: Footing {
                endpoint: endpoint.id,
                uncached_tokens: costs[at].uncached_tokens,
                ahead_tokens: u32::try_from(chosen.load.prefill_tokens).unwrap_or(u32::MAX),
                running: chosen.load.running,
                warm_blocks: chosen.warm_blocks,
                known_blocks: 0,
                known_conversation: false,
                inserted_since: self.inserted_since(chosen, shape),
            },
            cost: costs[at],
            endpoint,
        })
    }

    /// How many of the blocks that were placed at a candidate its engine is believed to have kept.
    fn still_warm(&self, candidate: &Candidate<'_>, shape: &RequestShape) -> u32 {
        let noted = candidate.noted_blocks as usize;
        match (noted, candidate.endpoint.retention().horizon()) {
            (1.., Some(horizon)) => {
                let blocks = &shape.blocks[..noted.min(shape.blocks.len())];
                self.index.depth_since(blocks, candidate.endpoint.slot, horizon) as u32
            }
            _ => candidate.noted_blocks,
        }
    }

    /// The tokens of the prompt that this one goes on from, if another replica placed it there a moment ago.
    fn asked_on(&self, candidate: &Candidate<'_>, shape: &RequestShape, now: Moment) -> Option<u32> {
        let end = shape.blocks.get((candidate.noted_blocks as usize).checked_sub(1)?)?;
        self.heard.tokens(*end, candidate.endpoint.slot, now)
    }

    /// Tokens put into the candidate's cache since the deepest block noted there was wanted.
    fn inserted_since(&self, candidate: &Candidate<'_>, shape: &RequestShape) -> u64 {
        let deepest = (candidate.noted_blocks as usize).checked_sub(1).and_then(|at| shape.blocks.get(at));
        deepest
            .and_then(|block| self.index.touched(*block, candidate.endpoint.slot))
            .map_or(0, |at| candidate.endpoint.retention().inserted_since(at))
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

    /// Notes that the endpoint is about to hold the prompt, and tells the others what is new of that.
    fn note_placement(&self, shape: &RequestShape, endpoint: &Endpoint, footing: &mut Footing, now: Moment) {
        endpoint.add_placed(f64::from(shape.prompt_tokens.max(PLACED_QUANTUM)), now);
        endpoint.retention().insert(u64::from(footing.uncached_tokens), now);
        self.shares.count(model_key(shape), &shape.blocks);
        let placed = self.index.place(&shape.blocks, endpoint.slot, now);
        let mut news: Vec<BlockHash> = Vec::new();
        if let Some(conversation) = shape.conversation.map(BlockHash::from_raw) {
            let home = self.index.place(&[conversation], endpoint.slot, now);
            footing.known_conversation = home.new_from > 0;
            // Not after the path, which must end where the prompt ends.
            news.extend((!footing.known_conversation).then_some(conversation));
        }
        footing.known_blocks = placed.new_from as u32;
        // What the engine was believed to have forgotten is news again.
        let warm = placed.new_from.min(footing.warm_blocks as usize);
        if warm < shape.blocks.len() || footing.inserted_since >= RETOLD_AFTER_TOKENS {
            // With the last block that was known, so that others see where prompts part company, and that it
            // was wanted.
            news.extend_from_slice(&shape.blocks[warm.saturating_sub(1)..]);
        }
        if !news.is_empty() {
            self.tell_later(LedgerRecord::Place { endpoint: endpoint.id, blocks: news });
        }
        if let Some(key) = shape.session {
            let began = self.sessions.begin(key, endpoint.id, now);
            let moved = matches!(began, Began::First | Began::Moved { .. });
            if moved && self.active.load().plan.placed(shape, endpoint.id) == Pin::Needed {
                self.tell_later(LedgerRecord::Pin { key, endpoint: endpoint.id });
            }
        }
    }

    /// The request failed where `footing` says before its first token: what it added to what is believed of
    /// the endpoint is void.
    pub fn withdraw(&self, shape: &RequestShape, footing: &Footing) {
        let view = self.view();
        let Some(endpoint) = view.get(footing.endpoint) else { return };
        let mut blocks = shape.blocks.get(footing.known_blocks as usize..).unwrap_or_default().to_vec();
        if !footing.known_conversation {
            blocks.extend(shape.conversation.map(BlockHash::from_raw));
        }
        if blocks.is_empty() {
            return;
        }
        self.index.withdraw(&blocks, endpoint.slot);
        self.tell(LedgerRecord::Withdraw { endpoint: endpoint.id, blocks });
    }
}

/// What the blocks of one model's prompts are counted under.
pub(super) fn model_key(shape: &RequestShape) -> u64 {
    shape.model.as_deref().map_or(0, |model| xxh3_64(model.as_bytes()))
}

fn charge_size(decided: &Decided, shape: &RequestShape, now: Moment) -> ChargeSize {
    let cost = &decided.cost;
    let until_first_token =
        Duration::from_secs_f64(((cost.wait_ms + cost.prefill_ms) / 1_000.0).clamp(0.0, 1e6));
    ChargeSize {
        prefill_tokens: cost.uncached_tokens,
        output_tokens: shape.output_tokens.saturating_mul(shape.samples.max(1)),
        prefill_ends: (!shape.stream).then(|| now.plus(until_first_token.min(PREFILL_PREDICTED_MAX))),
    }
}

fn told((candidate, cost): (&Candidate<'_>, &Cost)) -> CandidateCost {
    CandidateCost {
        endpoint: candidate.endpoint.id,
        cost_ms: cost.total_ms,
        wait_ms: cost.wait_ms,
        warm_tokens: cost.warm_tokens,
        uncached_tokens: cost.uncached_tokens,
        running: candidate.load.running,
        dropped_by: candidate.dropped_by.map(FilterName::as_str),
    }
}
