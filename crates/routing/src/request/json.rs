//! A cursor over JSON text that builds nothing: it checks the grammar (RFC 8259) and hands out spans of
//! the original bytes.
//!
//! It never recurses, so that no input can exhaust the stack, and every byte is looked at a bounded
//! number of times. Strings are handed out as written; [`Text::pieces`] undoes the escapes on the fly.

use super::text::{Text, find_special};

/// How deeply arrays and objects may nest. Real bodies (tool schemas) stay below 20; engines' own parsers
/// give up between 128 and 1,000.
pub(crate) const DEPTH_MAX: u32 = 128;

/// Why text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Byte offset in the text that the cursor was made for.
    pub(crate) at: usize,
    pub(crate) kind: FaultKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// The text ends inside a value.
    Truncated,
    /// Something else than what the grammar allows here.
    Expected(&'static str),
    /// More than [`DEPTH_MAX`] levels.
    TooDeep,
}

/// What a value is, told by its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

impl Kind {
    /// With its article, for messages.
    pub(crate) const fn described(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool => "a boolean",
            Self::Number => "a number",
            Self::String => "a string",
            Self::Array => "an array",
            Self::Object => "an object",
        }
    }
}

/// A number as a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    /// A whole number from 0; what does not fit is the greatest that does.
    Whole(u64),
    Negative,
    Fraction,
}

/// A number as written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Number<'a>(&'a [u8]);

impl Number<'_> {
    /// Reads the number as a count; `16.0` and `1e3` are whole.
    pub(crate) fn count(&self) -> Count {
        if self.0.first() == Some(&b'-') {
            return if self.float() == 0.0 { Count::Whole(0) } else { Count::Negative };
        }
        if self.0.iter().all(u8::is_ascii_digit) {
            return Count::Whole(
                self.0
                    .iter()
                    .fold(0_u64, |sum, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'))),
            );
        }
        let float = self.float();
        // `as` saturates, which is what is wanted of 1e300
        if float.fract() == 0.0 { Count::Whole(float as u64) } else { Count::Fraction }
    }

    /// The nearest float; infinite if it is out of range.
    pub(crate) fn float(&self) -> f64 {
        std::str::from_utf8(self.0).ok().and_then(|digits| digits.parse().ok()).unwrap_or(f64::NAN)
    }
}

