//! How a prompt begins, as one hash: what a ring homes prompts by.

use smallvec::SmallVec;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::rules::{Beginning, BeginningHash};

/// Bits of a SimHash that are kept. Of two prompts that differ in one word of eighty about two thirds keep
/// the same 8 bits, and 256 places are enough for a ring of some tens of endpoints.
const SIMILAR_BITS: u32 = 8;

/// The longest run of text without a blank that counts as one word: scripts that have no blanks are cut.
const WORD_BYTES_MAX: usize = 16;

/// Takes the first bytes of a prompt.
#[derive(Debug)]
pub(super) struct BeginningReader {
    rule: Beginning,
    start: SmallVec<[u8; 512]>,
}

impl BeginningReader {
    pub(super) fn new(rule: Beginning) -> Self {
        Self { rule, start: SmallVec::new() }
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        let wanted = self.rule.bytes.saturating_sub(self.start.len());
        self.start.extend_from_slice(&bytes[..bytes.len().min(wanted)]);
    }

    /// The hash of what came; `seed` keeps models apart.
    pub(super) fn key(&self, seed: u64) -> u64 {
        match self.rule.hash {
            BeginningHash::Xxhash => xxh3_64_with_seed(&self.start, seed),
            BeginningHash::Simhash => {
                let similar = simhash(&self.start) >> (u64::BITS - SIMILAR_BITS);
                xxh3_64_with_seed(&similar.to_le_bytes(), seed)
            }
        }
    }
}

/// Charikar's SimHash (2002) over words: each bit is the majority of that bit in the words' hashes, so texts
/// that share most words share most bits.
fn simhash(text: &[u8]) -> u64 {
    let mut balance = [0_i32; u64::BITS as usize];
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte >= 0x80;
    for run in text.split(|byte| !is_word(byte)) {
        for word in run.chunks(WORD_BYTES_MAX) {
            let hash = xxh3_64(word);
            for (bit, balance) in balance.iter_mut().enumerate() {
                *balance += if hash >> bit & 1 == 1 { 1 } else { -1 };
            }
        }
    }
    balance.iter().enumerate().filter(|(_, sum)| **sum > 0).fold(0, |hash, (bit, _)| hash | 1 << bit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(hash: BeginningHash, pieces: &[&str]) -> u64 {
        let mut reader = BeginningReader::new(Beginning { bytes: 512, hash });
        pieces.iter().for_each(|piece| reader.put(piece.as_bytes()));
        reader.key(7)
    }

    fn prose(seed: u64) -> String {
        (0..80).map(|at| format!("{:x} ", xxh3_64(&(seed * 1_000 + at).to_le_bytes()) as u16)).collect()
    }

    #[test]
    fn only_the_first_bytes_count_however_they_come() {
        for hash in [BeginningHash::Xxhash, BeginningHash::Simhash] {
            let text = prose(1) + &prose(2);
            let whole = key(hash, &[&text]);
            assert_eq!(key(hash, &[&text[..100], &text[100..]]), whole);
            assert_eq!(key(hash, &[&text[..512]]), whole);
            assert_eq!(key(hash, &[&text[..512], "other"]), whole);
        }
    }

    #[test]
    fn similar_beginnings_mostly_meet_under_simhash_and_never_under_xxhash() {
        let met = |hash| {
            (0..200)
                .filter(|seed| {
                    let text = prose(*seed);
                    key(hash, &[&text]) == key(hash, &[&text.replacen(' ', " changed ", 1)])
                })
                .count()
        };
        assert!(met(BeginningHash::Simhash) > 100, "{}", met(BeginningHash::Simhash));
        assert_eq!(met(BeginningHash::Xxhash), 0);
    }

    #[test]
    fn different_beginnings_are_spread_under_simhash() {
        let mut keys: Vec<u64> = (0..200).map(|seed| key(BeginningHash::Simhash, &[&prose(seed)])).collect();
        keys.sort_unstable();
        keys.dedup();
        assert!(keys.len() > 80, "{} of 200", keys.len());
    }
}
