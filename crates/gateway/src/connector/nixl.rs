//! vLLM's exchange over NIXL, as recorded from a real engine: first the prefill, whose reply names its engine, its
//! side channel and its blocks in `kv_transfer_params`; then the decode, which is given that and reads them.

use bytes::Bytes;
use routing::lifecycle::LegOrder;
use routing::request::members;
use routing::retry::LegFault;
use serde::Deserialize;
use serde_json::Value;

use super::{Connector, plain};
use crate::edit::{Change, edited};

/// The field of both legs.
const PARAMS: &str = "kv_transfer_params";

/// What the prefill leg is asked for.
const ASKED: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// Of the parameters, the blocks: a list for each group of layers.
const BLOCKS: &str = "remote_block_ids";

/// A leg of which nothing is wanted but that it ends. One token fills no block, so the block that is read for it, which
/// is another prompt's, is never found by anyone; no model, which is the engine's default.
const RELEASING: &[u8] = br#"{"prompt":[1],"max_tokens":1,"stream":false}"#;

/// `vllm-nixl`.
pub(crate) struct Nixl;

impl Connector for Nixl {
    fn order(&self) -> LegOrder {
        LegOrder::PrefillFirst
    }

    fn prefill_leg(&self, body: &Bytes) -> Bytes {
        plain::shortened(body, PARAMS, &[(PARAMS, ASKED)])
    }

    fn decode_leg(&self, body: &Bytes, reply: &[u8]) -> Result<Bytes, LegFault> {
        let params = params(reply).ok_or(LegFault::Garbled)?;
        let change = |key: &[u8]| if key == PARAMS.as_bytes() { Change::Drop } else { Change::Keep };
        Ok(edited(body, change, &[(PARAMS, params)]))
    }

    fn pins(&self) -> bool {
        true
    }

    /// One token, in one piece. The prefill engine has accepted the request in this form, where a decode engine may
    /// have refused the client's.
    fn release_leg(&self, decode_leg: &Bytes) -> Bytes {
        plain::shortened(decode_leg, "", &[])
    }

    /// The parameters as they are, but of the blocks the last one of each group alone: the engine lets go of all by
    /// the request's name, and the leg that says so has no use for more.
    fn token(&self, reply: &[u8]) -> Option<Vec<u8>> {
        let params = params(reply)?;
        let blocks = member(params, BLOCKS)?;
        let groups: Value = serde_json::from_slice(blocks).ok()?;
        let last = |list: &Value| Some(Value::from(vec![list.as_array()?.last()?.clone()]));
        let last_of_each: Option<Vec<Value>> = match groups.as_array()?.first()? {
            Value::Array(_) => groups.as_array()?.iter().map(last).collect(),
            _ => last(&groups)?.as_array().cloned(),
        };
        let blocks = serde_json::to_vec(&last_of_each?).ok()?;
        let change = |key: &[u8]| if key == BLOCKS.as_bytes() { Change::Drop } else { Change::Keep };
        Some(edited(&Bytes::copy_from_slice(params), change, &[(BLOCKS, &blocks)]).to_vec())
    }

    fn orphan_leg(&self, token: &[u8]) -> Option<Bytes> {
        // Parameters that lack something kill an engine.
        let whole: Whole = serde_json::from_slice(token).ok()?;
        let named = whole.do_remote_prefill
            && whole.remote_block_ids.iter().flatten().next().is_some()
            && [&whole.remote_engine_id, &whole.remote_request_id, &whole.remote_host]
                .iter()
                .all(|name| !name.is_empty());
        named.then(|| edited(&Bytes::from_static(RELEASING), |_| Change::Keep, &[(PARAMS, token)]))
    }
}

/// The parameters in a prefill leg's reply. An engine that was not set up for this says null, or nothing.
fn params(reply: &[u8]) -> Option<&[u8]> {
    member(reply, PARAMS).filter(|params| params.starts_with(b"{"))
}

/// The value of a field of a JSON object.
fn member<'a>(object: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut found = None;
    let is_object = members(object, |key, _, value| {
        if key == name.as_bytes() {
            found = Some(&object[value]);
        }
    });
    found.filter(|_| is_object)
}

/// What parameters must say so that an engine can do as they say.
#[derive(Deserialize)]
struct Whole {
    do_remote_prefill: bool,
    remote_block_ids: Vec<Vec<u64>>,
    remote_engine_id: String,
    remote_request_id: String,
    remote_host: String,
    #[expect(dead_code, reason = "it must be there, and be a port")]
    remote_port: u16,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bytes(text: &str) -> Bytes {
        Bytes::copy_from_slice(text.as_bytes())
    }

    fn json_of(body: &[u8]) -> Value {
        serde_json::from_slice(body).unwrap()
    }

