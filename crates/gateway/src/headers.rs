//! Which headers travel: end-to-end ones pass, hop-by-hop ones stay, a few are ours to set.

use std::net::IpAddr;

use actix_web::http::header as client;
use http::header as engine;
use routing::endpoint::EndpointSpec;
use routing::{Decision, ReplicaId};

use crate::upstream::Target;

/// The header that names a request.
pub(crate) const X_REQUEST_ID: client::HeaderName = client::HeaderName::from_static("x-request-id");

/// Names of headers that concern one connection only (RFC 9110, 7.6.1), and `expect`, which the server has
/// already answered. `content-length` is set anew from the body's own length.
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "expect"
            | "content-length"
    )
}

/// What the gateway says about a request on its way to an engine.
pub(crate) struct Outgoing<'a> {
    /// Where it goes.
    pub(crate) target: &'a Target,
    /// Its id, kept or made.
    pub(crate) request_id: &'a client::HeaderValue,
    /// Who sent it.
    pub(crate) peer: Option<IpAddr>,
    /// Whether the reply must be readable: then no compression is asked for.
    pub(crate) plain_reply: bool,
}

/// The headers of a request to an engine.
pub(crate) fn to_engine(from: &client::HeaderMap, ours: &Outgoing<'_>) -> http::HeaderMap {
    let mut to = http::HeaderMap::with_capacity(from.len() + 4);
    to.insert(engine::HOST, ours.target.host.clone());
    let named = connection_names(from.get_all(client::CONNECTION).map(client::HeaderValue::as_bytes));
    for (name, value) in from {
        let name = name.as_str();
        let kept = match name {
            "host" | "x-request-id" | "x-forwarded-for" => false,
            "accept-encoding" => !ours.plain_reply,
            "x-data-parallel-rank" => ours.target.rank.is_none(),
            _ => !is_hop_by_hop(name) && !named.iter().any(|other| other == name),
        };
        if kept {
            append(&mut to, name, value.as_bytes());
        }
    }
    append(&mut to, "x-request-id", ours.request_id.as_bytes());
    if let Some(rank) = &ours.target.rank {
        to.insert("x-data-parallel-rank", rank.clone());
    }
    if let Some(chain) = forwarded_for(from, ours.peer) {
        append(&mut to, "x-forwarded-for", &chain);
    }
    to
}

/// Copies an engine's reply headers for the client. Its `x-request-id` is left out: the gateway's stands.
pub(crate) fn to_client(from: &http::HeaderMap, to: &mut client::HeaderMap) {
    let named = connection_names(from.get_all(engine::CONNECTION).iter().map(http::HeaderValue::as_bytes));
    for (name, value) in from {
        let name = name.as_str();
        if name == "x-request-id" || is_hop_by_hop(name) || named.iter().any(|other| other == name) {
            continue;
        }
        if let (Ok(name), Ok(value)) = (
            client::HeaderName::from_bytes(name.as_bytes()),
            client::HeaderValue::from_bytes(value.as_bytes()),
        ) {
            to.append(name, value);
        }
    }
}

/// How long an engine's reply says it is.
pub(crate) fn content_length(from: &http::HeaderMap) -> Option<u64> {
    from.get(engine::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Says which replica, endpoint and reason served a request.
pub(crate) fn explain(
    to: &mut client::HeaderMap,
    replica: &ReplicaId,
    endpoint: &EndpointSpec,
    decision: &Decision,
) {
    let values = [
        ("x-grapevine-replica", replica.as_str().to_owned()),
        ("x-grapevine-endpoint", endpoint.label()),
        ("x-grapevine-decision", format!("{}:{}", decision.policy, decision.reason.as_str())),
    ];
    for (name, value) in values {
        if let Ok(value) = client::HeaderValue::from_str(&value) {
            to.insert(client::HeaderName::from_static(name), value);
        }
    }
}

fn append(to: &mut http::HeaderMap, name: &str, value: &[u8]) {
    if let (Ok(name), Ok(value)) =
        (http::HeaderName::from_bytes(name.as_bytes()), http::HeaderValue::from_bytes(value))
    {
        to.append(name, value);
    }
}

/// Headers that `Connection` names, lower case; `keep-alive` and `close` are no headers of interest.
fn connection_names<'a>(values: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    values
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(|name| String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase())
        .filter(|name| !matches!(name.as_str(), "" | "keep-alive" | "close"))
        .collect()
}

fn forwarded_for(from: &client::HeaderMap, peer: Option<IpAddr>) -> Option<Vec<u8>> {
    let mut chain = Vec::new();
    for value in from.get_all("x-forwarded-for") {
        if !chain.is_empty() {
            chain.extend_from_slice(b", ");
        }
        chain.extend_from_slice(value.as_bytes());
    }
    if let Some(peer) = peer {
        if !chain.is_empty() {
            chain.extend_from_slice(b", ");
        }
        chain.extend_from_slice(peer.to_string().as_bytes());
    }
    (!chain.is_empty()).then_some(chain)
}
