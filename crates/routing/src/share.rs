//! How much of the traffic runs through which prefix block, and where prompts part company.
//!
//! A prefix that most prompts begin with is worth a copy at every endpoint: whoever follows the one copy
//! that happens to be first sends the whole fleet's traffic to one engine. A prefix that few prompts share
//! is worth one home. So the number of homes of a block is its share of the traffic times the number of
//! endpoints, and while it has fewer it must not draw requests to those it has.
//!
//! Only blocks after which prompts were seen to differ count: a chat's own turns all run through its
//! blocks, yet are one conversation.
//!
//! The counts sit in a table of fixed size, one word a block, without locks. Where two blocks fall on one
//! word, the more frequent stays (the rule of the Misra-Gries summary). A lost update under contention costs
//! one count.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::BlockHash;

/// Words in the table: 256 KiB, room for the blocks of some hundred long common prefixes.
const WORDS: usize = 1 << 15;

/// Counts halve whenever a model has seen this many prompts, so that the share is that of about the last
/// two thousand, however fast they came.
const AGE_EVERY: u32 = 1_024;

/// No more blocks of one prompt than this are counted: 128 KiB at the default size. What is common to most
/// prompts is not longer.
const DEPTH_COUNTED_MAX: usize = 256;

/// Prompts that are assumed to have run through any block before the first was counted: while little is
/// known a branching prefix is taken for common.
const PRIOR: f64 = 1.0;

const COUNT_BITS: u32 = 20;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const AGE_BITS: u32 = 8;
const AGE_SHIFT: u32 = COUNT_BITS;
const AGE_MASK: u64 = (1 << AGE_BITS) - 1;
const BRANCHED: u64 = 1 << (COUNT_BITS + AGE_BITS);
const CHILD_BITS: u32 = 15;
const CHILD_SHIFT: u32 = COUNT_BITS + AGE_BITS + 1;
const CHILD_MASK: u64 = (1 << CHILD_BITS) - 1;
const TAG_SHIFT: u32 = CHILD_SHIFT + CHILD_BITS;
const TAG_MASK: u64 = (1 << (64 - TAG_SHIFT)) - 1;

/// One block's word: tag, mark of the block that came after it, whether others came too, age, count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Word(u64);

impl Word {
    fn new(tag: u64, child: u64, branched: bool, age: u8, count: u64) -> Self {
        Self(
            tag << TAG_SHIFT
                | child << CHILD_SHIFT
                | if branched { BRANCHED } else { 0 }
                | u64::from(age) << AGE_SHIFT
                | count.min(COUNT_MASK),
        )
    }

    const fn tag(self) -> u64 {
        self.0 >> TAG_SHIFT
    }

    const fn child(self) -> u64 {
        self.0 >> CHILD_SHIFT & CHILD_MASK
    }

    const fn branched(self) -> bool {
        self.0 & BRANCHED != 0
    }

    const fn age(self) -> u8 {
        (self.0 >> AGE_SHIFT & AGE_MASK) as u8
    }

    /// The word after a prompt that went on with the block marked `child`; 0 if it ended.
    fn followed_by(self, child: u64) -> Self {
        let first = if self.child() == 0 { child } else { self.child() };
        let branched = self.branched() || (child != 0 && first != child);
        Self::new(self.tag(), first, branched, self.age(), self.0 & COUNT_MASK)
    }

    /// The count as it weighs at `age`.
    fn count(self, age: u8) -> u64 {
        let halvings = age.wrapping_sub(self.age());
        (self.0 & COUNT_MASK).checked_shr(u32::from(halvings)).unwrap_or(0)
    }
}

/// See the module.
#[derive(Debug)]
pub struct PrefixShares {
    words: Box<[AtomicU64]>,
}

