//! How facts become bytes: one version byte, then bincode; base64 where the gossip library wants text.
//!
//! The only file that names bincode. A change to what is encoded (here or in `routing::facts`) is a new
//! [`VERSION`], and the golden vectors below say so before a rolling upgrade does.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bincode::config::{Configuration, Limit, LittleEndian, Varint};
use bincode::enc::write::SizeWriter;
use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

/// Version of the encoding; another is refused.
const VERSION: u8 = 1;
/// No encoded value is larger: a page of a pull is the largest.
pub(crate) const ENCODED_BYTES_MAX: usize = 1 << 20;
/// Room for most records: a pin, or a prompt of a dozen blocks.
const RECORD_BYTES: usize = 128;

const CONFIG: Configuration<LittleEndian, Varint, Limit<ENCODED_BYTES_MAX>> =
    bincode::config::standard().with_limit::<ENCODED_BYTES_MAX>();

/// Why bytes are not a value.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("nothing there")]
    Empty,
    #[error("encoding version {0}")]
    Version(u8),
    #[error("not base64")]
    Text,
    #[error("malformed")]
    Malformed,
}

/// The bytes of a value; nothing if they would be more than [`ENCODED_BYTES_MAX`].
pub(crate) fn encode<T: Serialize>(value: &T) -> Option<Vec<u8>> {
    let size = size(value);
    if size >= ENCODED_BYTES_MAX {
        return None;
    }
    let mut bytes = Vec::with_capacity(1 + size);
    bytes.push(VERSION);
    bincode::serde::encode_into_std_write(value, &mut bytes, CONFIG).ok()?;
    Some(bytes)
}

/// The value in exactly these bytes.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    let (&version, body) = bytes.split_first().ok_or(DecodeError::Empty)?;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    match bincode::serde::decode_from_slice(body, CONFIG) {
        Ok((value, used)) if used == body.len() => Ok(value),
        _ => Err(DecodeError::Malformed),
    }
}

/// The value as text.
pub(crate) fn to_text<T: Serialize>(value: &T) -> Option<String> {
    encode(value).map(|bytes| STANDARD_NO_PAD.encode(bytes))
}

/// The value in a text.
pub(crate) fn from_text<T: DeserializeOwned>(text: &str) -> Result<T, DecodeError> {
    decode(&STANDARD_NO_PAD.decode(text).map_err(|_| DecodeError::Text)?)
}

/// How many bytes a value takes within another.
pub(crate) fn size<T: Serialize>(value: &T) -> usize {
    let mut counted = SizeWriter::default();
    bincode::serde::encode_into_writer(value, &mut counted, CONFIG)
        .map_or(usize::MAX, |()| counted.bytes_written)
}

/// A fingerprint of a value, the same on every replica.
pub(crate) fn digest<T: Serialize>(value: &T) -> u64 {
    let mut bytes = Vec::with_capacity(RECORD_BYTES);
    match bincode::serde::encode_into_std_write(value, &mut bytes, CONFIG) {
        Ok(_) => xxh3_64(&bytes),
        Err(_) => xxh3_64(&[]),
    }
}

#[cfg(test)]
mod tests;
