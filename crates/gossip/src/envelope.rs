//! The outside of every datagram: a header that says whose it is, and the seal.
//!
//! ```text
//! "GV" | version 1 | kind 1 | sealed 1 | part 1 | parts 1 | cluster 4 | sender 8 | counter 8 | body
//! body, if sealed: nonce 24 | ciphertext | tag 16, with the header as associated data
//! ```
//! Numbers are little-endian. `sender` is drawn at random by each socket when it opens, `counter` grows with
//! each datagram. Anything else on the ports is thrown away here, before it reaches a parser of anyone else's.

use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use rand::RngCore;

use crate::{ClusterKey, Rejection};

/// No datagram is longer, so that none needs IP fragments (1,280 is what every IPv6 link carries).
pub(crate) const DATAGRAM_BYTES_MAX: usize = 1_200;
/// What is left for the body, whether sealed or not.
pub(crate) const PAYLOAD_BYTES_MAX: usize = DATAGRAM_BYTES_MAX - HEADER_BYTES - SEAL_BYTES;

const HEADER_BYTES: usize = 27;
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
const SEAL_BYTES: usize = NONCE_BYTES + TAG_BYTES;
const MAGIC: [u8; 2] = *b"GV";
const VERSION: u8 = 1;

/// What a datagram or a connection carries. The text is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FrameKind {
    /// The library's gossip of the pulse.
    Pulse,
    /// The library's gossip of the ledger.
    Ledger,
    /// Fresh facts told directly.
    Push,
    /// The question whether a sender is there now, and its answer.
    Prove,
    /// Missing records or a snapshot, over TCP.
    Pull,
    /// What a replica has staged at prefill engines, for its heirs.
    Staged,
    /// Who waits at a replica for room.
    Queue,
}

impl FrameKind {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Pulse, Self::Ledger, Self::Push, Self::Prove, Self::Pull, Self::Staged, Self::Queue];

    /// The kind as a metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pulse => "pulse",
            Self::Ledger => "ledger",
            Self::Push => "push",
            Self::Prove => "prove",
            Self::Pull => "pull",
            Self::Staged => "staged",
            Self::Queue => "queue",
        }
    }

    /// The kind that `code` stands for in a datagram. Pulls have no datagrams.
    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code && *kind != Self::Pull)
    }
}

/// The readable part of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: FrameKind,
    /// Which part of a message in several datagrams, from 0.
    pub(crate) part: u8,
    /// How many datagrams the message has; at least 1.
    pub(crate) parts: u8,
    pub(crate) sender: u64,
    pub(crate) counter: u64,
}

/// Closes and opens datagrams and pulls with the cluster's keys, or leaves them open if there are none.
pub(crate) struct Sealer {
    /// Which cluster, as a hash.
    cluster: u32,
    ciphers: Vec<XChaCha20Poly1305>,
}

impl Sealer {
    pub(crate) fn new(cluster_id: &str, keys: &[ClusterKey]) -> Self {
        let cluster = xxhash_rust::xxh3::xxh3_64(cluster_id.as_bytes()) as u32;
        let ciphers = keys.iter().map(|key| XChaCha20Poly1305::new(key.bytes().into())).collect();
        Self { cluster, ciphers }
    }

    /// Whether there is a key, and so whether a sender's word can be relied on.
    pub(crate) fn is_keyed(&self) -> bool {
        !self.ciphers.is_empty()
    }

    /// The datagram with this header and body; the body is at most [`PAYLOAD_BYTES_MAX`].
    pub(crate) fn close(&self, header: Header, body: &[u8]) -> Vec<u8> {
        debug_assert!(body.len() <= PAYLOAD_BYTES_MAX);
        let mut out = Vec::with_capacity(HEADER_BYTES + SEAL_BYTES + body.len());
        out.extend(MAGIC);
        out.extend([VERSION, header.kind as u8, u8::from(self.is_keyed()), header.part, header.parts]);
        out.extend(self.cluster.to_le_bytes());
        out.extend(header.sender.to_le_bytes());
        out.extend(header.counter.to_le_bytes());
        let sealed = self.seal(&out, body);
        out.extend(sealed);
        out
    }

