//! Strings of JSON as they are written, and the search for what ends them.

use memchr::memchr2;

/// The longest key that is compared after its escapes are undone; no key that is read is longer.
const KEY_BYTES_MAX: usize = 64;

/// Text whose escapes are undone is handed on in pieces of about so many bytes.
const GATHER_BYTES: usize = 256;

/// Within a string, so many bytes without anything special are looked at word by word; then it is probably
/// a long one (an image), where vector code starts to pay.
const WORDWISE_BYTES: usize = 256;

/// A string's inside as it is written, without its quotes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text<'a> {
    raw: &'a [u8],
    escaped: bool,
}

impl<'a> Text<'a> {
    /// The inside of a string that is known to be sound.
    pub(crate) const fn new(raw: &'a [u8], escaped: bool) -> Self {
        Self { raw, escaped }
    }

    /// A text without escapes.
    pub(crate) const fn plain(raw: &'a [u8]) -> Self {
        Self { raw, escaped: false }
    }

    /// The text as written, if it has no escapes.
    pub(crate) fn as_plain(&self) -> Option<&'a [u8]> {
        (!self.escaped).then_some(self.raw)
    }

    /// The text in order, escapes undone, in as few pieces as that takes. A lone surrogate reads as
    /// U+FFFD.
    pub(crate) fn pieces(&self, mut take: impl FnMut(&[u8])) {
        if !self.escaped {
            take(self.raw);
            return;
        }
        // gathered, since text has escapes every few words
        let mut buffer = [0; GATHER_BYTES];
        let mut used = 0;
        let mut rest = self.raw;
        while !rest.is_empty() {
            let plain = find(rest, |word| equal(word, b'\\')).unwrap_or(rest.len());
            let (mut now, after) = rest.split_at(plain);
            while !now.is_empty() {
                if used == GATHER_BYTES {
                    take(&buffer);
                    used = 0;
                }
                let fits = now.len().min(GATHER_BYTES - used);
                buffer[used..used + fits].copy_from_slice(&now[..fits]);
                used += fits;
                now = &now[fits..];
            }
            rest = after;
            if !rest.is_empty() {
                if used + 4 > GATHER_BYTES {
                    take(&buffer[..used]);
                    used = 0;
                }
                let (decoded, length) = unescape(rest);
                used += decoded.encode_utf8(&mut buffer[used..]).len();
                rest = &rest[length..];
            }
        }
        take(&buffer[..used]);
    }

    /// The text as an owned string, escapes undone.
    pub(crate) fn to_owned(self) -> String {
        let mut bytes = Vec::with_capacity(self.raw.len());
        self.pieces(|piece| bytes.extend_from_slice(piece));
        String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
    }

    /// The text without escapes, in `buffer` if it has any. A text with escapes that does not fit is
    /// given as written, which equals no key.
    pub(crate) fn key<'b>(&'b self, buffer: &'b mut KeyBuffer) -> &'b [u8] {
        if !self.escaped {
            return self.raw;
        }
        let mut used = Some(0);
        self.pieces(|piece| {
            used = used.and_then(|from| {
                buffer.0.get_mut(from..from + piece.len())?.copy_from_slice(piece);
                Some(from + piece.len())
            });
        });
        used.map_or(self.raw, |used| &buffer.0[..used])
    }

    /// Whether the text, escapes undone, is `expected`.
    pub(crate) fn is(&self, expected: &str) -> bool {
        self.key(&mut KeyBuffer::default()) == expected.as_bytes()
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }

    /// Where its opening quote stands in `text`, of which it is a part.
    pub(crate) fn start_in(&self, text: &[u8]) -> usize {
        self.raw.as_ptr().addr() - text.as_ptr().addr() - 1
    }
}

/// Room for a key whose escapes are undone.
pub(crate) struct KeyBuffer([u8; KEY_BYTES_MAX]);

impl Default for KeyBuffer {
    fn default() -> Self {
        Self([0; KEY_BYTES_MAX])
    }
}

/// The character that the escape at the start of `text` stands for, and the escape's length in bytes.
fn unescape(text: &[u8]) -> (char, usize) {
    let short = match text.get(1) {
        Some(b'n') => '\n',
        Some(b't') => '\t',
        Some(b'r') => '\r',
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'u') => {
            let high = hex4(text, 2);
            if (0xd800..0xdc00).contains(&high) && text.get(6) == Some(&b'\\') && text.get(7) == Some(&b'u') {
                let low = hex4(text, 8);
                if (0xdc00..0xe000).contains(&low) {
                    let code = 0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                    return (char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER), 12);
                }
            }
            return (char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER), 6);
        }
        Some(&other) => char::from(other),
        None => return (char::REPLACEMENT_CHARACTER, text.len()),
    };
    (short, 2)
}

/// The number that four hex digits from `at` write.
fn hex4(text: &[u8], at: usize) -> u32 {
    text.iter().skip(at).take(4).fold(0, |sum, &digit| sum << 4 | char::from(digit).to_digit(16).unwrap_or(0))
}

/// Marks, by their top bits, the bytes of `word` that equal `byte`. Bytes above the first one marked may be
/// marked without need.
const fn equal(word: u64, byte: u8) -> u64 {
    let difference = word ^ (EACH * byte as u64);
    difference.wrapping_sub(EACH) & !difference & EACH << 7
}

/// Marks the control characters in the same way.
const fn control(word: u64) -> u64 {
    word.wrapping_sub(EACH * 0x20) & !word & EACH << 7
}

const EACH: u64 = 0x0101_0101_0101_0101;

/// The first byte of `text` that `marks` marks, eight at a time.
fn find(text: &[u8], marks: impl Fn(u64) -> u64) -> Option<usize> {
    let (words, rest) = text.as_chunks::<8>();
    for (at, word) in words.iter().enumerate() {
        let marked = marks(u64::from_le_bytes(*word));
        if marked != 0 {
            return Some(at * 8 + marked.trailing_zeros() as usize / 8);
        }
    }
    // spaces are never marked
    let mut last = [b' '; 8];
    last[..rest.len()].copy_from_slice(rest);
    let marked = marks(u64::from_le_bytes(last));
    (marked != 0).then(|| words.len() * 8 + marked.trailing_zeros() as usize / 8)
}

/// The first byte that ends a plain run of a string: a quote, a backslash or a control character.
pub(super) fn find_special(text: &[u8]) -> Option<usize> {
    let near = &text[..text.len().min(WORDWISE_BYTES)];
    let special = |word| equal(word, b'"') | equal(word, b'\\') | control(word);
    if let Some(at) = find(near, special) {
        return Some(at);
    }
    let far = &text[near.len()..];
    let end = memchr2(b'"', b'\\', far);
    let plain = &far[..end.unwrap_or(far.len())];
    // Without an early exit, and as a minimum, so that it becomes vector code.
    let at = if plain.iter().fold(u8::MAX, |least, &byte| least.min(byte)) < 0x20 {
        plain.iter().position(|&byte| byte < 0x20)
    } else {
        end
    };
    at.map(|at| near.len() + at)
}
