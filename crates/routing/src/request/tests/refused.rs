//! Bodies that no engine could serve, and bodies that make no sense at all.

use super::*;
use crate::request::json::{Cursor, DEPTH_MAX};

/// Checks that a body is refused, naming this field and code.
fn check(route: Route, body: impl AsRef<[u8]>, param: Option<&str>, code: &str) {
    let body = body.as_ref();
    let shown = String::from_utf8_lossy(&body[..body.len().min(200)]);
    match try_read(route, body) {
        Ok(_) => panic!("accepted: {shown}"),
        Err(refused) => {
            assert_eq!((refused.param, refused.code), (param, code), "{shown}: {refused}");
            assert!(!refused.message.is_empty());
        }
    }
}

fn chat_with(field: &str) -> String {
    format!(r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],{field}}}"#)
}

#[test]
fn what_is_not_json_is_refused() {
    for body in [
        "",
        " ",
        "{",
        r#"{"a":nul"#,
        r#"{"messages""#,
        r#"{"messages":[{"role":"user"}]"#,
        r#"{"messages":[{"role":"us"#,
        r#"{"messages":[{"role":"user\"#,
        r#"{"messages":[{"role":"user"}]}}"#,
        r#"{"messages":[{"role":"user"}]} x"#,
        r#"{"messages":[{"role":"user"},]}"#,
        r#"{"messages":[{"role":"user"}],}"#,
        r#"{messages:[{"role":"user"}]}"#,
        r#"{"messages":[{"role":"user"}],"x":NaN}"#,
        r#"{"messages":[{"role":"user"}],"x":01}"#,
        r#"{"messages":[{"role":"user"}],"x":1.}"#,
        r#"{"messages":[{"role":"user"}],"x":-}"#,
        r#"{"messages":[{"role":"user"}],"x":"\x"}"#,
        r#"{"messages":[{"role":"user"}],"x":"\u12"}"#,
        "{\"messages\":[{\"role\":\"user\"}],\"x\":\"a\nb\"}",
        "\u{feff}{\"messages\":[{\"role\":\"user\"}]}",
    ] {
        check(ChatCompletions, body, None, "invalid_json");
    }
    check(ChatCompletions, b"{\"messages\":[{\"role\":\"\xff\"}]}", None, "invalid_utf8");
    check(ChatCompletions, "[]", None, "invalid_type");
    check(ChatCompletions, "null", None, "invalid_type");
}

#[test]
fn a_cut_body_is_refused_wherever_it_is_cut() {
    let whole = BASE.as_bytes();
    for end in 0..whole.len() {
        assert!(try_read(ChatCompletions, &whole[..end]).is_err(), "{end}");
    }
}

