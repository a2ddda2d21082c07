use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::retry::{BudgetConfig, RetryBudget};

fn endpoint(n: u64) -> EndpointId {
    EndpointId::from_raw(n)
}

fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

fn begin(delivery: Delivery) -> Lifecycle {
    let budget = Arc::new(RetryBudget::new(BudgetConfig::default()));
    Lifecycle::new(Limits::default(), delivery, RetryPlan::new(3, budget), at(0))
}

const fn failed(fault: LegFault) -> Event {
    Event::LegFailed { failure: LegFailure::new(fault), in_flight: 1 }
}

fn sent(n: u64) -> Event {
    Event::Dispatched { endpoint: endpoint(n) }
}

fn looked(n: u64, seen: Seen) -> Event {
    Event::Looked { endpoint: endpoint(n), seen, in_flight: 1 }
}

/// An effect in a few words; endpoints by number.
fn words(effect: &Effect) -> String {
    match effect {
        Effect::AbortUpstream { endpoint, cause } => format!("abort {} {cause:?}", endpoint.raw()),
        Effect::Release { endpoint } => format!("release {}", endpoint.raw()),
        Effect::FirstToken { endpoint } => format!("first-token {}", endpoint.raw()),
        Effect::Withdraw { endpoint } => format!("withdraw {}", endpoint.raw()),
        Effect::Report { endpoint, signal } => format!("report {} {signal:?}", endpoint.raw()),
        Effect::RetryElsewhere { after } => format!("retry {}", after.as_str()),
        Effect::ResumeElsewhere { after } => format!("resume {}", after.as_str()),
        Effect::Look { endpoint } => format!("look {}", endpoint.raw()),
        Effect::DecodeElsewhere { after } => format!("decode-elsewhere {}", after.as_str()),
        Effect::ReleaseStaged { prefill, decode, leg } => {
            format!("release-staged {} for {} {leg:?}", prefill.raw(), decode.raw())
        }
        Effect::GiveUp(what) => format!("give-up {what:?}"),
        Effect::EndWithErrorEvent(cause) => format!("error-event {}", cause.as_str()),
        Effect::CutReply(cause) => format!("cut {}", cause.as_str()),
        Effect::Done(outcome) => format!("done {}", outcome.verdict.phase().as_str()),
    }
}

/// Runs a script of events (at, event) and compares what the last one leads to.
#[track_caller]
fn check(delivery: Delivery, script: &[(u64, Event)], want: &[&str]) -> Lifecycle {
    let mut lifecycle = begin(delivery);
    let mut last = Effects::new();
    for (ms, event) in script {
        last = lifecycle.step(*event, at(*ms));
    }
    let got: Vec<_> = last.iter().map(words).collect();
    assert_eq!(got, want, "{script:?}");
    lifecycle
}

use Delivery::{Stream, Whole};
use Event::{ClientGone, Ended, FirstByte, Progress, Queued, Refused, Shutdown, Tick};

const OK: Event = Event::HeadArrived { status: 200 };

#[test]
fn a_request_that_goes_well_is_released_and_reported_once() {
    let script = [(0, Queued), (5, sent(1)), (30, OK), (31, FirstByte), (40, Progress), (90, Ended)];
    for delivery in [Stream, Whole] {
        check(delivery, &script[..4], &["first-token 1"]);
        check(delivery, &script, &["release 1", "report 1 Success", "done finished"]);
    }
}

#[test]
fn the_outcome_tells_the_time_of_each_phase() {
    let mut lifecycle = begin(Stream);
    lifecycle.step(sent(1), at(10));
    lifecycle.step(failed(LegFault::Reset), at(20));
    lifecycle.step(sent(2), at(25));
    lifecycle.step(FirstByte, at(125));
    let effects = lifecycle.step(Ended, at(1_125));
    let Some(Effect::Done(outcome)) = effects.last() else { panic!("{effects:?}") };
    assert_eq!(outcome.endpoint, Some(endpoint(2)));
    assert_eq!(outcome.queued_ms, 25.0);
    assert_eq!(outcome.prefill_ms, Some(100.0));
    assert_eq!(outcome.ttft_ms, Some(125.0));
    assert_eq!(outcome.decode_ms, Some(1_000.0));
    assert_eq!((outcome.total_ms, outcome.leg_ms()), (1_125.0, 1_100.0));
    assert_eq!(outcome.failed.len(), 1);
    assert_eq!(outcome.failed[0].failure, LegFailure::new(LegFault::Reset));
}

