use super::*;

const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
const CJK: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"漢字🙂é\"},\"finish_reason\":null}]}\n\n";
const STOP: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"!\"},\"finish_reason\":\"stop\"}]}\n\n";
const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\n";
const ABORT: &str =
    "data: {\"choices\":[{\"text\":\"Tab\",\"finish_reason\":\"abort\",\"stop_reason\":null}]}\n\n";
const ERROR: &str = "data: {\"error\":{\"message\":\"boom\",\"code\":500}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

fn run(scanner: &mut Scanner, stream: &str, step: usize) -> String {
    let mut out = Vec::new();
    for chunk in stream.as_bytes().chunks(step) {
        for piece in scanner.push(Bytes::copy_from_slice(chunk)).pieces {
            out.extend_from_slice(&piece);
        }
    }
    for piece in scanner.finish().pieces {
        out.extend_from_slice(&piece);
    }
    String::from_utf8(out).unwrap()
}

/// Whatever the cut, the same bytes come out and the same is known of the stream.
fn check(stream: &[&str], want: &[&str], ending: Ending) {
    let (stream, want) = (stream.concat(), want.concat());
    for step in 1..=stream.len() {
        let mut scanner = Scanner::new(Dialect::Completions);
        assert_eq!(run(&mut scanner, &stream, step), want, "step {step}");
        assert_eq!(scanner.ending(), ending, "step {step}");
    }
}

#[test]
fn a_whole_stream_passes_untouched_however_it_is_cut() {
    let stream = [": ping\n\n", ROLE, CJK, STOP, USAGE, DONE];
    check(&stream, &stream, Ending::Done);
    let carriage = stream.concat().replace('\n', "\r\n");
    check(&[&carriage], &[&carriage], Ending::Done);
    let returns = stream.concat().replace('\n', "\r");
    check(&[&returns], &[&returns], Ending::Done);
}

#[test]
fn comments_are_no_events_and_what_follows_them_in_one_is() {
    for (stream, events) in [
        (": one\n: two\r\n\r\n", 0),
        (":\r\r", 0),
        ("\n\n", 0),
        (": one\ndata: x\n\n", 1),
        ("\r\ndata: x\n\n", 1),
        ("event: x\n\n", 1),
    ] {
        let mut scanner = Scanner::new(Dialect::Completions);
        assert_eq!(run(&mut scanner, stream, 1), stream);
        assert_eq!(scanner.events(), events, "{stream:?}");
    }
}

#[test]
fn done_without_its_blank_line_is_done() {
    check(&[CJK, "data: [DONE]"], &[CJK, "data: [DONE]"], Ending::Done);
}

#[test]
fn no_done_follows_an_error_event() {
    // The engine's own failure is kept back: another engine may do better.
    check(&[CJK, ERROR, CJK, DONE], &[CJK], Ending::Failed);
    let mut scanner = Scanner::new(Dialect::Completions);
    run(&mut scanner, &[CJK, ERROR, DONE].concat(), 7);
    assert_eq!(scanner.take_error_event().as_deref(), Some(ERROR.as_bytes()));
    let old = "data: {\"object\":\"error\",\"message\":\"boom\",\"code\":400}\n\n";
    check(&[CJK, old, DONE], &[CJK, old], Ending::Failed);
}

#[test]
fn an_abort_keeps_its_text_and_loses_its_ending() {
    let kept = ABORT.replace("\"abort\"", "null");
    check(&[CJK, ABORT, USAGE, DONE], &[CJK, &kept], Ending::Aborted);
}

#[test]
fn a_cut_stream_is_open_and_a_finished_one_is_not() {
    check(&[ROLE, CJK], &[ROLE, CJK], Ending::Open);
    check(&[ROLE, "data: {\"choi"], &[ROLE, "data: {\"choi"], Ending::Open);
    check(&[ROLE, STOP], &[ROLE, STOP], Ending::Finished);
}