/// What a walk over a value of any kind meets, in the order of the text.
pub(crate) trait Sink {
    /// One of `{ } [ ]`.
    fn bracket(&mut self, byte: u8);
    /// A string or a key.
    fn text(&mut self, text: Text<'_>);
    /// A number or a literal, as written.
    fn word(&mut self, word: &[u8]);
}

struct Nothing;

impl Sink for Nothing {
    fn bracket(&mut self, _: u8) {}
    fn text(&mut self, _: Text<'_>) {}
    fn word(&mut self, _: &[u8]) {}
}

/// Reads one value after the other from text that is known to be UTF-8.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
    depth: u32,
}

type Read<T> = Result<T, Fault>;

impl<'a> Cursor<'a> {
    pub(crate) const fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0, depth: 0 }
    }

    fn fault<T>(&self, expected: &'static str) -> Read<T> {
        let kind =
            if self.at >= self.text.len() { FaultKind::Truncated } else { FaultKind::Expected(expected) };
        Err(Fault { at: self.at.min(self.text.len()), kind })
    }

    /// The next byte that is not white space, not taken.
    fn next_byte(&mut self) -> Option<u8> {
        while let Some(&byte) = self.text.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// What the next value is.
    pub(crate) fn kind(&mut self) -> Read<Kind> {
        match self.next_byte() {
            Some(b'"') => Ok(Kind::String),
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'n') => Ok(Kind::Null),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            _ => self.fault("a value"),
        }
    }

    /// Whether only white space is left.
    pub(crate) fn at_end(&mut self) -> bool {
        self.next_byte().is_none()
    }

    /// Fails unless only white space is left.
    pub(crate) fn end(&mut self) -> Read<()> {
        if self.at_end() { Ok(()) } else { self.fault("nothing after the value") }
    }

    /// Takes `null`.
    pub(crate) fn null(&mut self) -> Read<()> {
        self.literal().map(|_| ())
    }

    /// Takes `true` or `false`.
    pub(crate) fn boolean(&mut self) -> Read<bool> {
        Ok(self.literal()? == b"true")
    }

    fn literal(&mut self) -> Read<&'a [u8]> {
        let word: &[u8] = match self.next_byte() {
            Some(b't') => b"true",
            Some(b'f') => b"false",
            _ => b"null",
        };
        let rest = &self.text[self.at..];
        if rest.starts_with(word) {
            self.at += word.len();
            return Ok(&rest[..word.len()]);
        }
        if word.starts_with(rest) {
            self.at = self.text.len();
        }
        self.fault("a value")
    }

    /// Takes a whole number of up to nine digits, if that is what comes.
    pub(crate) fn small_number(&mut self) -> Option<u32> {
        self.next_byte();
        let rest = &self.text[self.at..];
        let digits = rest.iter().take(10).take_while(|byte| byte.is_ascii_digit()).count();
        let plain = digits == 1 || (2..=9).contains(&digits) && rest[0] != b'0';
        if !plain || !matches!(rest.get(digits), Some(b',' | b']' | b' ' | b'\n')) {
            return None;
        }
        self.at += digits;
        Some(rest[..digits].iter().fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0')))
    }

    /// Takes a number.
    pub(crate) fn number(&mut self) -> Read<Number<'a>> {
        self.next_byte();
        let start = self.at;
        if self.text.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        match self.text.get(self.at) {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits(),
            _ => return self.fault("a digit"),
        }
        if self.text.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.some_digits()?;
        }
        if let Some(b'e' | b'E') = self.text.get(self.at) {
            self.at += 1;
            if let Some(b'+' | b'-') = self.text.get(self.at) {
                self.at += 1;
            }
            self.some_digits()?;
        }
        Ok(Number(&self.text[start..self.at]))
    }

    fn digits(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
    }

    fn some_digits(&mut self) -> Read<()> {
        let from = self.at;
        self.digits();
        if self.at == from { self.fault("a digit") } else { Ok(()) }
    }

    /// Takes a string.
    pub(crate) fn string(&mut self) -> Read<Text<'a>> {
        if self.next_byte() != Some(b'"') {
            return self.fault("a string");
        }
        let start = self.at + 1;
        let mut at = start;
        let mut escaped = false;
        loop {
            let Some(found) = find_special(&self.text[at..]) else {
                self.at = self.text.len();
                return self.fault("the end of the string");
            };
            at += found;
            if self.text[at] < 0x20 {
                self.at = at;
                return self.fault("an escape instead of a control character in a string");
            }
            if self.text[at] == b'"' {
                self.at = at + 1;
                return Ok(Text::new(&self.text[start..at], escaped));
            }
            escaped = true;
            self.at = at + 1;
            at += match self.text.get(self.at) {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                Some(b'u') => {
                    for _ in 0..4 {
                        self.at += 1;
                        if !self.text.get(self.at).is_some_and(u8::is_ascii_hexdigit) {
                            return self.fault("four hex digits after \\u");
                        }
                    }
                    6
                }
                _ => return self.fault("an escape that JSON knows"),
            };
        }
    }

    fn descend(&mut self) -> Read<()> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(Fault { at: self.at, kind: FaultKind::TooDeep });
        }
        Ok(())
    }

    /// Takes an object, giving each key to `member` with the cursor before its value; `member` takes
    /// exactly that value.
    pub(crate) fn object<E: From<Fault>>(
        &mut self,
        mut member: impl FnMut(Text<'a>, &mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        if self.next_byte() != Some(b'{') {
            return Ok(self.fault("an object")?);
        }
        self.at += 1;
        self.descend()?;
        if self.next_byte() == Some(b'}') {
            self.at += 1;
        } else {
            loop {
                let key = self.key()?;
                member(key, self)?;
                match self.next_byte() {
                    Some(b',') => self.at += 1,
                    Some(b'}') => {
                        self.at += 1;
                        break;
                    }
                    _ => return Ok(self.fault("',' or '}'")?),
                }
            }
        }
        self.depth -= 1;
        Ok(())
    }

    /// Takes an array, calling `item` with its index and the cursor before each value; `item` takes
    /// exactly that value. Returns the number of items.
    pub(crate) fn array<E: From<Fault>>(
        &mut self,
        mut item: impl FnMut(usize, &mut Self) -> Result<(), E>,
    ) -> Result<usize, E> {
        if self.next_byte() != Some(b'[') {
            return Ok(self.fault("an array")?);
        }
        self.at += 1;
        self.descend()?;
        let mut items = 0;
        if self.next_byte() == Some(b']') {
            self.at += 1;
        } else {
            loop {
                item(items, self)?;
                items += 1;
                match self.next_byte() {
                    Some(b',') => self.at += 1,
                    Some(b']') => {
                        self.at += 1;
                        break;
                    }
                    _ => return Ok(self.fault("',' or ']'")?),
                }
            }
        }
        self.depth -= 1;
        Ok(items)
    }

    fn key(&mut self) -> Read<Text<'a>> {
        let key = self.string()?;
        if self.next_byte() != Some(b':') {
            return self.fault("':'");
        }
        self.at += 1;
        Ok(key)
    }

    /// Takes a value of any kind and returns its text.
    pub(crate) fn skip(&mut self) -> Read<&'a [u8]> {
        self.next_byte();
        let start = self.at;
        self.walk(&mut Nothing)?;
        Ok(&self.text[start..self.at])
    }

    /// Takes a value of any kind and tells `sink` what it is made of.
    pub(crate) fn walk(&mut self, sink: &mut impl Sink) -> Read<()> {
        // bit i: whether level i is an object; DEPTH_MAX levels fit
        let mut objects = 0_u128;
        let floor = self.depth;
        loop {
            let opened = match self.kind()? {
                Kind::String => {
                    sink.text(self.string()?);
                    None
                }
                Kind::Number => {
                    sink.word(self.number()?.0);
                    None
                }
                Kind::Null | Kind::Bool => {
                    sink.word(self.literal()?);
                    None
                }
                Kind::Array => Some(false),
                Kind::Object => Some(true),
            };
            let mut first = false;
            if let Some(object) = opened {
                sink.bracket(if object { b'{' } else { b'[' });
                self.at += 1;
                self.descend()?;
                objects = objects << 1 | u128::from(object);
                first = true;
            }
            // a value or an opening bracket is behind: go on to the next value
            loop {
                if self.depth == floor {
                    return Ok(());
                }
                let object = objects & 1 == 1;
                let close = if object { b'}' } else { b']' };
                match self.next_byte() {
                    Some(byte) if byte == close => {
                        sink.bracket(byte);
                        self.at += 1;
                        self.depth -= 1;
                        objects >>= 1;
                        first = false;
                        continue;
                    }
                    Some(b',') if !first => self.at += 1,
                    Some(_) if first => {}
                    _ => return self.fault(if object { "',' or '}'" } else { "',' or ']'" }),
                }
                if object {
                    sink.text(self.key()?);
                }
                break;
            }
        }
    }
}