#[test]
fn before_the_first_byte_a_failed_leg_is_tried_elsewhere() {
    let refused = failed(LegFault::ConnectRefused);
    check(
        Stream,
        &[(0, sent(1)), (1, refused)],
        &["release 1", "report 1 Failure(Refused)", "withdraw 1", "retry connect-refused"],
    );
    check(
        Whole,
        &[(0, sent(1)), (1, failed(LegFault::Status(503)))],
        &["release 1", "report 1 Failure(Unavailable)", "withdraw 1", "retry status-503"],
    );
    // A full queue is nobody's fault.
    check(
        Whole,
        &[(0, sent(1)), (1, failed(LegFault::Status(429)))],
        &["release 1", "withdraw 1", "retry status-429"],
    );
    // But it may say for how long it wants to be left alone.
    let full = LegFailure { fault: LegFault::Status(429), retry_after: Some(Duration::from_secs(7)) };
    check(
        Whole,
        &[(0, sent(1)), (1, Event::LegFailed { failure: full, in_flight: 1 })],
        &["release 1", "report 1 Pause(7s)", "withdraw 1", "retry status-429"],
    );
}

#[test]
fn when_tries_or_endpoints_are_used_up_the_last_failure_says_what_the_client_is_told() {
    let retry_after = Some(Duration::from_secs(7));
    let full = LegFailure { fault: LegFault::Status(429), retry_after };
    let full = Event::LegFailed { failure: full, in_flight: 1 };
    let pass_on = format!("give-up {:?}", GiveUp::PassOn { status: 429, retry_after });
    check(Stream, &[(0, sent(1)), (1, full), (2, Refused)], &[&pass_on, "done failed"]);

    let reset = failed(LegFault::Reset);
    let bad_gateway =
        format!("give-up {:?}", GiveUp::BadGateway { failure: LegFailure::new(LegFault::Reset) });
    check(
        Stream,
        &[(0, sent(1)), (1, reset), (2, sent(2)), (3, reset), (4, sent(3)), (5, reset)],
        &["release 3", "report 3 Failure(Reset)", "withdraw 3", &bad_gateway, "done failed"],
    );
    check(Stream, &[(0, Refused)], &["give-up Refusal", "done failed"]);
    check(Stream, &[(0, Queued), (9, Refused)], &["give-up Refusal", "done failed"]);
}

#[test]
fn after_the_first_byte_a_failed_leg_ends_the_reply_visibly() {
    let script = [(0, sent(1)), (1, OK), (2, FirstByte), (3, failed(LegFault::Truncated))];
    let told = ["release 1", "report 1 Failure(Truncated)", "error-event truncated", "done failed"];
    check(Stream, &script, &told);
    check(Whole, &script, &["release 1", "report 1 Failure(Truncated)", "cut truncated", "done failed"]);
}

#[test]
fn a_stream_that_ends_before_it_began_is_a_failure_and_an_empty_reply_is_not() {
    check(
        Stream,
        &[(0, sent(1)), (1, OK), (2, Ended)],
        &["release 1", "report 1 Failure(Truncated)", "withdraw 1", "retry truncated"],
    );
    check(Whole, &[(0, sent(1)), (1, OK), (2, Ended)], &["release 1", "report 1 Success", "done finished"]);
}

#[test]
fn what_an_engine_answers_below_500_says_nothing_of_its_health() {
    for status in 400..500 {
        let answer = Event::HeadArrived { status };
        let told = ["release 1", "withdraw 1", "done finished"];
        check(Stream, &[(0, sent(1)), (1, answer), (2, FirstByte), (3, Ended)], &told);
    }
    check(
        Stream,
        &[(0, sent(1)), (1, Event::HeadArrived { status: 500 }), (2, FirstByte), (3, Ended)],
        &["release 1", "report 1 Failure(ServerError)", "withdraw 1", "done finished"],
    );
}

#[test]
fn a_client_that_leaves_closes_the_leg_in_every_phase() {
    let gone = (5, ClientGone);
    check(Stream, &[gone], &["done cancelled"]);
    check(Stream, &[(0, Queued), gone], &["done cancelled"]);
    let before = ["abort 1 ClientGone", "release 1", "withdraw 1", "done cancelled"];
    check(Stream, &[(0, sent(1)), gone], &before);
    check(
        Stream,
        &[(0, sent(1)), (1, FirstByte), gone],
        &["abort 1 ClientGone", "release 1", "done cancelled"],
    );
    check(Stream, &[(0, sent(1)), (1, failed(LegFault::Reset)), gone], &["done cancelled"]);
    let lifecycle = check(Stream, &[gone, gone], &[]);
    assert_eq!(lifecycle.phase(), Phase::Cancelled);
}

#[test]
fn a_leg_sent_after_the_end_is_closed_and_its_charge_given_back() {
    check(Stream, &[(0, ClientGone), (1, sent(1))], &["abort 1 NotWanted", "release 1"]);
    check(Stream, &[(0, sent(1)), (1, sent(2))], &["abort 2 NotWanted", "release 2"]);
}

