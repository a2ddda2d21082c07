//! The index against what it should believe.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::prefix::WarmCrowd;

/// A prompt as chained hashes: equal beginnings give equal hashes, as the block hasher's do.
fn path(words: &[u64]) -> Vec<BlockHash> {
    let mut chain = 0;
    words
        .iter()
        .map(|word| {
            chain = xxhash_rust::xxh3::xxh3_64_with_seed(&word.to_le_bytes(), chain);
            BlockHash::from_raw(chain)
        })
        .collect()
}

fn at_second(second: u64) -> Moment {
    Moment::from_millis(second * 1_000)
}

fn depths(index: &PrefixIndex, blocks: &[BlockHash]) -> BTreeMap<u16, u32> {
    let mut out = WarmDepths::default();
    index.warm_depths(blocks, &mut out);
    assert_eq!(out.deepest(), out.iter().map(|(_, depth)| depth).max().unwrap_or(0));
    for (slot, depth) in out.iter() {
        assert_eq!(out.at(slot), depth);
    }
    out.iter().map(|(slot, depth)| (slot.number(), depth)).collect()
}

impl PrefixIndex {
    fn check(&self) {
        let mut bytes = (0, 0);
        for part in &self.parts {
            let part = part.read();
            part.check(&self.shared);
            bytes.0 += part.bytes().0;
            bytes.1 += part.bytes().1;
        }
        assert_eq!(bytes.0, self.shared.entry_bytes.load(Ordering::Relaxed));
        assert_eq!(bytes.1, self.shared.crowd_bytes.load(Ordering::Relaxed));
    }

    fn all_pairs(&self, limit: usize) -> BTreeSet<(BlockHash, u16)> {
        let mut pairs = BTreeSet::new();
        let mut cursor = None;
        loop {
            let (page, next) = self.walk(cursor, limit);
            for (block, slot) in page {
                assert!(pairs.insert((block, slot.number())), "a pair came twice");
            }
            match next {
                Some(next) => cursor = Some(next),
                None => return pairs,
            }
        }
    }
}

