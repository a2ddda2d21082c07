use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::stream::Usage;

const CHAT: Route = Route::ChatCompletions;
const TEXT: Route = Route::Completions;

/// A chat's event as vLLM writes it.
fn chat_event(id: &str, delta: &str, finish: &str) -> String {
    format!(
        "data: {{\"id\":\"{id}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\",\
         \"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
    )
}

fn content(id: &str, text: &str) -> String {
    chat_event(id, &json!({ "content": text }).to_string(), "null")
}

fn role(id: &str) -> String {
    chat_event(id, r#"{"role":"assistant","content":""}"#, "null")
}

fn said(route: Route, stream: &str) -> Result<Said, NoResume> {
    let mut memory = Memory::new(route, 1 << 20);
    memory.keep(stream.as_bytes());
    memory.so_far().map(|said| said.clone())
}

#[track_caller]
fn check_said(route: Route, stream: &str, want: Result<(&str, u32), NoResume>) {
    let got = said(route, stream);
    assert_eq!(got.as_ref().map(|said| (said.text(), said.tokens())).map_err(|why| *why), want, "{stream}");
}

#[test]
fn the_text_of_a_stream_is_put_together_from_its_events() {
    let stream =
        [role("a"), content("a", "Grüß"), ": ping\n\n".to_owned(), content("a", " \"Gott\"\n")].concat();
    check_said(CHAT, &stream, Ok(("Grüß \"Gott\"\n", 2)));
    check_said(CHAT, &role("a"), Ok(("", 0)));
    check_said(CHAT, "", Ok(("", 0)));
    let text = |text: &str| {
        format!("data: {{\"id\":\"a\",\"choices\":[{{\"index\":0,\"text\":\"{text}\"}}]}}\r\n\r\n")
    };
    check_said(TEXT, &[text("one"), text(""), text(" two")].concat(), Ok(("one two", 2)));
    // An engine that counts is believed: it may put several tokens into one event.
    let counted = r#"data: {"choices":[{"text":"a b c"}],"usage":{"prompt_tokens":7,"completion_tokens":3}}"#;
    check_said(TEXT, &format!("{counted}\n\n"), Ok(("a b c", 3)));
}

#[test]
fn what_is_more_than_a_text_or_is_over_can_not_be_said_again() {
    let after = |delta: &str| [role("a"), content("a", "x"), chat_event("a", delta, "null")].concat();
    for delta in [
        r#"{"reasoning_content":"hm"}"#,
        r#"{"reasoning":"hm"}"#,
        r#"{"tool_calls":[{"index":0}]}"#,
        r#"{"function_call":{"name":"f"}}"#,
        r#"{"refusal":"no"}"#,
        r#"{"audio":{"id":"a"}}"#,
    ] {
        check_said(CHAT, &after(delta), Err(NoResume::Unreadable));
    }
    let nothing = r#"{"content":"y","reasoning_content":null,"reasoning":"","refusal":null,"tool_calls":[]}"#;
    check_said(CHAT, &after(nothing), Ok(("xy", 2)));
    check_said(
        CHAT,
        &[content("a", "x"), chat_event("a", "{}", "\"stop\"")].concat(),
        Err(NoResume::Finished),
    );
    let second = "data: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"x\"}}]}\n\n";
    check_said(CHAT, second, Err(NoResume::Unreadable));
    check_said(CHAT, "data: {\"error\":{\"code\":400}}\n\n", Err(NoResume::Unreadable));
    check_said(CHAT, "data: what?\n\n", Err(NoResume::Unreadable));
    check_said(CHAT, &content("a", "x")[..30], Err(NoResume::Unreadable));
}

#[test]
fn no_more_is_kept_than_is_allowed_and_a_long_stream_is_kept_as_its_text() {
    let event = content("a", "word");
    let mut memory = Memory::new(CHAT, UNREAD_BYTES_MAX + 10_000);
    let events = 2_000;
    assert!(events * event.len() > 4 * UNREAD_BYTES_MAX);
    for _ in 0..events {
        memory.keep(event.as_bytes());
        assert!(memory.unread.len() < UNREAD_BYTES_MAX && memory.unread.capacity() <= 2 * UNREAD_BYTES_MAX);
    }
    assert_eq!(memory.so_far().map(|said| said.text().len()), Ok(4 * events));

    let mut memory = Memory::new(CHAT, 1_000);
    while !memory.is_lost() {
        memory.keep(event.as_bytes());
    }
    assert_eq!(memory.so_far(), Err(NoResume::TooLong));
    assert_eq!(memory.unread.capacity(), 0, "nothing is kept of what is lost");
}

fn said_by(route: Route, text: &str, pieces: usize) -> Said {
    let cut = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    let events = (0..pieces).map(|n| {
        let piece = if n + 1 == pieces { &text[cut(n)..] } else { &text[cut(n)..cut(n + 1)] };
        match route {
            TEXT => format!("data: {}\n\n", json!({"id": "a", "choices": [{"index": 0, "text": piece}]})),
            _ => content("a", piece),
        }
    });
    said(route, &events.collect::<String>()).unwrap()
}

#[track_caller]
fn check_body(route: Route, said: &Said, body: &str, want: Result<&str, NoResume>) {
    let got = continued(route, &Bytes::copy_from_slice(body.as_bytes()), said);
    let got = got.as_ref().map(|got| std::str::from_utf8(got).unwrap()).map_err(|why| *why);
    assert_eq!(got, want, "{body}");
}

#[test]
fn a_chat_is_continued_behind_what_was_said_and_all_else_stays_as_it_was() {
    let three = said_by(CHAT, "a\"é", 3);
    check_body(
        CHAT,
        &three,
        r#"{"x":12345678901234567890123, "messages" : [ {"role":"user","content":"hi"} ] ,"max_tokens":10,"stream":true}"#,
        Ok(
            r#"{"x":12345678901234567890123, "messages" : [ {"role":"user","content":"hi"} ,{"role":"assistant","content":"a\"é"}] ,"max_tokens":7,"stream":true,"continue_final_message":true,"add_generation_prompt":false}"#,
        ),
    );
    // Limits of both names, and what must come at the least; what says otherwise of the end of the chat goes.
    check_body(
        CHAT,
        &three,
        r#"{"add_generation_prompt":true,"continue_final_message":null,"messages":[],"max_completion_tokens":4,"max_tokens":null,"min_tokens":2}"#,
        Ok(
            r#"{"messages":[{"role":"assistant","content":"a\"é"}],"max_completion_tokens":1,"max_tokens":null,"min_tokens":0,"continue_final_message":true,"add_generation_prompt":false}"#,
        ),
    );
    check_body(CHAT, &three, r#"{"messages":[1],"max_tokens":3}"#, Err(NoResume::Finished));
    check_body(CHAT, &three, r#"{"messages":[1],"max_tokens":"many"}"#, Err(NoResume::Unreadable));
    check_body(CHAT, &three, r#"{"prompt":"x","max_tokens":9}"#, Err(NoResume::Unreadable));
}

#[test]
fn a_text_completion_is_continued_behind_its_prompt() {
    let two = said_by(TEXT, " b\n", 2);
    check_body(
        TEXT,
        &two,
        r#"{"prompt":"say \"a\"","max_tokens":1e1,"min_tokens":9,"messages":[]}"#,
        Ok(r#"{"prompt":"say \"a\" b\n","max_tokens":8,"min_tokens":7,"messages":[]}"#),
    );
    check_body(
        TEXT,
        &two,
        r#"{"prompt":[ "a" ],"max_tokens":9}"#,
        Ok(r#"{"prompt":[ "a b\n" ],"max_tokens":7}"#),
    );
    check_body(TEXT, &two, r#"{"prompt":7,"max_tokens":9}"#, Err(NoResume::Unreadable));
    check_body(TEXT, &two, r#"{"max_tokens":9}"#, Err(NoResume::Unreadable));
}

#[test]
fn tokens_that_came_several_in_one_event_are_counted_by_who_goes_on() {
    let body = r#"{"prompt":"p","max_tokens":20}"#;
    let mut broke = said_by(TEXT, "abcdef", 3);
    assert!(broke.wants_count());
    let asked = continued_prompt(TEXT, &Bytes::from(body), &broke).unwrap();
    assert_eq!(asked, r#"{"prompt":"pabcdef","max_tokens":20}"#);
    broke.count(5, 6);
    check_body(TEXT, &broke, body, Ok(r#"{"prompt":"pabcdef","max_tokens":14}"#));
    let own = Usage { prompt_tokens: 11, output_tokens: 14, cached_tokens: None };
    let wanted = Usage { prompt_tokens: 5, output_tokens: 20, cached_tokens: None };
    assert_eq!(Stitch::to(&broke).usage(own), wanted);
    // What comes after is counted by events again.
    broke.take(b"data: {\"choices\":[{\"text\":\"g\"}]}\n\n").unwrap();
    assert_eq!(broke.tokens(), 7);
    // Each event had a token at the least, and the end of all would have been said.
    broke.count(5, 1);
    assert_eq!(broke.tokens(), 4);
    broke.count(5, 30);
    check_body(TEXT, &broke, body, Ok(r#"{"prompt":"pabcdefg","max_tokens":1}"#));
    check_body(TEXT, &broke, r#"{"prompt":"p","max_tokens":4}"#, Err(NoResume::Finished));
    let counted = r#"data: {"choices":[{"text":"a b c"}],"usage":{"prompt_tokens":7,"completion_tokens":3}}"#;
    assert!(!said(TEXT, &format!("{counted}\n\n")).unwrap().wants_count());
}

#[test]
fn where_nothing_was_said_the_same_is_asked_again() {
    let nothing = said(CHAT, &role("a")).unwrap();
    check_body(
        CHAT,
        &nothing,
        r#"{"messages":[1],"max_tokens":1}"#,
        Ok(r#"{"messages":[1],"max_tokens":1}"#),
    );
}

#[track_caller]
fn check_joined(before: &str, rest: &str, want: &str) {
    let stitch = Stitch::to(&said(CHAT, before).unwrap());
    let got = stitch.joined(&Bytes::copy_from_slice(rest.as_bytes()));
    assert_eq!(std::str::from_utf8(&got).unwrap(), want);
}

#[test]
fn the_rest_is_named_as_the_stream_was_and_says_no_role_again() {
    let before = [role("first"), content("first", "a")].concat();
    let other = |event: String| event.replace("1700000000", "1800000000").replace("\"m\"", "\"other\"");
    let rest = [role("second"), content("second", "b"), ": ping\n\n".to_owned()].map(other).concat();
    check_joined(&before, &rest, &[content("first", "b"), ": ping\n\n".to_owned()].concat());
    check_joined(&before, "data: [DONE]\n\n", "data: [DONE]\n\n");
    // A role that comes with the first word goes alone; one that the client has not been told stays.
    let both = chat_event("second", r#"{"role":"assistant","content":"b"}"#, "null");
    check_joined(&before, &both, &content("first", "b"));
    check_joined("", &both, &both);
    check_joined(&content("first", "a"), &both, &content("first", "b"));
    let end = chat_event("second", r#"{"role":"assistant","content":""}"#, "\"length\"");
    check_joined(&before, &end, &chat_event("first", r#"{"content":""}"#, "\"length\""));
    check_joined(&before, "data:{\"id\":\ndata:7}\r\n\r\n", "data: {\"id\": \"first\"}\n\n");
}

#[test]
fn reports_of_tokens_are_about_the_whole_answer() {
    let usage = |usage: Value| format!("data: {}\n\n", json!({ "choices": [], "usage": usage }));
    let parts = |text: &str| -> Value {
        serde_json::from_str::<Value>(text.strip_prefix("data: ").unwrap()).unwrap()["usage"].clone()
    };
    let three = said_by(CHAT, "abc", 3);
    let joined = |said: &Said, report: Value| {
        let joined = Stitch::to(said).joined(&Bytes::from(usage(report)));
        parts(std::str::from_utf8(&joined).unwrap())
    };
    let report = json!({
        "prompt_tokens": 13, "total_tokens": 18, "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 12, "other": 1}
    });
    let whole = json!({
        "prompt_tokens": 10, "total_tokens": 18, "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 10, "other": 1}
    });
    assert_eq!(joined(&three, report), whole);
    let own = Usage { prompt_tokens: 13, output_tokens: 5, cached_tokens: Some(12) };
    let wanted = Usage { prompt_tokens: 10, output_tokens: 8, cached_tokens: Some(10) };
    assert_eq!(Stitch::to(&three).usage(own), wanted);
    // The first engine has told what the prompt was.
    let told = [content("a", "ab"), usage(json!({"prompt_tokens": 9, "completion_tokens": 2}))].concat();
    let told = said(CHAT, &told).unwrap();
    let report = json!({"prompt_tokens": 12, "completion_tokens": 1});
    assert_eq!(joined(&told, report), json!({"prompt_tokens": 9, "completion_tokens": 3}));
    // It is asked again from the start.
    let nothing = said(CHAT, &role("a")).unwrap();
    let report = json!({"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13});
    assert_eq!(joined(&nothing, report.clone()), report);
}

proptest! {
    #[test]
    fn any_text_comes_back_from_its_events_and_stands_in_the_body_that_continues_it(
        words in prop::collection::vec("\\PC{0,8}|[\\x00-\\x1f\"\\\\]{1,3}", 1..20),
        chat: bool,
        cut in 0_usize..4_000,
    ) {
        let route = if chat { CHAT } else { TEXT };
        let event = |word: &String| match route {
            TEXT => format!("data: {}\n\n", json!({"id": "a", "choices": [{"index": 0, "text": word}]})),
            _ => content("a", word),
        };
        let stream: String = words.iter().map(event).collect();
        let mut memory = Memory::new(route, 1 << 20);
        let cut = cut.min(stream.len());
        memory.keep(&stream.as_bytes()[..cut]);
        memory.read();
        memory.keep(&stream.as_bytes()[cut..]);
        let whole = words.concat();
        let said = memory.so_far().unwrap();
        prop_assert_eq!(said.text(), &whole);
        let body = json!({"messages": [{"role": "user", "content": "q"}], "prompt": "p", "max_tokens": 50});
        let again = continued(route, &Bytes::from(body.to_string()), said).unwrap();
        let again: Value = serde_json::from_slice(&again).unwrap();
        let left = if whole.is_empty() { 50 } else { 50 - words.iter().filter(|word| !word.is_empty()).count() };
        prop_assert_eq!(&again["max_tokens"], left);
        if !whole.is_empty() && chat {
            prop_assert_eq!(&again["messages"][1], &json!({"role": "assistant", "content": whole}));
        } else if !whole.is_empty() {
            prop_assert_eq!(&again["prompt"], &format!("p{whole}"));
        }
    }

    #[test]
    fn whatever_an_engine_sends_is_read_or_refused_and_stitched_without_a_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..60),
        at in 0_usize..200,
    ) {
        let mut stream = [role("a"), content("a", "x")].concat().into_bytes();
        let at = at.min(stream.len());
        stream.splice(at..at, bytes);
        let mut memory = Memory::new(CHAT, 1 << 20);
        memory.keep(&stream);
        let _ = memory.so_far();
        let stitch = Stitch::to(&said(CHAT, &role("b")).unwrap());
        let _ = stitch.joined(&Bytes::from(stream));
    }
}