#[test]
fn a_fault_is_told_with_its_place() {
    let refused = try_read(ChatCompletions, br#"{"messages":[1 2]}"#);
    assert_eq!(
        refused.map_err(|refused| refused.message),
        Err("The body is not valid JSON: expected ',' or ']' at byte 15.".to_owned())
    );
    let refused = try_read(ChatCompletions, br#"{"messages":[{"role":"user"},{"role":7}]}"#);
    assert_eq!(
        refused.map_err(|refused| refused.message),
        Err("Invalid type for 'messages[1].role': expected a string, but got a number instead.".to_owned())
    );
}

#[test]
fn nesting_is_bounded() {
    let nested = |levels: usize| chat_with(&format!(r#""x":{}{}"#, "[".repeat(levels), "]".repeat(levels)));
    read(ChatCompletions, &nested(DEPTH_MAX as usize - 1));
    check(ChatCompletions, nested(DEPTH_MAX as usize), None, "nesting_too_deep");
    check(ChatCompletions, nested(1_000_000), None, "nesting_too_deep");
    check(ChatCompletions, r#"{"extra_body":"#.repeat(100_000), None, "nesting_too_deep");
    check(ChatCompletions, r#"{"a":"#.repeat(100_000), None, "nesting_too_deep");
}

#[test]
fn missing_and_empty_prompts_are_refused() {
    let missing = "missing_required_parameter";
    check(ChatCompletions, "{}", Some("messages"), missing);
    check(ChatCompletions, r#"{"messages":null,"prompt":"x"}"#, Some("messages"), missing);
    check(ChatCompletions, r#"{"messages":[]}"#, Some("messages"), "empty_array");
    check(ChatCompletions, r#"{"messages":[{"content":"x"}]}"#, Some("messages"), missing);
    check(Completions, r#"{"messages":[{"role":"user"}]}"#, Some("prompt"), missing);
    check(Completions, r#"{"prompt":[]}"#, Some("prompt"), "empty_array");
    check(Embeddings, r#"{"prompt":"x"}"#, Some("input"), missing);
    check(Responses, r#"{"messages":[{"role":"user"}]}"#, Some("input"), missing);
}

#[test]
fn wrong_types_are_refused() {
    for (field, name) in [
        (r#""model":7"#, "model"),
        (r#""model":["m"]"#, "model"),
        (r#""messages":"hello""#, "messages"),
        (r#""messages":{"role":"user"}"#, "messages"),
        (r#""messages":["hello"]"#, "messages"),
        (r#""messages":[{"role":7}]"#, "messages"),
        (r#""messages":[{"role":"user","content":7}]"#, "messages"),
        (r#""messages":[{"role":"user","content":[7]}]"#, "messages"),
        (r#""messages":[{"role":"user","name":{}}]"#, "messages"),
        (r#""messages":[{"role":"user","tool_calls":"f"}]"#, "messages"),
        (r#""tools":{}"#, "tools"),
        (r#""chat_template_kwargs":"x""#, "chat_template_kwargs"),
        (r#""stream":"true""#, "stream"),
        (r#""stream":1"#, "stream"),
        (r#""stream_options":true"#, "stream_options"),
        (r#""stream_options":{"include_usage":1}"#, "stream_options"),
        (r#""max_tokens":"16""#, "max_tokens"),
        (r#""max_tokens":1.5"#, "max_tokens"),
        (r#""max_tokens":true"#, "max_tokens"),
        (r#""max_completion_tokens":[]"#, "max_completion_tokens"),
        (r#""n":"2""#, "n"),
        (r#""user":{}"#, "user"),
        (r#""cache_salt":1"#, "cache_salt"),
        (r#""prompt_cache_key":1"#, "prompt_cache_key"),
        (r#""frequency_penalty":"a""#, "frequency_penalty"),
    ] {
        check(ChatCompletions, chat_with(field), Some(name), "invalid_type");
    }
    for prompt in
        ["7", "{}", "true", "[true]", r#"["a",1]"#, r#"[1,"a"]"#, r#"[[1],"a"]"#, r#"[["a"]]"#, "[null]"]
    {
        check(Completions, format!(r#"{{"prompt":{prompt}}}"#), Some("prompt"), "invalid_type");
    }
    check(Responses, r#"{"input":7}"#, Some("input"), "invalid_type");
    check(Embeddings, r#"{"input":{"a":1}}"#, Some("input"), "invalid_type");
}

#[test]
fn absurd_numbers_are_refused() {
    for (field, name) in [
        (r#""max_tokens":-1"#, "max_tokens"),
        (r#""n":0"#, "n"),
        (r#""n":129"#, "n"),
        (r#""n":99999999999999999999"#, "n"),
        (r#""best_of":1000"#, "best_of"),
    ] {
        check(ChatCompletions, chat_with(field), Some(name), "invalid_value");
    }
    for prompt in ["[-1]", "[1.5]", "[4294967296]", "[[1,-1]]"] {
        check(Completions, format!(r#"{{"prompt":{prompt}}}"#), Some("prompt"), "invalid_value");
    }
    read(ChatCompletions, &chat_with(r#""max_tokens":-0,"n":128"#));
}

#[test]
fn fields_that_travel_between_engines_are_refused_from_a_client() {
    let code = "unsupported_parameter";
    for (field, name) in [
        (r#""kv_transfer_params":{"do_remote_prefill":true}"#, "kv_transfer_params"),
        (r#""kv_transfer_params":null,"kv_transfer_params":0"#, "kv_transfer_params"),
        (r#""kv_transfer_params":{},"kv_transfer_params":null"#, "kv_transfer_params"),
        (r#""kv\u005ftransfer_params":{}"#, "kv_transfer_params"),
        (r#""bootstrap_host":"10.0.0.1""#, "bootstrap_host"),
        (r#""bootstrap_port":[1]"#, "bootstrap_port"),
        (r#""bootstrap_room":1"#, "bootstrap_room"),
        (r#""vllm_xargs":{"kv_transfer_params":"x"}"#, "kv_transfer_params"),
        (r#""sampling_params":{"extra_args":{"kv_transfer_params":{}}}"#, "kv_transfer_params"),
    ] {
        for route in [ChatCompletions, Other] {
            check(route, chat_with(field), Some(name), code);
        }
        check(Completions, format!(r#"{{"prompt":"x",{field}}}"#), Some(name), code);
    }
    read(ChatCompletions, &chat_with(r#""kv_transfer_params":null,"vllm_xargs":{"a":1},"extra_args":[1]"#));
    // what a prompt or a schema says is its own business
    read(
        ChatCompletions,
        r#"{"messages":[{"role":"user","content":"kv_transfer_params"}],"tools":[{"kv_transfer_params":1}],"response_format":{"bootstrap_host":1}}"#,
    );
}

#[test]
fn what_is_passed_through_cannot_hide_such_fields() {
    for body in [
        r#"{"a":NaN,"kv_transfer_params":{}}"#,
        "\u{feff}{\"kv_transfer_params\":{}}",
        r#"{"a":1}{"kv_transfer_params":{}}"#,
        "{\"a\":\"\n\",\"kv_transfer_params\":{}}",
    ] {
        assert!(try_read(Other, body.as_bytes()).is_err(), "{body}");
    }
    let wide =
        |text: &str, order: fn(u16) -> [u8; 2]| text.encode_utf16().flat_map(order).collect::<Vec<u8>>();
    for order in [u16::to_le_bytes, u16::to_be_bytes] {
        assert!(try_read(Other, &wide(r#"{"kv_transfer_params":{}}"#, order)).is_err());
        assert!(try_read(Other, &wide("\u{feff}{\"kv_transfer_params\":{}}", order)).is_err());
    }
}

/// Text that is often nearly JSON.
fn nearly_json() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("{"),
        Just("}"),
        Just("["),
        Just("]"),
        Just(","),
        Just(":"),
        Just("\""),
        Just("\\"),
        Just("\\u00"),
        Just("\\ud83d"),
        Just("null"),
        Just("true"),
        Just("fals"),
        Just("-"),
        Just("0"),
        Just("12"),
        Just("."),
        Just("e5"),
        Just("\"a\":"),
        Just("\"a\""),
        Just(" "),
        Just("\n"),
        Just("é"),
        Just("\u{1}"),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// Bodies in good order, to be spoiled.
fn sound() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(BASE.to_owned()),
        Just(chat_with(r#""stream":true,"stream_options":{"include_usage":true},"max_tokens":16,"n":2,"vllm_xargs":{"a":[1]}"#)),
        Just(r#"{"prompt":[[1,2,3],[4,5]],"input":["a","b\u00e9"],"messages":[{"role":"tool","tool_call_id":"1","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#.to_owned()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200), text in nearly_json()) {
        for route in [ChatCompletions, Completions, Embeddings, Responses, Other] {
            drop(try_read(route, &bytes));
            drop(try_read(route, text.as_bytes()));
            drop(try_read(route, format!(r#"{{"messages":{text},"prompt":{text},"input":{text}}}"#).as_bytes()));
        }
    }

    #[test]
    fn no_spoiled_body_is_too_strange(
        body in sound(),
        spots in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3), 1..6),
    ) {
        let mut bytes = body.into_bytes();
        for (spot, byte, how) in spots {
            let at = spot.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => bytes.truncate(at.max(1)),
            }
        }
        for route in [ChatCompletions, Completions, Embeddings, Responses, Other] {
            drop(try_read(route, &bytes));
        }
    }

    /// What is JSON is settled by another parser.
    #[test]
    fn what_is_json_is_agreed_on(text in nearly_json()) {
        let mut cursor = Cursor::new(text.as_bytes());
        let ours = cursor.skip().and_then(|_| cursor.end());
        let theirs = serde_json::from_str::<serde::de::IgnoredAny>(&text);
        prop_assert_eq!(ours.is_ok(), theirs.is_ok(), "{}: {:?} {:?}", text, ours, theirs);
    }
}
