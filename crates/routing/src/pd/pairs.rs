//! The cheapest pair of a prefill and a decode endpoint.

use smallvec::SmallVec;

use super::pools::{Pools, Way};
use crate::EndpointId;
use crate::candidates::Candidates;
use crate::cost::{Cost, Costs};
use crate::decision::Reason;
use crate::picker::cheapest;
use crate::scene::Scene;
use crate::tie::Positions;
use crate::view::View;

/// The candidates of one side, what each costs, and its pool.
pub(crate) struct Side<'a> {
    pub(crate) candidates: &'a Candidates<'a>,
    pub(crate) costs: Costs,
    pools: SmallVec<[u16; 16]>,
}

impl<'a> Side<'a> {
    /// # Panics
    /// If a candidate is not from `view`.
    pub(crate) fn new(candidates: &'a Candidates<'a>, costs: Costs, view: &View, pools: &Pools) -> Self {
        // Both are in the order of ids.
        let mut position = 0;
        let of_each = candidates.all().iter().map(|each| {
            while view.endpoints[position].id != each.endpoint.id {
                position += 1;
            }
            pools.at(position)
        });
        Self { candidates, costs, pools: of_each.collect() }
    }

    /// The pool of the candidate at a position.
    pub(crate) fn pool(&self, at: usize) -> u16 {
        self.pools[at]
    }

    fn id(&self, at: usize) -> EndpointId {
        self.candidates.all()[at].endpoint.id
    }
}

/// A pair, and what it costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    /// Position among the prefill candidates, and why that one.
    pub(crate) prefill: (usize, Reason),
    /// Position among the decode candidates, and why that one.
    pub(crate) decode: (usize, Reason),
    /// All of it.
    pub(crate) total_ms: f64,
}

/// The two cheapest of some decode endpoints: one of them is not the prefill endpoint itself.
#[derive(Clone, Copy, Debug, Default)]
struct TwoBest([Option<(f64, EndpointId)>; 2]);

impl TwoBest {
    fn offer(&mut self, ms: f64, id: EndpointId) {
        let [first, second] = &mut self.0;
        if first.is_none_or(|(least, _)| ms < least) {
            *second = first.replace((ms, id));
        } else if second.is_none_or(|(least, _)| ms < least) {
            *second = Some((ms, id));
        }
    }

    fn other_than(&self, id: EndpointId) -> Option<f64> {
        self.0.iter().flatten().find(|(_, each)| *each != id).map(|(ms, _)| *ms)
    }
}

/// What handing over between two pools costs.
pub(crate) struct Ways<'a> {
    pub(crate) pools: &'a Pools,
    /// Beyond a zone, in ms more.
    pub(crate) zone_ms: f64,
}

impl Ways<'_> {
    const fn ms(&self, way: Way) -> f64 {
        match way {
            Way::Near => 0.0,
            Way::AcrossZones => self.zone_ms,
        }
    }

    /// For each prefill pool the cheapest that it can hand over to.
    fn reach(&self, decode: &Side<'_>) -> Vec<TwoBest> {
        let mut best = vec![TwoBest::default(); self.pools.count()];
        for at in decode.candidates.kept_positions() {
            best[usize::from(decode.pools[at])].offer(decode.costs[at].total_ms, decode.id(at));
        }
        let mut reach = vec![TwoBest::default(); self.pools.count()];
        for pair in self.pools.pairs() {
            for (ms, id) in best[usize::from(pair.decode)].0.into_iter().flatten() {
                reach[usize::from(pair.prefill)].offer(ms + self.ms(pair.way), id);
            }
        }
        reach
    }

    /// How far it is from a prefill candidate to a decode candidate; `None` if they make no pair.
    pub(crate) fn way(&self, prefill: &Side<'_>, from: usize, decode: &Side<'_>, to: usize) -> Option<Way> {
        let way = self.pools.way(prefill.pools[from], decode.pools[to]);
        way.filter(|_| prefill.id(from) != decode.id(to))
    }

    /// The decode candidates that the prefill candidate at `from` can hand over to, and what that costs.
    pub(crate) fn onward(&self, prefill: &Side<'_>, from: usize, decode: &Side<'_>) -> (Positions, Costs) {
        self.onward_from(prefill.pools[from], prefill.id(from), decode)
    }

    /// The same of an endpoint that is named by its pool.
    pub(crate) fn onward_from(&self, pool: u16, id: EndpointId, decode: &Side<'_>) -> (Positions, Costs) {
        let mut costs = decode.costs.clone();
        let mut onward = Positions::new();
        for at in decode.candidates.kept_positions() {
            let way = self.pools.way(pool, decode.pools[at]);
            if let Some(way) = way.filter(|_| decode.id(at) != id) {
                costs[at].total_ms += self.ms(way);
                onward.push(at);
            }
        }
        (onward, costs)
    }

    /// What the cheapest pair with each prefill candidate costs; infinite where there is none.
    pub(crate) fn through_each(&self, prefill: &Side<'_>, decode: &Side<'_>) -> Costs {
        let reach = self.reach(decode);
        let through = |(at, cost): (usize, &Cost)| {
            let onward = reach[usize::from(prefill.pools[at])].other_than(prefill.id(at));
            Cost { total_ms: cost.total_ms + onward.unwrap_or(f64::INFINITY), ..*cost }
        };
        prefill.costs.iter().enumerate().map(through).collect()
    }

    /// The cheapest pair, ties settled on each side alone; `None` if nobody can hand over to anybody.
    pub(crate) fn cheapest(
        &self,
        prefill: &Side<'_>,
        decode: &Side<'_>,
        scenes: [&Scene<'_>; 2],
        tie_ms: f64,
    ) -> Option<Pair> {
        let through = self.through_each(prefill, decode);
        let reachable: Positions =
            prefill.candidates.kept_positions().filter(|at| through[*at].total_ms.is_finite()).collect();
        let from = match reachable[..] {
            [] => return None,
            [only] => (only, Reason::OnlyCandidate),
            _ => cheapest(&Scene { costs: &through, ..*scenes[0] }, &reachable, tie_ms),
        };
        let (onward, costs) = self.onward(prefill, from.0, decode);
        let to = match onward[..] {
            [] => return None,
            [only] => (only, Reason::OnlyCandidate),
            _ => cheapest(&Scene { costs: &costs, ..*scenes[1] }, &onward, tie_ms),
        };
        let total_ms = prefill.costs[from.0].total_ms + costs[to.0].total_ms;
        Some(Pair { prefill: from, decode: to, total_ms })
    }
}

#[cfg(test)]
mod tests;
