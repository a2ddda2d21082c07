//! Streams that break: which go on elsewhere, how often, and how silence is told from death.

use super::*;
use crate::lifecycle::LegOrder;

const CUT: Event = failed(LegFault::Truncated);

/// A stream that began at endpoint 1 within 100 ms.
const BEGUN: [(u64, Event); 3] =
    [(0, Event::Dispatched { endpoint: EndpointId::from_raw(1) }), (90, OK), (100, FirstByte)];

fn after(script: &[(u64, Event)], on_break: OnBreak) -> (Lifecycle, Effects) {
    let mut lifecycle = begin(Stream).on_break(on_break);
    let mut last = Effects::new();
    for (ms, event) in BEGUN.iter().chain(script) {
        last = lifecycle.step(*event, at(*ms));
    }
    (lifecycle, last)
}

#[track_caller]
fn check_resumable(script: &[(u64, Event)], want: &[&str]) -> Lifecycle {
    let (lifecycle, last) = after(script, OnBreak::Resume);
    assert_eq!(last.iter().map(words).collect::<Vec<_>>(), want, "{script:?}");
    lifecycle
}

fn breaks(effects: &Effects) -> Vec<(u64, &'static str, &'static str)> {
    let Some(Effect::Done(outcome)) = effects.last() else { panic!("{effects:?}") };
    let told = |each: &Break| (each.endpoint.raw(), each.failure.as_str(), each.then.as_str());
    outcome.breaks.iter().map(told).collect()
}

#[test]
fn a_stream_that_breaks_goes_on_elsewhere_as_the_same_stream() {
    let script = [(500, CUT), (501, sent(2)), (540, OK), (550, FirstByte), (900, Progress), (1_000, Ended)];
    let lifecycle =
        check_resumable(&script[..1], &["release 1", "report 1 Failure(Truncated)", "resume truncated"]);
    assert_eq!((lifecycle.phase(), lifecycle.tried()), (Phase::Resuming, &[endpoint(1)][..]));
    let lifecycle = check_resumable(&script[..3], &[]);
    assert_eq!((lifecycle.phase(), lifecycle.endpoint()), (Phase::Resuming, Some(endpoint(2))));
    assert_eq!(lifecycle.next_deadline(), Some((at(60_500), Limit::FirstByte)), "counted anew");
    assert_eq!(check_resumable(&script[..4], &["first-token 2"]).phase(), Phase::Decoding);
    let (_, last) = after(&script, OnBreak::Resume);
    assert_eq!(breaks(&last), [(1, "truncated", "resumed")]);
    let Some(Effect::Done(outcome)) = last.last() else { panic!("{last:?}") };
    assert_eq!((outcome.endpoint, outcome.resumed()), (Some(endpoint(2)), 1));
    assert_eq!((outcome.ttft_ms, outcome.decode_ms, outcome.total_ms), (Some(100.0), Some(900.0), 1_000.0));
    assert!(outcome.failed.is_empty(), "it is no retry");
}

#[test]
fn a_continuation_is_tried_as_often_as_a_request_and_then_ended_visibly() {
    let again = [(500, CUT), (501, sent(2)), (510, failed(LegFault::Reset))];
    check_resumable(&again, &["release 2", "report 2 Failure(Reset)", "withdraw 2", "resume reset"]);
    let (_, last) = after(&[&again[..], &[(511, Refused)]].concat(), OnBreak::Resume);
    assert_eq!(last.iter().map(words).collect::<Vec<_>>(), ["error-event reset", "done failed"]);
    assert_eq!(breaks(&last), [(1, "truncated", "no-endpoint")]);

    let twice = [(500, CUT), (501, sent(2)), (550, FirstByte), (600, CUT), (601, sent(3)), (650, FirstByte)];
    let third = [&twice[..], &[(700, CUT)]].concat();
    let (_, last) = after(&third, OnBreak::Resume);
    let words: Vec<_> = last.iter().map(words).collect();
    assert_eq!(words, ["release 3", "report 3 Failure(Truncated)", "error-event truncated", "done failed"]);
    let broke = |at, then| (at, "truncated", then);
    assert_eq!(breaks(&last), [broke(1, "resumed"), broke(2, "resumed"), broke(3, "tries-used")]);
}

