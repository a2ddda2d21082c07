//! Split requests: who is blamed, where each leg goes next, and that nothing stays behind.

use super::*;
use crate::lifecycle::LegOrder;

const PAIR: Event = pair(1, 2, LegOrder::PrefillFirst);
const TOGETHER: Event = pair(1, 2, LegOrder::Together);
const HANDED: Event = Event::HandedOff;
const ERROR: Event = failed(LegFault::Status(500));

const fn pair(prefill: u64, decode: u64, order: LegOrder) -> Event {
    Event::Split { prefill: EndpointId::from_raw(prefill), decode: EndpointId::from_raw(decode), order }
}

const fn decode(n: u64) -> Event {
    Event::DecodeDispatched { endpoint: EndpointId::from_raw(n) }
}

const fn prefill_failed(fault: LegFault) -> Event {
    Event::PrefillFailed { failure: LegFailure::new(fault), in_flight: 1 }
}

#[test]
fn a_split_request_that_goes_well_gives_each_charge_back_when_its_leg_is_over() {
    let script = [(0, PAIR), (50, HANDED), (50, decode(2)), (60, OK), (61, FirstByte), (90, Ended)];
    check(Stream, &script[..1], &[]);
    let lifecycle = check(Stream, &script[..2], &["release 1", "report 1 Success"]);
    assert_eq!(lifecycle.phase(), Phase::HandedOff);
    check(Stream, &script[..5], &["first-token 2"]);
    for delivery in [Stream, Whole] {
        check(delivery, &script, &["release 2", "report 2 Success", "done finished"]);
    }
    let together = [(0, TOGETHER), (50, HANDED), (61, FirstByte), (90, Ended)];
    check(Stream, &together, &["release 2", "report 2 Success", "done finished"]);
    // Its first byte may be seen before the prefill leg's end.
    let early = [(0, TOGETHER), (49, FirstByte), (50, HANDED)];
    check(Stream, &early[..2], &["release 1", "report 1 Success", "first-token 2"]);
    check(Stream, &early, &[]);
}

#[test]
fn the_outcome_tells_the_time_of_each_phase_of_both_legs() {
    let mut lifecycle = begin(Stream);
    lifecycle.step(PAIR, at(10));
    lifecycle.step(prefill_failed(LegFault::Reset), at(20));
    lifecycle.step(pair(3, 2, LegOrder::PrefillFirst), at(25));
    assert_eq!(lifecycle.phase(), Phase::Prefilling);
    assert_eq!(lifecycle.endpoint(), Some(endpoint(3)));
    lifecycle.step(HANDED, at(125));
    lifecycle.step(decode(2), at(126));
    assert_eq!((lifecycle.endpoint(), lifecycle.prefill_endpoint()), (Some(endpoint(2)), Some(endpoint(3))));
    lifecycle.step(FirstByte, at(165));
    let effects = lifecycle.step(Ended, at(1_165));
    let Some(Effect::Done(outcome)) = effects.last() else { panic!("{effects:?}") };
    assert_eq!((outcome.endpoint, outcome.prefill_endpoint), (Some(endpoint(2)), Some(endpoint(3))));
    assert_eq!((outcome.queued_ms, outcome.prefill_ms, outcome.handoff_ms), (25.0, Some(100.0), Some(40.0)));
    assert_eq!((outcome.ttft_ms, outcome.decode_ms), (Some(165.0), Some(1_000.0)));
    assert_eq!((outcome.leg_ms(), outcome.first_byte_of_leg_ms()), (1_040.0, Some(40.0)));
}

#[test]
fn a_failed_prefill_is_alone_to_blame_and_is_tried_elsewhere() {
    let unavailable = prefill_failed(LegFault::Status(503));
    let blamed = ["release 1", "withdraw 1", "report 1 Failure(Unavailable)"];
    let elsewhere = ["release 2", "withdraw 2", "retry status-503"];
    check(Stream, &[(0, PAIR), (5, unavailable)], &[&blamed[..], &elsewhere].concat());
    // The decode leg of a pair that went together does not wait for what will not come.
    let cancelled = ["abort 2 NotWanted"];
    check(Whole, &[(0, TOGETHER), (5, unavailable)], &[&blamed[..], &cancelled, &elsewhere].concat());
    // What failed is never asked again; whom it would have gone to may be.
    let again = check(Stream, &[(0, PAIR), (5, unavailable), (6, pair(3, 2, LegOrder::PrefillFirst))], &[]);
    assert_eq!(again.tried(), [endpoint(1)]);
    // Two that failed a prefill leave it all the tries of a whole request.
    let reset = failed(LegFault::Reset);
    let script = [
        (0, PAIR),
        (1, unavailable),
        (2, pair(3, 2, LegOrder::PrefillFirst)),
        (3, prefill_failed(LegFault::Status(500))),
        (4, sent(2)),
        (5, reset),
        (6, sent(4)),
        (7, reset),
    ];
    check(Stream, &script, &["release 4", "report 4 Failure(Reset)", "withdraw 4", "retry reset"]);
}

