//! What counts as the same prompt, what a request says of itself, and what is refused.

use proptest::prelude::*;

use super::*;
use crate::lifecycle::{NoResume, OnBreak};
use crate::{BlockHash, SessionKey};

mod refused;

use Route::{ChatCompletions, Completions, Embeddings, Other, Responses};

/// Small blocks, so that short prompts have several.
fn rules() -> ShapeRules {
    ShapeRules { block_bytes: 16, ..ShapeRules::default() }
}

fn try_read(route: Route, body: &[u8]) -> Result<RequestShape, BadRequest> {
    RequestShape::read(route, &[("host", "x")], body, &rules())
}

fn read(route: Route, body: &str) -> RequestShape {
    match try_read(route, body.as_bytes()) {
        Ok(shape) => shape,
        Err(refused) => panic!("{body}: {refused}"),
    }
}

fn chat(messages: &str) -> RequestShape {
    read(ChatCompletions, &format!(r#"{{"model":"m","messages":[{messages}]}}"#))
}

/// What engines would cache under the same prefix.
fn prompt(shape: &RequestShape) -> (&[BlockHash], u64, u64, Option<u64>) {
    (&shape.blocks, shape.tail, shape.rendezvous, shape.conversation)
}

const BASE: &str = r#"{"model":"m","messages":[{"role":"system","content":"You help."},{"role":"user","content":"Say \"hi\" to Zoë, please."}],"tools":[{"type":"function","function":{"name":"f"}}],"chat_template_kwargs":{"thinking":true}}"#;

#[test]
fn a_refusal_says_what_the_route_takes() {
    for (route, body, takes) in [
        (Responses, r#"{"input":1}"#, "a string or an array of messages"),
        (ChatCompletions, r#"{"messages":1}"#, "expected an array,"),
    ] {
        let refused = try_read(route, body.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains(takes), "{refused}");
    }
}

#[test]
fn the_same_prompt_written_differently_is_the_same_prompt() {
    let check = |other: &str| {
        let (base, other) = (read(ChatCompletions, BASE), read(ChatCompletions, other));
        assert!(base.blocks.len() > 3);
        assert_eq!(prompt(&base), prompt(&other), "{other:?}");
    };
    // another order of the keys, top to bottom
    check(
        r#"{"chat_template_kwargs":{"thinking":true},"tools":[{"type":"function","function":{"name":"f"}}],"messages":[{"content":"You help.","role":"system"},{"content":"Say \"hi\" to Zoë, please.","role":"user"}],"model":"m"}"#,
    );
    // other escapes, in keys as well
    check(
        r#"{"model":"\u006d","m\u0065ssages":[{"role":"system","content":"You help\u002e"},{"role":"user","content":"Say \u0022hi\u0022 to Zo\u00eb, please."}],"tools":[{"type":"function","function":{"name":"\u0066"}}],"chat_template_kwargs":{"thinking":true}}"#,
    );
    // white space
    check(
        " {\n\"model\" : \"m\", \"messages\" : [ {\"role\":\"system\" , \"content\":\"You help.\"}, \r\n{ \"role\":\"user\",\"content\":\"Say \\\"hi\\\" to Zoë, please.\"}],\t\"tools\":[ {\"type\":\"function\", \"function\":{ \"name\":\"f\"}}],\"chat_template_kwargs\":{\"thinking\" :true }} ",
    );
    // a text as parts, one of them with keys that are not rendered
    check(
        r#"{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":"You help."}]},{"role":"user","content":[{"cache_control":{"type":"ephemeral"},"text":"Say \"hi\" to Zoë, please.","type":"text"}]}],"tools":[{"type":"function","function":{"name":"f"}}],"chat_template_kwargs":{"thinking":true}}"#,
    );
    // of a key that comes twice the last counts; null and what is unknown do not count
    check(
        r#"{"model":"x","model":"m","messages":[],"messages":[{"role":"user","role":"system","content":"You help.","name":null},{"role":"user","content":null,"content":"Say \"hi\" to Zoë, please.","tool_calls":null,"weight":12345678901234567890123}],"tools":[{"type":"function","function":{"name":"f"}}],"chat_template_kwargs":{"thinking":true},"seed":7,"nonsense":{"messages":[]}}"#,
    );
}

/// Where a difference shows, from the front on.
#[derive(PartialEq, PartialOrd)]
enum Shows {
    InFirstBlock,
    AtHome,
    InConversation,
}

#[test]
fn another_prompt_is_another_prompt() {
    use Shows::{AtHome, InConversation, InFirstBlock};
    let base = read(ChatCompletions, BASE);
    let check = |from: &str, to: &str, shows: Shows| {
        assert!(BASE.contains(from), "{from}");
        let other = read(ChatCompletions, &BASE.replace(from, to));
        assert_ne!(base.tail, other.tail, "{to}");
        assert_ne!(base.conversation, other.conversation, "{to}");
        assert_eq!(base.rendezvous != other.rendezvous, shows <= AtHome, "{to}");
        assert_eq!(base.blocks[0] != other.blocks[0], shows == InFirstBlock, "{to}");
    };
    check(r#""model":"m""#, r#""model":"lora""#, InFirstBlock);
    check(r#"{"model":"m","#, r#"{"model":"m","cache_salt":"tenant","#, InFirstBlock);
    check(r#""tools":["#, r#""tools":[{},"#, InFirstBlock);
    check(r#""tools":[{"type":"function","function":{"name":"f"}}],"#, "", InFirstBlock);
    check(r#"{"thinking":true}"#, r#"{"thinking":false}"#, AtHome);
    check(r#"{"thinking":true}"#, "null", AtHome);
    check("You help.", "You hinder.", AtHome);
    check(r#""role":"user""#, r#""role":"assistant""#, AtHome);
    check(r#""role":"user""#, r#""role":"user","name":"Ann""#, AtHome);
    check(r#""role":"user""#, r#""role":"user","tool_call_id":"1""#, InConversation);
    check(r#""role":"user""#, r#""role":"user","tool_calls":[{"id":"1"}]"#, InConversation);
    check("please.", "please!", InConversation);
}

#[test]
fn where_one_piece_ends_and_the_next_begins_matters() {
    let tails: Vec<u64> = [
        r#"{"role":"user","content":"ab"}"#,
        r#"{"role":"user","content":"a"},{"role":"user","content":"b"}"#,
        r#"{"role":"user","content":["a","b"]}"#,
        r#"{"role":"usera","content":"b"}"#,
        r#"{"role":"user","name":"a","content":"b"}"#,
        r#"{"role":"user","name":"ab"}"#,
        r#"{"role":"user","name":"ab","content":""}"#,
        r#"{"role":"user","tool_calls":[1,23]}"#,
        r#"{"role":"user","tool_calls":[12,3]}"#,
        r#"{"role":"user","tool_calls":["12",3]}"#,
        r#"{"role":"user","tool_calls":["1","23"]}"#,
        r#"{"role":"user","tool_calls":["[1,23]"]}"#,
        r#"{"role":"user","tool_calls":[[1,23]]}"#,
        r#"{"role":"user","tool_calls":[{"a":{}}]}"#,
        r#"{"role":"user","tool_calls":[{"a":""}]}"#,
    ]
    .map(|messages| chat(messages).tail)
    .into();
    let mut distinct = tails.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), tails.len(), "{tails:x?}");
}

#[test]
fn a_chat_goes_on_where_it_left_off() {
    let turns = [
        r#"{"role":"system","content":"You are a helpful assistant, mostly."}"#,
        r#"{"role":"user","content":[{"type":"text","text":"What is in this picture, in one word?"},{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}"#,
        r#"{"role":"assistant","content":null,"tool_calls":[{"id":"call_1","type":"function","function":{"name":"look","arguments":"{\"n\":1}"}}]}"#,
        r#"{"role":"tool","tool_call_id":"call_1","content":"a cat"}"#,
        r#"{"role":"assistant","content":"A cat. It sits on a mat and looks at you as if you were late."}"#,
        r#"{"role":"user","content":"And now?"}"#,
    ];
    let shapes: Vec<RequestShape> = (2..=turns.len()).map(|count| chat(&turns[..count].join(","))).collect();
    for pair in shapes.windows(2) {
        assert!(pair[1].blocks.starts_with(&pair[0].blocks));
        assert!(pair[1].prompt_bytes > pair[0].prompt_bytes);
        assert_eq!(pair[0].conversation, pair[1].conversation);
        assert_eq!(pair[0].rendezvous, pair[1].rendezvous);
        assert_ne!(pair[0].tail, pair[1].tail);
    }
}

#[test]
fn media_count_by_what_they_show_and_weigh_little() {
    let image = |data: &str, rest: &str| {
        chat(&format!(
            r#"{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{data}"}}}}{rest}]}}"#
        ))
    };
    let long = "QUJD".repeat(100_000);
    let base = image(&long, "");
    assert!(base.prompt_bytes < 100);
    assert_eq!(base.media, 1);
    assert!(base.prompt_tokens >= ShapeRules::default().media_tokens);
    assert_ne!(base.tail, image(&format!("{long}A"), "").tail);
    // a slash may be escaped
    assert_eq!(image("a/b+c", "").tail, image(r"a\/b\u002bc", "").tail);
    let with_text = image(&long, r#",{"type":"text","text":"What is it?"}"#);
    assert!(with_text.blocks.starts_with(&base.blocks));
    let sound =
        r#"{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"A","format":"wav"}}]}"#;
    let reordered =
        r#"{"role":"user","content":[{"input_audio":{"data":"A","format":"wav"},"type":"input_audio"}]}"#;
    assert_eq!(chat(sound).tail, chat(reordered).tail);
    assert_ne!(chat(sound).tail, chat(&sound.replace("wav", "mp3")).tail);
}

#[test]
fn the_same_first_message_behind_other_instructions_is_another_conversation() {
    let tenant = |system: &str, user: &str| {
        chat(&format!(r#"{{"role":"developer","content":"{system}"}},{{"role":"user","content":"{user}"}}"#))
    };
    let base = tenant("Be brief.", "Hello");
    assert_ne!(base.conversation, tenant("Be long.", "Hello").conversation);
    assert_ne!(base.rendezvous, tenant("Be long.", "Hello").rendezvous);
    assert_ne!(base.rendezvous, tenant("Be brief.", "Hello!").rendezvous);
    // what comes after the first block of a first message does not move its home, but is another chat
    let (one, other) = (tenant("Be brief.", &"a".repeat(40)), tenant("Be brief.", &"a".repeat(41)));
    assert_eq!(one.rendezvous, other.rendezvous);
    assert_ne!(one.conversation, other.conversation);
    // without any message of the user there is no conversation yet, but a home
    let system = chat(r#"{"role":"system","content":"Be brief, be very brief."}"#);
    assert_eq!(system.conversation, None);
    assert_ne!(system.rendezvous, 0);
}

#[test]
fn raw_prompts_come_as_text_or_tokens_alone_or_in_lists() {
    let prompt = |prompt: &str| read(Completions, &format!(r#"{{"model":"m","prompt":{prompt}}}"#));
    let text = prompt(r#""0123456789abcdef0123456789""#);
    assert_eq!((text.blocks.len(), text.prompt_bytes, text.prompt_tokens), (1, 26, 7));
    assert_eq!((text.unit, text.prompts), (PromptUnit::Text, 1));
    assert_eq!(text.conversation, None);
    assert_eq!(text.obstacles.names().collect::<Vec<_>>(), ["limitless"]);
    let list = prompt(r#"["0123456789abcdef0123456789","x"]"#);
    assert_eq!(list.blocks, text.blocks);
    assert_eq!((list.prompt_bytes, list.prompts), (27, 2));
    assert!(list.obstacles.contains(ResumeObstacles::PROMPT_LIST));
    let ids = prompt("[1,2,3,4,500000,6]");
    assert_eq!((ids.blocks.len(), ids.prompt_bytes, ids.prompt_tokens), (1, 24, 6));
    assert_eq!((ids.unit, ids.prompts), (PromptUnit::Tokens, 1));
    assert!(ids.obstacles.contains(ResumeObstacles::TOKEN_IDS));
    let lists = prompt("[[1, 2, 3, 4, 500000, 6 ], [7]]");
    assert_eq!(lists.blocks, ids.blocks);
    assert_eq!((lists.prompt_tokens, lists.prompts), (7, 2));
    assert_eq!(prompt("[1,2,3,4,9]").blocks, ids.blocks, "the same first block");
    assert_ne!(prompt("[1,2,3,5,9]").blocks, ids.blocks);
}

#[test]
fn a_prompt_that_is_warm_in_part_meets_where_it_turns_cold() {
    let shape = |text: &str| read(Completions, &format!(r#"{{"prompt":"{text}"}}"#));
    let (one, other) = (shape(&"a".repeat(40)), shape(&format!("{}{}", "a".repeat(20), "b".repeat(20))));
    assert_eq!(one.first_cold_block(0), other.first_cold_block(0));
    assert_ne!(one.first_cold_block(1), other.first_cold_block(1));
    assert_eq!(one.first_cold_block(2), one.tail);
    assert_eq!(one.rendezvous, one.blocks[1].raw());
    let short = shape("hi");
    assert_eq!((short.rendezvous, short.conversation), (short.tail, Some(short.tail)));
    assert_eq!(one.conversation, None, "its blocks are what it is known by");
    let chat = chat(r#"{"role":"user","content":"a long message, longer than a block"}"#);
    assert_eq!(chat.first_cold_block(1), chat.rendezvous);
}

#[test]
fn inputs_of_embeddings_and_responses_are_prompts() {
    let input = |route, rest: &str| read(route, &format!(r#"{{"model":"m",{rest}}}"#));
    assert_eq!(input(Embeddings, r#""input":"0123456789abcdef""#).blocks.len(), 1);
    assert_eq!(input(Embeddings, r#""input":[[1,2],[3]]"#).prompt_tokens, 3);
    assert_eq!(input(Embeddings, r#""messages":[{"role":"user","content":"x"}]"#).unit, PromptUnit::Text);
    let text = input(Responses, r#""input":"Hello there, how are you?""#);
    let messages = input(
        Responses,
        r#""input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"Hello there, how are you?"}]}]"#,
    );
    assert_eq!(prompt(&text), prompt(&messages));
    let instructed = input(Responses, r#""instructions":"Be brief.","input":"Hello there, how are you?""#);
    let system = input(
        Responses,
        r#""input":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hello there, how are you?"}]"#,
    );
    assert_eq!(prompt(&instructed), prompt(&system));
    assert_ne!(instructed.conversation, text.conversation);
    let called = input(
        Responses,
        r#""input":[{"role":"user","content":"Hello there, how are you?"},{"type":"function_call","call_id":"1","name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"1","output":"fine"}],"previous_response_id":"resp_1""#,
    );
    assert!(called.blocks.starts_with(&text.blocks));
    assert_eq!(called.previous_response, Some(response_key(b"resp_1")));
    assert_eq!(called.previous_response, Some(SessionKey::of("response", b"resp_1")));
}

#[test]
fn a_prompt_that_cannot_be_read_counts_as_load_only() {
    let check = |route, body: &str| {
        let shape = read(route, body);
        assert_eq!((shape.unit, shape.prompt_tokens, shape.blocks.len()), (PromptUnit::None, 0, 0), "{body}");
    };
    check(Completions, r#"{"prompt_embeds":"AAAA"}"#);
    check(Responses, r#"{"prompt":{"id":"pmpt_1"}}"#);
    check(Responses, r#"{"previous_response_id":"resp_1"}"#);
    check(Other, r#"{"model":"m","query":"q","documents":["a"]}"#);
    check(Other, "");
    check(Other, "--boundary\r\n\u{fffd} not JSON at all {");
    assert_eq!(read(Other, r#"{"model":"m","stream":true}"#).model.as_deref(), Some("m"));
    assert!(read(Other, r#"{"model":"m","stream":true}"#).stream);
    assert_eq!(read(Other, "{\"a\":1}\n{\"b\":2}\n").model, None);
    assert!(try_read(Other, b"\x89PNG\xff\xfe\x00").is_ok());
    assert_ne!(read(Other, "a").rendezvous, read(Other, "b").rendezvous, "ties don't all fall alike");
}

#[test]
fn limits_and_samples_are_read() {
    let check = |route, rest: &str, expected: (u32, Option<u32>, u32)| {
        let body = format!(r#"{{"messages":[{{"role":"user"}}],"prompt":"p","input":"i",{rest}}}"#);
        let shape = read(route, &body);
        assert_eq!((shape.output_tokens, shape.output_tokens_max, shape.samples), expected, "{rest}");
    };
    check(ChatCompletions, r#""x":0"#, (512, None, 1));
    check(ChatCompletions, r#""max_tokens":20"#, (20, Some(20), 1));
    check(ChatCompletions, r#""max_tokens":20.0,"n":3"#, (20, Some(20), 3));
    check(ChatCompletions, r#""max_tokens":2e3,"n":null"#, (512, Some(2_000), 1));
    check(ChatCompletions, r#""max_completion_tokens":30,"max_tokens":20"#, (30, Some(30), 1));
    check(ChatCompletions, r#""max_tokens":null,"max_completion_tokens":null"#, (512, None, 1));
    check(ChatCompletions, r#""max_tokens":99999999999999999999"#, (512, Some(u32::MAX), 1));
    check(ChatCompletions, r#""max_tokens":0"#, (0, Some(0), 1));
    check(Completions, r#""max_tokens":16,"n":2,"best_of":4"#, (16, Some(16), 4));
    check(Responses, r#""max_output_tokens":64"#, (64, Some(64), 1));
}

#[test]
fn a_prompt_whose_own_probabilities_are_wanted_is_computed_where_the_answer_is() {
    let check = |route, rest: &str, expected: bool| {
        let body = format!(r#"{{"messages":[{{"role":"user"}}],"prompt":"p",{rest}}}"#);
        assert_eq!(read(route, &body).undivided, expected, "{rest}");
    };
    check(ChatCompletions, r#""logprobs":true,"top_logprobs":3"#, false);
    check(ChatCompletions, r#""prompt_logprobs":null,"use_beam_search":false"#, false);
    check(ChatCompletions, r#""prompt_logprobs":0"#, true);
    check(ChatCompletions, r#""use_beam_search":true"#, true);
    check(Completions, r#""echo":true"#, false);
    check(Completions, r#""echo":true,"logprobs":null"#, false);
    check(Completions, r#""echo":true,"logprobs":1"#, true);
    check(Completions, r#""logprobs":1,"echo":true"#, true);
}

#[test]
fn streams_are_told_apart() {
    let check = |rest: &str, expected: (bool, bool)| {
        let shape = read(ChatCompletions, &format!(r#"{{"messages":[{{"role":"user"}}],{rest}}}"#));
        assert_eq!((shape.stream, shape.include_usage), expected, "{rest}");
    };
    check(r#""stream":null"#, (false, false));
    check(r#""stream":true"#, (true, false));
    check(r#""stream":true,"stream":false"#, (false, false));
    check(r#""stream":true,"stream_options":{"x":[1],"include_usage":true}"#, (true, true));
    check(r#""stream":true,"stream_options":{"include_usage":null}"#, (true, false));
    check(r#""stream":true,"stream_options":null"#, (true, false));
}

#[test]
fn what_stands_against_a_resume_is_named() {
    let check = |route, rest: &str, expected: &[&str]| {
        let body =
            format!(r#"{{"messages":[{{"role":"user"}}],"prompt":"p","input":"i","max_tokens":9,{rest}}}"#);
        let shape = read(route, &body);
        assert_eq!(shape.obstacles.names().collect::<Vec<_>>(), expected, "{rest}");
    };
    check(ChatCompletions, r#""temperature":0.2,"stop":["x"],"tools":[],"n":1,"seed":null"#, &[]);
    check(ChatCompletions, r#""tools":[{"type":"function"}]"#, &["tools"]);
    check(ChatCompletions, r#""functions":[{"name":"f"}]"#, &["tools"]);
    check(ChatCompletions, r#""logprobs":true,"n":2,"seed":0"#, &["logprobs", "samples", "seed"]);
    check(ChatCompletions, r#""logprobs":false"#, &[]);
    check(Completions, r#""logprobs":0,"echo":true"#, &["logprobs", "echo"]);
    check(ChatCompletions, r#""response_format":{"type":"text"}"#, &[]);
    check(
        ChatCompletions,
        r#""response_format":{"json_schema":{"type":"text"},"type":"json_schema"}"#,
        &["structured"],
    );
    check(ChatCompletions, r#""guided_regex":"a+""#, &["structured"]);
    check(Responses, r#""text":{"format":{"type":"json_object"}}"#, &["structured", "other_prompt"]);
    check(Responses, r#""text":{"verbosity":"low"}"#, &["other_prompt"]);
    check(ChatCompletions, r#""presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1"#, &[]);
    check(ChatCompletions, r#""frequency_penalty":0.5"#, &["penalties"]);
    check(ChatCompletions, r#""repetition_penalty":1.1"#, &["penalties"]);
    check(Completions, r#""prompt":[1,2]"#, &["token_ids"]);
    check(Completions, r#""prompt":["a","b"]"#, &["prompt_list"]);
    check(ChatCompletions, r#""continue_final_message":false,"add_generation_prompt":true"#, &[]);
    check(ChatCompletions, r#""continue_final_message":true"#, &["continued"]);
    check(ChatCompletions, r#""add_generation_prompt":false"#, &["continued"]);
    check(ChatCompletions, r#""max_tokens":null"#, &[]);
    check(Completions, r#""max_tokens":null"#, &["limitless"]);
    check(ChatCompletions, r#""truncate_prompt_tokens":5"#, &["other_prompt"]);
    check(ChatCompletions, r#""return_token_ids":true"#, &["ids_said"]);
    check(ChatCompletions, r#""use_beam_search":true"#, &["samples"]);
}

#[test]
fn only_streams_of_completions_without_obstacles_are_resumed() {
    let check = |route, rest: &str, expected: OnBreak| {
        let body =
            format!(r#"{{"messages":[{{"role":"user"}}],"prompt":"p","input":"i","max_tokens":9,{rest}}}"#);
        assert_eq!(read(route, &body).on_break(), expected, "{rest}");
    };
    check(ChatCompletions, r#""stream":true"#, OnBreak::Resume);
    check(Completions, r#""stream":true"#, OnBreak::Resume);
    check(ChatCompletions, r#""stream":true,"seed":1"#, OnBreak::End(NoResume::Inexact));
    check(Responses, r#""stream":true"#, OnBreak::End(NoResume::Inexact));
    check(ChatCompletions, r#""stream":false"#, OnBreak::End(NoResume::Off));
}

#[test]
fn headers_say_how_urgent_and_how_long() {
    let check = |headers: [(&str, &str); 3], expected: (Priority, f64, f64, Option<f64>, u32, u32)| {
        let body = br#"{"messages":[{"role":"user"}],"max_tokens":1000}"#;
        let shape = RequestShape::read(ChatCompletions, &headers, body, &rules());
        let read = shape.map(|shape| {
            let Slo { ttft_ms, tpot_ms, total_ms } = shape.slo;
            (shape.priority, ttft_ms, tpot_ms, total_ms, shape.output_tokens, shape.ignored_headers)
        });
        assert_eq!(read, Ok(expected), "{headers:?}");
    };
    let none = ("a", "b");
    check([none, none, none], (Priority::Normal, 2_000.0, 50.0, None, 512, 0));
    check([("x-request-priority", "1"), none, none], (Priority::High, 1_000.0, 50.0, None, 512, 0));
    check([("X-Request-Priority", " 3 "), none, none], (Priority::Low, 3_000.0, 100.0, None, 512, 0));
    check(
        [("x-slo-ttft-ms", "150"), ("x-slo-tpot-ms", "12.5"), ("x-sla-target-ms", "9000")],
        (Priority::Normal, 150.0, 12.5, Some(9_000.0), 512, 0),
    );
    check([("x-expected-output-tokens", "900"), none, none], (Priority::Normal, 2_000.0, 50.0, None, 900, 0));
    check(
        [("x-expected-output-tokens", "90000"), none, none],
        (Priority::Normal, 2_000.0, 50.0, None, 1_000, 0),
    );
    // what makes no sense counts as not sent, and is counted
    check(
        [("x-request-priority", "urgent"), ("x-slo-ttft-ms", "-1"), ("x-slo-tpot-ms", "NaN")],
        (Priority::Normal, 2_000.0, 50.0, None, 512, 3),
    );
    check(
        [("x-request-priority", "0"), ("x-sla-target-ms", "inf"), ("x-expected-output-tokens", "0")],
        (Priority::Normal, 2_000.0, 50.0, None, 512, 3),
    );
}

#[test]
fn a_session_is_named_by_header_cache_key_or_configured_user() {
    let body = r#"{"messages":[{"role":"user"}],"prompt_cache_key":"k","user":"u"}"#;
    let check = |headers: [(&str, &str); 2], body: &str, from_user: bool, expected: Option<(&str, &str)>| {
        let rules = ShapeRules { session_from_user: from_user, ..rules() };
        let shape = RequestShape::read(ChatCompletions, &headers, body.as_bytes(), &rules);
        let session = shape.as_ref().map(|shape| shape.session);
        let expected = expected.map(|(namespace, text)| SessionKey::of(namespace, text.as_bytes()));
        assert_eq!(session, Ok(expected), "{headers:?} {body}");
        if let (Ok(shape), Some(key)) = (shape, expected) {
            assert_eq!(shape.rendezvous, key.raw());
        }
    };
    let none = ("a", "b");
    let keyless = r#"{"messages":[{"role":"user"}],"user":"u","prompt_cache_key":""}"#;
    check([("x-user-id", "7"), ("x-session-id", "s")], body, true, Some(("x-session-id", "s")));
    check([("x-user-id", "7"), ("x-session-id", " ")], body, true, Some(("x-user-id", "7")));
    check([none, none], body, true, Some(("prompt_cache_key", "k")));
    check([none, none], keyless, true, Some(("user", "u")));
    check([none, none], keyless, false, None);
}

#[test]
fn a_very_long_prompt_is_counted_in_full_and_indexed_in_part() {
    let shape = read(Completions, &format!(r#"{{"prompt":"{}"}}"#, "a".repeat(100_000)));
    assert_eq!(shape.blocks.len(), crate::prefix::BLOCKS_MAX);
    assert_eq!(shape.prompt_bytes, 100_000);
}

/// Replicas of different builds have to agree on these.
#[test]
fn hashes_are_the_same_on_every_build() {
    let shape = read(ChatCompletions, BASE);
    assert_eq!(shape.blocks[0].raw(), 2_620_376_966_443_519_761);
    assert_eq!(shape.tail, 16_397_756_766_448_020_972);
    assert_eq!(shape.rendezvous, 13_840_006_156_722_625_966);
    let ids = read(Completions, r#"{"model":"m","prompt":[1,2,3,4]}"#);
    assert_eq!(ids.blocks[0].raw(), 9_935_869_365_223_907_543);
}

/// `text` as JSON with every character that may be escaped the long way.
fn escaped(text: &str) -> String {
    let units = text.encode_utf16().map(|unit| format!("\\u{unit:04x}"));
    format!("\"{}\"", units.collect::<String>())
}

proptest! {
    #[test]
    fn texts_are_the_same_however_they_are_escaped(text in "\\PC{0,80}|(.|\n|\"|\\\\){0,80}") {
        let plain = serde_json::to_string(&text).expect("a string is JSON");
        let body = |text: &str| format!(r#"{{"model":{text},"messages":[{{"role":"user","content":{text}}}],"prompt_cache_key":{text}}}"#);
        let (one, other) = (read(ChatCompletions, &body(&plain)), read(ChatCompletions, &body(&escaped(&text))));
        prop_assert_eq!(one.model.as_deref(), Some(text.as_str()));
        prop_assert_eq!(one, other);
    }

    #[test]
    fn a_longer_chat_begins_like_a_shorter_one(texts in prop::collection::vec("[a-z\"\\\\é\n]{0,40}", 2..8)) {
        let messages: Vec<String> = texts
            .iter()
            .enumerate()
            .map(|(at, text)| {
                let role = ["user", "assistant"][at % 2];
                serde_json::json!({ "role": role, "content": text }).to_string()
            })
            .collect();
        let whole = chat(&messages.join(","));
        for count in 1..messages.len() {
            let part = chat(&messages[..count].join(","));
            prop_assert!(whole.blocks.starts_with(&part.blocks));
            prop_assert_eq!(whole.conversation, part.conversation);
        }
    }
}
