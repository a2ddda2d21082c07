//! Choosing where endpoints have roles: whether to split, and the pair.

use smallvec::SmallVec;

use super::choosing::{Asked, Decided, Ground, Scratch, told};
use super::{Rng, Router};
use crate::admission::NO_ROOM;
use crate::candidates::Scope;
use crate::decision::{Decision, Part, PrefillChoice, Reason, Refusal, SplitDecision, SplitReason};
use crate::pd::{Choosing, Pair, Pairs, PdPlan, Pools, Side, Sides, Tariff, Ways};
use crate::policy::SplitMode;
use crate::roster::Roster;
use crate::scene::Scene;
use crate::{EndpointId, Moment};

impl Router {
    /// Decides where some of those that serve the model have roles.
    pub(super) fn decide_with_roles(
        &self,
        scratch: &mut Scratch,
        ground: &Ground<'_>,
        scope: &Scope<'_>,
        roster: &Roster,
        pools: &Pools,
        rng: &mut Rng,
    ) -> Result<Decided, Refusal> {
        let shape = ground.asked.shape;
        let plan = &ground.active.pd;
        let mut sides = Sides::gather(roster, scope, ground.now)?;
        self.look_up(scratch, shape);
        self.get_to_know(&mut sides.whole, scratch, ground);
        let reverted = plan.decode.filter(&mut sides.whole, ground.view, shape);
        let tariff = self.tariff(ground);
        let mut weighed = self.weigh(&sides.whole, ground);
        let gate = ground.asked.gate.as_ref();
        if let Some(gate) = gate {
            let narrowed = gate.below_max(std::mem::take(&mut sides.whole), weighed);
            (sides.whole, weighed) = narrowed.ok_or(NO_ROOM)?;
        }
        let whole_open = gate.is_none_or(|gate| gate.any_open(&sides.whole, &weighed, ground.now));
        let whole_costs = tariff.whole(&sides.whole, &weighed);
        let whole_scene = ground.scene(&sides.whole, &whole_costs, scratch);
        let able = sides.able_alone();
        let splits_only = able.is_empty();
        let (alone, why_alone) = if splits_only {
            plan.decode.pick(&whole_scene, rng)
        } else {
            plan.decode.pick_among(&whole_scene, &able, rng)
        };
        let mode = if splits_only { SplitMode::Always } else { plan.mode };
        let alone_cost = &whole_costs[alone];
        let whole = |split: SplitDecision| {
            // What no pair could serve either is for the engine to refuse in its own words.
            if splits_only && split.reason != SplitReason::Unsplittable {
                return Err(sides.refusal(scope, split.reason));
            }
            Ok(Decided {
                decision: Decision {
                    policy: plan.name(),
                    reason: why_alone,
                    chosen: sides.whole.all()[alone].endpoint.id,
                    candidates: told(&sides.whole, &whole_costs),
                    reverted: reverted.clone(),
                    split: Some(Box::new(SplitDecision { whole_ms: Some(alone_cost.total_ms), ..split })),
                },
                leg: self.leg(&sides.whole.all()[alone], alone_cost, Part::Whole, ground),
                prefill: None,
            })
        };
        let whole_if_open = |reason| {
            if whole_open || splits_only { whole(unsplit(plan, reason)) } else { Err(NO_ROOM) }
        };
        if let Err(reason) = sides.may_split(shape, mode) {
            return whole_if_open(reason);
        }
        if mode == SplitMode::Auto && alone_cost.uncached_tokens < plan.settings.split_tokens_min {
            let prompt_tokens = alone_cost.uncached_tokens.saturating_add(alone_cost.warm_tokens);
            let short = prompt_tokens < plan.settings.split_tokens_min;
            return whole_if_open(if short { SplitReason::Short } else { SplitReason::Warm });
        }
        let mut candidates = match sides.prefill(shape, scope, mode, ground.now) {
            Ok(candidates) => candidates,
            Err(reason) => return whole_if_open(reason),
        };
        self.get_to_know(&mut candidates, scratch, ground);
        let prefill_reverted = plan.prefill.filter(&mut candidates, ground.view, shape);
        let mut prefill_weighed = self.weigh(&candidates, ground);
        if let Some(gate) = gate {
            let below_max = gate.below_max(candidates, prefill_weighed);
            let Some(narrowed) = below_max else { return whole_if_open(SplitReason::NoPrefillEndpoint) };
            (candidates, prefill_weighed) = narrowed;
            let prefill_open = gate.any_open(&candidates, &prefill_weighed, ground.now);
            if !prefill_open && (mode == SplitMode::Always || !whole_open) {
                return Err(NO_ROOM);
            }
        }
        let prefill =
            Side::new(&candidates, tariff.prefill(&candidates, &prefill_weighed), ground.view, pools);
        let decode = Side::new(&sides.whole, tariff.decode(&sides.whole, &weighed), ground.view, pools);
        let ways = Ways { pools, zone_ms: plan.settings.zone_ms };
        let scenes = [
            &ground.scene(&candidates, &prefill.costs, scratch),
            &ground.scene(&sides.whole, &decode.costs, scratch),
        ];
        let pair = match plan.choosing {
            Choosing::Cost { tie_ms } => ways.cheapest(&prefill, &decode, scenes, tie_ms),
            Choosing::Qoe { tie_qoe } => {
                let transfer_ms: Vec<f64> =
                    decode.costs.iter().map(|cost| tariff.transfer_ms(cost.uncached_tokens)).collect();
                let pairs = Pairs {
                    prefill: &prefill,
                    decode: &decode,
                    ways: &ways,
                    request: shape,
                    transfer_ms: &transfer_ms,
                };
                pairs.best(scenes, tie_qoe)
            }
            Choosing::Apart => {
                self.pair_apart(&prefill, &decode, &ways, scenes, (alone, why_alone), ground, rng)
            }
        };
        let through = ways.through_each(&prefill, &decode);
        let split = |reason, prefill: Option<PrefillChoice>, pair: Option<&Pair>| SplitDecision {
            policy: plan.prefill_name(),
            reason,
            prefill,
            pair_ms: pair.map(|pair| pair.total_ms),
            whole_ms: Some(alone_cost.total_ms),
            candidates: told(&candidates, &through),
            reverted: prefill_reverted.clone(),
        };
        let Some(pair) = pair else { return whole(split(SplitReason::NoPair, None, None)) };
        let reason = match plan.mode {
            SplitMode::Always => SplitReason::Always,
            _ if splits_only => SplitReason::ConnectorSplitsOnly,
            _ if pair.total_ms < alone_cost.total_ms => SplitReason::Paid,
            _ => return whole(split(SplitReason::Costlier, None, Some(&pair))),
        };
        let (from, to) = (pair.prefill.0, pair.decode.0);
        let choice = PrefillChoice { chosen: candidates.all()[from].endpoint.id, reason: pair.prefill.1 };
        Ok(Decided {
            decision: Decision {
                policy: plan.name(),
                reason: pair.decode.1,
                chosen: sides.whole.all()[to].endpoint.id,
                candidates: told(&sides.whole, &decode.costs),
                reverted,
                split: Some(Box::new(split(reason, Some(choice), Some(&pair)))),
            },
            leg: self.leg(&sides.whole.all()[to], &decode.costs[to], Part::Decode, ground),
            prefill: Some(self.leg(&candidates.all()[from], &prefill.costs[from], Part::Prefill, ground)),
        })
    }

