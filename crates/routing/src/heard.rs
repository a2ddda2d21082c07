//! Prompts that other replicas placed a moment ago.
//!
//! Between a reply's end and the news of it a replica still counts the request that is over. That is the very
//! moment in which the next turn of the same chat comes. But whoever asks on where a prompt ended has its
//! reply: that prompt is done, whatever the load rows say yet, and its own chat must not flee from it.

use hashbrown::HashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::time::Duration;

use crate::prefix::Slot;
use crate::{BlockHash, Moment};

/// How many are remembered. 1,024: what a cluster at 10,000 requests a second places within 100 ms.
const HEARD_MAX: usize = 1_024;

/// For how long. 250 ms: by then a load row has come by one way or the other.
const HEARD_FOR: Duration = Duration::from_millis(250);

/// The placements heard last, by the block that their path ended with.
#[derive(Debug, Default)]
pub(crate) struct Heard(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    by_end: HashMap<BlockHash, SmallVec<[Placement; 1]>>,
    order: VecDeque<(BlockHash, Slot)>,
}

#[derive(Debug)]
struct Placement {
    slot: Slot,
    tokens: u32,
    at: Moment,
}

/// Where prompts that ended with one block were placed lately, and their tokens.
pub(crate) type Lately = SmallVec<[(Slot, u32); 2]>;

impl Heard {
    /// Another replica placed a prompt at `slot` whose last full block is `end`, with `tokens` to compute.
    pub(crate) fn note(&self, end: BlockHash, slot: Slot, tokens: u32, now: Moment) {
        let State { by_end, order } = &mut *self.0.lock();
        let placements = by_end.entry(end).or_default();
        let placement = Placement { slot, tokens, at: now };
        match placements.iter_mut().find(|held| held.slot == slot) {
            Some(held) => *held = placement,
            None => {
                placements.push(placement);
                order.push_back((end, slot));
            }
        }
        if order.len() > HEARD_MAX
            && let Some((end, slot)) = order.pop_front()
            && let Some(placements) = by_end.get_mut(&end)
        {
            placements.retain(|held| held.slot != slot);
            if placements.is_empty() {
                by_end.remove(&end);
            }
        }
    }

    /// Where prompts that ended with this block were placed of which was heard lately.
    pub(crate) fn lately(&self, end: BlockHash, now: Moment) -> Lately {
        let state = self.0.lock();
        let placements = state.by_end.get(&end).into_iter().flatten();
        placements
            .filter(|held| now.since(held.at) <= HEARD_FOR)
            .map(|held| (held.slot, held.tokens))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_is_remembered_for_a_moment_and_not_without_bound() {
        let heard = Heard::default();
        let at = Moment::from_millis;
        let (end, slot) = (BlockHash::from_raw(1), Slot::new(3));
        heard.note(end, slot, 640, at(10));
        heard.note(end, Slot::new(4), 32, at(100));
        heard.note(end, slot, 640, at(10));
        assert_eq!(heard.lately(end, at(20))[..], [(slot, 640), (Slot::new(4), 32)]);
        assert_eq!(heard.lately(end, at(300))[..], [(Slot::new(4), 32)]);
        assert_eq!(heard.lately(end, at(400))[..], []);
        (2..5_000).for_each(|end| heard.note(BlockHash::from_raw(end), slot, 1, at(400)));
        assert_eq!(heard.lately(end, at(20))[..], []);
        assert_eq!(heard.0.lock().by_end.len(), HEARD_MAX);
    }
}