#[test]
fn what_the_engine_says_of_the_prompt_is_for_the_client() {
    let answered = [(0, PAIR), (5, Event::PrefillAnswered { status: 400 })];
    let all = ["release 1", "withdraw 1", "release 2", "withdraw 2", "done finished"];
    check(Stream, &answered, &all);
}

#[test]
fn a_failed_decode_goes_elsewhere_with_the_same_prefill() {
    let unavailable = failed(LegFault::Status(503));
    let script = [(0, PAIR), (50, HANDED), (50, decode(2)), (55, unavailable)];
    let blamed = ["release 2", "withdraw 2", "report 2 Failure(Unavailable)", "decode-elsewhere status-503"];
    check(Stream, &script, &blamed);
    let next = [&script[..], &[(56, decode(4)), (60, FirstByte)]].concat();
    let lifecycle = check(Stream, &next, &["first-token 4"]);
    assert_eq!(lifecycle.prefill_endpoint(), Some(endpoint(1)));
    // Nobody else: what is computed is given up, and it is served whole where there is room.
    let nobody = [&script[..], &[(56, Refused)]].concat();
    check(Stream, &nobody, &["release-staged 1 for 2 Waiting", "retry status-503"]);
    let whole = [&nobody[..], &[(57, sent(1)), (60, FirstByte)]].concat();
    check(Stream, &whole, &["first-token 1"]);
    check(
        Stream,
        &[&nobody[..], &[(57, Refused)]].concat()[..],
        &[&format!("give-up {:?}", GiveUp::PassOn { status: 503, retry_after: None }), "done failed"],
    );
}

#[test]
fn a_decode_that_fails_long_after_it_was_sent_may_have_lost_its_prefill_and_is_not_to_blame() {
    let script = [(0, PAIR), (50, HANDED), (50, decode(2))];
    let late = [&script[..], &[(5_060, ERROR)]].concat();
    check(Stream, &late, &["release 2", "withdraw 2", "release-staged 1 for 2 Out", "retry status-500"]);
}

#[test]
fn a_decode_that_fails_at_once_is_to_blame_if_another_can_fetch_the_same() {
    for fault in [LegFault::Status(500), LegFault::ErrorEvent] {
        let script = [(0, PAIR), (50, HANDED), (50, decode(2)), (60, failed(fault))];
        let elsewhere = format!("decode-elsewhere {}", LegFailure::new(fault).as_str());
        let lifecycle = check(Stream, &script, &["release 2", "withdraw 2", &elsewhere]);
        assert_eq!(lifecycle.tried(), [endpoint(2)]);
        let fetched = [&script[..], &[(61, decode(4)), (65, FirstByte)]].concat();
        check(Stream, &fetched, &["report 2 Failure(ServerError)", "first-token 4"]);
    }
}