#[test]
fn no_endpoint_is_tried_twice() {
    let bad_gateway =
        format!("give-up {:?}", GiveUp::BadGateway { failure: LegFailure::new(LegFault::Reset) });
    check(
        Stream,
        &[(0, sent(1)), (1, failed(LegFault::Reset)), (2, sent(1))],
        &["abort 1 NotWanted", "release 1", &bad_gateway, "done failed"],
    );
}

#[test]
fn limits_are_separate_and_the_first_byte_limit_spans_all_tries() {
    fn deadline(delivery: Delivery, script: &[(u64, Event)], want: Option<(u64, Limit)>) {
        let mut lifecycle = begin(delivery);
        for (ms, event) in script {
            lifecycle.step(*event, at(*ms));
        }
        let want = want.map(|(ms, limit)| (at(ms), limit));
        assert_eq!(lifecycle.next_deadline(), want, "{delivery:?} {script:?}");
    }
    let retried = [(0, sent(1)), (50_000, failed(LegFault::Reset)), (50_001, sent(2))];
    deadline(Stream, &[], Some((60_000, Limit::FirstByte)));
    deadline(Stream, &retried, Some((60_000, Limit::FirstByte)));
    let begun = [(0, sent(1)), (100, FirstByte), (20_000, Progress)];
    deadline(Stream, &begun[..2], Some((60_100, Limit::Idle)));
    deadline(Stream, &begun, Some((80_000, Limit::Idle)));
    let long = [(0, sent(1)), (100, FirstByte), (3_599_000, Progress)];
    deadline(Stream, &long, Some((3_600_000, Limit::Total)));
    deadline(Whole, &begun, Some((600_000, Limit::Total)));
    deadline(Whole, &[(0, ClientGone)], None);
}

#[test]
fn a_limit_that_passes_closes_the_leg_and_tells_the_client_in_its_phase() {
    let timeout = |limit| format!("give-up {:?}", GiveUp::Timeout { limit });
    check(
        Stream,
        &[(0, sent(1)), (60_000, Tick)],
        &[
            "abort 1 Limit(FirstByte)",
            "release 1",
            "withdraw 1",
            "report 1 Failure(Silent)",
            &timeout(Limit::FirstByte),
            "done failed",
        ],
    );
    check(
        Stream,
        &[(0, sent(1)), (100, FirstByte), (60_100, Tick)],
        &[
            "abort 1 Limit(Idle)",
            "report 1 Failure(Silent)",
            "release 1",
            "error-event idle-timeout",
            "done failed",
        ],
    );
    // A long reply in one piece may be long for good reasons.
    check(
        Whole,
        &[(0, sent(1)), (600_000, Tick)],
        &["abort 1 Limit(Total)", "release 1", "withdraw 1", &timeout(Limit::Total), "done failed"],
    );
    check(Stream, &[(0, Queued), (60_000, Tick)], &[&timeout(Limit::FirstByte), "done failed"]);
    check(Stream, &[(0, sent(1)), (59_999, Tick)], &[]);
}

#[test]
fn a_slow_but_live_stream_is_not_cut_for_ten_minutes() {
    let mut lifecycle = begin(Stream);
    lifecycle.step(sent(1), at(0));
    lifecycle.step(FirstByte, at(1_000));
    for n in 1..31 {
        assert_eq!(lifecycle.step(Tick, at(n * 20_000)).as_slice(), [Effect::Look { endpoint: endpoint(1) }]);
        assert!(lifecycle.step(looked(1, Seen::Answers), at(n * 20_000)).is_empty());
        assert!(lifecycle.step(Progress, at(n * 20_000)).is_empty());
    }
    assert_eq!(lifecycle.phase(), Phase::Decoding);
}

#[test]
fn a_request_waiting_at_an_engine_that_is_found_dead_moves() {
    let lost = |cause| (5, Event::EndpointLost { endpoint: endpoint(1), cause });
    check(
        Whole,
        &[(0, sent(1)), lost(Cause::Silent)],
        &["abort 1 EndpointLost(Silent)", "release 1", "withdraw 1", "retry endpoint-lost"],
    );
    check(Whole, &[(0, sent(1)), lost(Cause::Unavailable)], &[]);
    check(Whole, &[(0, sent(1)), (1, OK), lost(Cause::Silent)], &[]);
    check(Stream, &[(0, sent(1)), (1, FirstByte), lost(Cause::Refused)], &[]);
    check(Whole, &[(0, sent(2)), lost(Cause::Silent)], &[]);
}

