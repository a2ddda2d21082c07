//! Prompts that other replicas placed a moment ago.
//!
//! Between a reply's end and the news of it a replica still counts the request that is over. That is the very
//! moment in which the next turn of the same chat comes. But whoever asks on where a prompt ended has its
//! reply: that prompt is done, whatever the load rows say yet, and its own chat must not flee from it.

use hashbrown::HashMap;
use parking_lot::Mutex;
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
    by_end: HashMap<(BlockHash, Slot), (u32, Moment)>,
    order: VecDeque<(BlockHash, Slot)>,
}

impl Heard {
    /// Another replica placed a prompt at `slot` whose last full block is `end`, with `tokens` to compute.
    pub(crate) fn note(&self, end: BlockHash, slot: Slot, tokens: u32, now: Moment) {
        let mut state = self.0.lock();
        if state.by_end.insert((end, slot), (tokens, now)).is_none() {
            state.order.push_back((end, slot));
        }
        if state.order.len() > HEARD_MAX
            && let Some(oldest) = state.order.pop_front()
        {
            state.by_end.remove(&oldest);
        }
    }

    /// The tokens of a prompt that was heard of lately and ended with this block.
    pub(crate) fn tokens(&self, end: BlockHash, slot: Slot, now: Moment) -> Option<u32> {
        let state = self.0.lock();
        let (tokens, at) = state.by_end.get(&(end, slot))?;
        (now.since(*at) <= HEARD_FOR).then_some(*tokens)
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
        assert_eq!(heard.tokens(end, slot, at(20)), Some(640));
        assert_eq!(heard.tokens(end, Slot::new(4), at(20)), None);
        assert_eq!(heard.tokens(end, slot, at(400)), None);
        (2..5_000).for_each(|end| heard.note(BlockHash::from_raw(end), slot, 1, at(400)));
        assert_eq!(heard.tokens(end, slot, at(20)), None);
        assert_eq!(heard.0.lock().by_end.len(), HEARD_MAX);
    }
}
