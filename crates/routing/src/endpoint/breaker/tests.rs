use proptest::prelude::*;

use super::*;
use Signal::{Failure, ProbeFailed, ProbeOk, Success};

fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

/// A breaker that has been heard of, and signals that come every `every_ms` from 0 on.
fn ready() -> Breaker {
    let mut breaker = Breaker::new(BreakerConfig::default(), at(0));
    assert_eq!(breaker.report(ProbeOk, true, at(0)), StandingChange::Joined);
    breaker
}

#[track_caller]
fn check(signals: &[Signal], every_ms: u64, want: &str) {
    let mut breaker = ready();
    for (n, signal) in (1..).zip(signals) {
        breaker.report(*signal, true, at(n * every_ms));
    }
    assert_eq!(breaker.standing().as_str(), want, "{signals:?} every {every_ms} ms");
}

#[test]
fn one_failed_probe_never_ejects_and_three_in_a_row_do() {
    let failed = ProbeFailed(Cause::Silent);
    check(&[failed], 500, "ready");
    check(&[failed, failed], 500, "ready");
    check(&[failed, failed, failed], 500, "ejected");
    check(&[failed, failed, ProbeOk, failed, failed], 500, "ready");
}

#[test]
fn three_failed_requests_in_a_row_eject() {
    let reset = Failure(Cause::Reset);
    check(&[reset, Failure(Cause::Refused)], 10, "ready");
    check(&[reset, Failure(Cause::Refused), reset], 10, "ejected");
    check(&[reset, reset, Success, reset, reset], 10, "ready");
    check(&[reset, reset, ProbeOk, reset], 10, "ejected");
    check(&[reset; 5], 31_000, "ready");
}

#[test]
fn a_poisonous_request_may_be_sent_nine_times() {
    check(&[Failure(Cause::ServerError); 9], 10, "ready");
    check(&[Failure(Cause::ServerError); 10], 10, "ejected");
}

#[test]
fn old_streams_that_end_well_do_not_hide_that_new_requests_fail() {
    let mixed = [Failure(Cause::Refused), Success].repeat(10);
    check(&mixed, 100, "ejected");
    let mostly_well = [Failure(Cause::Refused), Success, Success].repeat(10);
    check(&mostly_well, 100, "ready");
    check(&mixed, 1_500, "ready");
}

#[test]
fn a_busy_engine_that_serves_is_not_ejected_for_slow_probes() {
    let slow = ProbeFailed(Cause::Silent);
    check(&[slow, slow, Success, slow, slow, Success, slow], 500, "ready");
    let says_so = ProbeFailed(Cause::Unavailable);
    check(&[says_so, says_so, Success, says_so], 500, "ejected");
}

#[test]
fn a_new_endpoint_joins_with_its_first_good_sign() {
    for signal in [Success, ProbeOk] {
        let mut breaker = Breaker::new(BreakerConfig::default(), at(0));
        assert_eq!(breaker.standing(), Standing::Joining { since: at(0) });
        assert_eq!(breaker.report(signal, true, at(1)), StandingChange::Joined);
        assert_eq!(breaker.standing(), Standing::Ready);
    }
    let mut breaker = Breaker::new(BreakerConfig::default(), at(0));
    for _ in 0..3 {
        breaker.report(ProbeFailed(Cause::Refused), true, at(1));
    }
    assert_eq!(breaker.standing().as_str(), "ejected");
}

#[test]
fn two_good_probes_readmit_and_nothing_else_does() {
    let mut breaker = ready();
    for _ in 0..3 {
        breaker.report(Failure(Cause::Reset), true, at(0));
    }
    assert_eq!(breaker.report(Success, true, at(1)), StandingChange::Unchanged);
    assert_eq!(breaker.report(ProbeOk, true, at(250)), StandingChange::Unchanged);
    breaker.report(ProbeFailed(Cause::Reset), true, at(500));
    assert_eq!(breaker.report(ProbeOk, true, at(1_000)), StandingChange::Unchanged);
    assert_eq!(breaker.report(ProbeOk, true, at(1_250)), StandingChange::Readmitted);
    assert_eq!(breaker.standing(), Standing::Ready);
}

#[test]
fn probes_of_an_ejected_endpoint_come_one_at_a_time_and_back_off_to_a_bound() {
    let mut breaker = ready();
    for _ in 0..3 {
        breaker.report(Failure(Cause::Refused), true, at(0));
    }
    let mut now = at(0);
    let mut gaps_ms = Vec::new();
    for _ in 0..7 {
        let due = breaker.next_probe().unwrap();
        gaps_ms.push(due.since(now).as_millis());
        assert_eq!(breaker.begin_probe(due.minus(Duration::from_millis(1))), ProbeStart::NotBefore(due));
        now = due;
        assert_eq!(breaker.begin_probe(now), ProbeStart::Begun);
        let lost = now.plus(breaker.config.probe_timeout);
        assert_eq!(breaker.begin_probe(now), ProbeStart::NotBefore(lost), "one at a time");
        breaker.report(ProbeFailed(Cause::Refused), true, now);
    }
    assert_eq!(gaps_ms, [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000]);
}

