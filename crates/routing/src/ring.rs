//! A consistent-hash ring over replicas (who scrapes an endpoint) or endpoints (where a session is at home).
//!
//! `consistent_hash_ring` keeps the points; this fixes what every replica must do alike: which bytes are
//! hashed, by what, and how many points a member has. Inserting a member moves memory in proportion to all
//! points, so a ring is never rebuilt: it is cloned, changed and published.

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{EndpointId, ReplicaId};

/// Points of one member while there are at most [`MEMBERS_AT_FULL_WEIGHT`]. 128: the busiest of 100 members
/// owns about 1.25 times the mean.
pub const POINTS_PER_MEMBER: usize = 128;

/// Beyond this many members each doubling halves the points of all, so that a ring stays below 131,072
/// points (4 MB) and a change of it below some milliseconds.
pub const MEMBERS_AT_FULL_WEIGHT: usize = 1_024;

/// The fewest points that a member ever has.
pub const POINTS_MIN: usize = 8;

/// Seed of the key by which a member's heirs are found: that of none of its points.
const HEIR_SEED: u64 = 0x6865_6972;

/// What can stand on a ring, by its explicit bytes.
pub trait Member: Clone + Eq + Ord {
    /// Calls `write` once with the bytes that stand for this member on every replica and build.
    fn bytes(&self, write: impl FnOnce(&[u8]));
}

impl Member for EndpointId {
    fn bytes(&self, write: impl FnOnce(&[u8])) {
        write(&self.raw().to_le_bytes());
    }
}

impl Member for ReplicaId {
    fn bytes(&self, write: impl FnOnce(&[u8])) {
        write(self.as_str().as_bytes());
    }
}

/// A ring at one moment. Equal members give equal rings, whatever the order in which they came.
#[derive(Clone)]
pub struct Ring<T: Member> {
    points: consistent_hash_ring::Ring<Point<T>, FixedSeed>,
    members: Vec<T>,
}

impl<T: Member> Default for Ring<T> {
    fn default() -> Self {
        let points = consistent_hash_ring::RingBuilder::new(FixedSeed).vnodes(POINTS_PER_MEMBER).build();
        Self { points, members: Vec::new() }
    }
}

impl<T: Member> Ring<T> {
    /// Its members, sorted.
    pub fn members(&self) -> &[T] {
        &self.members
    }

    /// The member that owns `key`; `None` on an empty ring.
    pub fn owner(&self, key: u64) -> Option<&T> {
        self.points.try_get(Key(key)).map(|point| &point.0)
    }

    /// All members, the owner of `key` first, each after those that it would take over from. Ends after the
    /// last; allocates, so ask [`Self::owner`] first.
    pub fn walk(&self, key: u64) -> impl Iterator<Item = &T> {
        self.points.replicas(Key(key)).map(|point| &point.0)
    }

    /// Who takes over from `gone`, first the one that does if it lives; whether or not `gone` itself is still on the
    /// ring does not matter.
    pub fn heirs<'a>(&'a self, gone: &'a T) -> impl Iterator<Item = &'a T> {
        let mut key = 0;
        gone.bytes(|bytes| key = xxh3_64_with_seed(bytes, HEIR_SEED));
        self.walk(key).filter(move |member| *member != gone)
    }

    /// This ring with exactly `members`; `None` if it has them already.
    pub fn with_members(&self, members: &[T]) -> Option<Self> {
        let mut wanted = members.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        if wanted == self.members {
            return None;
        }
        let mut next = self.clone();
        for gone in self.members.iter().filter(|member| wanted.binary_search(member).is_err()) {
            next.points.remove(&Point(gone.clone()));
        }
        let points = points_per_member(wanted.len());
        let reweigh = points != points_per_member(self.members.len());
        for member in &wanted {
            if reweigh || self.members.binary_search(member).is_err() {
                next.points.insert_weight(Point(member.clone()), points);
            }
        }
        next.members = wanted;
        Some(next)
    }
}

/// Points of each of `members`: a function of their number alone, so that replicas agree.
fn points_per_member(members: usize) -> usize {
    let doublings = members.div_ceil(MEMBERS_AT_FULL_WEIGHT).max(1).next_power_of_two().trailing_zeros();
    (POINTS_PER_MEMBER >> doublings).max(POINTS_MIN)
}

/// A ring that is read while it changes.
pub struct SharedRing<T: Member> {
    published: ArcSwap<Ring<T>>,
    changing: Mutex<()>,
}

impl<T: Member> Default for SharedRing<T> {
    fn default() -> Self {
        Self { published: ArcSwap::from_pointee(Ring::default()), changing: Mutex::new(()) }
    }
}

impl<T: Member> SharedRing<T> {
    /// The ring as it is now.
    pub fn load(&self) -> arc_swap::Guard<Arc<Ring<T>>> {
        self.published.load()
    }

    /// Makes it a ring of exactly `members`. Readers see the old one until the new one is whole.
    pub fn set_members(&self, members: &[T]) -> RingChange {
        let _one_at_a_time = self.changing.lock();
        match self.published.load().with_members(members) {
            None => RingChange::Same,
            Some(next) => {
                self.published.store(Arc::new(next));
                RingChange::Changed
            }
        }
    }
}

/// Whether a ring was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingChange {
    /// It had these members.
    Same,
    /// Some keys have another owner now.
    Changed,
}

