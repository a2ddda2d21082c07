//! The bodies of the two legs of a split chat, as vLLM's NIXL connector exchanges them.

use anyhow::Context as _;
use bytes::Bytes;
use serde_json::{Map, Value, json};

/// The field that both engines read.
const PARAMS: &str = "kv_transfer_params";

/// The body that makes an engine compute the prompt of `chat` and keep its KV.
pub(super) fn prefill(chat: &[u8]) -> anyhow::Result<Bytes> {
    let mut leg: Map<String, Value> = serde_json::from_slice(chat)?;
    leg.remove("stream_options");
    leg.insert("stream".to_owned(), false.into());
    leg.insert("max_tokens".to_owned(), 1.into());
    leg.insert(PARAMS.to_owned(), json!({ "do_remote_decode": true, "do_remote_prefill": false }));
    Ok(serde_json::to_vec(&leg)?.into())
}

/// The body that makes another engine fetch that KV and answer `chat`, from the reply to the first leg.
pub(super) fn decode(chat: &[u8], reply: &[u8]) -> anyhow::Result<Bytes> {
    let mut leg: Map<String, Value> = serde_json::from_slice(chat)?;
    let mut reply: Map<String, Value> = serde_json::from_slice(reply)?;
    leg.insert(PARAMS.to_owned(), reply.remove(PARAMS).context("the prefill leg kept nothing")?);
    Ok(serde_json::to_vec(&leg)?.into())
}
