//! The head of a reply, and what it says of the body that follows.

use std::ops::Range;

use actix_web::http::Method;
use bytes::{Bytes, BytesMut};

use super::framing::{self, Chunk, Framing};

/// Longest head of a reply, in bytes. 64 KiB: generous against cookies gone wild.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// The most fields of a head.
const FIELDS_MAX: usize = 128;
/// The most fields of an ordinary head, for which less room has to be made.
const FIELDS_USUAL: usize = 24;

/// The head of a reply: the bytes that came, and where in them its fields lie.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    raw: Bytes,
    fields: Vec<Field>,
}

#[derive(Debug)]
struct Field {
    name: Range<usize>,
    value: Range<usize>,
}

/// What reading a head has come to.
pub(super) enum Parsed {
    /// More has to be read first.
    Partial,
    /// A head that says that another one follows (1xx).
    Interim,
    /// The head, how its body is framed, and whether another request may follow on the connection.
    Whole { head: Head, framing: Framing, keep_alive: bool },
}

/// It is no head of a reply.
#[derive(Debug)]
pub(super) struct Garbled;

impl Head {
    /// All fields in their order.
    pub(crate) fn fields(&self) -> impl Iterator<Item = (&[u8], Bytes)> {
        self.fields.iter().map(|field| (&self.raw[field.name.clone()], self.raw.slice(field.value.clone())))
    }

    /// The first value of the field `name` (lower case).
    pub(crate) fn get(&self, name: &str) -> Option<&[u8]> {
        let found = self.fields.iter().find(|field| self.is(field, name))?;
        Some(&self.raw[found.value.clone()])
    }

    /// All values of the field `name` (lower case).
    pub(crate) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        let named = self.fields.iter().filter(move |field| self.is(field, name));
        named.map(|field| &self.raw[field.value.clone()])
    }

    fn is(&self, field: &Field, name: &str) -> bool {
        self.raw[field.name.clone()].eq_ignore_ascii_case(name.as_bytes())
    }

    /// How long the reply says that its body is.
    pub(crate) fn content_length(&self) -> Option<u64> {
        std::str::from_utf8(self.get("content-length")?).ok()?.trim().parse().ok()
    }
}

/// Takes a head out of `buffer`, once it is whole.
pub(super) fn take(buffer: &mut BytesMut, method: &Method) -> Result<Parsed, Garbled> {
    match take_with::<FIELDS_USUAL>(buffer, method) {
        Err(Refused::TooManyFields) => take_with::<FIELDS_MAX>(buffer, method),
        other => other,
    }
    .map_err(|_| Garbled)
}

enum Refused {
    TooManyFields,
    Garbled,
}

fn take_with<const FIELDS: usize>(buffer: &mut BytesMut, method: &Method) -> Result<Parsed, Refused> {
    let mut space = [httparse::EMPTY_HEADER; FIELDS];
    let mut reply = httparse::Response::new(&mut space);
    let length = match reply.parse(buffer) {
        Err(httparse::Error::TooManyHeaders) => return Err(Refused::TooManyFields),
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if buffer.len() > HEAD_BYTES_MAX => return Err(Refused::Garbled),
        Ok(httparse::Status::Partial) => return Ok(Parsed::Partial),
        Err(_) => return Err(Refused::Garbled),
    };
    let (Some(status), Some(version)) = (reply.code, reply.version) else { return Err(Refused::Garbled) };
    let start = buffer.as_ptr() as usize;
    let place = |part: &[u8]| {
        let at = part.as_ptr() as usize - start;
        at..at + part.len()
    };
    let field = |field: &httparse::Header<'_>| Field {
        name: place(field.name.as_bytes()),
        value: place(field.value),
    };
    let fields = reply.headers.iter().map(field).collect();
    let raw = framing::take(buffer, length);
    if status == 101 {
        // Nobody was asked to leave HTTP.
        return Err(Refused::Garbled);
    }
    if (100..200).contains(&status) {
        return Ok(Parsed::Interim);
    }
    let head = Head { status, raw, fields };
    let framing = framing_of(&head, method).map_err(|Garbled| Refused::Garbled)?;
    let keep_alive = keeps_alive(&head, version) && framing != Framing::UntilClose;
    Ok(Parsed::Whole { head, framing, keep_alive })
}

