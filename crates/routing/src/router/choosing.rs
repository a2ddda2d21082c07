//! Choosing an endpoint and charging it, as one step.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::{Active, Rng, Router};
use crate::affinity::Pin;
use crate::candidates::{Candidate, Candidates, Scope};
use crate::cost::{Cost, Costs, weigh};
use crate::decision::{CandidateCost, Chosen, Decision, Footing, Part, PrefillLeg, Refusal};
use crate::endpoint::{Endpoint, PLACED_QUANTUM};
use crate::endpoint_filter::FilterName;
use crate::facts::LedgerRecord;
use crate::prefix::WarmDepths;
use crate::request::RequestShape;
use crate::reserve::{Begins, ChargeSize, PREFILL_PREDICTED_MAX, PackedCharge, Reservation};
use crate::scene::Scene;
use crate::session::Began;
use crate::view::View;
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
pub(super) struct Scratch {
    warm: WarmDepths,
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
}

/// What a decision came to, before anything is charged.
pub(super) struct Decided {
    pub(super) decision: Decision,
    /// Where the request goes, or the decode leg of a split one.
    pub(super) seat: Seat,
    /// Where the prefill leg of a split one goes.
    pub(super) prefill: Option<Seat>,
}

/// An endpoint that was decided on, and what is to be charged there.
pub(super) struct Seat {
    endpoint: Arc<Endpoint>,
    seen: PackedCharge,
    footing: Footing,
    size: ChargeSize,
}

impl Decided {
    pub(super) fn chosen(&self) -> EndpointId {
        self.seat.endpoint.id
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
        self.charge(shape, now, || self.decide(&Asked { shape, tried, charged: None }, now, rng))
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
        let asked = Asked { shape, tried, charged: None };
        self.charge(shape, now, || {
            SCRATCH.with_borrow_mut(|scratch| self.decide_decode_again(scratch, &asked, prefill, now, rng))
        })
    }

