//! What happens when: events in the order of their times, those of one moment in the order in which they came.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use engine_model::timing::Moment;

/// Events to come.
pub(crate) struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    pushed: u64,
}

struct Entry<E> {
    at: Moment,
    number: u64,
    event: E,
}

impl<E> Queue<E> {
    pub(crate) fn new() -> Self {
        Self { heap: BinaryHeap::new(), pushed: 0 }
    }

    pub(crate) fn push(&mut self, at: Moment, event: E) {
        self.pushed += 1;
        self.heap.push(Entry { at, number: self.pushed, event });
    }

    pub(crate) fn pop(&mut self) -> Option<(Moment, E)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

impl<E> Entry<E> {
    fn key(&self) -> (Moment, u64) {
        (self.at, self.number)
    }
}

/// The heap gives its greatest first: the earliest is the greatest.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_of_one_moment_the_first_pushed() {
        let mut queue = Queue::new();
        for (at, event) in [(5, "c"), (1, "a"), (5, "d"), (3, "b")] {
            queue.push(Moment(at), event);
        }
        let order: String = std::iter::from_fn(|| queue.pop()).map(|(_, event)| event).collect();
        assert_eq!(order, "abcd");
    }
}
