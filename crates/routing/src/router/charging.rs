//! Charging what was decided, and noting what follows from it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Router;
use super::choosing::{Decided, Ground, model_key};
use crate::admission::Held;
use crate::affinity::Pin;
use crate::candidates::Candidate;
use crate::cost::Cost;
use crate::decision::{Chosen, Footing, Part, PrefillLeg, Refusal};
use crate::endpoint::{Endpoint, PLACED_QUANTUM};
use crate::facts::LedgerRecord;
use crate::request::RequestShape;
use crate::reserve::{Begins, ChargeSize, PREFILL_PREDICTED_MAX, PackedCharge, Reservation};
use crate::session::Began;
use crate::{BlockHash, EndpointId, Moment};

/// How often a choice is made again because another request was charged in between. Each time somebody
/// else got on, so this many in a row are only seen with hundreds of threads; then the charge is made
/// anyway and counted.
const ATTEMPTS_MAX: u32 = 256;

/// Tokens put into an endpoint's cache after which it is worth telling others that blocks were wanted again
/// there, even if nothing is new: far less than any engine keeps.
const RETOLD_AFTER_TOKENS: u64 = 2_048;

/// An endpoint that was decided on, and what is to be charged there.
pub(super) struct DecidedLeg {
    endpoint: Arc<Endpoint>,
    /// The charge that the decision read there.
    seen: PackedCharge,
    footing: Footing,
    size: ChargeSize,
}

impl DecidedLeg {
    /// Charges it, if its charge still is what the decision read; or whatever it is.
    fn reserve(&self, forced: bool) -> Option<Reservation> {
        if forced {
            Some(Reservation::new(&self.endpoint, self.size))
        } else {
            Reservation::try_new(&self.endpoint, self.seen, self.size)
        }
    }
}

impl Decided {
    /// Charges the legs, of which one that can't be charged gives the other's charge back.
    fn reserve(&self, forced: bool) -> Option<(Reservation, Option<Reservation>)> {
        let prefill = match &self.prefill {
            Some(leg) => Some(leg.reserve(forced)?),
            None => None,
        };
        Some((self.leg.reserve(forced)?, prefill))
    }
}

impl Router {
    /// Charges what `decide` comes to, or lets it decide anew where something else was charged in between.
    pub(super) fn charge(
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
            let Some((reservation, prefill)) = decided.reserve(forced) else {
                self.counters.reserve_conflicts.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let Decided { decision, mut leg, prefill: prefill_leg } = decided;
            if prefill_leg.is_none() && leg.footing.part == Part::Whole {
                self.sample(shape, &leg.footing);
            }
            let prefill = prefill_leg.zip(prefill).map(|(mut leg, reservation)| {
                self.note_cached(shape, &mut leg, now);
                PrefillLeg { endpoint: leg.endpoint, reservation, footing: leg.footing }
            });
            self.note_cached(shape, &mut leg, now);
            if leg.footing.part == Part::Whole || prefill.is_some() {
                // A decode leg that goes elsewhere was counted before.
                self.shares.count(model_key(shape), &shape.blocks);
            }
            self.note_session(shape, &leg.endpoint, decision.prefill(), now);
            self.news.ring();
            let DecidedLeg { endpoint, footing, .. } = leg;
            let mut reservation = reservation;
            reservation.hold(Held::new(&self.holdings, shape.session));
            return Ok(Chosen { decision, endpoint, reservation, footing, prefill });
        }
    }

    pub(super) fn leg(
        &self,
        candidate: &Candidate<'_>,
        cost: &Cost,
        part: Part,
        ground: &Ground<'_>,
    ) -> DecidedLeg {
        let shape = ground.asked.shape;
        DecidedLeg {
            endpoint: Arc::clone(candidate.endpoint),
            seen: candidate.load.own,
            footing: Footing {
                endpoint: candidate.endpoint.id,
                part,
                uncached_tokens: cost.uncached_tokens,
                ahead_tokens: u32::try_from(candidate.load.prefill_tokens).unwrap_or(u32::MAX),
                running: candidate.in_flight.running(),
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

    /// Notes that the endpoint is about to hold the prompt, and tells the others what is new of that.
    fn note_cached(&self, shape: &RequestShape, leg: &mut DecidedLeg, now: Moment) {
        let DecidedLeg { endpoint, footing, .. } = leg;
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
        if warm < shape.blocks.len() || footing.inserted_since.most >= RETOLD_AFTER_TOKENS {
            // With the last block that was known, so that others see where prompts part company, and that it
            // was wanted.
            news.extend_from_slice(&shape.blocks[warm.saturating_sub(1)..]);
        }
        if !news.is_empty() {
            self.tell_later(LedgerRecord::Place { endpoint: endpoint.id, blocks: news });
        }
    }

    /// Notes that the request's session, if it has one, lives at the endpoint, and who prefills for it.
    fn note_session(
        &self,
        shape: &RequestShape,
        endpoint: &Endpoint,
        prefill: Option<EndpointId>,
        now: Moment,
    ) {
        let Some(key) = shape.session else { return };
        let began = self.sessions.begin(key, endpoint.id, now);
        if let Some(prefill) = prefill {
            self.sessions.paired(key, prefill);
        }
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
