//! Highest-random-weight hashing: all replicas rank the same endpoints alike for a key, without a word.

use crate::EndpointId;

/// Odd constants (the first digits of pi) that keep a key or id of few set bits from a weak product.
const KEY_SALT: u64 = 0x2438_6f68_8ab4_0a3f;
const ID_SALT: u64 = 0x1319_8a2e_0370_7345;

/// How highly `endpoint` ranks for `key`. Both are hashes already, so that one folded product (the core of
/// wyhash) mixes them well; a full hash of each pair would cost a decision over 10,000 endpoints too much.
pub const fn score(key: u64, endpoint: EndpointId) -> u64 {
    let product = ((key ^ KEY_SALT) as u128).wrapping_mul((endpoint.raw() ^ ID_SALT) as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Collects the two that rank highest for a key, whatever the order in which they are offered.
#[derive(Clone, Copy, Debug)]
pub struct TopTwo<T> {
    key: u64,
    first: Option<Ranked<T>>,
    second: Option<Ranked<T>>,
}

#[derive(Clone, Copy, Debug)]
struct Ranked<T> {
    rank: (u64, EndpointId),
    item: T,
}

impl<T: Copy> TopTwo<T> {
    /// Nobody yet, for `key`.
    pub const fn new(key: u64) -> Self {
        Self { key, first: None, second: None }
    }

    /// Offers an endpoint, with what is to be known of it later. Each is offered once.
    pub fn offer(&mut self, endpoint: EndpointId, item: T) {
        let ranked = Ranked { rank: (score(self.key, endpoint), endpoint), item };
        if self.first.is_none_or(|first| ranked.rank > first.rank) {
            self.second = self.first.replace(ranked);
        } else if self.second.is_none_or(|second| ranked.rank > second.rank) {
            self.second = Some(ranked);
        }
    }

    /// The highest.
    pub fn first(&self) -> Option<T> {
        self.first.map(|ranked| ranked.item)
    }

    /// The one after it.
    pub fn second(&self) -> Option<T> {
        self.second.map(|ranked| ranked.item)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    fn endpoints(count: u16) -> Vec<EndpointId> {
        (0..count).map(|n| EndpointId::of(&format!("http://10.0.0.{n}:8000"), None)).collect()
    }

    fn top_two(key: u64, of: &[EndpointId]) -> [EndpointId; 2] {
        let mut top = TopTwo::new(key);
        of.iter().for_each(|id| top.offer(*id, *id));
        [top.first().unwrap(), top.second().unwrap()]
    }

    /// The figures come from a second implementation, in another language.
    #[test]
    fn scores_are_the_same_on_every_build() {
        let endpoint = EndpointId::of("http://10.0.0.1:8000", None);
        assert_eq!(score(0, endpoint), 0x0415_2c5d_9bab_2d0a);
        assert_eq!(score(xxh3_64(b"tenant"), endpoint), 0x3943_fbfc_ed2b_8fa1);
    }

    #[test]
    fn both_places_are_spread_evenly_and_independently() {
        let endpoints = endpoints(8);
        let mut pairs = std::collections::BTreeMap::new();
        for n in 0..56_000_u32 {
            *pairs.entry(top_two(xxh3_64(&n.to_le_bytes()), &endpoints)).or_insert(0_u32) += 1;
        }
        // 56 ordered pairs, 1,000 expected in each, standard deviation about 31.
        assert_eq!(pairs.len(), 56);
        assert!(pairs.values().all(|count| (850..1_150).contains(count)), "{pairs:?}");
    }

    proptest! {
        #[test]
        fn the_order_of_offers_does_not_matter(key: u64, turn in 0_usize..16) {
            let mut endpoints = endpoints(16);
            let want = top_two(key, &endpoints);
            endpoints.rotate_left(turn);
            prop_assert_eq!(top_two(key, &endpoints), want);
            endpoints.reverse();
            prop_assert_eq!(top_two(key, &endpoints), want);
        }

        #[test]
        fn removing_one_moves_only_what_was_there(key: u64, gone in 0_usize..16) {
            let mut endpoints = endpoints(16);
            let [first, second] = top_two(key, &endpoints);
            let removed = endpoints.remove(gone);
            let after = top_two(key, &endpoints);
            if removed == first {
                prop_assert_eq!(after[0], second);
            } else {
                prop_assert_eq!(after[0], first);
            }
        }
    }
}
