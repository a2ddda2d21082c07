//! Text out of numbers: the same key gives the same letters.

/// Letters that text is made of; a power of two of them, so that each takes a few bits of a number.
const LETTERS: [u8; 16] = *b"abcdefghijklmnop";
/// Letters out of one number.
const LETTERS_PER_NUMBER: usize = 16;

/// Appends exactly `bytes` letters that belong to `key`. A shorter text of a key begins a longer one.
pub(crate) fn append(text: &mut String, key: u64, bytes: usize) {
    text.reserve(bytes);
    let mut state = key;
    let mut left = bytes;
    while left > 0 {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = scramble(state);
        let mut letters = [0; LETTERS_PER_NUMBER];
        for letter in &mut letters {
            *letter = LETTERS[(bits & 15) as usize];
            bits >>= 4;
        }
        let take = left.min(LETTERS_PER_NUMBER);
        text.extend(letters[..take].iter().copied().map(char::from));
        left -= take;
    }
}

/// The text of a key alone.
pub(crate) fn of(key: u64, bytes: usize) -> String {
    let mut text = String::new();
    append(&mut text, key, bytes);
    text
}

/// One key out of a seed and what the text is for.
pub(crate) fn key(seed: u64, purpose: u64, which: u64) -> u64 {
    scramble(scramble(scramble(seed) ^ scramble(purpose)) ^ scramble(which.wrapping_add(1)))
}

/// The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit moves every output bit.
fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_text_of_any_length_and_no_two_the_same() {
        for bytes in [0, 1, 15, 16, 17, 2_048] {
            assert_eq!(of(7, bytes).len(), bytes);
            assert!(of(7, 4_096).starts_with(&of(7, bytes)));
        }
        let mut all: Vec<String> =
            (0..500).flat_map(|n| [key(1, 2, n), key(1, 3, n)]).map(|key| of(key, 64)).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 1_000);
    }
}
