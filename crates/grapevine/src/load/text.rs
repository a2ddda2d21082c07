//! Prompt text out of numbers: the same key gives the same bytes, on every machine and in every version.
//!
//! The words are common and have three letters, so that a word with its space is four bytes and, for the
//! usual byte-pair tokenizers, one token. A prompt of `n` tokens is therefore `4 n` bytes long and costs a
//! real engine close to `n` tokens.

/// Bytes of generated text that stand for one token.
pub const BYTES_PER_TOKEN: usize = 4;

/// Bits of the generator spent on one word: `WORDS` has `2^6` entries.
const BITS_PER_WORD: u32 = 6;

const WORDS: [&str; 1 << BITS_PER_WORD] = [
    "the ", "and ", "for ", "you ", "was ", "are ", "not ", "but ", "had ", "has ", "her ", "his ", "one ",
    "our ", "out ", "day ", "get ", "him ", "how ", "man ", "new ", "now ", "old ", "see ", "two ", "way ",
    "who ", "boy ", "did ", "its ", "let ", "put ", "say ", "she ", "too ", "use ", "car ", "dog ", "cat ",
    "run ", "sun ", "sea ", "red ", "big ", "hot ", "top ", "end ", "few ", "far ", "law ", "own ", "air ",
    "job ", "pay ", "war ", "art ", "oil ", "eye ", "age ", "arm ", "bad ", "bed ", "box ", "sky ",
];

/// What a piece of text is for: two pieces for different purposes never share their words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Piece {
    /// The part of the system prompt that every chat has.
    Common,
    /// The part of the system prompt that one tenant's chats have.
    Tenant(u64),
    /// What the user says at a turn (from 0) of a chat.
    Turn {
        /// Which chat.
        chat: u64,
        /// Which of its turns, from 0.
        turn: u32,
    },
    /// One prefix block of a trace, by its hash id.
    Block(u64),
    /// The whole prompt of a trace row that shares nothing.
    Row(u64),
}

impl Piece {
    fn key(self, seed: u64) -> u64 {
        let (purpose, first, second) = match self {
            Self::Common => (1, 0, 0),
            Self::Tenant(tenant) => (2, tenant, 0),
            Self::Turn { chat, turn } => (3, chat, u64::from(turn)),
            Self::Block(id) => (4, id, 0),
            Self::Row(row) => (5, row, 0),
        };
        [purpose, first, second].iter().fold(scramble(seed), |key, part| scramble(key ^ scramble(*part)))
    }
}

/// Appends exactly `bytes` bytes of words (ASCII letters and spaces) for this piece.
///
/// A shorter text for the same piece and seed is a prefix of a longer one.
pub(super) fn append(text: &mut String, seed: u64, piece: Piece, bytes: usize) {
    let mut numbers = Numbers::new(piece.key(seed));
    text.reserve(bytes);
    let end = text.len() + bytes;
    let (mut bits, mut bits_left) = (0u64, 0u32);
    while text.len() < end {
        if bits_left < BITS_PER_WORD {
            (bits, bits_left) = (numbers.next(), u64::BITS);
        }
        let word = WORDS[(bits & ((1 << BITS_PER_WORD) - 1)) as usize];
        bits >>= BITS_PER_WORD;
        bits_left -= BITS_PER_WORD;
        let take = word.len().min(end - text.len());
        text.push_str(&word[..take]);
    }
}

/// A stream of numbers from a seed: splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
///
/// Written out because a workload must stay the same from one version of a random number crate to the next.
#[derive(Debug, Clone)]
pub(super) struct Numbers {
    state: u64,
}

impl Numbers {
    /// The stream that belongs to `seed`.
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub(super) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.state)
    }

    /// The next number in `[0, 1)`.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The finaliser of splitmix64: a bijection in which every input bit moves every output bit.
pub(super) fn scramble(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn text(seed: u64, piece: Piece, bytes: usize) -> String {
        let mut text = String::new();
        append(&mut text, seed, piece, bytes);
        text
    }

    #[test]
    fn a_piece_has_exactly_the_asked_length() {
        for bytes in [0, 1, 3, 4, 5, 340, 2048, 2049] {
            assert_eq!(text(7, Piece::Common, bytes).len(), bytes);
        }
    }

    #[test]
    fn a_shorter_text_is_a_prefix_of_the_longer_one() {
        assert!(text(7, Piece::Block(9), 2048).starts_with(&text(7, Piece::Block(9), 1001)));
    }

    #[test]
    fn pieces_differ_within_their_first_sixty_four_bytes() {
        let pieces =
            (0..1000).map(Piece::Block).chain((0..1000).map(Piece::Row)).chain((0..1000).map(Piece::Tenant));
        let turns = (0..100).flat_map(|chat| (0..10).map(move |turn| Piece::Turn { chat, turn }));
        let texts: HashSet<_> = pieces.chain(turns).map(|piece| text(1, piece, 64)).collect();
        assert_eq!(texts.len(), 4000);
    }

    #[test]
    fn another_seed_gives_another_text() {
        assert_ne!(text(1, Piece::Common, 64), text(2, Piece::Common, 64));
    }

    #[test]
    fn the_text_of_a_key_never_changes() {
        // Recorded: a changed generator would make old results incomparable without a word.
        assert_eq!(text(0, Piece::Block(0), 24), "and see top hot car had ");
    }

    #[test]
    fn unit_numbers_fill_the_unit_interval() {
        let mut numbers = Numbers::new(3);
        let draws: Vec<f64> = (0..10_000).map(|_| numbers.unit()).collect();
        assert!(draws.iter().all(|draw| (0.0..1.0).contains(draw)));
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean - 0.5).abs() < 0.02, "mean {mean}");
    }
}
