//! What has arrived of another replica's ledger, and what is missing of it.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::wire::Head;

/// Records held beyond a gap: a burst at full rate for the second that a pull may take. More are refused,
/// and pulled with the gap.
const BEYOND_MAX: usize = 4_096;

/// Where one replica's ledger stands here. Records may come in any order and more than once.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// All up to it arrived.
    upto: Head,
    /// Those after the first gap, with their digests.
    beyond: BTreeMap<u64, u64>,
    /// The furthest that the replica said it is.
    told: Head,
}

/// Whether a record was already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    New,
    Known,
    /// Too far beyond a gap to be kept track of.
    TooFar,
}

impl Inbox {
    pub(crate) fn offer(&mut self, sequence: u64, digest: u64) -> Arrival {
        if sequence <= self.upto.sequence || self.beyond.contains_key(&sequence) {
            return Arrival::Known;
        }
        if sequence == self.upto.sequence + 1 {
            self.upto = self.upto.after(digest);
            self.catch_up();
        } else if self.beyond.len() < BEYOND_MAX {
            self.beyond.insert(sequence, digest);
        } else {
            return Arrival::TooFar;
        }
        Arrival::New
    }

    /// Notes how far the replica says that its ledger goes.
    pub(crate) fn told(&mut self, head: Head) {
        if head.sequence > self.told.sequence {
            self.told = head;
        }
    }

    /// Goes on from here, where a snapshot ended; never back.
    pub(crate) fn settle(&mut self, head: Head) {
        if head.sequence > self.upto.sequence {
            self.upto = head;
            self.beyond = self.beyond.split_off(&(head.sequence + 1));
            self.catch_up();
        }
    }

    /// Takes the replica's word for where it is, after a snapshot that settles a divergence.
    pub(crate) fn reset(&mut self, head: Head) {
        *self = Self { upto: head, beyond: BTreeMap::new(), told: head };
    }

    /// All up to it arrived.
    pub(crate) fn upto(&self) -> Head {
        self.upto
    }

    /// The furthest that the replica said it is.
    pub(crate) fn told_head(&self) -> Head {
        self.told
    }

    /// The first run of numbers that is missing.
    pub(crate) fn gap(&self) -> Option<RangeInclusive<u64>> {
        let first = self.upto.sequence + 1;
        let last = self.beyond.keys().next().map_or(self.told.sequence, |next| next - 1);
        (first <= last).then_some(first..=last)
    }

    /// Whether what arrived is not what the replica says it wrote.
    pub(crate) fn diverged(&self) -> bool {
        self.told.sequence == self.upto.sequence && self.told.digest != self.upto.digest
    }

    fn catch_up(&mut self) {
        while let Some(digest) = self.beyond.remove(&(self.upto.sequence + 1)) {
            self.upto = self.upto.after(digest);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head(sequence: u64) -> Head {
        (1..=sequence).fold(Head::default(), Head::after)
    }

    #[test]
    fn a_gap_is_the_first_run_that_is_missing() {
        let mut inbox = Inbox::default();
        assert_eq!(inbox.gap(), None);
        inbox.told(head(9));
        assert_eq!(inbox.gap(), Some(1..=9));
        assert_eq!(inbox.offer(4, 4), Arrival::New);
        assert_eq!(inbox.gap(), Some(1..=3));
        inbox.settle(head(5));
        assert_eq!(inbox.gap(), Some(6..=9));
        inbox.told(head(7));
        assert_eq!(inbox.gap(), Some(6..=9));
    }

    #[test]
    fn another_ledger_of_the_same_length_is_noticed() {
        let mut inbox = Inbox::default();
        inbox.told(head(2));
        assert!(!inbox.diverged());
        assert_eq!(inbox.offer(1, 1), Arrival::New);
        assert_eq!(inbox.offer(2, 99), Arrival::New);
        assert!(inbox.diverged());
        inbox.reset(head(2));
        assert!(!inbox.diverged());
    }

    #[test]
    fn what_is_held_beyond_a_gap_is_bounded() {
        let mut inbox = Inbox::default();
        for n in 2..2 + BEYOND_MAX as u64 {
            assert_eq!(inbox.offer(n, n), Arrival::New);
        }
        assert_eq!(inbox.offer(2 + BEYOND_MAX as u64, 0), Arrival::TooFar);
        assert_eq!(inbox.offer(1, 1), Arrival::New);
        assert_eq!(inbox.upto(), head(1 + BEYOND_MAX as u64));
    }

    proptest! {
        #[test]
        fn any_order_ends_at_the_same_head(order in Just((1_u64..60).collect::<Vec<_>>()).prop_shuffle()) {
            let mut inbox = Inbox::default();
            for &n in order.iter().chain(&order) {
                inbox.offer(n, n);
            }
            inbox.told(head(59));
            prop_assert_eq!(inbox.upto(), head(59));
            prop_assert_eq!(inbox.gap(), None);
            prop_assert!(!inbox.diverged());
        }
    }
}
