//! Settling ties alike on every replica.

use smallvec::SmallVec;

use crate::decision::Reason;
use crate::endpoint::PLACED_QUANTUM;
use crate::rendezvous::TopTwo;
use crate::scene::Scene;

/// Placed tokens differ clearly when they do by more than one in so many. 4: the busiest of four endpoints then
/// gets at most a quarter more than the mean, and replicas that hear of each other 10 ms late keep 99 of 100
/// chats together (8: an eighth more, and 98).
const PLACED_CLEAR_PART: u32 = 4;
/// And by more than this many, or two prompts like this one: the first few prompts go where their hash says.
const PLACED_CLEAR_MIN: u32 = 2_048;

/// Positions of candidates.
pub type Positions = SmallVec<[usize; 16]>;

/// Settles among `tied` candidates (at least one), in this order: the session's or conversation's home; the
/// deepest warm holder; of the two that rank highest for the prompt's rendezvous key the one with clearly
/// fewer placed tokens.
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

/// Of the two of `left` (at least one) that rank highest for the prompt's key, the first, unless clearly more
/// was placed there lately than at the second.
///
/// A replica that has not heard yet where a prompt went a moment ago comes to the same end as the one that
/// sent it there, but for the few prompts that fall between the two replicas' pictures of what is clear.
pub fn of_two(scene: &Scene<'_>, left: &[usize]) -> usize {
    // The two are those of all candidates, not of the tied ones, which differ with what each replica has
    // heard of the load.
    let all = scene.candidates.all();
    let ranked: Positions = scene.candidates.kept_positions().filter(|at| all[*at].is_ranked).collect();
    let wanted = top_two(scene, &ranked);
    let mut two: Positions = wanted.iter().copied().filter(|at| left.contains(at)).collect();
    if two.is_empty() {
        two = top_two(scene, left);
    }
    let (first, second) = match two[..] {
        [first, second, ..] => (first, second),
        [only] => return only,
        [] => return left.first().copied().unwrap_or(0),
    };
    let placed = |at: usize| scene.endpoint(at).placed_tokens(scene.now);
    let (most, least) = (placed(first), placed(second));
    let few = scene.request.prompt_tokens.max(PLACED_QUANTUM).saturating_mul(2).min(PLACED_CLEAR_MIN);
    let clear = (most / PLACED_CLEAR_PART).max(few);
    if least.saturating_add(clear) < most { second } else { first }
}

/// The two of `among` that rank highest, in order.
fn top_two(scene: &Scene<'_>, among: &[usize]) -> Positions {
    let mut top = TopTwo::new(scene.rendezvous);
    for at in among {
        top.offer(scene.endpoint(*at).id, *at);
    }
    top.first().into_iter().chain(top.second()).collect()
}