impl Default for PrefixShares {
    fn default() -> Self {
        Self { words: (0..WORDS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl PrefixShares {
    fn slot(&self, hash: u64) -> (&AtomicU64, u64) {
        // Both parts come from a product, so that poor low bits of a hash do no harm.
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (&self.words[(mixed >> 49) as usize % WORDS], mixed & TAG_MASK)
    }

    /// A mark of a block as another's child; never 0.
    fn mark(child: BlockHash) -> u64 {
        (child.raw().wrapping_mul(0xd6e8_feb8_6659_fd93) >> (64 - CHILD_BITS)).max(1)
    }

    /// Counts a prompt of the model `model`.
    pub fn count(&self, model: u64, blocks: &[BlockHash]) {
        let (slot, tag) = self.slot(model);
        let word = Word(slot.load(Ordering::Relaxed));
        // The model's own word counts its prompts since the last halving and carries the age of all.
        let (mut prompts, mut age) =
            if word.tag() == tag { ((word.0 & COUNT_MASK) + 1, word.age()) } else { (1, 0) };
        if prompts >= u64::from(AGE_EVERY) * 2 {
            prompts /= 2;
            age = age.wrapping_add(1);
        }
        slot.store(Word::new(tag, 1, true, age, prompts).0, Ordering::Relaxed);
        for (at, block) in blocks.iter().take(DEPTH_COUNTED_MAX).enumerate() {
            self.pass(*block, blocks.get(at + 1).copied(), age);
        }
    }

    /// Notes where another replica's prompt went on from what is known, without counting it: each replica
    /// counts its own part of the traffic, of which all parts look alike.
    pub fn note_branches(&self, blocks: &[BlockHash]) {
        for pair in blocks.windows(2).take(DEPTH_COUNTED_MAX) {
            let (slot, tag) = self.slot(pair[0].raw());
            let word = Word(slot.load(Ordering::Relaxed));
            let child = Self::mark(pair[1]);
            let next = if word.tag() == tag {
                word.followed_by(child)
            } else {
                Word::new(tag, child, false, word.age(), 0)
            };
            if word.tag() == tag || word.0 & COUNT_MASK == 0 {
                slot.store(next.0, Ordering::Relaxed);
            }
        }
    }

    fn pass(&self, block: BlockHash, child: Option<BlockHash>, age: u8) {
        let (slot, tag) = self.slot(block.raw());
        let word = Word(slot.load(Ordering::Relaxed));
        let count = word.count(age);
        let child = child.map_or(0, Self::mark);
        let next = if word.tag() == tag {
            let word = word.followed_by(child);
            Word::new(tag, word.child(), word.branched(), age, count + 1)
        } else if count <= 1 {
            Word::new(tag, child, false, age, 1)
        } else {
            Word::new(word.tag(), word.child(), word.branched(), age, count - 1)
        };
        if next != word {
            slot.store(next.0, Ordering::Relaxed);
        }
    }

    /// How many leading blocks of the prompt should have more homes than they have: they are as good as
    /// warm everywhere. `endpoints` could serve the prompt, `holders(depth)` of them hold the block at
    /// `depth`.
    pub fn common_depth(
        &self,
        model: u64,
        blocks: &[BlockHash],
        endpoints: usize,
        holders: impl Fn(usize) -> usize,
    ) -> usize {
        let (slot, tag) = self.slot(model);
        let total = Word(slot.load(Ordering::Relaxed));
        let (prompts, age) = if total.tag() == tag { (total.0 & COUNT_MASK, total.age()) } else { (0, 0) };
        let mut common = 0;
        for (at, block) in blocks.iter().take(DEPTH_COUNTED_MAX).enumerate() {
            let (slot, tag) = self.slot(block.raw());
            let word = Word(slot.load(Ordering::Relaxed));
            if word.tag() != tag {
                break;
            }
            let share = ((word.count(age) as f64 + PRIOR) / (prompts as f64 + PRIOR)).min(1.0);
            let homes = (share * endpoints as f64).round() as usize;
            if homes < 2 {
                // Deeper blocks have no greater share.
                break;
            }
            let next = blocks.get(at + 1).map_or(0, |next| Self::mark(*next));
            let branches = word.branched() || (next != 0 && word.child() != 0 && word.child() != next);
            if branches && holders(at) < homes {
                common = at + 1;
            }
        }
        common
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: u64 = 7;

    /// A prompt of named parts, each two blocks long.
    fn prompt(parts: &[&str]) -> Vec<BlockHash> {
        let mut chain = MODEL;
        let mut blocks = Vec::new();
        for part in parts {
            for half in 0..2_u8 {
                chain = xxhash_rust::xxh3::xxh3_64_with_seed(&[part.as_bytes(), &[half]].concat(), chain);
                blocks.push(BlockHash::from_raw(chain));
            }
        }
        blocks
    }

    fn check(shares: &PrefixShares, parts: &[&str], endpoints: usize, holders: usize, common: usize) {
        let got = shares.common_depth(MODEL, &prompt(parts), endpoints, |_| holders);
        assert_eq!(got, common, "{parts:?} on {endpoints} endpoints of which {holders} hold it");
    }

    #[test]
    fn what_most_prompts_share_is_common_and_a_tenants_own_is_not() {
        let shares = PrefixShares::default();
        for chat in 0..10 {
            for tenant in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"] {
                shares.count(MODEL, &prompt(&["system", tenant, &format!("chat {chat}")]));
            }
        }
        check(&shares, &["system", "a", "new chat"], 4, 1, 2);
        check(&shares, &["system", "new tenant", "new chat"], 4, 1, 2);
        check(&shares, &["other", "a", "new chat"], 4, 1, 0);
    }

    #[test]
    fn a_block_with_enough_homes_is_not_common() {
        let shares = PrefixShares::default();
        for n in 0..100 {
            let half = if n % 2 == 0 { "one" } else { "two" };
            shares.count(MODEL, &prompt(&[half, &format!("{n}")]));
        }
        check(&shares, &["one", "new"], 8, 3, 2);
        check(&shares, &["one", "new"], 8, 4, 0);
        check(&shares, &["one", "new"], 2, 1, 0);
    }

    #[test]
    fn the_turns_of_the_only_chat_are_not_a_common_prefix() {
        let shares = PrefixShares::default();
        let turns = ["first", "second", "third", "fourth"];
        for upto in 1..=turns.len() {
            shares.count(MODEL, &prompt(&turns[..upto]));
        }
        check(&shares, &turns, 4, 1, 0);
    }

    #[test]
    fn the_second_prompt_behind_a_prefix_already_shows_that_it_branches() {
        let shares = PrefixShares::default();
        shares.count(MODEL, &prompt(&["system", "a"]));
        check(&shares, &["system", "b"], 4, 1, 2);
    }

    #[test]
    fn another_replicas_branches_are_noted() {
        let shares = PrefixShares::default();
        shares.note_branches(&prompt(&["system", "a"]));
        shares.note_branches(&prompt(&["system", "b"])[1..]);
        check(&shares, &["system", "a"], 4, 1, 2);
    }

    #[test]
    fn old_habits_are_forgotten() {
        let shares = PrefixShares::default();
        for n in 0..2_000 {
            shares.count(MODEL, &prompt(&["old", &format!("{n}")]));
        }
        check(&shares, &["old", "x"], 4, 1, 2);
        for n in 0..8_000 {
            shares.count(MODEL, &prompt(&["new", &format!("{n}")]));
        }
        check(&shares, &["old", "x"], 4, 1, 0);
        check(&shares, &["new", "x"], 4, 1, 2);
    }

    #[test]
    fn a_frequent_block_outlives_a_flood_of_others() {
        let shares = PrefixShares::default();
        for n in 0..20_000 {
            shares.count(MODEL, &prompt(&["system", &format!("{n}"), "x", "y", "z"]));
        }
        check(&shares, &["system", "q"], 4, 1, 2);
    }
}