#[test]
fn a_decode_that_fails_at_once_as_others_do_has_lost_its_prefill_and_may_serve_the_request_whole() {
    let first = [(0, PAIR), (50, HANDED), (50, decode(2)), (60, ERROR)];
    let second = [&first[..], &[(61, decode(4)), (65, ERROR)]].concat();
    let whole = ["release-staged 1 for 4 Out", "retry status-500"];
    let lifecycle = check(Stream, &second, &[&["release 4", "withdraw 4"][..], &whole].concat());
    assert_eq!(lifecycle.tried(), [endpoint(1)]);
    // The same if there is no other to tell by.
    let alone = [&first[..], &[(61, Refused)]].concat();
    let lifecycle = check(Stream, &alone, &["release-staged 1 for 2 Waiting", "retry status-500"]);
    assert_eq!(lifecycle.tried(), [endpoint(1)]);
    let served = [&alone[..], &[(62, sent(2)), (70, FirstByte)]].concat();
    check(Stream, &served, &["first-token 2"]);
    // It failed whole as well: it was its own fault, and who is left is the one that computed the prompt.
    let guilty = [&alone[..], &[(62, sent(2)), (63, ERROR)]].concat();
    let blamed = ["release 2", "report 2 Failure(ServerError)", "withdraw 2", "retry status-500"];
    check(Stream, &guilty, &blamed);
    let nobody = [&guilty[..], &[(64, Refused)]].concat();
    let lifecycle = check(Stream, &nobody, &["retry status-500"]);
    assert_eq!(lifecycle.tried(), [endpoint(2)]);
    check(Stream, &[&nobody[..], &[(65, sent(1)), (70, FirstByte)]].concat(), &["first-token 1"]);
    let given_up = format!("give-up {:?}", GiveUp::PassOn { status: 500, retry_after: None });
    check(Stream, &[&nobody[..], &[(65, Refused)]].concat(), &[&given_up, "done failed"]);
}

#[test]
fn what_was_handed_off_long_ago_is_not_taken_over_by_another_engine() {
    let script = |at| [(0, PAIR), (50, HANDED), (50, decode(2)), (at, failed(LegFault::Reset))];
    let blamed = ["release 2", "withdraw 2", "report 2 Failure(Reset)"];
    check(Whole, &script(20_050), &[&blamed[..], &["decode-elsewhere reset"]].concat());
    let anew = ["release-staged 1 for 2 Out", "retry reset"];
    check(Whole, &script(20_051), &[&blamed[..], &anew].concat());
}

#[test]
fn a_decode_that_waits_for_a_prefill_engine_that_fell_silent_is_given_up_without_blame() {
    let lost = |at, cause| (at, Event::EndpointLost { endpoint: endpoint(1), cause });
    let script = [(0, PAIR), (50, HANDED), (50, decode(2))];
    let silent = [&script[..], &[lost(900, Cause::Silent)]].concat();
    let moved = ["abort 2 EndpointLost(Silent)", "release 2", "withdraw 2", "release-staged 1 for 2 Out"];
    for delivery in [Stream, Whole] {
        let lifecycle = check(delivery, &silent, &[&moved[..], &["retry endpoint-lost"]].concat());
        assert_eq!(lifecycle.tried(), [endpoint(1)]);
    }
    // A dead one is noticed by who fetches from it.
    check(Stream, &[&script[..], &[lost(900, Cause::Refused)]].concat(), &[]);
    // What is fetched is fetched: the answer may well be under way.
    check(Whole, &[&script[..], &[lost(20_050, Cause::Silent)]].concat(), &[]);
    check(Stream, &[&script[..], &[(60, FirstByte), lost(900, Cause::Silent)]].concat(), &[]);
}

#[test]
fn a_failed_decode_of_a_pair_that_went_together_takes_the_prefill_with_it() {
    let refused = failed(LegFault::ConnectRefused);
    let blamed = ["release 2", "withdraw 2", "report 2 Failure(Refused)"];
    let cancelled = ["abort 1 NotWanted", "release 1", "withdraw 1", "retry connect-refused"];
    check(Stream, &[(0, TOGETHER), (5, refused)], &[&blamed[..], &cancelled].concat());
}