#[test]
fn an_endpoint_that_fails_again_when_readmitted_is_left_alone_for_longer() {
    let mut breaker = ready();
    for _ in 0..3 {
        breaker.report(Failure(Cause::Unavailable), true, at(0));
    }
    let mut gaps_ms = Vec::new();
    let mut now = at(0);
    for _ in 0..3 {
        let Standing::Ejected { until, .. } = breaker.standing() else { panic!("{:?}", breaker.standing()) };
        gaps_ms.push(until.since(now).as_millis());
        now = until;
        breaker.report(ProbeOk, true, now);
        breaker.report(ProbeOk, true, now);
        assert_eq!(breaker.standing(), Standing::Ready);
        breaker.report(Failure(Cause::Unavailable), true, now);
    }
    assert_eq!(gaps_ms, [250, 500, 1_000]);
}

#[test]
fn the_last_endpoints_are_spared_and_that_is_said_once() {
    let mut breaker = ready();
    let said: Vec<_> = (0..5)
        .map(|n| breaker.report(Failure(Cause::Refused), false, at(n)))
        .filter(|change| *change != StandingChange::Unchanged)
        .collect();
    assert_eq!(said, [StandingChange::Spared { cause: Cause::Refused }]);
    assert!(said[0].clears_placements());
    assert_eq!(breaker.standing(), Standing::Ready);
    let change = breaker.report(Failure(Cause::Refused), true, at(9));
    assert_eq!(change, StandingChange::Ejected { cause: Cause::Refused }, "as soon as others are there");
}

#[test]
fn an_engine_whose_process_is_gone_loses_its_placements() {
    for (cause, clears) in [(Cause::Refused, true), (Cause::Reset, false), (Cause::Silent, false)] {
        assert_eq!(StandingChange::Ejected { cause }.clears_placements(), clears, "{cause:?}");
    }
    let mut breaker = ready();
    for _ in 0..3 {
        breaker.report(Failure(Cause::Reset), true, at(0));
    }
    let change = breaker.report(ProbeFailed(Cause::Refused), true, at(250));
    assert!(change.clears_placements(), "found gone after the ejection");
    let again = breaker.report(ProbeFailed(Cause::Refused), true, at(750));
    assert_eq!(again, StandingChange::Unchanged);
}

#[test]
fn a_failure_here_or_elsewhere_brings_the_next_probe_forward() {
    for signal in [Failure(Cause::Reset), Signal::EjectedElsewhere] {
        let mut breaker = ready();
        assert_eq!(breaker.next_probe(), Some(at(2_000)));
        breaker.report(signal, true, at(100));
        assert_eq!(breaker.next_probe(), Some(at(350)));
    }
}

#[test]
fn a_draining_endpoint_is_neither_probed_nor_ejected_and_joins_anew_when_taken_back() {
    let mut breaker = ready();
    breaker.drain(at(5_000));
    breaker.drain(at(9_000));
    assert_eq!(breaker.standing(), Standing::Draining { deadline: at(5_000) });
    assert_eq!(breaker.begin_probe(at(4_000)), ProbeStart::Never);
    for _ in 0..20 {
        breaker.report(Failure(Cause::Refused), true, at(1));
    }
    assert_eq!(breaker.standing().as_str(), "draining");
    breaker.undrain(at(10));
    assert_eq!(breaker.standing(), Standing::Joining { since: at(10) });
}

fn signal() -> impl Strategy<Value = Signal> {
    let causes = prop::sample::select(vec![
        Cause::Refused,
        Cause::ConnectTimeout,
        Cause::Reset,
        Cause::Unavailable,
        Cause::ServerError,
        Cause::Silent,
        Cause::Truncated,
        Cause::Garbled,
    ]);
    prop_oneof![
        2 => Just(Success),
        4 => causes.clone().prop_map(Failure),
        2 => Just(ProbeOk),
        2 => causes.prop_map(ProbeFailed),
        1 => Just(Signal::EjectedElsewhere),
    ]
}

proptest! {
    #[test]
    fn whatever_comes_ejection_needs_a_failure_and_leave_and_readmission_two_good_probes(
        signals in prop::collection::vec((signal(), any::<bool>(), 0_u64..4_000), 0..200),
    ) {
        let mut breaker = ready();
        let (mut now, mut good) = (0, 0);
        for (signal, may_eject, pause_ms) in signals {
            now += pause_ms;
            let before = breaker.standing();
            let change = breaker.report(signal, may_eject, at(now));
            let after = breaker.standing();
            good = match signal { ProbeOk => good + 1, ProbeFailed(_) => 0, _ => good };
            if !matches!(before, Standing::Ejected { .. }) && matches!(after, Standing::Ejected { .. }) {
                prop_assert!(may_eject && matches!(signal, Failure(_) | ProbeFailed(_)));
                let told = matches!(change, StandingChange::Ejected { .. });
                prop_assert!(told);
                good = 0;
            }
            if matches!(before, Standing::Ejected { .. }) && after == Standing::Ready {
                prop_assert!(good >= 2 && change == StandingChange::Readmitted);
            }
            if let Standing::Ejected { until, .. } = after {
                prop_assert!(until <= at(now).plus(Duration::from_secs(5)), "probed within a bound");
            }
        }
    }
}

#[test]
fn a_pause_that_is_asked_for_is_granted_up_to_a_minute_and_never_shortened() {
    let mut breaker = ready();
    assert!(breaker.paused_until() <= at(0));
    for (seconds, until_ms) in [(7, 8_000), (1, 8_000), (3_600, 61_000)] {
        breaker.report(Signal::Pause(Duration::from_secs(seconds)), true, at(1_000));
        assert_eq!(breaker.paused_until(), at(until_ms), "{seconds} s");
        assert_eq!(breaker.standing(), Standing::Ready);
    }
}
