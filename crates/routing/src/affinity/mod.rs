//! Affinities: the preference for an endpoint that knows the prompt or the session.

mod none;
mod prefix_cost;
mod prefix_longest;
mod prefix_ring;
mod session;

use crate::EndpointId;
use crate::decision::Reason;
use crate::request::RequestShape;
use crate::scene::Scene;
use crate::settings::names;
use crate::tie::Positions;
use crate::view::View;

pub use none::NoAffinity;
pub use prefix_cost::PrefixCost;
pub use prefix_longest::PrefixLongest;
pub use prefix_ring::PrefixRing;
pub use session::SessionAffinity;

/// Prefers some candidates to others.
pub trait Affinity: Send + Sync {
    /// The name that the configuration has for it.
    fn name(&self) -> AffinityName;

    /// Which of the kept candidates are preferred. Equal scenes must give equal preferences on every
    /// replica: no chance, no order of arrival.
    fn prefer(&self, scene: &Scene<'_>) -> Preference;

    /// The request was placed at `endpoint`. Says whether a session's home must be told to others, who
    /// would not find it by themselves.
    fn placed(&self, _request: &RequestShape, _endpoint: EndpointId) -> Pin {
        Pin::Needed
    }

    /// The endpoint list has changed.
    fn endpoints_changed(&self, _view: &View) {}
}

/// What an affinity prefers.
#[derive(Clone, Debug, PartialEq)]
pub enum Preference {
    /// Nothing: the picker takes any.
    Any,
    /// These positions, at least one; the picker takes one of them.
    Among {
        /// Positions of kept candidates.
        positions: Positions,
        /// Why these.
        reason: Reason,
    },
}

impl Preference {
    /// This one.
    pub fn one(position: usize, reason: Reason) -> Self {
        Self::Among { positions: Positions::from_slice(&[position]), reason }
    }
}

/// Whether a session's home has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Every replica finds it by itself.
    Needless,
    /// It does not.
    Needed,
}

names! {
    /// The affinities there are.
    AffinityName {
        /// No preference.
        None = "none",
        /// The session's home.
        Session = "session",
        /// The holder of the longest prefix.
        PrefixLongest = "prefix-longest",
        /// The ring's home of the first characters.
        PrefixRing = "prefix-ring",
        /// The fewest expected milliseconds, warm prefixes counted.
        PrefixCost = "prefix-cost",
    }
}