#[test]
fn texts_that_quote_the_markers_are_only_texts() {
    let quoting = [
        "data: {\"choices\":[{\"delta\":{\"content\":\"[DONE]\"},\"finish_reason\":null}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"error\"},\"finish_reason\":null}]}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"finish_reason\\\":\\\"abort\\\"\"},\"finish_reason\":null}],\"error\":null}\n\n",
    ];
    check(&quoting, &quoting, Ending::Open);
}

#[test]
fn events_content_and_usage_are_seen() {
    let mut scanner = Scanner::new(Dialect::Completions);
    assert_eq!(scanner.push(Bytes::from(": ping\n\n")).events, 0);
    assert_eq!(scanner.push(Bytes::from(ROLE)).events, 1);
    assert_eq!(scanner.take_tokens(), 0);
    scanner.push(Bytes::from(CJK));
    assert_eq!((scanner.take_tokens(), scanner.take_tokens()), (1, 0));
    assert_eq!(scanner.usage(), None);
    scanner.push(Bytes::from(USAGE));
    let usage = scanner.usage().unwrap();
    assert_eq!((usage.prompt_tokens, usage.output_tokens, usage.cached_tokens), (7, 2, Some(4)));
    assert_eq!((scanner.events(), scanner.take_tokens()), (3, 0));
}

#[test]
fn a_token_is_an_event_with_a_piece_of_the_answer() {
    const REPORTED: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}\n\n";
    const EMPTY_STOP: &str =
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":\"stop\"}]}\n\n";
    for (stream, want) in [
        (&[ROLE, ROLE, CJK, CJK, CJK, STOP, USAGE, DONE][..], 4),
        (&[": ping\n\n", ROLE, ": ping\n\n", CJK, ": ping\n\n", EMPTY_STOP, DONE], 1),
        (&[ROLE, REPORTED, REPORTED, USAGE, DONE], 2),
        (&[CJK, ABORT], 2),
        (&[ERROR], 0),
    ] {
        for step in [1, 7, 10_000] {
            let mut scanner = Scanner::new(Dialect::Completions);
            run(&mut scanner, &stream.concat(), step);
            assert_eq!(scanner.take_tokens(), want, "{stream:?} in steps of {step}");
        }
    }
}

#[test]
fn the_responses_api_ends_with_its_own_event() {
    let created = "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\",\"error\":null}}\n\n";
    let delta = "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"item_id\":\"m\",\"delta\":\"a\"}\n\n";
    let completed = "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_1\",\"error\":null,\"usage\":{\"input_tokens\":3,\"output_tokens\":1}}}\n\n";
    let mut scanner = Scanner::new(Dialect::Responses);
    run(&mut scanner, &[created, delta].concat(), 7);
    assert_eq!((scanner.ending(), scanner.response_id()), (Ending::Open, Some("resp_1")));
    assert_eq!(scanner.take_tokens(), 1);
    assert_eq!(run(&mut scanner, completed, 1), completed);
    assert_eq!(scanner.ending(), Ending::Finished);
    assert_eq!(scanner.usage().map(|usage| usage.prompt_tokens), Some(3));
    let failed = completed.replace("completed", "failed");
    let mut scanner = Scanner::new(Dialect::Responses);
    run(&mut scanner, &failed, 5);
    assert_eq!(scanner.ending(), Ending::Failed);
}

#[test]
fn an_overlong_event_passes_unread_and_the_next_is_read_again() {
    let long = format!("data: {{\"b64\":\"{}\"}}\n\n", "A".repeat(EVENT_BYTES_MAX));
    let stream = [&long, STOP, DONE].concat();
    for step in [1 << 20, (1 << 20) + 7, stream.len()] {
        let mut scanner = Scanner::new(Dialect::Completions);
        assert_eq!(run(&mut scanner, &stream, step), stream);
        assert_eq!(scanner.ending(), Ending::Done);
    }
}
