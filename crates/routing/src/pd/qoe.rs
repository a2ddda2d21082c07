//! The pair that promises the best quality of experience.
//!
//! The quality of a pair falls with the time to its first token and with the time between tokens, so of one
//! prefill pool the fastest endpoint makes the best pair with any decode endpoint, and one pass over the decode
//! endpoints finds the best of all. Pairs whose quality is practically the same are settled by a score of each
//! side's figures; the score of a pair is their sum, so a few of the best of each side are enough to look at.

use smallvec::SmallVec;

use super::pairs::{Pair, Side, Ways};
use crate::cost::{Cost, DECODE_BATCH_DOUBLES};
use crate::decision::Reason;
use crate::endpoint::Load;
use crate::qoe;
use crate::request::RequestShape;
use crate::scene::Scene;
use crate::tie::{self, Positions};

/// Endpoints of each side that are looked at together once qualities are practically the same: the best by
/// score. 8: with 64 pairs there is one within the tie unless the best of one side all lack the other's pace.
const SHORTLIST: usize = 8;

/// Scores that differ by less than this are the same: a hundredth of the least that one more waiting request
/// makes.
const SCORE_TIE: f64 = 1e-4;

/// Output tokens from which a request is a long one, for which the pace counts more.
const LONG_FROM_TOKENS: u32 = 1_000;

/// Until the prompt is computed, in ms.
fn prompt_ms(load: &Load, cost: &Cost) -> f64 {
    cost.wait_ms + cost.prefill_ms + f64::from(load.speed.base_us) / 1_000.0
}

/// Between two tokens with one request more, in ms.
fn tpot_ms(load: &Load) -> f64 {
    f64::from(load.speed.itl_us) / 1_000.0 * (1.0 + f64::from(load.running) / DECODE_BATCH_DOUBLES)
}

/// A figure's share of its usual value; one that is absent counts half. Not capped, so that slow ones differ.
fn share(figure: Option<f64>, usual: f64) -> f64 {
    figure.map_or(0.5, |figure| (figure / usual).max(0.0))
}

/// How bad a prefill endpoint is for a prompt.
pub(crate) fn prefill_score(ttft_ms: Option<f64>, warm_ratio: Option<f64>, queue: Option<f64>) -> f64 {
    let cold = warm_ratio.map(|ratio| 1.0 - ratio);
    0.5 * share(ttft_ms, 300.0) + 0.3 * share(cold, 1.0) + 0.2 * share(queue, 10.0)
}

/// How bad a decode endpoint is for a request of `tokens` output tokens.
pub(crate) fn decode_score(
    itl_ms: Option<f64>,
    tokens_per_s: Option<f64>,
    queue: Option<f64>,
    tokens: u32,
) -> f64 {
    let (itl, pace, waiting) = if tokens > LONG_FROM_TOKENS { (0.5, 0.4, 0.1) } else { (0.6, 0.3, 0.1) };
    let lacking = tokens_per_s.map(|tokens_per_s| (1.0 - tokens_per_s / 30.0).max(0.0));
    itl * share(itl_ms, 50.0) + pace * share(lacking, 1.0) + waiting * share(queue, 15.0)
}

/// The pairs of one choice.
pub(crate) struct Pairs<'a> {
    pub(crate) prefill: &'a Side<'a>,
    pub(crate) decode: &'a Side<'a>,
    pub(crate) ways: &'a Ways<'a>,
    pub(crate) request: &'a RequestShape,
    /// What a handoff to each decode candidate takes, in ms.
    pub(crate) transfer_ms: &'a [f64],
}

