//! Pools: endpoints that are alike in what they can hand over to whom.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::endpoint::{Endpoint, EndpointSpec, Role};

/// The pools of a view, and which of them can hand over to which.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    /// The pool of each endpoint, in the order of the view.
    of: Vec<u16>,
    count: usize,
    /// By prefill pool and decode pool.
    pairs: Vec<PoolPair>,
}

/// Two pools of which the first can hand over to the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolPair {
    pub(crate) prefill: u16,
    pub(crate) decode: u16,
    pub(crate) way: Way,
}

/// How far a handoff goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Within a zone, as far as is known.
    Near,
    /// To another zone.
    AcrossZones,
}

impl Pools {
    /// The pools of endpoints in the order of their ids.
    pub(crate) fn of(endpoints: &[Arc<Endpoint>]) -> Self {
        let mut numbers: BTreeMap<_, u16> = BTreeMap::new();
        let mut firsts: Vec<&EndpointSpec> = Vec::new();
        let mut of = Vec::with_capacity(endpoints.len());
        for endpoint in endpoints {
            let spec = &endpoint.spec;
            let role = spec.role.as_str();
            let number =
                *numbers.entry((role, spec.connector(), &spec.group, &spec.zone)).or_insert_with(|| {
                    firsts.push(spec);
                    // There are no more endpoints than slots, which are numbered with 16 bits.
                    (firsts.len() - 1) as u16
                });
            of.push(number);
        }
        let mut pairs = Vec::new();
        for (prefill, from) in firsts.iter().enumerate().filter(|(_, spec)| spec.role != Role::Decode) {
            for (decode, to) in firsts.iter().enumerate().filter(|(_, spec)| spec.role != Role::Prefill) {
                if from.hands_over_to(to) {
                    let apart = matches!((&from.zone, &to.zone), (Some(from), Some(to)) if from != to);
                    let way = if apart { Way::AcrossZones } else { Way::Near };
                    pairs.push(PoolPair { prefill: prefill as u16, decode: decode as u16, way });
                }
            }
        }
        Self { of, count: firsts.len(), pairs }
    }

    /// The pool of the endpoint at a position of the view.
    pub(crate) fn at(&self, position: usize) -> u16 {
        self.of[position]
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> usize {
        self.count
    }

    /// Every pair.
    pub(crate) fn pairs(&self) -> &[PoolPair] {
        &self.pairs
    }

    /// How far it is from one pool to another; `None` if the one can't hand over to the other.
    pub(crate) fn way(&self, prefill: u16, decode: u16) -> Option<Way> {
        let at =
            self.pairs.binary_search_by_key(&(prefill, decode), |pair| (pair.prefill, pair.decode)).ok()?;
        Some(self.pairs[at].way)
    }
}
