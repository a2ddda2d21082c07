//! Two plain legs over a store that both engines share: the prefill leg leaves its KV there, the decode leg finds
//! it, and neither is told of the other.

use bytes::Bytes;
use routing::lifecycle::LegOrder;
use routing::retry::LegFault;

use super::Connector;
use crate::edit::{Change, edited};

/// `none`.
pub(crate) struct Plain;

impl Connector for Plain {
    fn order(&self) -> LegOrder {
        LegOrder::PrefillFirst
    }

    fn prefill_leg(&self, body: &Bytes) -> Bytes {
        shortened(body, "", &[])
    }

    fn decode_leg(&self, body: &Bytes, _: &[u8]) -> Result<Bytes, LegFault> {
        Ok(body.clone())
    }

    fn pins(&self) -> bool {
        false
    }
}

/// The body as a prefill alone is asked for: one token, in one piece. `replaced` goes, `added` comes.
pub(super) fn shortened(body: &Bytes, replaced: &str, added: &[(&str, &[u8])]) -> Bytes {
    let limited = std::cell::Cell::new(false);
    let change = |key: &[u8]| match key {
        b"max_tokens" => {
            limited.set(true);
            Change::set("1")
        }
        b"max_completion_tokens" => Change::set("1"),
        b"stream" => Change::set("false"),
        // The one is refused without a stream, the other beside so few tokens.
        b"stream_options" | b"min_tokens" => Change::Drop,
        key if key == replaced.as_bytes() => Change::Drop,
        _ => Change::Keep,
    };
    let body = edited(body, change, added);
    // Read everywhere, where the newer name is read by one face alone.
    if limited.get() { body } else { edited(&body, |_| Change::Keep, &[("max_tokens", b"1")]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_legs_are_a_short_one_and_the_client_s_own() {
        let body = Bytes::from_static(br#"{"prompt":"p","max_tokens":9,"stream":true}"#);
        assert_eq!(Plain.prefill_leg(&body), br#"{"prompt":"p","max_tokens":1,"stream":false}"#.as_slice());
        assert_eq!(Plain.decode_leg(&body, b"anything").unwrap(), body);
    }
}