#[test]
fn an_engine_that_refuses_the_continuation_ends_the_stream() {
    let refused = [(500, CUT), (501, sent(2)), (510, failed(LegFault::Status(400)))];
    let (_, last) = after(&refused, OnBreak::Resume);
    let told: Vec<_> = last.iter().map(words).collect();
    assert_eq!(told, ["release 2", "withdraw 2", "error-event status-other", "done failed"]);
    assert_eq!(breaks(&last), [(1, "truncated", "failed")]);
    // A reply that ends without a word is none, whatever its status.
    let empty = [(500, CUT), (501, sent(2)), (510, Event::HeadArrived { status: 400 }), (511, Ended)];
    check_resumable(&empty, &["release 2", "report 2 Failure(Truncated)", "withdraw 2", "resume truncated"]);
}

#[test]
fn what_can_not_be_continued_is_ended_for_a_reason_that_is_told() {
    let (_, last) = after(&[(500, CUT)], OnBreak::End(NoResume::Inexact));
    assert_eq!(breaks(&last), [(1, "truncated", "inexact")]);
    let unreadable = [(500, CUT), (500, Event::Unresumable(NoResume::Unreadable))];
    let (_, last) = after(&unreadable, OnBreak::Resume);
    assert_eq!(last.iter().map(words).collect::<Vec<_>>(), ["error-event truncated", "done failed"]);
    assert_eq!(breaks(&last), [(1, "truncated", "unreadable")]);
    check_resumable(&[(500, Event::Unresumable(NoResume::TooLong))], &[]);
}

#[test]
fn a_client_that_leaves_while_its_stream_is_resumed_leaves_nothing() {
    check_resumable(&[(500, CUT), (501, ClientGone)], &["done cancelled"]);
    let out = ["abort 2 ClientGone", "release 2", "withdraw 2", "done cancelled"];
    check_resumable(&[(500, CUT), (501, sent(2)), (502, ClientGone)], &out);
    let (_, last) = after(&[(500, CUT), (501, sent(2)), (502, Shutdown)], OnBreak::Resume);
    assert!(last.contains(&Effect::EndWithErrorEvent(EndCause::Shutdown)), "{last:?}");
    assert_eq!(breaks(&last), [(1, "truncated", "interrupted")]);
}

#[test]
fn a_split_stream_goes_on_through_a_new_pair_or_whole() {
    let split = |prefill, decode| Event::Split {
        prefill: endpoint(prefill),
        decode: endpoint(decode),
        order: LegOrder::PrefillFirst,
    };
    let mut lifecycle = begin(Stream).on_break(OnBreak::Resume);
    let decode = |n| Event::DecodeDispatched { endpoint: endpoint(n) };
    let script = [(0, split(1, 2)), (50, Event::HandedOff), (50, decode(2)), (90, FirstByte), (200, CUT)];
    for (ms, event) in script {
        lifecycle.step(event, at(ms));
    }
    assert_eq!((lifecycle.phase(), lifecycle.tried()), (Phase::Resuming, &[endpoint(2)][..]));
    // The same prefill endpoint will do.
    assert!(lifecycle.step(split(1, 3), at(201)).is_empty());
    assert_eq!((lifecycle.phase(), lifecycle.endpoint()), (Phase::Resuming, Some(endpoint(1))));
    lifecycle.step(Event::HandedOff, at(250));
    lifecycle.step(decode(3), at(250));
    lifecycle.step(FirstByte, at(290));
    assert_eq!(lifecycle.phase(), Phase::Decoding);
    // Its prefill is refused, as the client's own would be: no second answer is given.
    lifecycle.step(CUT, at(300));
    lifecycle.step(split(1, 4), at(301));
    let told = lifecycle.step(Event::PrefillAnswered { status: 400 }, at(310));
    let told: Vec<_> = told.iter().map(words).collect();
    let given_back = ["release 1", "withdraw 1", "release 4", "withdraw 4"];
    assert_eq!(told, [&given_back[..], &["error-event status-other", "done failed"]].concat());
}

