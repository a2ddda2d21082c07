//! What the engine says: words that follow from the prompt alone, so that a continuation can be checked.
//!
//! Word `i` of the answer to prompt `P` is a token of 24 bits taken from `hash(seed(P), i)`. Nothing else
//! goes in: not the model, the engine, the cache or the sampling parameters. The seed of a prompt is found
//! in two parts: the tokens before its trailing run of answer words, then those words folded in one by one.
//! A prompt that ends in the first `k` words of an answer is therefore recognised by trying, along that
//! trailing run, where `P` could have ended; if the rest of the run is word for word what `P` is answered
//! with, the request is a continuation and goes on with word `k`. Otherwise the words are part of the prompt.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::tokens::{TokenId, to_bytes};

/// An answer, and how much of it the prompt already holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    seed: u64,
    said: u32,
}

impl Answer {
    /// The answer to a prompt.
    pub fn to(prompt: &[TokenId]) -> Self {
        let run = prompt.iter().rposition(|token| !token.is_word()).map_or(0, |last| last + 1);
        let (body, run) = prompt.split_at(run);
        let mut seed = xxh3_64_with_seed(&to_bytes(body), 0);
        for (k, &token) in run.iter().enumerate() {
            let candidate = Self { seed, said: 0 };
            if (0..).zip(&run[k..]).all(|(i, &said)| candidate.word(i) == said) {
                let said = u32::try_from(run.len() - k).unwrap_or(u32::MAX);
                return Self { seed, said };
            }
            seed = mix(seed, u64::from(token.0) + 1);
        }
        Self { seed, said: 0 }
    }

    /// The `n`-th of several answers to one prompt; the 0th is the answer itself. Only the 0th can be
    /// continued.
    pub fn sample(self, n: u32) -> Self {
        if n == 0 { self } else { Self { seed: mix(self.seed, u64::from(n) << 32), said: 0 } }
    }

    /// What is said instead when it is said from KV of another prompt.
    pub fn spoiled(self) -> Self {
        Self { seed: mix(self.seed, u64::MAX >> 1), said: 0 }
    }

    /// How many words of the answer the prompt already holds.
    pub fn said(self) -> u32 {
        self.said
    }

    /// The `i`-th token still to be said.
    pub fn token(self, i: u32) -> TokenId {
        self.word(self.said.wrapping_add(i))
    }

    /// The text of the next `count` words.
    pub fn text(self, count: u32) -> String {
        (0..count).flat_map(|i| self.token(i).word_bytes()).map(char::from).collect()
    }

    fn word(self, index: u32) -> TokenId {
        TokenId::word(mix(self.seed, u64::from(index)))
    }
}

/// A 64-bit finalizer (the constants are those of splitmix64) over a seed and a counter.
fn mix(seed: u64, value: u64) -> u64 {
    let mut z = seed.wrapping_add(value.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::tokenize;
    use proptest::prelude::*;

    fn answer(prompt: &str, words: u32) -> String {
        Answer::to(&tokenize(prompt)).text(words)
    }

    #[test]
    fn different_prompts_get_different_answers() {
        assert_ne!(answer("one", 4), answer("two", 4));
        assert_ne!(answer("one", 4), answer("one ", 4));
    }

    #[test]
    fn samples_differ_from_each_other() {
        let answer = Answer::to(&tokenize("one"));
        assert_ne!(answer.sample(1).text(3), answer.text(3));
        assert_ne!(answer.sample(1).text(3), answer.sample(2).text(3));
    }

    #[test]
    fn a_wrong_word_makes_the_text_a_prompt_of_its_own() {
        let said = answer("prompt", 5);
        let spoiled = format!("prompt{} ~AAAA", &said[..24]);
        assert_eq!(Answer::to(&tokenize(&spoiled)).said(), 0);
    }

    proptest! {
        #[test]
        fn a_prompt_with_the_first_words_is_answered_with_the_rest(
            prompt in "([a-z ]{0,30}( ~[a-z]{4}){0,3}){0,3}",
            said in 0_u32..40,
            more in 1_u32..10,
        ) {
            let whole = answer(&prompt, said + more);
            let cut = said as usize * crate::tokens::WORD_BYTES;
            let resumed = answer(&format!("{prompt}{}", &whole[..cut]), more);
            prop_assert_eq!(resumed, &whole[cut..]);
        }

        #[test]
        fn token_ids_are_continued_as_text_is(ids in prop::collection::vec(0_u32..200_000, 0..40), said in 0_u32..20) {
            let prompt: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
            let answer = Answer::to(&prompt);
            let mut partial = prompt.clone();
            partial.extend((0..said).map(|i| answer.token(i)));
            prop_assert_eq!(Answer::to(&partial).token(0), answer.token(said));
        }
    }
}