impl Pairs<'_> {
    /// The predicted quality of a pair, 0 to 1.
    fn qoe(&self, from: usize, to: usize) -> f64 {
        let load = |side: &Side<'_>, at: usize| side.candidates.all()[at].load;
        let prompt_ms = prompt_ms(&load(self.prefill, from), &self.prefill.costs[from]);
        let tpot_ms = tpot_ms(&load(self.decode, to));
        let ttft_ms = prompt_ms + self.transfer_ms[to] + tpot_ms;
        qoe::predicted(&self.request.slo, ttft_ms, tpot_ms, self.request.output_tokens)
    }

    fn prefill_score(&self, at: usize) -> f64 {
        let (candidate, cost) = (&self.prefill.candidates.all()[at], &self.prefill.costs[at]);
        let tokens = f64::from(cost.warm_tokens) + f64::from(cost.uncached_tokens);
        let warm_ratio = (tokens > 0.0).then(|| f64::from(cost.warm_tokens) / tokens);
        prefill_score(Some(prompt_ms(&candidate.load, cost)), warm_ratio, candidate.queue().map(f64::from))
    }

    fn decode_score(&self, at: usize) -> f64 {
        let candidate = &self.decode.candidates.all()[at];
        let itl_ms = tpot_ms(&candidate.load);
        let queue = candidate.queue().map(f64::from);
        decode_score(Some(itl_ms), Some(1_000.0 / itl_ms), queue, self.request.output_tokens)
    }

    /// The best pair; `None` if nobody can hand over to anybody.
    pub(crate) fn best(&self, scenes: [&Scene<'_>; 2], tie_qoe: f64) -> Option<Pair> {
        let fastest = self.fastest_of_pools();
        // The best with each decode candidate, and who makes it.
        let mut reached: Vec<(f64, usize)> = Vec::new();
        for at in self.decode.candidates.kept_positions() {
            let onto = fastest.iter().filter(|(_, onward)| onward.binary_search(&at).is_ok());
            let best = onto.map(|(from, _)| self.qoe(*from, at)).fold(f64::NEG_INFINITY, f64::max);
            if best > f64::NEG_INFINITY {
                reached.push((best, at));
            }
        }
        let best = reached.iter().map(|(qoe, _)| *qoe).fold(f64::NEG_INFINITY, f64::max);
        let good_to = reached.iter().filter(|(qoe, _)| *qoe >= best - tie_qoe).map(|(_, at)| *at);
        let to = shortlist(good_to, |at| self.decode_score(at));
        let reaches = |from: &usize| to.iter().any(|(_, at)| self.hands_over(*from, *at));
        let from =
            shortlist(self.prefill.candidates.kept_positions().filter(reaches), |at| self.prefill_score(at));
        let from = from.into_iter().chain(fastest.iter().map(|(at, _)| (self.prefill_score(*at), *at)));
        let mut pairs: Vec<(f64, usize, usize)> = Vec::new();
        for (prefill_score, from) in from {
            for (decode_score, to) in &to {
                if self.hands_over(from, *to) && self.qoe(from, *to) >= best - tie_qoe {
                    pairs.push((prefill_score + decode_score, from, *to));
                }
            }
        }
        let least = pairs.iter().map(|(score, ..)| *score).fold(f64::INFINITY, f64::min);
        pairs.retain(|(score, ..)| *score <= least + SCORE_TIE);
        let from = settle(scenes[0], pairs.iter().map(|(_, from, _)| *from))?;
        let to = settle(scenes[1], pairs.iter().filter(|pair| pair.1 == from.0).map(|(.., to)| *to))?;
        let (_, costs) = self.ways.onward(self.prefill, from.0, self.decode);
        let total_ms = self.prefill.costs[from.0].total_ms + costs[to.0].total_ms;
        Some(Pair { prefill: from, decode: to, total_ms })
    }

    /// Of each prefill pool the endpoint that is soonest done, and the one after it, with the decode candidates that each can hand over to.
    fn fastest_of_pools(&self) -> Vec<(usize, Positions)> {
        let ms = |at: usize| prompt_ms(&self.prefill.candidates.all()[at].load, &self.prefill.costs[at]);
        let mut order: Vec<usize> = self.prefill.candidates.kept_positions().collect();
        order.sort_by(|a, b| ms(*a).total_cmp(&ms(*b)));
        let mut seen: SmallVec<[(u16, u8); 8]> = SmallVec::new();
        let mut fastest = Vec::new();
        for at in order {
            let pool = self.prefill.pool(at);
            let count = match seen.iter_mut().find(|(each, _)| *each == pool) {
                Some((_, count)) => count,
                None => {
                    seen.push((pool, 0));
                    &mut seen.last_mut().expect("was just put there").1
                }
            };
            // A second one, for where the first would hand over to itself.
            if *count < 2 {
                *count += 1;
                fastest.push((at, self.ways.onward(self.prefill, at, self.decode).0));
            }
        }
        fastest
    }

    fn hands_over(&self, from: usize, to: usize) -> bool {
        self.ways.way(self.prefill, from, self.decode, to).is_some()
    }
}

/// The few with the lowest scores, and those scores.
fn shortlist(
    among: impl Iterator<Item = usize>,
    score: impl Fn(usize) -> f64,
) -> SmallVec<[(f64, usize); SHORTLIST]> {
    let mut all: Vec<(f64, usize)> = among.map(|at| (score(at), at)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all.into_iter().take(SHORTLIST).collect()
}

/// One of some positions, which may come several times: the only one, or as ties are settled.
fn settle(scene: &Scene<'_>, among: impl Iterator<Item = usize>) -> Option<(usize, Reason)> {
    let mut tied: Positions = among.collect();
    tied.sort_unstable();
    tied.dedup();
    match tied[..] {
        [] => None,
        [only] => Some((only, Reason::BestQoe)),
        _ => Some(tie::settle(scene, &tied)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-9, "{got} is not {want}");
    }

    #[test]
    fn a_prefill_endpoint_is_scored_by_its_first_token_its_warmth_and_its_queue() {
        check(prefill_score(Some(150.0), Some(0.4), Some(5.0)), 0.53);
        check(prefill_score(Some(0.0), Some(1.0), Some(0.0)), 0.0);
        // Not capped: of two slow ones the slower is the worse.
        check(prefill_score(Some(3_000.0), Some(0.0), Some(50.0)), 6.3);
        check(prefill_score(None, None, None), 0.5);
    }

    #[test]
    fn a_decode_endpoint_is_scored_by_its_pace_and_its_queue() {
        check(decode_score(Some(10.0), Some(15.0), Some(3.0), 512), 0.29);
        check(decode_score(Some(10.0), Some(15.0), Some(3.0), 1_000), 0.29);
        check(decode_score(Some(10.0), Some(15.0), Some(3.0), 1_001), 0.32);
        // Faster than is of use is as good as can be.
        check(decode_score(Some(10.0), Some(300.0), None, 512), 0.12 + 0.05);
        check(decode_score(None, None, None, 2_000), 0.5);
    }
}