#[test]
fn a_silent_stream_s_endpoint_is_looked_at_and_left_if_it_does_not_answer() {
    let (lifecycle, _) = after(&[], OnBreak::Resume);
    assert_eq!(lifecycle.next_look(), Some(at(1_100)));
    check_resumable(&[(1_099, Tick)], &[]);
    check_resumable(&[(1_100, Tick)], &["look 1"]);
    check_resumable(&[(1_100, Tick), (1_200, Tick)], &[]);
    let gone =
        ["abort 1 EndpointLost(Silent)", "report 1 Failure(Silent)", "release 1", "resume endpoint-lost"];
    check_resumable(&[(1_100, Tick), (1_600, looked(1, Seen::Nothing))], &gone);
    // One that answers is given as much time again, and so is one whose stream went on meanwhile.
    let answered = [(1_100, Tick), (1_101, looked(1, Seen::Answers)), (2_101, Tick)];
    check_resumable(&answered[..2], &[]);
    check_resumable(&answered, &["look 1"]);
    check_resumable(&[(1_100, Tick), (1_500, Progress), (1_600, looked(1, Seen::Nothing))], &[]);
    // Word of another endpoint, or of a look that nobody ordered, is none of this one.
    check_resumable(&[(1_100, Tick), (1_600, looked(2, Seen::Nothing))], &[]);
    check_resumable(&[(1_600, looked(1, Seen::Nothing))], &[]);
}

#[test]
fn a_stream_that_can_not_be_resumed_is_ended_only_after_three_looks_that_saw_nothing() {
    let blind = |n: u64| [(1_100 + 1_500 * n, Tick), (1_600 + 1_500 * n, looked(1, Seen::Nothing))];
    let end = OnBreak::End(NoResume::Inexact);
    let (_, last) = after(&[blind(0), blind(1)].concat(), end);
    assert!(last.is_empty(), "{last:?}");
    let (_, last) = after(&[blind(0), blind(1), blind(2)].concat(), end);
    assert!(last.iter().map(words).any(|word| word == "error-event endpoint-lost"), "{last:?}");
    let (_, last) = after(&[blind(0), blind(1), [(3_700, Progress), (3_701, Tick)], blind(2)].concat(), end);
    assert!(last.is_empty(), "{last:?}");
}

#[test]
fn how_long_silence_may_last_follows_from_the_endpoint_s_pace_between_a_floor_and_a_cap() {
    let limits = Limits::default();
    assert_eq!(limits.quiet_at(12.0), Duration::from_secs(1));
    assert_eq!(limits.quiet_at(150.0), Duration::from_secs(3));
    assert_eq!(limits.quiet_at(1e6), limits.idle);
    assert_eq!(limits.quiet_at(f64::NAN), limits.quiet);
    let (mut lifecycle, _) = after(&[], OnBreak::Resume);
    lifecycle.pace(150.0);
    assert_eq!(lifecycle.next_look(), Some(at(3_100)));
}

#[test]
fn an_idle_limit_that_passes_resumes_the_stream_too() {
    let idle = ["abort 1 Limit(Idle)", "report 1 Failure(Silent)", "release 1", "resume idle-timeout"];
    check_resumable(&[(60_100, Tick)], &idle);
}

#[test]
fn a_reply_that_ends_while_its_endpoint_is_taken_for_dead_has_ended() {
    let gone = [(1_100, Tick), (1_600, looked(1, Seen::Nothing)), (1_600, Ended)];
    check_resumable(&gone, &["done finished"]);
}