#[test]
fn a_client_that_leaves_leaves_no_staged_kv_in_any_phase() {
    let prefilling = [(0, PAIR), (10, ClientGone)];
    check(
        Stream,
        &prefilling,
        &["release-staged 1 for 2 Waiting", "release 1", "release 2", "withdraw 2", "done cancelled"],
    );
    let handed_off = [(0, PAIR), (50, HANDED), (51, ClientGone)];
    let waiting = ["release 2", "withdraw 2", "release-staged 1 for 2 Waiting", "done cancelled"];
    check(Stream, &handed_off, &waiting);
    // The decode leg is closed like any other.
    let sent = [(0, PAIR), (50, HANDED), (51, decode(2)), (52, ClientGone)];
    let closed =
        ["abort 2 ClientGone", "release 2", "withdraw 2", "release-staged 1 for 2 Out", "done cancelled"];
    check(Stream, &sent, &closed);
    let retrying =
        [(0, PAIR), (50, HANDED), (51, decode(2)), (52, failed(LegFault::Reset)), (53, ClientGone)];
    check(Stream, &retrying, &["release-staged 1 for 2 Waiting", "done cancelled"]);
    let decoding = [(0, PAIR), (50, HANDED), (51, decode(2)), (60, FirstByte), (70, ClientGone)];
    check(Stream, &decoding, &["abort 2 ClientGone", "release 2", "done cancelled"]);
    let together = [(0, TOGETHER), (10, ClientGone)];
    let both =
        ["abort 1 ClientGone", "release 1", "withdraw 1", "abort 2 ClientGone", "release 2", "withdraw 2"];
    check(Stream, &together, &[&both[..], &["done cancelled"]].concat());
    // A leg that is sent after that is closed, and its charge was given back before.
    check(Stream, &[&handed_off[..], &[(52, decode(2))]].concat()[..], &["abort 2 NotWanted"]);
    check(Stream, &[&retrying[..], &[(54, decode(3))]].concat()[..], &["abort 3 NotWanted", "release 3"]);
}

#[test]
fn each_leg_has_a_limit_of_its_own_and_all_together_have_one() {
    let lifecycle = check(Stream, &[(0, PAIR), (19_999, Tick)], &[]);
    assert_eq!(lifecycle.next_deadline(), Some((at(20_000), Limit::Prefill)));
    let late = ["abort 1 Limit(Prefill)", "report 1 Failure(Silent)", "release 1", "withdraw 1"];
    let elsewhere = ["release 2", "withdraw 2", "retry prefill-timeout"];
    for delivery in [Stream, Whole] {
        check(delivery, &[(0, PAIR), (20_000, Tick)], &[&late[..], &elsewhere].concat());
    }
    let handed = [(0, PAIR), (50, HANDED), (60, decode(2)), (20_050, Tick)];
    let late = ["abort 2 Limit(Handoff)", "report 2 Failure(Silent)", "release 2", "withdraw 2"];
    check(Stream, &handed, &[&late[..], &["decode-elsewhere handoff-timeout"]].concat());
    // A reply in one piece may take as long as the generation.
    check(Whole, &handed, &[]);
    let again = [&handed[..], &[(20_060, decode(4))]].concat();
    let lifecycle = check(Stream, &again, &[]);
    assert_eq!(lifecycle.next_deadline(), Some((at(40_060), Limit::Handoff)));
    // With nobody left to go to it is said which limit it was.
    let refused = [(0, PAIR), (20_000, Tick), (20_001, Refused)];
    let said = ["give-up Timeout { limit: Prefill }", "done failed"];
    check(Stream, &refused, &said);
    let mut queued = begin(Stream);
    queued.step(PAIR, at(45_000));
    assert_eq!(queued.next_deadline(), Some((at(60_000), Limit::FirstByte)));
}

#[test]
fn an_endpoint_that_is_lost_moves_the_leg_that_waits_for_it() {
    let lost = |n| (15, Event::EndpointLost { endpoint: endpoint(n), cause: Cause::Silent });
    let moved = ["abort 1 EndpointLost(Silent)", "release 1", "withdraw 1", "release 2", "withdraw 2"];
    check(Stream, &[(0, PAIR), lost(1)], &[&moved[..], &["retry endpoint-lost"]].concat());
    let moved = ["abort 2 EndpointLost(Silent)", "release 2", "withdraw 2", "decode-elsewhere endpoint-lost"];
    check(Stream, &[(0, PAIR), (10, HANDED), (11, decode(2)), lost(2)], &moved);
}

#[test]
fn a_decode_that_refuses_leaves_no_staged_kv() {
    let refused =
        [(0, PAIR), (50, HANDED), (50, decode(2)), (60, Event::HeadArrived { status: 400 }), (61, Ended)];
    check(Whole, &refused, &["release-staged 1 for 2 Out", "release 2", "withdraw 2", "done finished"]);
}

