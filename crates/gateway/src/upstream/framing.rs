//! Where a reply's body ends (RFC 9112, 6.3), and what its chunks hold.

use bytes::{Buf, Bytes, BytesMut};
use memchr::memchr;

/// Longest piece that is copied rather than handed over, in bytes: up to here a copy costs less than a new
/// buffer to read into.
const COPIED_BYTES_MAX: usize = 4 << 10;

/// Longest line of a chunked body's framing, in bytes: sizes, extensions, trailers.
const LINE_BYTES_MAX: usize = 8 << 10;

/// How a body is framed, and how far it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// Nothing is left (or there never was anything).
    Over,
    /// So many bytes are left.
    Sized(u64),
    /// In chunks.
    Chunked(Chunk),
    /// Until the connection ends, which then can't be told from a break.
    UntilClose,
}

/// Where in a chunked body its reader stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// Before a chunk's size.
    Size,
    /// Within a chunk's data, of which so many bytes are left.
    Data(u64),
    /// After a chunk's data, before its line end.
    DataEnd,
    /// After the last chunk.
    Trailers,
}

/// The framing makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Garbled;

impl Framing {
    /// Takes what `buffer` holds of the body out of it, in one piece. An empty piece means that more has to
    /// be read first, unless it is over.
    pub(super) fn take(&mut self, buffer: &mut BytesMut) -> Result<Bytes, Garbled> {
        match self {
            Self::Over => Ok(Bytes::new()),
            Self::UntilClose => Ok(take(buffer, buffer.len())),
            Self::Sized(left) => {
                let piece = split(buffer, left);
                if *left == 0 {
                    *self = Self::Over;
                }
                Ok(piece)
            }
            Self::Chunked(_) => self.take_chunks(buffer),
        }
    }

    /// A single piece of data is handed on as it lies; several are put together, so that a burst of small
    /// chunks goes on as one.
    fn take_chunks(&mut self, buffer: &mut BytesMut) -> Result<Bytes, Garbled> {
        let mut first = Bytes::new();
        let mut joined = BytesMut::new();
        while let Self::Chunked(chunk) = self {
            match chunk {
                Chunk::Data(left) => {
                    if buffer.is_empty() {
                        break;
                    }
                    if first.is_empty() && joined.is_empty() {
                        first = split(buffer, left);
                    } else {
                        let length = here(buffer, *left);
                        if joined.is_empty() {
                            joined.reserve(first.len() + buffer.len());
                            joined.extend_from_slice(&first);
                        }
                        joined.extend_from_slice(&buffer[..length]);
                        buffer.advance(length);
                        *left -= length as u64;
                    }
                    if *left == 0 {
                        *chunk = Chunk::DataEnd;
                    }
                }
                Chunk::Size => {
                    let Some(length) = line(buffer)? else { break };
                    let size = size_of(&buffer[..length])?;
                    buffer.advance(length + 2);
                    *chunk = if size == 0 { Chunk::Trailers } else { Chunk::Data(size) };
                }
                Chunk::DataEnd => {
                    let Some(length) = line(buffer)? else { break };
                    if length > 0 {
                        return Err(Garbled);
                    }
                    buffer.advance(2);
                    *chunk = Chunk::Size;
                }
                Chunk::Trailers => {
                    let Some(length) = line(buffer)? else { break };
                    buffer.advance(length + 2);
                    if length == 0 {
                        *self = Self::Over;
                    }
                }
            }
        }
        Ok(if joined.is_empty() { first } else { joined.freeze() })
    }
}

/// How many of the bytes that are `left` are in `buffer`.
fn here(buffer: &BytesMut, left: u64) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len())
}

fn split(buffer: &mut BytesMut, left: &mut u64) -> Bytes {
    let length = here(buffer, *left);
    *left -= length as u64;
    take(buffer, length)
}