    #[test]
    fn the_prefill_leg_is_the_recorded_one() {
        let body = r#"{"model": "tiny", "prompt": [1, 2], "max_tokens": 8, "temperature": 0, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}, "min_tokens": 3}"#;
        let leg = Nixl.prefill_leg(&bytes(body));
        assert_eq!(
            std::str::from_utf8(&leg).unwrap(),
            r#"{"model": "tiny", "prompt": [1, 2], "max_tokens": 1, "temperature": 0, "ignore_eos": true, "stream": false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#
        );
    }

    #[test]
    fn a_chat_s_newer_limit_is_changed_as_well_and_none_is_left_out() {
        let leg = json_of(&Nixl.prefill_leg(&bytes(r#"{"messages":[],"max_completion_tokens":90}"#)));
        assert_eq!((&leg["max_completion_tokens"], &leg["max_tokens"]), (&json!(1), &json!(1)));
        assert_eq!(json_of(&Nixl.prefill_leg(&bytes("{}")))["max_tokens"], 1);
    }

    #[test]
    fn what_the_prefill_says_goes_into_the_client_s_own_body_as_it_came() {
        let params = r#"{"remote_block_ids": [[1, 2]], "remote_port":15600, "expiry": 1.50e3}"#;
        let reply = format!(r#"{{"id":"x","kv_transfer_params":{params},"metrics":null}}"#);
        let body = r#"{"prompt":"\u00e9", "big":12345678901234567890,"kv_transfer_params":null}"#;
        let leg = Nixl.decode_leg(&bytes(body), reply.as_bytes()).unwrap();
        assert_eq!(
            std::str::from_utf8(&leg).unwrap(),
            format!(r#"{{"prompt":"\u00e9", "big":12345678901234567890,"kv_transfer_params":{params}}}"#)
        );
    }

    #[test]
    fn what_nobody_wants_is_taken_over_by_a_request_for_one_token() {
        let body = r#"{"prompt":"p","max_tokens":900,"min_tokens":1000,"stream_options":{},"kv_transfer_params":{"remote_block_ids":[[1]]}}"#;
        assert_eq!(
            std::str::from_utf8(&Nixl.release_leg(&bytes(body))).unwrap(),
            r#"{"prompt":"p","max_tokens":1,"kv_transfer_params":{"remote_block_ids":[[1]]}}"#
        );
    }

    #[test]
    fn the_token_is_the_recorded_parameters_with_one_block_and_makes_a_leg_that_fills_none() {
        let recorded = r#"{"id":"x","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3],[7]],"remote_engine_id":"ef76","remote_request_id":"cmpl-pd-1-0-83a6b28a","remote_host":"127.0.0.1","remote_port":15600,"tp_size":1},"metrics":null}"#;
        let token = Nixl.token(recorded.as_bytes()).unwrap();
        let wanted = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"ef76","remote_request_id":"cmpl-pd-1-0-83a6b28a","remote_host":"127.0.0.1","remote_port":15600,"tp_size":1,"remote_block_ids":[[3],[7]]}"#;
        assert_eq!(std::str::from_utf8(&token).unwrap(), wanted);
        let leg = Nixl.orphan_leg(&token).unwrap();
        let wanted =
            format!(r#"{{"prompt":[1],"max_tokens":1,"stream":false,"kv_transfer_params":{wanted}}}"#);
        assert_eq!(std::str::from_utf8(&leg).unwrap(), wanted);
    }

    #[test]
    fn no_leg_is_made_of_parameters_that_lack_something() {
        let whole = json!({
            "do_remote_prefill": true, "remote_block_ids": [[3]], "remote_engine_id": "e",
            "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
        });
        assert!(Nixl.orphan_leg(whole.to_string().as_bytes()).is_some());
        for (name, bad) in [
            ("do_remote_prefill", json!(false)),
            ("remote_block_ids", json!([[]])),
            ("remote_engine_id", json!(null)),
            ("remote_request_id", json!("")),
            ("remote_host", json!("")),
            ("remote_port", json!(70_000)),
        ] {
            let mut params = whole.clone();
            params[name] = bad;
            assert_eq!(Nixl.orphan_leg(params.to_string().as_bytes()), None, "{params}");
            params.as_object_mut().unwrap().remove(name);
            assert_eq!(Nixl.orphan_leg(params.to_string().as_bytes()), None, "{params}");
        }
        assert_eq!(Nixl.orphan_leg(br#"{"do_remote_prefill":true},"prompt":[2],"x":{}"#), None);
        for reply in ["{}", r#"{"kv_transfer_params":{"remote_block_ids":[]}}"#] {
            assert_eq!(Nixl.token(reply.as_bytes()), None, "{reply}");
        }
    }

    #[test]
    fn a_reply_that_names_nothing_is_no_handoff() {
        for reply in
            [r#"{"id":"x"}"#, r#"{"kv_transfer_params":null}"#, "[]", "", r#"{"kv_transfer_params":{"#]
        {
            assert_eq!(Nixl.decode_leg(&bytes("{}"), reply.as_bytes()), Err(LegFault::Garbled), "{reply}");
        }
    }
}
