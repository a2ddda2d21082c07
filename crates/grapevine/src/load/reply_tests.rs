use super::*;

/// Reads a stream of events that arrive 10 ms apart.
fn stream(events: &[&str]) -> (Answer, Result<(), ErrorKind>) {
    let mut reader = StreamReader::default();
    let start = Instant::now();
    for (index, event) in events.iter().enumerate() {
        let now = start + Duration::from_millis(10 * index as u64);
        reader.push(format!("data: {event}\n\n").as_bytes(), now);
    }
    let (answer, verdict) = reader.finish();
    (answer, verdict.map_err(|failure| failure.kind))
}

const ROLE: &str =
    r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
const ONE: &str = r#"{"choices":[{"index":0,"delta":{"content":"one"},"finish_reason":null}]}"#;
const LINE: &str = r#"{"choices":[{"index":0,"delta":{"content":"\n\"é"},"finish_reason":null}]}"#;
const END: &str = r#"{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"length"}]}"#;
const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":14,"total_tokens":19,"completion_tokens":5,
    "prompt_tokens_details":{"cached_tokens":8}}}"#;
const ERROR: &str =
    r#"{"error":{"message":"engine died","type":"InternalServerError","param":null,"code":500}}"#;
const ABORT: &str = r#"{"choices":[{"index":0,"text":"Tab","finish_reason":"abort"}]}"#;
const DONE: &str = "[DONE]";

#[test]
fn a_whole_stream_gives_text_times_and_usage() {
    let (answer, verdict) = stream(&[ROLE, ONE, LINE, END, &USAGE.replace('\n', ""), DONE]);
    assert_eq!(verdict, Ok(()));
    assert_eq!(answer.text, "one\n\"é");
    assert_eq!(answer.gaps, [Duration::from_millis(10)]);
    assert_eq!(answer.content_events, 2);
    let usage = answer.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens()), (14, 5, Some(8)));
}

#[test]
fn the_first_token_is_the_first_content_not_the_role() {
    let start = Instant::now();
    let mut reader = StreamReader::default();
    for (event, at_ms) in [(ROLE, 1), (ONE, 7)] {
        reader.push(format!("data: {event}\n\n").as_bytes(), start + Duration::from_millis(at_ms));
    }
    let (answer, _) = reader.finish();
    assert_eq!(answer.first_content, Some(start + Duration::from_millis(7)));
}

#[test]
fn reasoning_tool_calls_and_completions_text_are_content() {
    for event in [
        r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#,
        r#"{"choices":[{"delta":{"reasoning":"hm","content":null}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}"#,
        r#"{"choices":[{"text":" a"}]}"#,
    ] {
        assert_eq!(stream(&[event]).0.content_events, 1, "{event}");
    }
    assert_eq!(stream(&[r#"{"choices":[{"delta":{"tool_calls":null}}],"error":null}"#]).0.content_events, 0);
}

#[test]
fn each_way_a_stream_breaks_has_its_kind() {
    let check = |events: &[&str], kind| assert_eq!(stream(events).1, Err(kind), "{events:?}");
    check(&[ROLE, ONE, END], ErrorKind::Truncated);
    check(&[ROLE, ONE, DONE], ErrorKind::Truncated);
    check(&[], ErrorKind::Truncated);
    check(&[ROLE, ONE, ERROR], ErrorKind::ErrorEvent);
    check(&[ROLE, ONE, ERROR, DONE], ErrorKind::ErrorEvent);
    check(&[ONE, END, ERROR, DONE], ErrorKind::ErrorEvent);
    check(&[ONE, ABORT, DONE], ErrorKind::Abort);
    check(&[ONE, "<html>", END, DONE], ErrorKind::BodyMismatch);
}

#[test]
fn an_answer_without_end_is_given_up() {
    let mut reader = StreamReader::default();
    let event = format!("data: {{\"choices\":[{{\"text\":\"{}\"}}]}}\n\n", "x".repeat(1 << 18));
    let events = (0..100).take_while(|_| {
        reader.push(event.as_bytes(), Instant::now());
        !reader.is_hopeless()
    });
    assert_eq!(events.count(), 4);
}

#[test]
fn a_whole_reply_is_a_completion_or_says_why_not() {
    let check = |body: &str| {
        let (answer, verdict) = read_whole(body.as_bytes());
        (answer.text, verdict.map_err(|failure| failure.kind))
    };
    let chat = r#"{"choices":[{"message":{"role":"assistant","content":"hi","tool_calls":null},
        "finish_reason":"stop"}],"usage":{"prompt_tokens":3}}"#;
    assert_eq!(check(chat), ("hi".to_owned(), Ok(())));
    let text = r#"{"choices":[{"text":"hi","finish_reason":"length"}],"usage":null}"#;
    assert_eq!(check(text), ("hi".to_owned(), Ok(())));
    assert_eq!(check(&text.replace("length", "abort")).1, Err(ErrorKind::Abort));
    assert_eq!(check(r#"{"choices":[{"text":"hi"}]}"#).1, Err(ErrorKind::Truncated));
    assert_eq!(check(r#"{"choices":[]}"#).1, Err(ErrorKind::BodyMismatch));
    assert_eq!(check("ok").1, Err(ErrorKind::BodyMismatch));
    assert_eq!(check(ERROR).1, Err(ErrorKind::ErrorEvent));
}

#[test]
fn what_the_other_side_said_is_kept_short_and_printable() {
    let failure = Failure::new(ErrorKind::Reset, format!("\u{1b}[31m\r\n{}", "x".repeat(1000)));
    assert_eq!(failure.detail.chars().count(), 200);
    assert!(failure.detail.starts_with(" [31m  x"));
}
