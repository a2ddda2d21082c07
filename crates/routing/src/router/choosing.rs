//! Choosing an endpoint and charging it, as one step.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::Rng as _;
use smallvec::SmallVec;

use super::{Rng, Router};
use crate::candidates::Candidates;
use crate::decision::{CandidateCost, Chosen, Decision, Reason, Refusal};
use crate::endpoint::Endpoint;
use crate::facts::LedgerRecord;
use crate::prefix::WarmDepths;
use crate::request::RequestShape;
use crate::reserve::{ChargeSize, PackedCharge, Reservation};
use crate::{BlockHash, EndpointId, Moment};

/// How often a choice is made again because another request was charged in between. Each time somebody
/// else got on, so this many in a row are only seen with hundreds of threads; then the charge is made
/// anyway and counted.
const ATTEMPTS_MAX: u32 = 256;

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
        for attempt in 0..=ATTEMPTS_MAX {
            let (decision, endpoint, seen) = self.decide(shape, tried, now, rng)?;
            let size = charge_size(&decision, shape, now);
            let reservation = if attempt < ATTEMPTS_MAX {
                Reservation::try_new(&endpoint, seen, size)
            } else {
                self.counters.reserve_forced.fetch_add(1, Ordering::Relaxed);
                Some(Reservation::new(&endpoint, size))
            };
            if let Some(reservation) = reservation {
                endpoint.add_placed(f64::from(size.prefill_tokens), now);
                self.place(shape, &endpoint, now);
                return Ok(Chosen { decision, endpoint, reservation });
            }
            self.counters.reserve_conflicts.fetch_add(1, Ordering::Relaxed);
        }
        Err(Refusal::NoEndpointConfigured)
    }

    /// What would be chosen now, without charging or noting anything.
    ///
    /// # Errors
    /// Why no endpoint can be chosen.
    pub fn explain(&self, shape: &RequestShape, now: Moment, rng: &mut Rng) -> Result<Decision, Refusal> {
        self.decide(shape, &[], now, rng).map(|(decision, _, _)| decision)
    }

    fn decide(
        &self,
        shape: &RequestShape,
        tried: &[EndpointId],
        now: Moment,
        rng: &mut Rng,
    ) -> Result<(Decision, Arc<Endpoint>, PackedCharge), Refusal> {
        let view = self.view.load();
        let active = self.active.load();
        let mut candidates =
            Candidates::gather(&view, shape, active.rules.default_model.as_deref(), tried, now)?;
        let mut warm = WarmDepths::default();
        self.index.warm_depths(&shape.blocks, &mut warm);
        for candidate in candidates.all_mut() {
            candidate.warm_blocks = warm.at(candidate.endpoint.slot);
        }
        let reverted = active.plan.filter(&mut candidates, &view, shape);
        let least = candidates.kept().map(|each| each.load.running).min().unwrap_or(0);
        let tied: SmallVec<[usize; 8]> =
            candidates.kept_positions().filter(|at| candidates.all()[*at].load.running == least).collect();
        let picked = tied[rng.random_range(0..tied.len())];
        let costs = candidates.all().iter().map(|each| cost_of(each, shape)).collect();
        let chosen = &candidates.all()[picked];
        let decision = Decision {
            policy: active.plan.name.as_str(),
            reason: Reason::LeastLoad,
            chosen: chosen.endpoint.id,
            candidates: costs,
            reverted,
        };
        Ok((decision, Arc::clone(chosen.endpoint), chosen.load.own))
    }

    /// Notes that the endpoint is about to hold the prompt, and tells the others what is new of that.
    fn place(&self, shape: &RequestShape, endpoint: &Endpoint, now: Moment) {
        let placed = self.index.place(&shape.blocks, endpoint.slot, now);
        let mut news: Vec<BlockHash> = shape.blocks.get(placed.new_from..).unwrap_or_default().to_vec();
        if let Some(conversation) = shape.conversation {
            let pin = [BlockHash::from_raw(conversation)];
            if self.index.place(&pin, endpoint.slot, now).new_from == 0 {
                news.extend(pin);
            }
        }
        if !news.is_empty() {
            self.tell(LedgerRecord::Place { endpoint: endpoint.id, blocks: news });
        }
    }

    /// The request failed at `endpoint` before its first token: what was noted of it there is void.
    pub fn withdraw(&self, shape: &RequestShape, endpoint: EndpointId) {
        let view = self.view();
        let Some(endpoint) = view.get(endpoint) else { return };
        let mut blocks = shape.blocks.clone();
        blocks.extend(shape.conversation.map(BlockHash::from_raw));
        if blocks.is_empty() {
            return;
        }
        self.index.withdraw(&blocks, endpoint.slot);
        self.tell(LedgerRecord::Withdraw { endpoint: endpoint.id, blocks });
    }
}

fn charge_size(decision: &Decision, shape: &RequestShape, now: Moment) -> ChargeSize {
    let uncached = decision.chosen_cost().map_or(shape.prompt_tokens, |cost| cost.uncached_tokens);
    ChargeSize {
        prefill_tokens: uncached,
        output_tokens: shape.output_tokens.saturating_mul(shape.samples.max(1)),
        prefill_ends: (!shape.stream).then_some(now),
    }
}

fn cost_of(candidate: &crate::candidates::Candidate<'_>, shape: &RequestShape) -> CandidateCost {
    let warm_bytes = u64::from(candidate.warm_blocks) * u64::from(shape.block_bytes);
    let share = if shape.prompt_bytes == 0 { 0.0 } else { warm_bytes as f64 / shape.prompt_bytes as f64 };
    let warm_tokens = (f64::from(shape.prompt_tokens) * share.min(1.0)) as u32;
    CandidateCost {
        endpoint: candidate.endpoint.id,
        cost_ms: 0.0,
        wait_ms: 0.0,
        warm_tokens,
        uncached_tokens: shape.prompt_tokens - warm_tokens,
        running: candidate.load.running,
        dropped_by: candidate.dropped_by.map(crate::endpoint_filter::FilterName::as_str),
    }
}
