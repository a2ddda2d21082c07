//! How far replicas agree: one choice of many is told to the others, who say what they would have chosen.
//!
//! Replicas see each other some milliseconds late, so they differ now and then by nature. The figure says how
//! often, on real requests.

use std::sync::atomic::Ordering;

use rand::SeedableRng as _;

use super::Router;
use super::choosing::Asked;
use crate::decision::Footing;
use crate::facts::{DecisionSample, LedgerRecord};
use crate::request::RequestShape;
use crate::{Moment, Rng};

/// One choice in so many is told: enough for a figure each minute at one request a second, and next to
/// nothing on the wire.
const SAMPLE_EVERY: u64 = 32;

/// Longer prompts are not told: a record must fit a datagram.
const SAMPLE_BLOCKS_MAX: usize = 64;

/// Nor are longer names.
const SAMPLE_MODEL_BYTES_MAX: usize = 128;

impl Router {
    /// Tells the others of a choice if it is this one's turn. It must be told before its placement.
    pub(super) fn sample(&self, shape: &RequestShape, footing: &Footing) {
        let turn = self.counters.chosen.fetch_add(1, Ordering::Relaxed).is_multiple_of(SAMPLE_EVERY);
        let fits = shape.blocks.len() <= SAMPLE_BLOCKS_MAX
            && shape.model.as_ref().is_none_or(|model| model.len() <= SAMPLE_MODEL_BYTES_MAX);
        if !turn || !fits || !self.active.load().plan.name.is_agreed() {
            return;
        }
        self.tell_later(LedgerRecord::Sample(Box::new(DecisionSample {
            chosen: footing.endpoint,
            uncached_tokens: footing.uncached_tokens,
            model: shape.model.clone(),
            blocks: shape.blocks.clone(),
            block_bytes: shape.block_bytes,
            prompt_bytes: shape.prompt_bytes,
            prompt_tokens: shape.prompt_tokens,
            output_tokens: shape.output_tokens,
            rendezvous: shape.rendezvous,
            tail: shape.tail,
            conversation: shape.conversation,
            beginning: shape.beginning,
            session: shape.session,
        })));
    }

    /// Says what this replica would have chosen. The request's own charge is mostly known here already and
    /// is left out. A sample taken under other rules or of what is unknown here says nothing.
    pub(super) fn compare(&self, sample: &DecisionSample, now: Moment) {
        let active = self.active.load();
        if !active.plan.name.is_agreed() || sample.block_bytes as usize != active.rules.block_bytes {
            return;
        }
        let asked = Asked {
            shape: &RequestShape::of_sample(sample),
            tried: &[],
            charged: Some((sample.chosen, sample.uncached_tokens)),
            gate: None,
        };
        // Policies that replicas agree on draw no lots.
        let Ok(decision) = self.decide(&asked, now, &mut Rng::seed_from_u64(0)) else { return };
        self.counters.compared.fetch_add(1, Ordering::Relaxed);
        if decision.chosen() != sample.chosen {
            self.counters.disagreed.fetch_add(1, Ordering::Relaxed);
        }
    }
}
