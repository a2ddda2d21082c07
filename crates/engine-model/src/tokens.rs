//! The tokenizer: about four bytes a token, exactly invertible, and equal prefixes give equal tokens.
//!
//! Rule: text is cut from its start into pieces of four bytes, and a piece's id is those bytes as a
//! little-endian `u32` (a shorter last piece is padded with zeros). One exception: an answer word of this
//! engine (see [`crate::answer`]) is a token of its own wherever it stands, so that an answer sent back in
//! the next turn's prompt gives the very tokens that were generated, as with a real model. An answer word is
//! a space, a tilde and four characters of the base64url alphabet; its id has `0xff` as its top byte, which no
//! piece of UTF-8 text can have. Ids that a client sends count as themselves.

/// The id of one token.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenId(pub u32);

/// Bytes in an ordinary token.
const PIECE_BYTES: usize = 4;
/// Bytes in an answer word: space, tilde, four characters of six bits.
pub const WORD_BYTES: usize = 6;
const WORD_TAG: u32 = 0xff00_0000;
const WORD_MASK: u32 = 0x00ff_ffff;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

impl TokenId {
    /// The answer word that carries the lowest 24 bits of `value`.
    pub fn word(value: u64) -> Self {
        Self(WORD_TAG | (value as u32 & WORD_MASK))
    }

    /// Whether this token is an answer word.
    pub fn is_word(self) -> bool {
        self.0 & WORD_TAG == WORD_TAG
    }

    /// Appends the bytes this token stands for.
    pub fn write(self, out: &mut Vec<u8>) {
        if self.is_word() {
            out.extend_from_slice(&self.word_bytes());
        } else {
            let bytes = self.0.to_le_bytes();
            let len = bytes.iter().rposition(|&byte| byte != 0).map_or(1, |last| last + 1);
            out.extend_from_slice(&bytes[..len]);
        }
    }

    /// The text of an answer word.
    pub fn word_bytes(self) -> [u8; WORD_BYTES] {
        let digit = |shift: u32| ALPHABET[(self.0 >> shift & 63) as usize];
        [b' ', b'~', digit(18), digit(12), digit(6), digit(0)]
    }
}

/// The tokens of a text.
pub fn tokenize(text: &str) -> Vec<TokenId> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::with_capacity(bytes.len() / PIECE_BYTES + 1);
    let mut done = 0;
    for tilde in memchr::memchr_iter(b'~', bytes) {
        let Some(start) = tilde.checked_sub(1).filter(|&start| start >= done) else { continue };
        if let Some(word) = bytes.get(start..start + WORD_BYTES).and_then(parse_word) {
            push_pieces(&bytes[done..start], &mut tokens);
            tokens.push(word);
            done = start + WORD_BYTES;
        }
    }
    push_pieces(&bytes[done..], &mut tokens);
    tokens
}

/// The bytes that tokens stand for; the inverse of [`tokenize`] for text without NUL bytes.
pub fn detokenize(tokens: &[TokenId]) -> Vec<u8> {
    let mut out = Vec::with_capacity(tokens.len() * PIECE_BYTES);
    for token in tokens {
        token.write(&mut out);
    }
    out
}

/// Tokens as little-endian bytes, the form that is hashed.
pub fn to_bytes(tokens: &[TokenId]) -> Vec<u8> {
    let mut bytes = vec![0; tokens.len() * PIECE_BYTES];
    for (place, token) in bytes.chunks_exact_mut(PIECE_BYTES).zip(tokens) {
        place.copy_from_slice(&token.0.to_le_bytes());
    }
    bytes
}

fn push_pieces(bytes: &[u8], tokens: &mut Vec<TokenId>) {
    let pieces = bytes.chunks_exact(PIECE_BYTES);
    let rest = pieces.remainder();
    tokens.extend(pieces.map(|piece| TokenId(u32::from_le_bytes([piece[0], piece[1], piece[2], piece[3]]))));
    if !rest.is_empty() {
        let mut padded = [0; PIECE_BYTES];
        padded[..rest.len()].copy_from_slice(rest);
        tokens.push(TokenId(u32::from_le_bytes(padded)));
    }
}

fn parse_word(bytes: &[u8]) -> Option<TokenId> {
    if bytes[0] != b' ' || bytes[1] != b'~' {
        return None;
    }
    let mut value = 0_u32;
    for &byte in &bytes[2..WORD_BYTES] {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'-' => 62,
            b'_' => 63,
            _ => return None,
        };
        value = value << 6 | u32::from(digit);
    }
    Some(TokenId(WORD_TAG | value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn plain_text_is_a_token_for_every_four_bytes() {
        for (text, tokens) in [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("Hello world", 3)] {
            assert_eq!(tokenize(text).len(), tokens, "{text:?}");
        }
    }

    #[test]
    fn an_answer_word_is_one_token_wherever_it_stands() {
        let word = TokenId::word(0x12_3456);
        let text = String::from_utf8(word.word_bytes().to_vec()).expect("words are ASCII");
        for before in ["", "a", "abcd", "abcde", "~", " ~", " ~ab"] {
            let tokens = tokenize(&format!("{before}{text}{text}xyz"));
            let from = tokens.len() - 3;
            assert_eq!(&tokens[from..from + 2], &[word, word], "after {before:?}");
        }
    }

    proptest! {
        #[test]
        fn text_comes_back_from_its_tokens(text in "([^\\x00]|~| ~[A-Za-z0-9_-]{4}){0,60}") {
            prop_assert_eq!(detokenize(&tokenize(&text)), text.into_bytes());
        }

        #[test]
        fn a_longer_text_starts_with_the_same_tokens(text in "(~| |[a-e]){0,60}", more in "(~| |[a-e]){0,20}") {
            let short = tokenize(&text);
            let long = tokenize(&format!("{text}{more}"));
            // Only what the end of the text cuts through may differ: one piece, or a word begun (two pieces).
            let stable = short.len().saturating_sub(2);
            prop_assert_eq!(&short[..stable], &long[..stable]);
        }
    }
}