fn framing_of(head: &Head, method: &Method) -> Result<Framing, Garbled> {
    if method == Method::HEAD || matches!(head.status, 204 | 304) {
        return Ok(Framing::Over);
    }
    if let Some(codings) = head.all("transfer-encoding").last() {
        let last = codings.rsplit(|byte| *byte == b',').next().unwrap_or_default().trim_ascii();
        let is_chunked = last.eq_ignore_ascii_case(b"chunked");
        return Ok(if is_chunked { Framing::Chunked(Chunk::Size) } else { Framing::UntilClose });
    }
    let mut lengths = head.all("content-length");
    let Some(first) = lengths.next() else { return Ok(Framing::UntilClose) };
    if lengths.any(|other| other != first) || first.is_empty() || !first.iter().all(u8::is_ascii_digit) {
        return Err(Garbled);
    }
    match head.content_length() {
        Some(0) => Ok(Framing::Over),
        Some(length) => Ok(Framing::Sized(length)),
        None => Err(Garbled),
    }
}

fn keeps_alive(head: &Head, version: u8) -> bool {
    let says = |word: &[u8]| {
        head.all("connection")
            .flat_map(|value| value.split(|byte| *byte == b','))
            .any(|option| option.trim_ascii().eq_ignore_ascii_case(word))
    };
    // With both framings told, who knows where the reply ends for the other side.
    let is_ambiguous = head.get("transfer-encoding").is_some() && head.get("content-length").is_some();
    !is_ambiguous && if version == 1 { !says(b"close") } else { says(b"keep-alive") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(wire: &str, method: &Method, want: Option<(u16, Framing, bool)>) {
        for cut in 1..wire.len() {
            let mut buffer = BytesMut::from(&wire.as_bytes()[..cut]);
            if !matches!(take(&mut buffer, method), Ok(Parsed::Partial) | Err(Garbled)) {
                assert!(cut > wire.find("\r\n\r\n").unwrap_or(0), "whole after {cut} bytes");
            }
        }
        let mut buffer = BytesMut::from(wire);
        let got = match take(&mut buffer, method) {
            Ok(Parsed::Whole { head, framing, keep_alive }) => Some((head.status, framing, keep_alive)),
            Ok(Parsed::Partial | Parsed::Interim) => panic!("not whole: {wire:?}"),
            Err(Garbled) => None,
        };
        assert_eq!(got, want, "{wire:?}");
    }

    #[test]
    fn the_framing_follows_from_the_head() {
        let get = || &Method::GET;
        check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", get(), Some((200, Framing::Sized(5), true)));
        check("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", get(), Some((200, Framing::Over, true)));
        check("HTTP/1.1 200\r\nContent-Length: 5\r\n\r\n", &Method::HEAD, Some((200, Framing::Over, true)));
        let chunked = Framing::Chunked(Chunk::Size);
        check("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", get(), Some((200, chunked, true)));
        check(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, Chunked\r\nConnection: x, Close\r\n\r\n",
            get(),
            Some((200, chunked, false)),
        );
        check(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
            get(),
            Some((200, chunked, false)),
        );
        check("HTTP/1.1 200 OK\r\n\r\n", get(), Some((200, Framing::UntilClose, false)));
        check("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", get(), Some((200, Framing::Sized(1), false)));
        check("HTTP/1.1 204 No\r\n\r\n", get(), Some((204, Framing::Over, true)));
    }

    #[test]
    fn what_is_no_head_is_refused() {
        for wire in [
            "SSH-2.0-OpenSSH\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        ] {
            check(wire, &Method::GET, None);
        }
        let mut long = BytesMut::from(&*format!("HTTP/1.1 200 OK\r\nX: {}", "a".repeat(HEAD_BYTES_MAX)));
        assert!(take(&mut long, &Method::GET).is_err());
    }

    #[test]
    fn an_interim_reply_is_passed_over() {
        let mut buffer =
            BytesMut::from("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX: y\r\nx: z\r\n\r\n");
        assert!(matches!(take(&mut buffer, &Method::POST), Ok(Parsed::Interim)));
        let Ok(Parsed::Whole { head, .. }) = take(&mut buffer, &Method::POST) else { panic!("no head") };
        assert_eq!(head.all("x").collect::<Vec<_>>(), [b"y", b"z"]);
    }
}
