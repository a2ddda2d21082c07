//! Names of things, as types: an endpoint's id can't be passed where a block's hash is meant.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

macro_rules! hashed_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(u64);

        impl $name {
            /// The id with this raw value.
            pub const fn from_raw(raw: u64) -> Self {
                Self(raw)
            }

            /// The raw 64-bit value.
            pub const fn raw(self) -> u64 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:016x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:016x})"), self.0)
            }
        }
    };
}

hashed_id! {
    /// An endpoint, the same on every replica: the hash of its normalised URL and DP rank, never an index.
    EndpointId
}
hashed_id! {
    /// A session, the hash of an explicit key (header or body field) or of a response id.
    SessionKey
}
hashed_id! {
    /// A prefix block: the hash of a fixed run of prompt bytes chained with all before it.
    BlockHash
}

impl EndpointId {
    /// The id of the endpoint at `url` (already normalised), data-parallel rank `rank` if it has one.
    pub fn of(url: &str, rank: Option<u16>) -> Self {
        match rank {
            None => Self(xxh3_64(url.as_bytes())),
            Some(rank) => Self(xxh3_64(format!("{url}#{rank}").as_bytes())),
        }
    }

    /// Reads the 16 hex digits that `Display` writes.
    pub fn parse(text: &str) -> Option<Self> {
        (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok()).flatten().map(Self)
    }
}

impl SessionKey {
    /// The key that stands for `text` within `namespace` (a header's name, a body field's name), so that
    /// equal values of different kinds don't meet.
    pub fn of(namespace: &str, text: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_64_with_seed(text, xxh3_64(namespace.as_bytes())))
    }
}

/// A replica of the cluster, by its configured (or made-up) name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReplicaId(Arc<str>);

impl ReplicaId {
    /// The replica called `name`.
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplicaId({})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_ids_are_the_same_on_every_build_and_differ_by_rank() {
        let plain = EndpointId::of("http://10.0.0.1:8000", None);
        assert_eq!(EndpointId::parse(&plain.to_string()), Some(plain));
        assert_ne!(plain, EndpointId::of("http://10.0.0.1:8000", Some(0)));
        assert_eq!(EndpointId::parse("xyz"), None);
    }

    #[test]
    fn equal_texts_of_different_kinds_are_different_sessions() {
        assert_ne!(SessionKey::of("x-session-id", b"7"), SessionKey::of("x-user-id", b"7"));
    }
}