    /// A pair of which each leg's own policy picks its endpoint. The one that would serve the request alone decodes
    /// if it can, so that policies which take turns take one.
    #[expect(clippy::too_many_arguments, reason = "both sides of one choice, and what each goes by")]
    fn pair_apart(
        &self,
        prefill: &Side<'_>,
        decode: &Side<'_>,
        ways: &Ways<'_>,
        scenes: [&Scene<'_>; 2],
        alone: (usize, Reason),
        ground: &Ground<'_>,
        rng: &mut Rng,
    ) -> Option<Pair> {
        let plan = &ground.active.pd;
        let through = ways.through_each(prefill, decode);
        let reachable: SmallVec<[usize; 16]> =
            prefill.candidates.kept_positions().filter(|at| through[*at].total_ms.is_finite()).collect();
        if reachable.is_empty() {
            return None;
        }
        let from = plan.prefill.pick_among(scenes[0], &reachable, rng);
        let (onward, costs) = ways.onward(prefill, from.0, decode);
        let to =
            if onward.contains(&alone.0) { alone } else { plan.decode.pick_among(scenes[1], &onward, rng) };
        let total_ms = prefill.costs[from.0].total_ms + costs[to.0].total_ms;
        Some(Pair { prefill: from, decode: to, total_ms })
    }

    /// Decides on another endpoint for a decode leg.
    pub(super) fn decide_decode_again(
        &self,
        scratch: &mut Scratch,
        asked: &Asked<'_>,
        from: EndpointId,
        now: Moment,
        rng: &mut Rng,
    ) -> Result<Decided, Refusal> {
        let view = self.view.load();
        let active = self.active.load();
        let ground = self.ground(asked, &view, &active, now);
        let scope = self.scope(&ground)?;
        let shape = asked.shape;
        let (Some(pools), Some(at)) = (&view.pools, view.position(from)) else {
            return Err(Refusal::AllTried);
        };
        let (from, pool) = (&view.endpoints[at], pools.at(at));
        let (rosters, number) = self.rosters(&view, shape, &scope, now)?;
        let mut sides = Sides::gather(rosters.get(number), &scope, now)?;
        self.look_up(scratch, shape);
        self.get_to_know(&mut sides.whole, scratch, &ground);
        let plan = &active.pd;
        let reverted = plan.decode.filter(&mut sides.whole, &view, shape);
        let tariff = self.tariff(&ground);
        let costs = tariff.decode(&sides.whole, &self.weigh(&sides.whole, &ground));
        let decode = Side::new(&sides.whole, costs, &view, pools);
        let ways = Ways { pools, zone_ms: plan.settings.zone_ms };
        let (onward, costs) = ways.onward_from(pool, from.id, &decode);
        if onward.is_empty() {
            return Err(Refusal::AllTried);
        }
        let scene = ground.scene(&sides.whole, &costs, scratch);
        let (at, reason) = plan.decode.pick_among(&scene, &onward, rng);
        let chosen = &sides.whole.all()[at];
        Ok(Decided {
            decision: Decision {
                policy: plan.name(),
                reason,
                chosen: chosen.endpoint.id,
                candidates: told(&sides.whole, &costs),
                reverted,
                split: Some(Box::new(SplitDecision {
                    prefill: Some(PrefillChoice { chosen: from.id, reason: Reason::OnlyCandidate }),
                    ..unsplit(plan, SplitReason::Prefilled)
                })),
            },
            leg: self.leg(chosen, &costs[at], Part::Decode, &ground),
            prefill: None,
        })
    }

    fn tariff<'a>(&self, ground: &Ground<'a>) -> Tariff<'a> {
        let tables = &ground.active.settings.policy_tables;
        Tariff {
            cost: &tables.cost,
            pd: &tables.pd_cost,
            transfer_us_per_token: self.transfers.us_per_token(ground.active),
        }
    }
}

/// A decision not to split, for which no prefill endpoint was looked at.
fn unsplit(plan: &PdPlan, reason: SplitReason) -> SplitDecision {
    SplitDecision {
        policy: plan.prefill_name(),
        reason,
        prefill: None,
        pair_ms: None,
        whole_ms: None,
        candidates: SmallVec::new(),
        reverted: SmallVec::new(),
    }
}