/// A member as the ring hashes it: a tag, then its bytes, in one write.
#[derive(Clone, PartialEq, Eq)]
struct Point<T>(T);

impl<T: Member> Hash for Point<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u8(b'm');
        self.0.bytes(|bytes| state.write(bytes));
    }
}

/// A key as the ring hashes it: never the bytes of a member.
struct Key(u64);

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u8(b'k');
        state.write(&self.0.to_le_bytes());
    }
}

/// Makes [`FixedHasher`]s that all begin alike.
#[derive(Clone, Copy)]
struct FixedSeed;

impl BuildHasher for FixedSeed {
    type Hasher = FixedHasher;

    fn build_hasher(&self) -> FixedHasher {
        FixedHasher(0)
    }
}

/// xxh3-64 of each write, seeded by those before it. Integers (the ring hashes a member's points one from
/// the other, as `u64`) are written as little-endian bytes, not as the machine has them.
struct FixedHasher(u64);

impl Hasher for FixedHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u64(&mut self, figure: u64) {
        self.write(&figure.to_le_bytes());
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    fn endpoint(n: usize) -> EndpointId {
        EndpointId::of(&format!("http://10.0.0.{n}:8000"), None)
    }

    fn ring(of: &[usize]) -> Ring<EndpointId> {
        let members: Vec<_> = of.iter().map(|n| endpoint(*n)).collect();
        Ring::default().with_members(&members).unwrap_or_default()
    }

    fn key(n: u32) -> u64 {
        xxh3_64(&n.to_le_bytes())
    }

    /// The figures come from a second implementation, in another language.
    #[test]
    fn owners_are_the_same_on_every_build() {
        let replicas: Vec<_> = ["a", "b", "c"].map(ReplicaId::new).to_vec();
        let by_replica = Ring::default().with_members(&replicas).unwrap();
        let owners: String = (0..24).map(|n| by_replica.owner(key(n)).unwrap().as_str()).collect();
        assert_eq!(owners, "bbbaaabbcacccabbbcbbbbab");
        let by_endpoint = ring(&[0, 1, 2, 3]);
        let index = |id: &EndpointId| (0..4).find(|n| endpoint(*n) == *id).unwrap().to_string();
        let owners: String = (0..24).map(|n| index(by_endpoint.owner(key(n)).unwrap())).collect();
        assert_eq!(owners, "212313023101311322012012");
        let walk: String = by_endpoint.walk(key(0)).map(index).collect();
        assert_eq!(walk, "2103");
    }

    #[test]
    fn an_empty_ring_has_no_owner() {
        assert_eq!(Ring::<EndpointId>::default().owner(7), None);
        assert_eq!(Ring::<EndpointId>::default().walk(7).count(), 0);
    }

    #[test]
    fn the_busiest_of_a_hundred_owns_little_more_than_the_mean() {
        let ring = ring(&(0..100).collect::<Vec<_>>());
        let mut owned = std::collections::BTreeMap::new();
        for n in 0..100_000 {
            *owned.entry(*ring.owner(key(n)).unwrap()).or_insert(0) += 1;
        }
        assert_eq!(owned.len(), 100);
        assert!(owned.values().all(|count| *count < 1_350), "{:?}", owned.values().max());
    }

    #[test]
    fn a_member_that_leaves_moves_only_its_own_keys() {
        let before = ring(&(0..10).collect::<Vec<_>>());
        let after = ring(&[0, 1, 2, 3, 4, 5, 6, 7, 8]);
        for n in 0..2_000 {
            let (was, is) = (before.owner(key(n)).unwrap(), after.owner(key(n)).unwrap());
            assert!(was == is || *was == endpoint(9), "key {n}");
        }
    }

    #[test]
    fn points_halve_with_each_doubling_beyond_full_weight() {
        let points = [0, 1, 1_024, 1_025, 2_048, 2_049, 5_000, 1_000_000].map(points_per_member);
        assert_eq!(points, [128, 128, 128, 64, 64, 32, 16, 8]);
    }

    #[test]
    fn readers_see_a_new_ring_only_when_it_differs() {
        let shared = SharedRing::default();
        assert_eq!(shared.set_members(&[endpoint(2), endpoint(1)]), RingChange::Changed);
        assert_eq!(shared.set_members(&[endpoint(1), endpoint(2), endpoint(1)]), RingChange::Same);
        assert_eq!(shared.load().members().len(), 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_history_of_a_ring_leaves_no_trace(steps in prop::collection::vec(prop::collection::btree_set(0_usize..12, 0..8), 1..5)) {
            let mut grown = Ring::default();
            for step in &steps {
                let members: Vec<_> = step.iter().map(|n| endpoint(*n)).collect();
                grown = grown.with_members(&members).unwrap_or(grown);
            }
            let fresh = ring(&steps.last().unwrap().iter().copied().collect::<Vec<_>>());
            for n in 0..100 {
                prop_assert_eq!(grown.owner(key(n)), fresh.owner(key(n)));
            }
        }

        #[test]
        fn a_walk_names_each_member_once_and_begins_with_the_owner(count in 1_usize..20, at: u64) {
            let ring = ring(&(0..count).collect::<Vec<_>>());
            let walk: Vec<_> = ring.walk(at).copied().collect();
            prop_assert_eq!(ring.owner(at), walk.first());
            let mut seen = walk.clone();
            seen.sort_unstable();
            prop_assert_eq!(seen.as_slice(), ring.members());
        }
    }
}
