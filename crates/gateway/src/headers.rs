//! Which headers travel: end-to-end ones pass, hop-by-hop ones stay, a few are ours to set.

use std::net::IpAddr;

use actix_web::http::{Method, header as client};
use bytes::BytesMut;
use routing::endpoint::EndpointSpec;
use routing::{Decision, ReplicaId};

use crate::upstream::{Head, Target};

/// Room for the head of an ordinary request, in bytes.
const HEAD_BYTES: usize = 1 << 10;

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
    /// How its body is framed.
    pub(crate) length: BodyLength,
}

/// How the length of a request's body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyLength {
    /// There is none.
    Absent,
    /// In bytes.
    Known(u64),
    /// By its last chunk.
    Chunked,
}

/// The head of a request to an engine, as it goes out. All parts of it have been parsed by the server, so
/// none can hold a line end.
pub(crate) fn to_engine(
    method: &Method,
    path: &str,
    from: &client::HeaderMap,
    ours: &Outgoing<'_>,
) -> BytesMut {
    let mut to = BytesMut::with_capacity(HEAD_BYTES);
    for part in
        [method.as_str(), " ", &ours.target.base, path, " HTTP/1.1\r\nhost: ", &ours.target.host, "\r\n"]
    {
        to.extend_from_slice(part.as_bytes());
    }
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
            put(&mut to, name, value.as_bytes());
        }
    }
    put(&mut to, "x-request-id", ours.request_id.as_bytes());
    if let Some(rank) = &ours.target.rank {
        put(&mut to, "x-data-parallel-rank", rank.as_bytes());
    }
    put_forwarded_for(&mut to, from, ours.peer);
    match ours.length {
        BodyLength::Absent => {}
        BodyLength::Known(length) => put(&mut to, "content-length", length.to_string().as_bytes()),
        BodyLength::Chunked => put(&mut to, "transfer-encoding", b"chunked"),
    }
    to.extend_from_slice(b"\r\n");
    to
}

/// Copies an engine's reply headers for the client. Its `x-request-id` is left out: the gateway's stands.
pub(crate) fn to_client(from: &Head, to: &mut client::HeaderMap) {
    let named = connection_names(from.all("connection"));
    for (name, value) in from.fields() {
        let (Ok(name), Ok(value)) =
            (client::HeaderName::from_bytes(name), client::HeaderValue::from_maybe_shared(value))
        else {
            continue;
        };
        let text = name.as_str();
        if text != "x-request-id" && !is_hop_by_hop(text) && !named.iter().any(|other| other == text) {
            to.append(name, value);
        }
    }
}

/// Says which replica, endpoints and reason served a request.
pub(crate) fn explain(
    to: &mut client::HeaderMap,
    replica: &ReplicaId,
    endpoint: &EndpointSpec,
    prefill: Option<&EndpointSpec>,
    decision: &Decision,
) {
    let values = [
        ("x-grapevine-replica", Some(replica.as_str().to_owned())),
        ("x-grapevine-endpoint", Some(endpoint.label())),
        ("x-grapevine-prefill-endpoint", prefill.map(EndpointSpec::label)),
        ("x-grapevine-decision", Some(format!("{}:{}", decision.policy, decision.reason.as_str()))),
    ];
    for (name, value) in values.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        if let Ok(value) = client::HeaderValue::from_str(&value) {
            to.insert(client::HeaderName::from_static(name), value);
        }
    }
}

fn put(to: &mut BytesMut, name: &str, value: &[u8]) {
    to.extend_from_slice(name.as_bytes());
    to.extend_from_slice(b": ");
    to.extend_from_slice(value);
    to.extend_from_slice(b"\r\n");
}

/// Headers that `Connection` names, lower case; `keep-alive` and `close` are no headers of interest.
fn connection_names<'a>(values: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    values
        .flat_map(|value| value.split(|byte| *byte == b','))
        .map(|name| String::from_utf8_lossy(name.trim_ascii()).to_ascii_lowercase())
        .filter(|name| !matches!(name.as_str(), "" | "keep-alive" | "close"))
        .collect()
}

/// The chain of those who passed the request on, with the sender at its end.
fn put_forwarded_for(to: &mut BytesMut, from: &client::HeaderMap, peer: Option<IpAddr>) {
    let mut chain = String::new();
    for value in from.get_all("x-forwarded-for").filter_map(|value| value.to_str().ok()) {
        chain.push_str(value);
        chain.push_str(", ");
    }
    match peer {
        Some(peer) => chain.push_str(&peer.to_string()),
        None => chain.truncate(chain.len().saturating_sub(2)),
    }
    if !chain.is_empty() {
        put(to, "x-forwarded-for", chain.as_bytes());
    }
}
