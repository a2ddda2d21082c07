//! What the settings make of a policy: filters, then an affinity, then a picker.

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::{CacheAwareSettings, PolicyName};
use crate::affinity::{
    Affinity, AffinityName, NoAffinity, Pin, Preference, PrefixCost, PrefixLongest, PrefixRing,
    SessionAffinity,
};
use crate::candidates::Candidates;
use crate::decision::{Part, Reason};
use crate::endpoint_filter::EndpointFilter;
use crate::picker::{LoadTie, Picker, Turn};
use crate::request::RequestShape;
use crate::router::Rng;
use crate::scene::Scene;
use crate::settings::Settings;
use crate::view::View;
use crate::{EndpointId, ReplicaId};

/// A policy as it runs.
pub(crate) struct Plan {
    pub(crate) name: PolicyName,
    filters: Vec<Box<dyn EndpointFilter>>,
    /// Beyond this difference of loads affinity is not asked.
    imbalance: Option<CacheAwareSettings>,
    affinity: Box<dyn Affinity>,
    picker: Picker,
    /// The reason to give when the affinity has no preference; the picker's own if `None`.
    fallback: Option<Reason>,
}

impl Plan {
    /// The plan of `policy` for a part of each request.
    pub(crate) fn new(policy: PolicyName, part: Part, settings: &Settings, own: &ReplicaId) -> Self {
        let tables = &settings.policy_tables;
        let tie_ms = tables.cost.tie_ms;
        // Replicas begin their turns at different places.
        let turn = || Turn::from(xxh3_64(own.as_str().as_bytes()) as usize >> 1);
        let by_load = || Picker::LeastLoad { tie: LoadTie::Rendezvous };
        use PolicyName as P;
        let (affinity, picker, fallback) = match policy {
            P::Cost | P::PdCost | P::PdQoe => (AffinityName::PrefixCost, Picker::LeastCost { tie_ms }, None),
            P::PrefixLongest => (AffinityName::PrefixLongest, by_load(), Some(Reason::NoMatchLeastLoad)),
            P::PrefixRing => (AffinityName::PrefixRing, by_load(), Some(Reason::NoMatchLeastLoad)),
            P::CacheAware => (AffinityName::PrefixLongest, by_load(), Some(Reason::NoMatchLeastLoad)),
            P::Session => (
                AffinityName::Session,
                Picker::LeastLoad { tie: LoadTie::Turn(turn()) },
                Some(Reason::NoSessionLeastLoad),
            ),
            P::RoundRobin => (AffinityName::None, Picker::RoundRobin(turn()), None),
            P::Random => (AffinityName::None, Picker::Random, None),
            P::LeastLoad => (AffinityName::None, Picker::LeastLoad { tie: LoadTie::Turn(turn()) }, None),
            P::PowerOfTwo => (AffinityName::None, Picker::PowerOfTwo, None),
            P::PdLoadAware if part == Part::Decode => {
                (AffinityName::None, Picker::LeastLoad { tie: LoadTie::Lot }, None)
            }
            P::PdLoadAware => (AffinityName::None, Picker::WithinLoad(tables.pd_load_aware.clone()), None),
        };
        let cache_aware = policy == P::CacheAware;
        let match_ratio_min = if cache_aware { tables.cache_aware.match_ratio_min } else { 0.0 };
        let affinity: Box<dyn Affinity> = match settings.affinity.unwrap_or(affinity) {
            AffinityName::None => Box::new(NoAffinity),
            AffinityName::Session => Box::new(SessionAffinity::default()),
            AffinityName::PrefixLongest => Box::new(PrefixLongest { match_ratio_min }),
            AffinityName::PrefixRing => Box::new(PrefixRing::new(&tables.prefix_ring)),
            AffinityName::PrefixCost => Box::new(PrefixCost { tie_ms }),
        };
        Self {
            name: policy,
            filters: settings.filters.iter().map(|name| settings.filter_tables.build(*name)).collect(),
            imbalance: cache_aware.then(|| tables.cache_aware.clone()),
            affinity,
            picker,
            fallback,
        }
    }

    /// Runs the filters in order and marks what each leaves out. One that would leave nothing is undone;
    /// the names of those are the result.
    pub(crate) fn filter(
        &self,
        candidates: &mut Candidates<'_>,
        view: &View,
        request: &RequestShape,
    ) -> SmallVec<[&'static str; 2]> {
        let mut reverted = SmallVec::new();
        for filter in &self.filters {
            let kept = filter.keep(candidates, view, request);
            if !candidates.drop_unless(&kept, filter.name()) {
                reverted.push(filter.name().as_str());
            }
        }
        reverted
    }

    /// Picks one of the kept candidates at some positions (at least one), as if there were no others.
    pub(crate) fn pick_among(
        &self,
        scene: &Scene<'_>,
        positions: &[usize],
        rng: &mut Rng,
    ) -> (usize, Reason) {
        if positions.len() == scene.candidates.kept().count() {
            return self.pick(scene, rng);
        }
        let (candidates, costs) = scene.candidates.at(positions, scene.costs);
        let (at, reason) = self.pick(&Scene { candidates: &candidates, costs: &costs, ..*scene }, rng);
        (positions[at], reason)
    }

    /// Picks one of the kept candidates, of which there is at least one.
    pub(crate) fn pick(&self, scene: &Scene<'_>, rng: &mut Rng) -> (usize, Reason) {
        let kept = scene.candidates.kept_list();
        if let [only] = kept[..] {
            return (only, Reason::OnlyCandidate);
        }
        if self.imbalance.as_ref().is_some_and(|limits| is_uneven(scene, &kept, limits)) {
            let (at, _) = self.picker.pick(scene, &kept, rng);
            return (at, Reason::ImbalancedLeastLoad);
        }
        match self.affinity.prefer(scene) {
            Preference::Among { positions, reason } => match positions[..] {
                [only] => (only, reason),
                _ => (self.picker.pick(scene, &positions, rng).0, reason),
            },
            Preference::Any => {
                let (at, reason) = self.picker.pick(scene, &kept, rng);
                (at, self.fallback.unwrap_or(reason))
            }
        }
    }

    /// Whether what it chooses costs the least, so that others than those that may need not be looked at.
    pub(crate) fn is_by_cost(&self) -> bool {
        self.affinity.name() == AffinityName::PrefixCost && self.imbalance.is_none()
    }

    pub(crate) fn placed(&self, request: &RequestShape, endpoint: EndpointId) -> Pin {
        self.affinity.placed(request, endpoint)
    }

    pub(crate) fn endpoints_changed(&self, view: &View) {
        self.affinity.endpoints_changed(view);
    }
}

/// Whether the loads of `kept` differ by more than both limits.
fn is_uneven(scene: &Scene<'_>, kept: &[usize], limits: &CacheAwareSettings) -> bool {
    let running = || kept.iter().map(|at| scene.running(*at));
    let (least, most) = (running().min().unwrap_or(0), running().max().unwrap_or(0));
    most - least > limits.imbalance_abs && f64::from(most) > limits.imbalance_ratio * f64::from(least)
}
