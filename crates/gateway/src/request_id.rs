//! Every request has an id, the client's if it sent one that can be used.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

use actix_web::http::header::{HeaderMap, HeaderValue};

/// Longest client-sent id that is kept, in bytes; it ends up in logs, tables and the engine's own ids.
const ID_BYTES_MAX: usize = 128;

/// The id of one request, as it travels.
#[derive(Clone, Debug)]
pub(crate) struct RequestId(HeaderValue);

impl RequestId {
    /// The client's `X-Request-Id` if it is short and printable, else a new one.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        headers
            .get("x-request-id")
            .filter(|value| is_usable(value.as_bytes()))
            .map_or_else(Self::make, |value| Self(value.clone()))
    }

    /// The id as a header's value.
    pub(crate) const fn value(&self) -> &HeaderValue {
        &self.0
    }

    /// The id as text.
    pub(crate) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }

    /// A new id: 32 hex digits, unlike any other (64 bits drawn per thread, 64 counted and mixed).
    pub(crate) fn make() -> Self {
        thread_local! {
            static SEED: (u64, Cell<u64>) = (drawn(), Cell::new(drawn()));
        }
        let (high, low) = SEED.with(|(seed, count)| {
            count.set(count.get().wrapping_add(1));
            (*seed, mix(count.get()))
        });
        Self(
            HeaderValue::from_str(&format!("{high:016x}{low:016x}")).unwrap_or(HeaderValue::from_static("0")),
        )
    }
}

fn is_usable(id: &[u8]) -> bool {
    (1..=ID_BYTES_MAX).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

fn drawn() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// The finaliser of splitmix64: neighbours look unlike each other.
const fn mix(count: u64) -> u64 {
    let z = (count ^ (count >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(sent: &str, kept: bool) {
        let mut headers = HeaderMap::new();
        headers.insert("x-request-id".parse().unwrap(), HeaderValue::from_str(sent).unwrap());
        assert_eq!(RequestId::of(&headers).as_str() == sent, kept, "{sent:?}");
    }

    #[test]
    fn a_usable_id_is_kept_and_any_other_replaced() {
        check("my-req-2", true);
        check(&"a".repeat(128), true);
        check(&"a".repeat(129), false);
        check("two words", false);
        check("", false);
    }

    #[test]
    fn made_ids_differ() {
        let ids: std::collections::HashSet<_> =
            (0..1_000).map(|_| RequestId::of(&HeaderMap::new()).as_str().to_owned()).collect();
        assert_eq!(ids.len(), 1_000);
        assert!(ids.iter().all(|id| id.len() == 32));
    }
}
