//! Tells a datagram that was seen from one that was not, for one sender.

/// How far behind the newest a datagram may come. Loopback and LAN reorder by a few; a sender that is
/// swamped by 1,000 is better served by the next round.
const WINDOW: u64 = 1_024;
const WORDS: usize = (WINDOW / 64) as usize;

/// A sliding window over one sender's counters.
#[derive(Debug)]
pub(crate) struct Window {
    highest: u64,
    seen: [u64; WORDS],
}

impl Window {
    /// A window in which `highest` and all before it count as seen.
    pub(crate) const fn after(highest: u64) -> Self {
        Self { highest, seen: [u64::MAX; WORDS] }
    }

    /// Whether `counter` is new; from now on it is not.
    pub(crate) fn admit(&mut self, counter: u64) -> bool {
        if counter > self.highest {
            let steps = counter - self.highest;
            if steps >= WINDOW {
                self.seen = [0; WORDS];
            } else {
                for passed in self.highest + 1..=counter {
                    self.seen[Self::word(passed)] &= !Self::bit(passed);
                }
            }
            self.highest = counter;
        } else if self.highest - counter >= WINDOW {
            return false;
        }
        let (word, bit) = (&mut self.seen[Self::word(counter)], Self::bit(counter));
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    const fn word(counter: u64) -> usize {
        ((counter % WINDOW) / 64) as usize
    }

    const fn bit(counter: u64) -> u64 {
        1 << (counter % 64)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_up_to_the_start_is_new() {
        let mut window = Window::after(5_000);
        assert!(!window.admit(5_000));
        assert!(!window.admit(4_999));
        assert!(!window.admit(1));
        assert!(window.admit(5_001));
        assert!(!window.admit(5_001));
    }

    #[test]
    fn a_leap_forgets_and_the_far_past_is_refused() {
        let mut window = Window::after(0);
        assert!(window.admit(10_000));
        assert!(window.admit(10_000 - WINDOW + 1));
        assert!(!window.admit(10_000 - WINDOW));
        assert!(window.admit(u64::MAX));
        assert!(!window.admit(u64::MAX));
    }

    proptest! {
        #[test]
        fn no_counter_is_new_twice(counters in proptest::collection::vec(1_u64..4_000, 1..400)) {
            let mut window = Window::after(0);
            let mut seen = HashSet::new();
            let mut highest = 0;
            for counter in counters {
                let fits = counter + WINDOW > highest;
                prop_assert_eq!(window.admit(counter), fits && !seen.contains(&counter));
                seen.insert(counter);
                highest = highest.max(counter);
            }
        }
    }
}