    /// Takes a datagram apart, or says why it is none of ours.
    pub(crate) fn open(&self, datagram: &[u8]) -> Result<(Header, Vec<u8>), Rejection> {
        if datagram.len() > DATAGRAM_BYTES_MAX {
            return Err(Rejection::Oversized);
        }
        if !datagram.starts_with(&MAGIC) {
            return Err(Rejection::Foreign);
        }
        let (head, body) = datagram.split_at_checked(HEADER_BYTES).ok_or(Rejection::Truncated)?;
        if head[2] != VERSION {
            return Err(Rejection::Version);
        }
        let kind = FrameKind::from_code(head[3]).ok_or(Rejection::Kind)?;
        if head[4] != u8::from(self.is_keyed()) {
            return Err(Rejection::Unsealed);
        }
        let (part, parts) = (head[5], head[6]);
        if part >= parts {
            return Err(Rejection::Malformed);
        }
        let number = |at: usize| head[at..at + 8].iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte));
        if head[7..11] != self.cluster.to_le_bytes() {
            return Err(Rejection::Cluster);
        }
        let header = Header { kind, part, parts, sender: number(11), counter: number(19) };
        Ok((header, self.unseal(head, body)?))
    }

    /// `body` such that only a holder of the key can read or have made it, in this context; as it is if
    /// there is no key.
    pub(crate) fn seal(&self, context: &[u8], body: &[u8]) -> Vec<u8> {
        let Some(cipher) = self.ciphers.first() else { return body.to_vec() };
        let mut nonce = [0; NONCE_BYTES];
        rand::rng().fill_bytes(&mut nonce);
        let nonce = XNonce::from(nonce);
        let sealed = cipher.encrypt(&nonce, Payload { msg: body, aad: context });
        // Only a body of 2^38 bytes can fail to be sealed.
        let sealed = sealed.unwrap_or_default();
        [nonce.as_slice(), &sealed].concat()
    }

    /// Undoes [`seal`](Self::seal) with either key.
    pub(crate) fn unseal(&self, context: &[u8], sealed: &[u8]) -> Result<Vec<u8>, Rejection> {
        if self.ciphers.is_empty() {
            return Ok(sealed.to_vec());
        }
        let (nonce, sealed) = sealed.split_at_checked(NONCE_BYTES).ok_or(Rejection::Truncated)?;
        let open = |cipher: &XChaCha20Poly1305| {
            cipher.decrypt(XNonce::from_slice(nonce), Payload { msg: sealed, aad: context }).ok()
        };
        self.ciphers.iter().find_map(open).ok_or(Rejection::Seal)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HEADER: Header = Header { kind: FrameKind::Push, part: 1, parts: 3, sender: 7, counter: 1 << 40 };

    fn keyed(keys: &[u8]) -> Sealer {
        let keys: Vec<_> = keys.iter().map(|&byte| ClusterKey::from_bytes([byte; 32])).collect();
        Sealer::new("test", &keys)
    }

    #[test]
    fn what_is_closed_opens_with_either_of_two_keys() {
        for (close, open) in [(&[][..], &[][..]), (&[1], &[1]), (&[1, 2], &[2, 1]), (&[2], &[1, 2])] {
            let datagram = keyed(close).close(HEADER, b"body");
            assert_eq!(keyed(open).open(&datagram), Ok((HEADER, b"body".to_vec())));
        }
    }

    #[test]
    fn every_stranger_has_its_cause() {
        let open = keyed(&[]).close(HEADER, b"body");
        let sealed = keyed(&[1]).close(HEADER, b"body");
        let changed = |at: usize, to: u8| {
            let mut datagram = sealed.clone();
            datagram[at] = to;
            datagram
        };
        let table = [
            (vec![], Rejection::Foreign),
            (b"hello".to_vec(), Rejection::Foreign),
            (sealed[..10].to_vec(), Rejection::Truncated),
            (sealed[..HEADER_BYTES + 5].to_vec(), Rejection::Truncated),
            (vec![0; DATAGRAM_BYTES_MAX + 1], Rejection::Oversized),
            (open, Rejection::Unsealed),
            (keyed(&[2]).close(HEADER, b"body"), Rejection::Seal),
            (changed(2, 9), Rejection::Version),
            (changed(3, 99), Rejection::Kind),
            (changed(3, FrameKind::Pull as u8), Rejection::Kind),
            (changed(5, 3), Rejection::Malformed),
            (changed(7, sealed[7] ^ 1), Rejection::Cluster),
            (changed(12, 1), Rejection::Seal),
            (changed(sealed.len() - 1, sealed[sealed.len() - 1] ^ 1), Rejection::Seal),
        ];
        for (datagram, cause) in table {
            assert_eq!(keyed(&[1]).open(&datagram), Err(cause));
        }
        assert_eq!(keyed(&[]).open(&sealed), Err(Rejection::Unsealed));
    }

    #[test]
    fn the_largest_body_fits_the_largest_datagram() {
        assert_eq!(keyed(&[1]).close(HEADER, &[0; PAYLOAD_BYTES_MAX]).len(), DATAGRAM_BYTES_MAX);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..1_300), keep in any::<bool>()) {
            let mut bytes = bytes;
            if keep && bytes.len() >= 2 {
                bytes[..2].copy_from_slice(&MAGIC);
            }
            let _ = keyed(&[]).open(&bytes);
            let _ = keyed(&[1, 2]).open(&bytes);
        }
    }
}
