//! `kv_transfer_params`, both ways.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// What a prefill engine says of a prompt whose blocks it keeps, in vLLM's order of fields.
#[derive(Serialize, Debug)]
pub(crate) struct Staged<'a> {
    pub(crate) do_remote_prefill: bool,
    pub(crate) do_remote_decode: bool,
    /// One list for each group of layers; here there is one group.
    pub(crate) remote_block_ids: [&'a [u32]; 1],
    pub(crate) remote_engine_id: &'a str,
    pub(crate) remote_request_id: &'a str,
    pub(crate) remote_host: &'a str,
    pub(crate) remote_port: u16,
    pub(crate) tp_size: u32,
    pub(crate) dcp_size: u32,
    pub(crate) pp_size: u32,
    pub(crate) remote_num_tokens: u32,
    pub(crate) remote_blocks_expiry_time: Option<f64>,
    pub(crate) transfer_mode: &'static str,
    pub(crate) remote_prefill_cached_tokens: u32,
}

/// Where a decode engine finds a prompt's KV.
#[derive(Deserialize, Debug)]
pub(crate) struct Remote {
    pub(crate) remote_block_ids: Vec<Vec<u32>>,
    pub(crate) remote_engine_id: String,
    pub(crate) remote_request_id: String,
    pub(crate) remote_host: String,
    pub(crate) remote_port: u16,
    /// What the decode engine reports as cached, as vLLM does: the client's prompt was computed over there.
    #[serde(default)]
    pub(crate) remote_prefill_cached_tokens: Option<u32>,
}

/// What `kv_transfer_params` ask for.
#[derive(Debug)]
pub(crate) enum Asked {
    /// Nothing.
    Nothing,
    /// To compute and keep.
    Prefill,
    /// To fetch and decode.
    Decode(Remote),
    /// To fetch, without saying (all of) what and where.
    Incomplete,
}

/// Reads the parameters; what is not an object asks for nothing and is refused elsewhere.
pub(crate) fn read(raw: &RawValue) -> Asked {
    #[derive(Deserialize)]
    struct Flags {
        #[serde(default)]
        do_remote_prefill: Option<bool>,
        #[serde(default)]
        do_remote_decode: Option<bool>,
    }
    let Ok(flags) = serde_json::from_str::<Flags>(raw.get()) else { return Asked::Nothing };
    if flags.do_remote_prefill == Some(true) {
        return serde_json::from_str(raw.get()).map_or(Asked::Incomplete, Asked::Decode);
    }
    if flags.do_remote_decode == Some(true) { Asked::Prefill } else { Asked::Nothing }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(json: &str) -> Asked {
        read(serde_json::from_str(json).expect("JSON"))
    }

    #[test]
    fn what_a_prefill_engine_says_is_what_a_decode_engine_reads() {
        let staged = Staged {
            do_remote_prefill: true,
            do_remote_decode: false,
            remote_block_ids: [&[3, 4]],
            remote_engine_id: "e",
            remote_request_id: "r",
            remote_host: "127.0.0.1",
            remote_port: 15_600,
            tp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            remote_num_tokens: 60,
            remote_blocks_expiry_time: None,
            transfer_mode: "pull",
            remote_prefill_cached_tokens: 0,
        };
        match asked(&serde_json::to_string(&staged).expect("JSON")) {
            Asked::Decode(remote) => {
                assert_eq!(remote.remote_block_ids, [[3, 4]]);
                assert_eq!((remote.remote_request_id.as_str(), remote.remote_port), ("r", 15_600));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_remote_prefill_without_a_place_is_incomplete() {
        for incomplete in [
            r#"{"do_remote_prefill":true}"#,
            r#"{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[[1]]}"#,
            r#"{"do_remote_prefill":true,"remote_block_ids":null,"remote_engine_id":"e","remote_request_id":"r",
                "remote_host":"h","remote_port":1}"#,
        ] {
            assert!(matches!(asked(incomplete), Asked::Incomplete), "{incomplete}");
        }
        let first = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null}"#;
        assert!(matches!(asked(first), Asked::Prefill));
        for nothing in ["{}", r#"{"do_remote_decode":false}"#, r#"{"do_remote_prefill":null}"#] {
            assert!(matches!(asked(nothing), Asked::Nothing), "{nothing}");
        }
    }
}
