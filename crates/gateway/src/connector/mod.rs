//! How a request that is split over two engines is said to each of them, by what moves the KV between them.
//!
//! The main choice: a leg is the client's own bytes with a few fields changed where they stand ([`crate::edit`]); what an
//! engine says of what it holds is opaque, and passed on as it came. What is made here lives and ends with one
//! request: parameters that went with another body would give a wrong answer, and spoil the engine's cache for
//! others.

mod bootstrap;
mod nixl;
mod plain;

use bytes::Bytes;
use routing::endpoint::EndpointSpec;
use routing::lifecycle::LegOrder;
use routing::retry::LegFault;

pub(crate) use bootstrap::Bootstrap;
pub(crate) use nixl::Nixl;
pub(crate) use plain::Plain;

/// Where the legs of one request meet.
pub(crate) struct Meeting<'a> {
    pub(crate) prefill: &'a EndpointSpec,
    /// Prompts times samples.
    pub(crate) sequences: u32,
    /// A number that no other request has, and so many after it.
    pub(crate) room: u64,
}

/// One way of handing KV over.
pub(crate) trait Connector: Sync {
    /// Which leg goes when.
    fn order(&self) -> LegOrder;

    /// What both legs are made of: `body` with what they say of where they meet.
    fn prepared(&self, body: &Bytes, _: &Meeting<'_>) -> Bytes {
        body.clone()
    }

    /// The body of the prefill leg: `body`, which is a JSON object, as far as computing its prompt goes.
    fn prefill_leg(&self, body: &Bytes) -> Bytes;

    /// The body of the decode leg: `body` with what the prefill leg's `reply` says.
    ///
    /// # Errors
    /// If the reply does not say what is needed.
    fn decode_leg(&self, body: &Bytes, reply: &[u8]) -> Result<Bytes, LegFault>;

    /// Whether an engine holds what it has computed until it was taken over, so that it must be told if nobody will.
    fn pins(&self) -> bool;

    /// The shortest request that has a decode engine take over what `decode_leg` would, for nobody.
    fn release_leg(&self, decode_leg: &Bytes) -> Bytes {
        decode_leg.clone()
    }

    /// The least of the prefill leg's `reply` with which what it staged can be released, by whoever has nothing else
    /// of the request; `None` if nothing pins, or nothing is said.
    fn token(&self, _reply: &[u8]) -> Option<Vec<u8>> {
        None
    }

    /// The body of a text completion that has a decode engine take over and drop what `token` names; `None` if it
    /// names nothing that can be taken over.
    fn orphan_leg(&self, _token: &[u8]) -> Option<Bytes> {
        None
    }
}

/// The connector called `name`, if it is one that this gateway speaks.
pub(crate) fn named(name: &str) -> Option<&'static dyn Connector> {
    match name {
        "vllm-nixl" => Some(&Nixl),
        "sglang-bootstrap" => Some(&Bootstrap),
        "none" => Some(&Plain),
        _ => None,
    }
}
