//! Pickers: one endpoint out of those that affinity left.

use std::sync::atomic::{AtomicUsize, Ordering};

use rand::Rng as _;

use crate::decision::Reason;
use crate::endpoint::Usable;
use crate::pd::{Row, within_load};
use crate::policy::PdLoadAwareSettings;
use crate::router::Rng;
use crate::scene::Scene;
use crate::tie::{self, Positions};

/// How one of several candidates is picked.
#[derive(Debug)]
pub enum Picker {
    /// The cheapest by expected cost; ties by [`tie::settle`].
    LeastCost {
        /// Costs that differ by less than this, in ms, are the same.
        tie_ms: f64,
    },
    /// The fewest requests in flight through all replicas.
    LeastLoad {
        /// Who is taken of several with the fewest.
        tie: LoadTie,
    },
    /// One after the other.
    RoundRobin(Turn),
    /// By lot.
    Random,
    /// The best match among those that carry no more than usual.
    WithinLoad(PdLoadAwareSettings),
    /// The less loaded of two drawn by lot; if they are equal, the one with fewer placed tokens.
    PowerOfTwo,
}

/// Who is taken of several endpoints with the same load.
#[derive(Debug)]
pub enum LoadTie {
    /// Each in turn: the most even.
    Turn(Turn),
    /// One drawn by lot.
    Lot,
    /// The one that all replicas agree on without a word: for policies that come back to where a prompt
    /// went.
    Rendezvous,
}

/// A count that goes round.
#[derive(Debug, Default)]
pub struct Turn(AtomicUsize);

impl Turn {
    /// Begins at `at`: replicas that begin elsewhere don't go in step.
    pub const fn from(at: usize) -> Self {
        Self(AtomicUsize::new(at))
    }

    fn take(&self, of: usize) -> usize {
        self.0.fetch_add(1, Ordering::Relaxed) % of.max(1)
    }
}

impl Picker {
    /// Picks one of `among` (at least one), and says why.
    pub fn pick(&self, scene: &Scene<'_>, among: &[usize], rng: &mut Rng) -> (usize, Reason) {
        let first = among.first().copied().unwrap_or(0);
        match self {
            Self::LeastCost { tie_ms } => cheapest(scene, among, *tie_ms),
            Self::LeastLoad { tie } => {
                let least = among.iter().map(|at| scene.running(*at)).min().unwrap_or(0);
                let tied: Positions =
                    among.iter().copied().filter(|at| scene.running(*at) == least).collect();
                let at = match tie {
                    LoadTie::Turn(turn) => tied[turn.take(tied.len())],
                    LoadTie::Lot => tied[rng.random_range(0..tied.len())],
                    LoadTie::Rendezvous => tie::of_two(scene, &tied),
                };
                (at, Reason::LeastLoad)
            }
            Self::RoundRobin(turn) => {
                (among.get(turn.take(among.len())).copied().unwrap_or(first), Reason::RoundRobin)
            }
            Self::Random => (among[rng.random_range(0..among.len())], Reason::Random),
            Self::WithinLoad(settings) => {
                let rows: Vec<Row> = among.iter().map(|at| row(scene, *at)).collect();
                let (at, reason) = within_load(&rows, settings, rng);
                (among[at], reason)
            }
            Self::PowerOfTwo => (power_of_two(scene, among, rng), Reason::PowerOfTwo),
        }
    }
}

/// What is known of a candidate's match and load. Nobody has heard of one that is not ready and has neither been
/// looked at nor been given anything.
fn row(scene: &Scene<'_>, at: usize) -> Row {
    let candidate = &scene.candidates.all()[at];
    let load = &candidate.load;
    let heard_of = load.running > 0
        || load.glance.waiting.is_some()
        || candidate.endpoint.usable_at(scene.now) == Usable::Yes;
    let bytes = f64::from(candidate.warm_blocks) * f64::from(scene.request.block_bytes);
    Row {
        match_ratio: bytes / (scene.request.prompt_bytes as f64).max(1.0),
        running: heard_of.then_some(load.running),
    }
}

/// The cheapest of `among`, ties settled; the reason says by what.
pub fn cheapest(scene: &Scene<'_>, among: &[usize], tie_ms: f64) -> (usize, Reason) {
    let cost = |at: usize| scene.costs[at].total_ms;
    let least = among.iter().map(|at| cost(*at)).fold(f64::INFINITY, f64::min);
    let tied: Positions = among.iter().copied().filter(|at| cost(*at) <= least + tie_ms).collect();
    if let [only] = tied[..] {
        return (only, Reason::LeastCost);
    }
    tie::settle(scene, &tied)
}

fn power_of_two(scene: &Scene<'_>, among: &[usize], rng: &mut Rng) -> usize {
    let one = rng.random_range(0..among.len());
    if among.len() == 1 {
        return among[one];
    }
    let other = (one + rng.random_range(1..among.len())) % among.len();
    let (one, other) = (among[one], among[other]);
    let weight = |at: usize| (scene.running(at), scene.endpoint(at).placed_tokens(scene.now));
    if weight(other) < weight(one) { other } else { one }
}
