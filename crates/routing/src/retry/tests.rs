use proptest::prelude::*;

use super::*;

fn endpoint(n: u64) -> EndpointId {
    EndpointId::from_raw(n)
}

fn at(ms: u64) -> Moment {
    Moment::from_millis(ms)
}

const UNAVAILABLE: LegFailure = LegFailure::new(LegFault::Status(503));
const FAILED: LegFailure = LegFailure::new(LegFault::Status(500));
const RESET: LegFailure = LegFailure::new(LegFault::Reset);

/// Engines that a replica tries in turn, each request beginning at the next one.
struct Script {
    budget: Arc<RetryBudget>,
    now_ms: u64,
    attempts: u64,
    failed: u64,
}

impl Script {
    fn new() -> Self {
        let budget = Arc::new(RetryBudget::new(BudgetConfig::default()));
        Self { budget, now_ms: 0, attempts: 0, failed: 0 }
    }

    /// `requests` over `engines`, one every `every_ms`; `answer` says how each engine answers.
    fn send(
        &mut self,
        requests: u64,
        engines: u64,
        every_ms: u64,
        answer: impl Fn(u64) -> Result<(), LegFailure>,
    ) {
        for n in 0..requests {
            self.now_ms += every_ms;
            let now = at(self.now_ms);
            self.budget.request(now);
            let mut plan = RetryPlan::new(RetryPlan::TRIES_DEFAULT, Arc::clone(&self.budget));
            for hop in 0..engines {
                let engine = (n + hop) % engines;
                self.attempts += 1;
                plan.dispatched(endpoint(engine));
                match answer(engine) {
                    Ok(()) => {
                        self.budget.succeeded(endpoint(engine), now);
                        break;
                    }
                    Err(failure) if plan.next(&failure, endpoint(engine), 1, now).is_ok() => {}
                    Err(_) => {
                        self.failed += 1;
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn an_engine_that_probes_had_lost_for_a_moment_takes_what_another_fails_at() {
    let lost = LegFailure::new(LegFault::EndpointLost(Cause::Silent));
    let budget = Arc::new(RetryBudget::new(BudgetConfig::default()));
    for n in 0..6 {
        budget.request(at(n * 100));
        budget.succeeded(endpoint(1), at(n * 100));
    }
    let next = |failure, from, ms| {
        let mut plan = RetryPlan::new(RetryPlan::TRIES_DEFAULT, Arc::clone(&budget));
        plan.dispatched(from);
        plan.next(&failure, from, 3, at(ms))
    };
    for n in 0..3 {
        assert_eq!(next(lost, endpoint(1), 1_000 + n), Ok(Source::Burst));
    }
    // It is back, and the other one dies.
    for n in 0..5 {
        assert_eq!(next(FAILED, endpoint(2), 3_000 + n), Ok(Source::Burst), "{n}");
    }
}

#[test]
fn when_all_engines_are_unavailable_retries_stay_a_fifth_of_the_requests() {
    for (requests, engines, every_ms) in [
        (10, 4, 0),
        (20, 4, 1),
        (100, 4, 10),
        (100, 1_000, 10),
        (500, 2, 100),
        (2_000, 8, 3),
        (100, 4, 1_000),
    ] {
        let mut script = Script::new();
        script.send(requests, engines, every_ms, |_| Err(UNAVAILABLE));
        assert!(5 * script.attempts <= 6 * requests, "{} for {requests}", script.attempts);
        assert!(every_ms >= 1_000 || script.attempts > requests, "some are tried elsewhere");
    }
}

#[test]
fn a_request_that_two_engines_fail_at_is_not_tried_at_a_third() {
    let mut script = Script::new();
    script.send(50, 4, 20, |_| Ok(()));
    script.attempts = 0;
    script.send(1, 4, 20, |_| Err(FAILED));
    assert_eq!((script.attempts, script.failed), (2, 1));
}

#[test]
fn credit_from_good_times_is_not_spent_on_an_outage() {
    let mut script = Script::new();
    script.send(1_000, 4, 5, |_| Ok(()));
    script.attempts = 0;
    script.send(100, 4, 5, |_| Err(UNAVAILABLE));
    assert!(script.attempts <= 120, "{}", script.attempts);
}

#[test]
fn one_bad_engine_among_good_ones_costs_nobody_an_answer() {
    for failure in [UNAVAILABLE, FAILED, RESET, LegFailure::new(LegFault::ConnectRefused)] {
        let mut script = Script::new();
        // Ejection comes after three; this is far longer.
        script.send(80, 4, 20, |engine| if engine == 1 { Err(failure) } else { Ok(()) });
        assert_eq!(script.failed, 0, "{failure:?}");
    }
}

#[test]
fn a_first_request_may_meet_two_bad_engines() {
    let mut script = Script::new();
    script.send(1, 3, 1, |engine| if engine < 2 { Err(UNAVAILABLE) } else { Ok(()) });
    assert_eq!((script.attempts, script.failed), (3, 0));
}

#[test]
fn all_requests_of_a_killed_engine_move_however_many() {
    for in_flight in [1_u32, 20, 21, 500] {
        let budget = Arc::new(RetryBudget::new(BudgetConfig::default()));
        for n in 0..in_flight {
            budget.request(at(u64::from(n)));
        }
        // Nobody is known to be well, and there is no other traffic to draw on.
        let refused = (0..in_flight)
            .filter(|n| {
                let mut plan = RetryPlan::new(3, Arc::clone(&budget));
                plan.dispatched(endpoint(1));
                plan.next(&RESET, endpoint(1), in_flight - n, at(2_000)).is_err()
            })
            .count();
        assert_eq!(refused, 0, "of {in_flight}");
    }
}

#[test]
fn a_burst_is_bounded_for_each_endpoint_and_comes_back_after_the_window() {
    let budget = RetryBudget::new(BudgetConfig::default());
    let granted = |from_ms: u64| {
        (0..100)
            .filter(|n| {
                budget.failed(endpoint(1), 5, at(from_ms + n));
                budget.draw(MayRetry::EndpointGone, endpoint(1), at(from_ms + n)) != Draw::Refused
            })
            .count()
    };
    assert_eq!(granted(0), 20);
    assert_eq!(granted(5_000), 0);
    assert_eq!(granted(11_000), 20);
    budget.failed(endpoint(2), 5, at(11_100));
    let other = budget.draw(MayRetry::EndpointGone, endpoint(2), at(11_100));
    assert_eq!(other, Draw::Granted(Source::Burst), "another endpoint has its own");
}

#[test]
fn a_plan_ends_after_its_tries() {
    let budget = Arc::new(RetryBudget::new(BudgetConfig::default()));
    let mut plan = RetryPlan::new(3, budget);
    for n in 0..3 {
        plan.dispatched(endpoint(n));
        let next = plan.next(&RESET, endpoint(n), 1, at(1));
        assert_eq!(next.is_ok(), n < 2, "after try {n}");
    }
    assert_eq!(plan.next(&RESET, endpoint(2), 1, at(1)), Err(NoRetry::TriesUsed));
    assert_eq!(plan.tried(), [endpoint(0), endpoint(1), endpoint(2)]);
}

#[test]
fn each_failure_says_who_is_at_fault_and_whether_another_would_mend_it() {
    fn check(fault: LegFault, whose: WhoseFault, may_retry: MayRetry) {
        let failure = LegFailure::new(fault);
        assert_eq!((failure.whose_fault(), failure.may_retry()), (whose, may_retry), "{fault:?}");
    }
    use MayRetry::{EndpointFailed, EndpointGone, EndpointUnable, Never};
    check(LegFault::ConnectRefused, WhoseFault::Endpoint(Cause::Refused), EndpointGone);
    check(LegFault::ConnectTimeout, WhoseFault::Endpoint(Cause::ConnectTimeout), EndpointGone);
    check(LegFault::Reset, WhoseFault::Endpoint(Cause::Reset), EndpointGone);
    check(LegFault::Truncated, WhoseFault::Endpoint(Cause::Truncated), EndpointGone);
    check(LegFault::EndpointLost(Cause::Silent), WhoseFault::Nobody, EndpointGone);
    check(LegFault::Garbled, WhoseFault::Endpoint(Cause::Garbled), EndpointUnable);
    check(LegFault::ErrorEvent, WhoseFault::Endpoint(Cause::ServerError), EndpointUnable);
    for status in [502, 503, 504] {
        check(LegFault::Status(status), WhoseFault::Endpoint(Cause::Unavailable), EndpointUnable);
    }
    check(LegFault::Status(500), WhoseFault::Endpoint(Cause::ServerError), EndpointFailed);
    check(LegFault::Status(429), WhoseFault::Nobody, EndpointUnable);
    for status in (400..429).chain(430..500) {
        check(LegFault::Status(status), WhoseFault::Client, Never);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Request,
    Succeeded(u64),
    Failed(u64, MayRetry, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let why = vec![MayRetry::EndpointGone, MayRetry::EndpointUnable, MayRetry::EndpointFailed];
    let why = prop::sample::select(why);
    prop_oneof![
        3 => Just(Step::Request),
        1 => (0_u64..4).prop_map(Step::Succeeded),
        3 => (0_u64..4, why, 0_u32..40).prop_map(|(n, why, in_flight)| Step::Failed(n, why, in_flight)),
    ]
}

proptest! {
    #[test]
    fn no_order_of_events_exceeds_the_sum_of_what_each_source_allows(
        steps in prop::collection::vec((step(), 0_u64..2_000), 0..400),
    ) {
        let budget = RetryBudget::new(BudgetConfig::default());
        let (mut now_ms, mut requests, mut successes, mut by_ratio, mut unknown) = (0, 0_u32, 0_u32, 0_u32, 0_u32);
        let mut bursts: Vec<(u64, u64, u32)> = Vec::new();
        for (step, pause_ms) in steps {
            now_ms += pause_ms;
            match step {
                Step::Request => {
                    requests += 1;
                    budget.request(at(now_ms));
                }
                Step::Succeeded(n) => {
                    successes += 1;
                    budget.succeeded(endpoint(n), at(now_ms));
                }
                Step::Failed(n, why, in_flight) => {
                    budget.failed(endpoint(n), in_flight, at(now_ms));
                    match budget.draw(why, endpoint(n), at(now_ms)) {
                        Draw::Granted(Source::Burst) => bursts.push((n, now_ms, in_flight)),
                        Draw::Granted(Source::Ratio) => by_ratio += 1,
                        Draw::Granted(Source::Unknown) => unknown += 1,
                        Draw::Refused => {}
                    }
                }
            }
            prop_assert!(f64::from(by_ratio) <= 0.2 * f64::from(requests));
            prop_assert!(unknown <= 2 * (1 + successes));
        }
        for (n, from_ms, _) in &bursts {
            let within = bursts.iter().filter(|(m, at, _)| m == n && (*from_ms..from_ms + 9_000).contains(at));
            // No endpoint had more than 39 in flight.
            prop_assert!(within.count() <= 39);
        }
    }
}