    /// Charges what `decide` comes to, or lets it decide anew where something else was charged in between.
    fn charge(
        &self,
        shape: &RequestShape,
        now: Moment,
        mut decide: impl FnMut() -> Result<Decided, Refusal>,
    ) -> Result<Chosen, Refusal> {
        let mut attempts = 0;
        loop {
            let decided = decide()?;
            attempts += 1;
            let forced = attempts >= ATTEMPTS_MAX;
            if forced {
                self.counters.reserve_forced.fetch_add(1, Ordering::Relaxed);
            }
            let prefill = decided.prefill.as_ref().map(|seat| seat.reserve(forced));
            let Some((reservation, prefill)) = decided.seat.reserve(forced).and_then(|reservation| {
                // A leg that can't be charged gives the other one's charge back.
                Some((reservation, prefill.map_or(Some(None), |prefill| prefill.map(Some))?))
            }) else {
                self.counters.reserve_conflicts.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let Decided { decision, mut seat, prefill: prefill_seat } = decided;
            if prefill_seat.is_none() && seat.footing.part == Part::Whole {
                self.sample(shape, &seat.footing);
            }
            let prefill = prefill_seat.zip(prefill).map(|(mut seat, reservation)| {
                self.note_cached(shape, &mut seat, now);
                PrefillLeg { endpoint: seat.endpoint, reservation, footing: seat.footing }
            });
            self.note_cached(shape, &mut seat, now);
            self.shares.count(model_key(shape), &shape.blocks);
            self.note_session(shape, &seat.endpoint, now);
            self.news.ring();
            let Seat { endpoint, footing, .. } = seat;
            return Ok(Chosen { decision, endpoint, reservation, footing, prefill });
        }
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
        let view = self.view.load();
        let active = self.active.load();
        let ground = self.ground(asked, &view, &active, now);
        let scope = self.scope(&ground)?;
        if let Some(pools) = &view.pools {
            return self.decide_with_roles(scratch, &ground, &scope, pools, rng);
        }
        let shape = asked.shape;
        let plan = &active.plan;
        let mut candidates = Candidates::gather(&view, shape, &scope, now)?;
        self.look_up(scratch, shape);
        self.get_to_know(&mut candidates, scratch, &ground);
        let reverted = plan.filter(&mut candidates, &view, shape);
        let costs = self.weigh(&candidates, &ground);
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
            seat: self.seat(&candidates.all()[at], &costs[at], Part::Whole, &ground),
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
        for candidate in candidates.all_mut() {
            candidate.noted_blocks = scratch.warm.at(candidate.endpoint.slot);
            candidate.warm_blocks = self.still_warm(candidate, shape);
            if let Some(tokens) = self.asked_on(candidate, shape, ground.now) {
                candidate.load.without_one(tokens, shape.output_tokens);
            } else if ground.session_home == Some(candidate.endpoint.id) {
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
    }

    /// What serving the request whole costs at each candidate.
    pub(super) fn weigh(&self, candidates: &Candidates<'_>, ground: &Ground<'_>) -> Costs {
        let shape = ground.asked.shape;
        let kept = candidates.kept().count();
        let common = self.shares.common_depth(ground.model, &shape.blocks, kept, |depth| {
            candidates.kept().filter(|each| each.warm_blocks as usize > depth).count()
        });
        let settings = &ground.active.settings;
        let prior = settings.speed.into();
        let weights = &settings.policy_tables.cost;
        weigh(candidates, shape, ground.prompt_tokens, common as u32, &prior, weights)
    }

    pub(super) fn seat(
        &self,
        candidate: &Candidate<'_>,
        cost: &Cost,
        part: Part,
        ground: &Ground<'_>,
    ) -> Seat {
        let shape = ground.asked.shape;
        Seat {
            endpoint: Arc::clone(candidate.endpoint),
            seen: candidate.load.own,
            footing: Footing {
                endpoint: candidate.endpoint.id,
                part,
                uncached_tokens: cost.uncached_tokens,
                ahead_tokens: u32::try_from(candidate.load.prefill_tokens).unwrap_or(u32::MAX),
                running: candidate.load.running,
                warm_blocks: candidate.warm_blocks,
                known_blocks: 0,
                known_conversation: false,
                inserted_since: self.inserted_since(candidate, shape),
            },
            size: match part {
                Part::Whole => whole_size(cost, shape, ground.now),
                Part::Prefill => ChargeSize { prefill_tokens: cost.uncached_tokens, ..ChargeSize::default() },
                Part::Decode => {
                    let us_per_token = self.transfers.us_per_token(ground.active);
                    let transfer_us = us_per_token * cost.uncached_tokens as f32;
                    let itl_us = candidate.load.speed.itl_us.max(f32::MIN_POSITIVE);
                    let transfer_tokens = (transfer_us / itl_us).ceil() as u32;
                    ChargeSize {
                        output_tokens: output_tokens(shape).saturating_add(transfer_tokens),
                        begins: Begins::Decoding,
                        ..ChargeSize::default()
                    }
                }
            },
        }
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
    fn note_cached(&self, shape: &RequestShape, seat: &mut Seat, now: Moment) {
        let Seat { endpoint, footing, .. } = seat;
        endpoint.add_placed(f64::from(shape.prompt_tokens.max(PLACED_QUANTUM)), now);
        endpoint.retention().insert(u64::from(footing.uncached_tokens), now);
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
    }

    /// Notes that the request's session, if it has one, lives at the endpoint.
    fn note_session(&self, shape: &RequestShape, endpoint: &Endpoint, now: Moment) {
        let Some(key) = shape.session else { return };
        let began = self.sessions.begin(key, endpoint.id, now);
        let moved = matches!(began, Began::First | Began::Moved { .. });
        if moved && self.active.load().plan(&self.view.load()).placed(shape, endpoint.id) == Pin::Needed {
            self.tell_later(LedgerRecord::Pin { key, endpoint: endpoint.id });
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

fn output_tokens(shape: &RequestShape) -> u32 {
    shape.output_tokens.saturating_mul(shape.samples.max(1))
}

fn whole_size(cost: &Cost, shape: &RequestShape, now: Moment) -> ChargeSize {
    let until_first_token =
        Duration::from_secs_f64(((cost.wait_ms + cost.prefill_ms) / 1_000.0).clamp(0.0, 1e6));
    ChargeSize {
        prefill_tokens: cost.uncached_tokens,
        output_tokens: output_tokens(shape),
        prefill_ends: (!shape.stream).then(|| now.plus(until_first_token.min(PREFILL_PREDICTED_MAX))),
        begins: Begins::Prefilling,
    }
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

impl Seat {
    /// Charges it, if its charge still is what the decision read; or whatever it is.
    fn reserve(&self, forced: bool) -> Option<Reservation> {
        if forced {
            Some(Reservation::new(&self.endpoint, self.size))
        } else {
            Reservation::try_new(&self.endpoint, self.seen, self.size)
        }
    }
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