fn any_event() -> impl Strategy<Value = Event> {
    let order = prop::sample::select(vec![LegOrder::PrefillFirst, LegOrder::Together]);
    let faults = prop::sample::select(vec![
        LegFault::ConnectRefused,
        LegFault::Status(400),
        LegFault::Status(500),
        LegFault::Status(503),
    ]);
    prop_oneof![
        8 => event(),
        6 => (0_u64..3, 3_u64..6, order).prop_map(|(from, to, order)| pair(from, to, order)),
        6 => Just(HANDED),
        6 => (3_u64..6).prop_map(decode),
        2 => faults.prop_map(prefill_failed),
        1 => Just(Event::PrefillAnswered { status: 400 }),
    ]
}

/// What engines hold for a request, as far as its driver's doings tell.
#[derive(Default)]
struct Engines {
    charges: Vec<EndpointId>,
    paired: Option<EndpointId>,
    /// Prefill endpoints that hold KV, or are about to.
    staged: Vec<EndpointId>,
}

impl Engines {
    fn before(&mut self, event: &Event, lifecycle: &Lifecycle) {
        match *event {
            Event::Dispatched { endpoint } => self.charges.push(endpoint),
            Event::Split { prefill, decode, order } => {
                self.charges.extend([prefill, decode]);
                if order == LegOrder::PrefillFirst {
                    self.staged.push(prefill);
                }
            }
            Event::DecodeDispatched { endpoint } if self.paired != Some(endpoint) => {
                self.charges.push(endpoint);
            }
            // A leg that failed or was refused has staged nothing.
            Event::PrefillFailed { .. } | Event::PrefillAnswered { .. }
                if lifecycle.endpoint().is_some() && lifecycle.endpoint() == lifecycle.prefill_endpoint() =>
            {
                self.staged.clear();
            }
            _ => {}
        }
    }

    fn after(&mut self, event: &Event, effects: &Effects) -> Result<(), TestCaseError> {
        for effect in effects {
            match effect {
                Effect::Release { endpoint } => {
                    let at = self.charges.iter().rposition(|held| held == endpoint);
                    prop_assert!(at.is_some(), "released what was not held");
                    self.charges.remove(at.unwrap());
                }
                Effect::ReleaseStaged { prefill, .. } => self.staged.retain(|each| each != prefill),
                // Closing the prefill leg stops it; the first byte says that its KV was taken.
                Effect::AbortUpstream { endpoint, .. } => self.staged.retain(|each| each != endpoint),
                Effect::FirstToken { .. } => self.staged.clear(),
                _ => {}
            }
        }
        if let Event::Split { decode, .. } = event
            && effects.is_empty()
        {
            self.paired = Some(*decode);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]
    #[test]
    fn any_order_of_events_of_split_requests_ends_once_and_leaves_nothing_behind(
        stream: bool,
        resumes: bool,
        events in prop::collection::vec((any_event(), prop::sample::select(vec![0_u64, 10, 5_000, 21_000])), 0..40),
    ) {
        let resumes = resumes && stream;
        let on_break = if resumes { OnBreak::Resume } else { OnBreak::End(NoResume::Inexact) };
        let mut lifecycle = begin(if stream { Stream } else { Whole }).on_break(on_break);
        let (mut engines, mut now_ms, mut ends) = (Engines::default(), 0, 0);
        let mut begun = false;
        for (event, pause_ms) in events.into_iter().chain([(ClientGone, 0), (ClientGone, 0)]) {
            now_ms += pause_ms;
            engines.before(&event, &lifecycle);
            let effects = lifecycle.step(event, at(now_ms));
            engines.after(&event, &effects)?;
            for effect in &effects {
                match effect {
                    Effect::FirstToken { .. } => begun = true,
                    Effect::RetryElsewhere { .. } | Effect::GiveUp(_) => prop_assert!(!begun),
                    Effect::DecodeElsewhere { .. } => prop_assert!(!begun || resumes),
                    Effect::ResumeElsewhere { .. } => prop_assert!(begun && resumes),
                    Effect::Done(_) => ends += 1,
                    _ => {}
                }
            }
            prop_assert_eq!(lifecycle.phase().is_terminal(), ends == 1);
            prop_assert_eq!(lifecycle.phase().is_terminal(), lifecycle.next_deadline().is_none());
            if lifecycle.phase().is_terminal() {
                prop_assert!(engines.charges.is_empty(), "{:?} held", engines.charges);
                prop_assert!(engines.staged.is_empty(), "{:?} staged", engines.staged);
            }
        }
        prop_assert_eq!(ends, 1);
    }
}