#[test]
fn a_prompt_is_as_warm_as_what_was_placed_of_it() {
    let index = PrefixIndex::new(0);
    let prompt = path(&[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(index.place(&prompt[..3], Slot::new(0), at_second(1)), Placed { new_from: 0 });
    assert_eq!(index.place(&prompt[..5], Slot::new(0), at_second(1)), Placed { new_from: 3 });
    assert_eq!(index.place(&prompt[..5], Slot::new(0), at_second(2)), Placed { new_from: 5 });
    index.place(&prompt[..1], Slot::new(7), at_second(1));
    index.place(&path(&[9, 2, 3]), Slot::new(8), at_second(1));
    assert_eq!(depths(&index, &prompt), BTreeMap::from([(0, 5), (7, 1)]));
    assert_eq!(depths(&index, &[]), BTreeMap::new());
    assert_eq!((index.blocks(), index.pairs()), (8, 9));
}

#[test]
fn what_is_withdrawn_or_trimmed_is_not_warm() {
    let index = PrefixIndex::new(0);
    let prompt = path(&[1, 2, 3, 4, 5, 6]);
    for slot in 0..2 {
        index.place(&prompt, Slot::new(slot), at_second(1));
    }
    index.trim(&prompt, Slot::new(0), 4);
    index.withdraw(&prompt, Slot::new(1));
    assert_eq!(depths(&index, &prompt), BTreeMap::from([(0, 4)]));
    index.trim(&prompt, Slot::new(0), 100);
    assert_eq!(depths(&index, &prompt), BTreeMap::from([(0, 4)]));
    index.check();
}

#[test]
fn a_cleared_slot_holds_nothing_and_can_be_used_again() {
    let index = PrefixIndex::new(0);
    let (old, new) = (path(&[1, 2]), path(&[3]));
    index.place(&old, Slot::new(5), at_second(1));
    index.place(&old, Slot::new(6), at_second(1));
    index.clear(Slot::new(5));
    assert_eq!(depths(&index, &old), BTreeMap::from([(6, 2)]));
    assert_eq!(index.place(&old[..1], Slot::new(5), at_second(2)), Placed { new_from: 0 });
    index.place(&new, Slot::new(5), at_second(2));
    assert_eq!(depths(&index, &old), BTreeMap::from([(5, 1), (6, 2)]));
    assert_eq!(depths(&index, &new), BTreeMap::from([(5, 1)]));
}

#[test]
fn a_holder_behind_a_hole_stays_one_though_another_before_it_was_cleared() {
    let index = PrefixIndex::new(0);
    let prompt = path(&[1, 2, 3]);
    for slot in [5, 6] {
        index.place(&prompt, Slot::new(slot), at_second(1));
    }
    index.withdraw(&prompt[..1], Slot::new(6));
    index.clear(Slot::new(5));
    // the first block is new, and the others' first pairs are those of a slot that holds nothing
    assert_eq!(index.place(&prompt, Slot::new(6), at_second(2)), Placed { new_from: 0 });
    assert_eq!(index.all_pairs(10).len(), 3);
    index.withdraw(&prompt, Slot::new(6));
    assert_eq!(depths(&index, &prompt), BTreeMap::new());
    index.check();
}

#[test]
fn a_hole_does_not_hide_what_lies_behind_it() {
    let index = PrefixIndex::new(0);
    let prompt = path(&(0..20).collect::<Vec<_>>());
    index.place(&prompt, Slot::new(1), at_second(1));
    index.withdraw(&prompt[3..9], Slot::new(1));
    assert_eq!(depths(&index, &prompt), BTreeMap::from([(1, 20)]));
}

#[test]
fn thousands_may_hold_one_block() {
    let index = PrefixIndex::new(4 << 20);
    let common = path(&[1, 2, 3, 4]);
    for slot in 0..5_000 {
        let own = path(&[1, 2, 3, 4, 100 + u64::from(slot)]);
        assert_eq!(index.place(&own, Slot::new(slot), at_second(1)).new_from, 0);
        assert_eq!(index.place(&own, Slot::new(slot), at_second(1)).new_from, 5, "{slot}");
    }
    index.check();
    let mut expected: BTreeMap<u16, u32> = (0..5_000).map(|slot| (slot, 4)).collect();
    assert_eq!(depths(&index, &common), expected);
    expected.insert(77, 5);
    assert_eq!(depths(&index, &path(&[1, 2, 3, 4, 177])), expected);
    assert_eq!(index.all_pairs(100).len(), 25_000);
    // what a pair takes stays what it is for a lone holder
    assert!(index.bytes() - fixed_bytes(index.parts.len()) < 25_000 * 24, "{}", index.bytes());
    for slot in 0..5_000 {
        index.clear(Slot::new(slot));
        index.place(&common, Slot::new(slot % 10), at_second(2));
    }
    assert_eq!(depths(&index, &common).len(), 10);
    index.check();
}

#[test]
fn a_crowd_is_not_listed_where_few_are_asked_for() {
    let index = PrefixIndex::new(0);
    let prompt = path(&[1, 2, 3, 4, 5]);
    for (slots, depth) in [(0..200, 2), (0..50, 3), (0..3, 5)] {
        slots.for_each(|slot| _ = index.place(&prompt[..depth], Slot::new(slot), at_second(1)));
    }
    let mut out = WarmDepths::default();
    for _ in 0..2 {
        index.warm_depths_of_few(&prompt, 10, &mut out);
        let listed: BTreeMap<u16, u32> = out.iter().map(|(slot, depth)| (slot.number(), depth)).collect();
        assert_eq!(listed, BTreeMap::from([(0, 5), (1, 5), (2, 5)]));
        let crowd = |depth, holders| WarmCrowd { depth, holders };
        assert_eq!(out.crowds(), [crowd(3, 50), crowd(2, 200)]);
        assert_eq!(out.deepest(), 5);
    }
    assert!(index.holds(prompt[2], Slot::new(49)) && !index.holds(prompt[2], Slot::new(50)));
    for (depth, holders) in [(2, 200), (3, 50), (5, 3)] {
        for from in [0, 1 << 63, u64::MAX] {
            let some = index.some_holders(prompt[depth - 1], from, 20);
            assert_eq!(some.iter().map(|slot| slot.number()).collect::<BTreeSet<_>>().len(), holders.min(20));
            assert!(some.iter().all(|slot| index.holds(prompt[depth - 1], *slot)));
        }
    }
    index.warm_depths(&prompt, &mut out);
    assert_eq!((out.iter().count(), out.crowds()), (200, &[][..]));
}

#[test]
fn the_index_stays_within_its_bytes_and_keeps_what_is_wanted_often() {
    let bytes_max = 2 << 20;
    let index = PrefixIndex::new(bytes_max);
    let common = path(&[1, 2, 3]);
    // 1,000,000 unique blocks behind a common beginning: more than ten times what fits
    for prompt in 0..250_000_u64 {
        let unique: Vec<u64> = [1, 2, 3].into_iter().chain((0..4).map(|at| prompt << 8 | at)).collect();
        index.place(&path(&unique), Slot::new((prompt % 8) as u16), at_second(prompt / 100));
        if prompt % 10_000 == 0 {
            assert!(index.bytes() <= bytes_max, "{}", index.bytes());
        }
    }
    index.check();
    assert!(index.bytes() <= bytes_max);
    assert!(index.evicted() > 800_000);
    assert_eq!(depths(&index, &common).len(), 8, "the common part is warm everywhere");
    let pairs = index.pairs();
    assert!(pairs > 75_000, "{pairs}");
    assert!(index.bytes() - fixed_bytes(index.parts.len()) < pairs * 24);
    // of the newest blocks nearly all are there, of those from before the last fill none
    let known = |prompts: std::ops::Range<u64>| {
        let all = prompts.end - prompts.start;
        let found = prompts.filter(|prompt| {
            let unique: Vec<u64> = [1, 2, 3].into_iter().chain((0..4).map(|at| prompt << 8 | at)).collect();
            depths(&index, &path(&unique)).values().any(|depth| *depth == 7)
        });
        found.count() as f64 / all as f64
    };
    assert!(known(245_000..250_000) > 0.95);
    assert!(known(100_000..110_000) < 0.01);
}

#[test]
fn a_walk_meets_every_pair_once_whatever_the_page() {
    let index = PrefixIndex::new(0);
    let mut expected = BTreeSet::new();
    for prompt in 0..500 {
        let blocks = path(&[prompt % 7, prompt % 31, prompt]);
        let slot = Slot::new((prompt % 13) as u16);
        index.place(&blocks, slot, at_second(1));
        expected.extend(blocks.iter().map(|block| (*block, slot.number())));
    }
    for limit in [1, 2, 7, 100, 100_000] {
        assert_eq!(index.all_pairs(limit), expected);
    }
    let (page, _) = index.walk(None, 7);
    assert!(page.len() < 7 + 13);
}

#[test]
fn hashes_made_up_to_share_one_home_cost_no_more_than_their_part() {
    let index = PrefixIndex::new(0);
    // more than one part has room for, in rising and in falling order
    let rising: Vec<BlockHash> = (0..4_000).map(BlockHash::from_raw).collect();
    let falling: Vec<BlockHash> = (0..4_000).map(|low| BlockHash::from_raw(u64::MAX - low)).collect();
    index.place(&rising, Slot::new(1), at_second(1));
    index.place(&falling, Slot::new(1), at_second(1));
    index.check();
    assert!(index.bytes() <= INDEX_BYTES_MIN);
    assert!(index.evicted() > 0);
}

#[test]
fn many_may_place_withdraw_clear_and_ask_at_once() {
    let index = PrefixIndex::new(INDEX_BYTES_MIN);
    let work = |thread: u64, index: &PrefixIndex| {
        let mut out = WarmDepths::default();
        for round in 0..400 {
            let own: Vec<u64> = (0..60).map(|at| if at < 5 { at } else { round % 50 * 64 + at }).collect();
            let blocks = path(&own);
            let slot = Slot::new((thread * 5 + round % 9) as u16);
            index.place(&blocks, slot, at_second(round));
            index.warm_depths(&blocks, &mut out);
            assert!(out.iter().all(|(_, depth)| (1..=60).contains(&depth)));
            match round % 40 {
                10 => index.withdraw(&blocks[20..], slot),
                20 => index.clear(slot),
                30 => assert!(!index.walk(None, 100).0.is_empty()),
                _ => {}
            }
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let index = &index;
            scope.spawn(move || work(thread, index));
        }
    });
    index.check();
    assert!(index.bytes() <= INDEX_BYTES_MIN);
}

#[derive(Clone, Debug)]
enum Step {
    Place { prompt: Vec<u64>, slot: u16 },
    Withdraw { prompt: Vec<u64>, from: usize, slot: u16 },
    Clear { slot: u16 },
}

fn prompts() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0_u64..3, 1..12)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let slots = 0_u16..24;
    let step = prop_oneof![
        8 => (prompts(), slots.clone()).prop_map(|(prompt, slot)| Step::Place { prompt, slot }),
        2 => (prompts(), 0_usize..12, slots.clone())
            .prop_map(|(prompt, from, slot)| Step::Withdraw { prompt, from, slot }),
        1 => slots.prop_map(|slot| Step::Clear { slot }),
    ];
    prop::collection::vec(step, 1..300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// While nothing is evicted the index believes exactly what a plain set of pairs says.
    #[test]
    fn the_index_believes_what_was_placed_and_not_taken_back(steps in steps(), asked in prompts()) {
        let index = PrefixIndex::new(4 << 20);
        // beginnings of prompts and who holds them
        let mut model: BTreeSet<(Vec<u64>, u16)> = BTreeSet::new();
        for (second, step) in steps.iter().enumerate() {
            match step {
                Step::Place { prompt, slot } => {
                    let beginnings = (1..=prompt.len()).map(|depth| (prompt[..depth].to_vec(), *slot));
                    let news = beginnings.clone().position(|one| !model.contains(&one));
                    let placed = index.place(&path(prompt), Slot::new(*slot), at_second(second as u64));
                    prop_assert_eq!(placed.new_from, news.unwrap_or(prompt.len()));
                    model.extend(beginnings);
                }
                Step::Withdraw { prompt, from, slot } => {
                    // with all that hangs on it, so that prefixes stay closed
                    let Some(stem) = prompt.get(..=*from) else { continue };
                    let gone: Vec<_> = model
                        .iter()
                        .filter(|(beginning, holder)| holder == slot && beginning.starts_with(stem))
                        .cloned()
                        .collect();
                    let blocks: Vec<BlockHash> = gone.iter().map(|(beginning, _)| last(beginning)).collect();
                    index.withdraw(&blocks, Slot::new(*slot));
                    for one in &gone {
                        model.remove(one);
                    }
                }
                Step::Clear { slot } => {
                    index.clear(Slot::new(*slot));
                    model.retain(|(_, holder)| holder != slot);
                }
            }
        }
        index.check();
        prop_assert_eq!(index.evicted(), 0);
        let pairs: BTreeSet<_> = model.iter().map(|(beginning, slot)| (last(beginning), *slot)).collect();
        prop_assert_eq!(&index.all_pairs(10), &pairs);
        let found = depths(&index, &path(&asked));
        for slot in 0..24 {
            let deepest = (1..=asked.len()).rev().find(|depth| model.contains(&(asked[..*depth].to_vec(), slot)));
            prop_assert_eq!(found.get(&slot).copied(), deepest.map(|depth| depth as u32));
        }
    }

    /// Wherever holes are, each pair stands once.
    #[test]
    fn a_pair_stands_once_whatever_was_taken_back_before(
        steps in prop::collection::vec((0_u8..8, 0_usize..6, 1_usize..6, 0_u16..12), 1..200),
    ) {
        let index = PrefixIndex::new(0);
        let prompt = path(&[0, 1, 2, 3, 4, 5]);
        let mut model: BTreeSet<(BlockHash, u16)> = BTreeSet::new();
        for (kind, from, length, slot) in steps {
            let part = &prompt[from..prompt.len().min(from + length)];
            let pairs = part.iter().map(|block| (*block, slot));
            match kind {
                0 => {
                    index.clear(Slot::new(slot));
                    model.retain(|(_, holder)| *holder != slot);
                }
                1 | 2 => {
                    index.withdraw(part, Slot::new(slot));
                    pairs.for_each(|pair| _ = model.remove(&pair));
                }
                _ => {
                    let news = pairs.clone().position(|pair| !model.contains(&pair));
                    let placed = index.place(part, Slot::new(slot), at_second(1));
                    prop_assert_eq!(placed.new_from, news.unwrap_or(part.len()));
                    model.extend(pairs);
                }
            }
            prop_assert_eq!(&index.all_pairs(10), &model);
        }
        index.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Under pressure it may forget, but it makes nothing up and stays in order and within its bytes.
    #[test]
    fn under_pressure_the_index_forgets_but_makes_nothing_up(
        seeds in prop::collection::vec((0_u64..400, 0_u16..40), 200),
        cleared in prop::collection::vec(0_u16..40, 0..6),
    ) {
        let index = PrefixIndex::new(INDEX_BYTES_MIN);
        let mut model: BTreeSet<(BlockHash, u16)> = BTreeSet::new();
        for (second, (seed, slot)) in seeds.iter().enumerate() {
            let prompt: Vec<u64> = (0..400).map(|at| if at < 4 { at } else { seed * 1_000 + at }).collect();
            let blocks = path(&prompt);
            index.place(&blocks, Slot::new(*slot), at_second(second as u64));
            model.extend(blocks.iter().map(|block| (*block, *slot)));
            if second == 150 {
                for slot in &cleared {
                    index.clear(Slot::new(*slot));
                    model.retain(|(_, holder)| holder != slot);
                }
            }
        }
        index.check();
        prop_assert!(index.bytes() <= INDEX_BYTES_MIN);
        prop_assert!(index.evicted() > 0);
        prop_assert!(index.all_pairs(1_000).is_subset(&model));
    }
}

fn last(beginning: &[u64]) -> BlockHash {
    path(beginning)[beginning.len() - 1]
}
