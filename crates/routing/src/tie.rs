//! Settling ties alike on every replica.

use smallvec::SmallVec;

use crate::decision::Reason;
use crate::rendezvous::TopTwo;
use crate::scene::Scene;

/// Positions of candidates.
pub type Positions = SmallVec<[usize; 16]>;

/// Settles among `tied` candidates (at least one), in this order: the session's or conversation's home; the
/// deepest warm holder; of the two that rank highest for the prompt's rendezvous key the one with fewer
/// placed tokens.
///
/// Nothing here depends on the order of `tied` or on chance: replicas with equal views settle alike, and
/// without a word they differ at most between the same two.
pub fn settle(scene: &Scene<'_>, tied: &[usize]) -> (usize, Reason) {
    let mut left: Positions = tied.into();
    if let Some(home) = scene.session_home
        && let Some(at) = left.iter().copied().find(|at| scene.endpoint(*at).id == home)
    {
        return (at, Reason::TieSession);
    }
    let at_home = |at: &usize| scene.conversation_homes.at(scene.endpoint(*at).slot) > 0;
    if left.iter().any(at_home) {
        left.retain(|at| at_home(at));
        if let [only] = left[..] {
            return (only, Reason::TieSession);
        }
    }
    let deepest = left.iter().map(|at| scene.costs[*at].depth).max().unwrap_or(0);
    left.retain(|at| scene.costs[*at].depth == deepest);
    if let [only] = left[..] {
        return (only, Reason::TieWarm);
    }
    (of_two(scene, &left), Reason::TieRendezvous)
}

/// Of the two of `left` (at least one) that rank highest for the prompt's key, the one with fewer placed
/// tokens.
pub fn of_two(scene: &Scene<'_>, left: &[usize]) -> usize {
    let mut top = TopTwo::new(scene.rendezvous);
    for at in left {
        top.offer(scene.endpoint(*at).id, *at);
    }
    let placed = |at: usize| scene.endpoint(at).placed_tokens(scene.now);
    match (top.first(), top.second()) {
        (Some(first), Some(second)) if placed(second) < placed(first) => second,
        (Some(first), _) => first,
        (None, _) => left.first().copied().unwrap_or(0),
    }
}
