//! Splitting a request: one endpoint computes the prompt, hands its KV over, and another decodes.
//!
//! The main choice: a split is weighed against not splitting, in the same milliseconds. A pair costs the prefill
//! endpoint's wait and computing, the handoff, and the decode endpoint's own load; one endpoint alone costs what
//! it does without roles, and what its computing the prompt takes from those that decode there. So long cold
//! prompts go to prefill endpoints while those have time, and short or warm ones straight to decode.
//!
//! Not all pairs are looked at. What a pair costs is a sum of a part for each endpoint and of one that depends on
//! their pools only (connector, group, zone), so the best pair of two pools is made of the best of each: one pass
//! over each side and one over the pairs of pools find the least of all pairs, exactly.

mod legs;
mod load_aware;
mod pairs;
mod plan;
mod pools;
mod qoe;
mod sides;

pub(crate) use legs::Tariff;
pub(crate) use load_aware::{Row, within_load};
pub(crate) use pairs::{Pair, Side, Ways};
pub(crate) use plan::{Choosing, PdPlan};
pub(crate) use pools::Pools;
pub(crate) use qoe::Pairs;
pub use sides::PREFILL_TRIES_MAX;
pub(crate) use sides::Sides;