#[test]
fn a_replica_that_ends_says_so_in_the_way_that_is_left() {
    check(Stream, &[(0, Queued), (1, Shutdown)], &["give-up Unavailable", "done failed"]);
    check(
        Stream,
        &[(0, sent(1)), (1, FirstByte), (2, Shutdown)],
        &["abort 1 Shutdown", "release 1", "error-event shutdown", "done failed"],
    );
}

mod resume;
mod split;

fn event() -> impl Strategy<Value = Event> {
    let faults = prop::sample::select(vec![
        LegFault::ConnectRefused,
        LegFault::Reset,
        LegFault::Status(400),
        LegFault::Status(429),
        LegFault::Status(503),
        LegFault::Truncated,
        LegFault::ErrorEvent,
    ]);
    let statuses = prop::sample::select(vec![200_u16, 204, 302, 400, 500]);
    prop_oneof![
        1 => Just(Queued),
        6 => (0_u64..6).prop_map(sent),
        1 => Just(Refused),
        3 => statuses.prop_map(|status| Event::HeadArrived { status }),
        3 => Just(FirstByte),
        2 => Just(Progress),
        2 => Just(Ended),
        4 => faults.prop_map(failed),
        1 => (0_u64..6).prop_map(|n| Event::EndpointLost { endpoint: endpoint(n), cause: Cause::Silent }),
        2 => (0_u64..6).prop_map(|n| looked(n, Seen::Nothing)),
        1 => (0_u64..6).prop_map(|n| looked(n, Seen::Answers)),
        1 => Just(Event::Unresumable(NoResume::Unreadable)),
        1 => Just(ClientGone),
        1 => Just(Shutdown),
        2 => Just(Tick),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]
    #[test]
    fn any_order_of_events_ends_once_and_gives_every_charge_back_once(
        stream: bool,
        resumes: bool,
        events in prop::collection::vec((event(), prop::sample::select(vec![0_u64, 10, 1_100, 31_000])), 0..40),
    ) {
        let delivery = if stream { Stream } else { Whole };
        let resumes = resumes && stream;
        let mut lifecycle = begin(delivery).on_break(if resumes { OnBreak::Resume } else { OnBreak::End(NoResume::Off) });
        let (mut now_ms, mut held, mut ends, mut told) = (0, Vec::new(), 0, 0);
        let mut begun = false;
        let closing = [(ClientGone, 0), (ClientGone, 0), (Ended, 0)];
        for (event, pause_ms) in events.into_iter().chain(closing) {
            now_ms += pause_ms;
            if let Event::Dispatched { endpoint } = event {
                held.push(endpoint);
            }
            let was_over = lifecycle.phase().is_terminal();
            let effects = lifecycle.step(event, at(now_ms));
            for effect in &effects {
                match effect {
                    Effect::Release { endpoint } => {
                        let at = held.iter().rposition(|held| held == endpoint);
                        prop_assert!(at.is_some(), "released what was not held");
                        held.remove(at.unwrap());
                    }
                    Effect::FirstToken { .. } => {
                        prop_assert!(!begun || resumes);
                        begun = true;
                    }
                    Effect::GiveUp(_) => {
                        prop_assert!(!begun, "a client that has bytes can't be given another answer");
                        told += 1;
                    }
                    Effect::EndWithErrorEvent(_) | Effect::CutReply(_) => {
                        prop_assert!(begun);
                        told += 1;
                    }
                    Effect::RetryElsewhere { .. } => prop_assert!(!begun),
                    Effect::Done(outcome) => {
                        ends += 1;
                        prop_assert_eq!(outcome.verdict.phase(), lifecycle.phase());
                        prop_assert!(outcome.failed.len() <= 3);
                        prop_assert!(outcome.breaks.len() <= 3 && outcome.resumed() <= 2);
                    }
                    Effect::DecodeElsewhere { .. } | Effect::ReleaseStaged { .. } => {
                        prop_assert!(false, "nothing was split");
                    }
                    Effect::ResumeElsewhere { .. } => prop_assert!(begun && resumes),
                    Effect::Look { endpoint } => {
                        prop_assert!(stream && Some(*endpoint) == lifecycle.endpoint());
                    }
                    Effect::AbortUpstream { .. } | Effect::Withdraw { .. } | Effect::Report { .. } => {}
                }
            }
            let last_is_done = matches!(effects.last(), Some(Effect::Done(_)));
            prop_assert!(!was_over || !last_is_done);
            prop_assert_eq!(lifecycle.phase().is_terminal(), ends == 1);
            prop_assert_eq!(lifecycle.phase().is_terminal(), lifecycle.next_deadline().is_none());
            prop_assert_eq!(held.len(), usize::from(lifecycle.endpoint().is_some()));
            prop_assert!(lifecycle.tried().len() <= 3);
        }
        prop_assert_eq!(ends, 1);
        prop_assert!(told <= 1);
        prop_assert!(held.is_empty());
    }
}