/// Takes the first `length` bytes out of `buffer`. A short piece is copied, so that the buffer stays nobody
/// else's and can be filled again; a long one is handed over as it lies.
pub(super) fn take(buffer: &mut BytesMut, length: usize) -> Bytes {
    if length > COPIED_BYTES_MAX {
        return buffer.split_to(length).freeze();
    }
    let piece = Bytes::copy_from_slice(&buffer[..length]);
    buffer.advance(length);
    piece
}

/// How long the next line is without its end, once it is whole.
fn line(buffer: &[u8]) -> Result<Option<usize>, Garbled> {
    let Some(at) = memchr(b'\n', buffer) else {
        return if buffer.len() > LINE_BYTES_MAX { Err(Garbled) } else { Ok(None) };
    };
    if at > LINE_BYTES_MAX || at == 0 || buffer[at - 1] != b'\r' {
        return Err(Garbled);
    }
    Ok(Some(at - 1))
}

/// A chunk's size: hexadecimal digits, then perhaps an extension.
fn size_of(line: &[u8]) -> Result<u64, Garbled> {
    let end = memchr(b';', line).unwrap_or(line.len());
    let digits = line[..end].trim_ascii_end();
    if digits.is_empty() || digits.len() > 15 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(Garbled);
    }
    let digits = std::str::from_utf8(digits).map_err(|_| Garbled)?;
    u64::from_str_radix(digits, 16).map_err(|_| Garbled)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `wire`, cut into parts of `step` bytes, to the end; the body and what was left behind it.
    fn read(mut framing: Framing, wire: &[u8], step: usize) -> Result<(Vec<u8>, Framing, usize), Garbled> {
        let mut buffer = BytesMut::new();
        let mut body = Vec::new();
        for part in wire.chunks(step) {
            buffer.extend_from_slice(part);
            body.extend_from_slice(&framing.take(&mut buffer)?);
        }
        Ok((body, framing, buffer.len()))
    }

    fn check(framing: Framing, wire: &str, want: &str, over: bool, left: usize) {
        for step in 1..=wire.len() {
            let (body, after, rest) = read(framing, wire.as_bytes(), step).unwrap();
            assert_eq!(String::from_utf8(body).unwrap(), want, "step {step}");
            assert_eq!((after == Framing::Over, rest), (over, left), "step {step}");
        }
    }

    const CHUNKED: Framing = Framing::Chunked(Chunk::Size);

    #[test]
    fn bodies_are_read_to_their_end_however_they_are_cut() {
        check(Framing::Sized(5), "helloX", "hello", true, 1);
        check(Framing::Sized(9), "hello", "hello", false, 0);
        check(Framing::UntilClose, "hello", "hello", false, 0);
        check(CHUNKED, "3\r\nabc\r\n00A;x=y\r\n0123456789\r\n0\r\n\r\nX", "abc0123456789", true, 1);
        check(CHUNKED, "1\r\na\r\n0\r\nTrailer: 1\r\nB: c\r\n\r\n", "a", true, 0);
        check(CHUNKED, "5\r\nab", "ab", false, 0);
        check(CHUNKED, "3\r\nabc\r\n", "abc", false, 0);
    }

    #[test]
    fn framing_that_makes_no_sense_is_refused() {
        let long = format!("1;{}\r\na\r\n", "x".repeat(LINE_BYTES_MAX + 1));
        for wire in [
            "zz\r\n",
            "\r\n",
            "-1\r\n",
            "3\r\nabcX\r\n",
            "1\na\n",
            "fffffffffffffffff\r\n",
            "+3\r\nabc\r\n",
            &long,
        ] {
            for step in [1, 2, wire.len()] {
                assert_eq!(read(CHUNKED, wire.as_bytes(), step).unwrap_err(), Garbled, "{wire:.20?} {step}");
            }
        }
    }

    #[test]
    fn a_burst_of_chunks_comes_out_in_one_piece() {
        let mut buffer = BytesMut::from(&b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n"[..]);
        let mut framing = CHUNKED;
        assert_eq!(framing.take(&mut buffer).unwrap(), "abc");
        assert_eq!(framing, Framing::Over);
    }
}
