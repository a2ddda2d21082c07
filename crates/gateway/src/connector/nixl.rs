//! vLLM's exchange over NIXL, as recorded from a real engine: first the prefill, whose reply names its engine, its
//! side channel and its blocks in `kv_transfer_params`; then the decode, which is given that and reads them.

use bytes::Bytes;
use routing::lifecycle::LegOrder;
use routing::request::members;
use routing::retry::LegFault;

use super::edit::{Change, edited};
use super::{Connector, plain};

/// The field of both legs.
const PARAMS: &str = "kv_transfer_params";

/// What the prefill leg is asked for.
const ASKED: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

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
        let mut params = None;
        let is_object = members(reply, |key, _, value| {
            if key == PARAMS.as_bytes() {
                params = Some(&reply[value]);
            }
        });
        // An engine that was not set up for this says null, or nothing.
        let params =
            params.filter(|params| is_object && params.starts_with(b"{")).ok_or(LegFault::Garbled)?;
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
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

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
    fn a_reply_that_names_nothing_is_no_handoff() {
        for reply in
            [r#"{"id":"x"}"#, r#"{"kv_transfer_params":null}"#, "[]", "", r#"{"kv_transfer_params":{"#]
        {
            assert_eq!(Nixl.decode_leg(&bytes("{}"), reply.as_bytes()), Err(LegFault::Garbled), "{reply}");
        }
    }
}
