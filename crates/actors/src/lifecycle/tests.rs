use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use routing::decision::Footing;
use routing::endpoint::{Cause, Endpoint, EndpointSpec, Signal};
use routing::lifecycle::{EndCause, GiveUp, Limit, NoResume, Phase, Seen, Verdict};
use routing::qoe::{Fared, Target};
use routing::request::{RequestShape, Route, ShapeRules};
use routing::retry::{BudgetConfig, LegFailure, LegFault};
use routing::settings::Settings;
use routing::{EndpointId, Moment, ReplicaId, Rng, Router};

use super::*;

struct FakePort {
    now: Cell<Moment>,
    router: Router,
    ended: RefCell<Vec<Verdict>>,
    legs_over: RefCell<Vec<bool>>,
    looks: RefCell<Vec<Look>>,
}

/// A look that was ordered.
type Look = Box<dyn FnOnce(Seen)>;

impl LifecyclePort for FakePort {
    fn now(&self) -> Moment {
        self.now.get()
    }
    fn report(&self, endpoint: EndpointId, signal: Signal) {
        self.router.report(endpoint, signal, self.now.get());
    }
    fn look(&self, _: &Arc<Endpoint>, told: Look) {
        self.looks.borrow_mut().push(told);
    }
    fn withdraw(&self, shape: &RequestShape, footing: &Footing) {
        self.router.withdraw(shape, footing);
    }
    fn first_byte(&self, footing: &Footing, took_ms: f64) {
        self.router.first_byte(footing, took_ms, self.now.get());
    }
    fn leg_over(&self, _: &RequestShape, _: EndpointId, _: &Account, finished: bool) {
        self.legs_over.borrow_mut().push(finished);
    }
    fn ended(&self, ended: &Ended<'_>) -> Fared {
        self.ended.borrow_mut().push(ended.outcome.verdict);
        Fared {
            qoe: ended.account.digestion.and_then(|digestion| digestion.qoe(None)),
            ttft: Some(Target::Missed),
            ..Fared::default()
        }
    }
}

/// One worker with two endpoints and a clock that the test moves.
struct Bench {
    port: Rc<FakePort>,
    all: Lifecycles,
    worker: WorkerLifecycles,
}

impl Bench {
    fn new() -> Self {
        let router = Router::new(ReplicaId::new("r"), 1, Settings::default()).unwrap();
        let spec = |url| EndpointSpec::at(url).unwrap();
        router.set_endpoints(vec![spec("http://a:1"), spec("http://b:1")], Moment::default());
        let port = Rc::new(FakePort {
            now: Cell::default(),
            router,
            ended: RefCell::default(),
            legs_over: RefCell::default(),
            looks: RefCell::default(),
        });
        let all = Lifecycles::new(LifecycleSettings::default(), BudgetConfig::default());
        let worker = all.on_worker(Rc::clone(&port) as Rc<dyn LifecyclePort>);
        Self { port, all, worker }
    }

    fn begin(&self, stream: bool) -> LifecycleHandle {
        self.begin_with(&format!(r#"{{"prompt":"hello","stream":{stream}}}"#))
    }

    fn begin_with(&self, body: &str) -> LifecycleHandle {
        let headers: [(&str, &str); 0] = [];
        let shape = RequestShape::read(Route::Completions, &headers, body.as_bytes(), &ShapeRules::default());
        self.worker.begin("id-1".to_owned(), shape.unwrap(), self.port.now())
    }

    fn dispatch(&self, handle: &LifecycleHandle, tried: &[EndpointId]) -> Arc<Endpoint> {
        let mut rng = Rng::seed_from_u64(7);
        let chosen = self.port.router.choose(handle.shape(), tried, self.port.now(), &mut rng).unwrap();
        handle.dispatched(&chosen.endpoint, chosen.reservation, chosen.footing);
        chosen.endpoint
    }

    fn running(&self) -> u32 {
        self.port.router.view().endpoints.iter().map(|each| each.running(self.port.now())).sum()
    }

    fn pass(&self, span: Duration) {
        self.port.now.set(self.port.now().plus(span));
    }

    async fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        for _ in 0..1_000 {
            if holds(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("in vain: {what}");
    }
}

fn refused() -> LegFailure {
    LegFailure::new(LegFault::ConnectRefused)
}

#[actix::test]
async fn a_finished_request_gives_its_charge_back_at_once_and_is_shown_as_ended() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    bench.dispatch(&handle, &[]);
    assert_eq!((bench.running(), bench.all.table().in_flight()), (1, 1));
    handle.head_arrived(200);
    handle.first_byte();
    handle.ended();
    assert_eq!(bench.running(), 0);
    drop(handle);
    bench.until("the end", |bench| bench.all.table().in_flight() == 0).await;
    assert_eq!(*bench.port.ended.borrow(), [Verdict::Finished { status: 200 }]);
    assert_eq!(*bench.port.legs_over.borrow(), [true]);
    let row = bench.all.table().find("id-1", bench.port.now()).unwrap();
    assert_eq!((row.phase, row.took_ms), ("finished", Some(0.0)));
}

#[actix::test]
async fn the_tokens_of_a_stream_are_timed_from_its_arrival_and_its_row_says_how_its_user_fared() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    bench.dispatch(&handle, &[]);
    handle.head_arrived(200);
    handle.first_byte();
    // The default class expects its first token after 2 s and then one every 50 ms; all come 1 s late.
    for wait_ms in [3_000, 50, 50, 50] {
        bench.pass(Duration::from_millis(wait_ms));
        handle.tokens(5, bench.port.now());
        bench.pass(Duration::from_millis(200));
    }
    let running = bench.all.table().find("id-1", bench.port.now()).unwrap();
    assert_eq!((running.qoe, running.slo), (None, None));
    handle.ended();
    bench.until("the end", |bench| bench.all.table().in_flight() == 0).await;
    let row = bench.all.table().find("id-1", bench.port.now()).unwrap();
    // Taken in: 20 tokens over 1 s, 10 token-seconds. Expected: as much in the second before, and 20 more.
    assert!((row.qoe.unwrap() - 1.0 / 3.0).abs() < 1e-9, "{row:?}");
    assert_eq!(row.slo, Some(SloShown { ttft: Some(Target::Missed), tpot: None, e2e: None }));
}

#[actix::test]
async fn a_dropped_handle_is_a_client_that_left() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    bench.dispatch(&handle, &[]);
    drop(handle);
    assert_eq!(bench.running(), 0);
    bench.until("the end", |bench| !bench.port.ended.borrow().is_empty()).await;
    assert_eq!(*bench.port.ended.borrow(), [Verdict::Cancelled { during: Phase::Prefilling }]);
}

#[actix::test]
async fn a_failed_leg_is_ordered_elsewhere_until_all_were_tried() {
    let bench = Bench::new();
    let handle = bench.begin(false);
    let first = bench.dispatch(&handle, &[]);
    handle.leg_failed(refused());
    assert_eq!(handle.order().await, Order::RetryElsewhere { after: refused() });
    assert_eq!(bench.running(), 0);
    let second = bench.dispatch(&handle, &[first.id]);
    assert_ne!(first.id, second.id);
    handle.leg_failed(refused());
    assert_eq!(handle.order().await, Order::RetryElsewhere { after: refused() });
    handle.refused();
    assert_eq!(handle.order().await, Order::GiveUp(GiveUp::BadGateway { failure: refused() }));
    assert_eq!(*bench.port.legs_over.borrow(), [false, false]);
}

#[actix::test]
async fn a_limit_that_passes_becomes_an_order_and_progress_puts_it_off() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    bench.dispatch(&handle, &[]);
    bench.pass(Duration::from_secs(59));
    handle.head_arrived(200);
    handle.first_byte();
    bench.until("decoding", |_| handle.phase() == Phase::Decoding).await;
    bench.pass(Duration::from_secs(50));
    handle.progress(bench.port.now());
    bench.pass(Duration::from_secs(50));
    tokio::task::yield_now().await;
    assert_eq!(handle.phase(), Phase::Decoding);
    bench.pass(Duration::from_secs(11));
    let order = tokio::time::timeout(Duration::from_secs(5), handle.order()).await.unwrap();
    assert!(matches!(order, Order::EndWithErrorEvent(cause) if cause.as_str() == "idle-timeout"));

    let silent = bench.begin(true);
    bench.dispatch(&silent, &[]);
    bench.pass(Duration::from_secs(61));
    let order = tokio::time::timeout(Duration::from_secs(5), silent.order()).await.unwrap();
    assert_eq!(order, Order::GiveUp(GiveUp::Timeout { limit: Limit::FirstByte }));
    assert_eq!(bench.running(), 0);
}

#[actix::test]
async fn a_silent_stream_s_engine_is_looked_at_and_the_stream_is_ordered_elsewhere_if_nothing_is_seen() {
    let bench = Bench::new();
    let handle = bench.begin_with(r#"{"prompt":"hello","stream":true,"max_tokens":5}"#);
    assert!(handle.resumes());
    let first = bench.dispatch(&handle, &[]);
    handle.head_arrived(200);
    handle.first_byte();
    bench.until("decoding", |_| handle.phase() == Phase::Decoding).await;
    bench.pass(Duration::from_secs(2));
    // Word of what came meanwhile stands against a look that has seen nothing.
    bench.until("a look", |bench| !bench.port.looks.borrow().is_empty()).await;
    bench.pass(Duration::from_millis(100));
    handle.progress(bench.port.now());
    bench.port.looks.borrow_mut().remove(0)(Seen::Nothing);
    bench.pass(Duration::from_secs(2));
    bench.until("another", |bench| !bench.port.looks.borrow().is_empty()).await;
    assert_eq!((handle.phase(), bench.running()), (Phase::Decoding, 1));
    bench.port.looks.borrow_mut().remove(0)(Seen::Nothing);
    let after = LegFailure::new(LegFault::EndpointLost(Cause::Silent));
    assert_eq!(handle.order().await, Order::ResumeElsewhere { after });
    assert_eq!((handle.phase(), bench.running()), (Phase::Resuming, 0));
    let row = bench.all.table().find("id-1", bench.port.now()).unwrap();
    let broke = BreakShown { endpoint: Some(first.spec.label()), cause: "endpoint-lost" };
    assert_eq!((row.phase, row.breaks), ("resuming", vec![broke]));
    // The client sees the status of the reply that it has.
    let second = bench.dispatch(&handle, &[first.id]);
    assert_ne!(first.id, second.id);
    handle.head_arrived(400);
    handle.note(|account| assert_eq!(account.status, 200));
    handle.unresumable(NoResume::Unreadable);
    drop(handle);
    bench.until("the end", |bench| bench.all.table().in_flight() == 0).await;
    assert_eq!(bench.running(), 0);
}

#[actix::test]
async fn an_actor_that_panics_is_recreated_and_its_request_goes_on() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    let endpoint = bench.dispatch(&handle, &[]);
    bench.until("prefilling", |_| handle.phase() == Phase::Prefilling).await;
    handle.inject_panic();
    bench.until("recreated", |bench| bench.all.counts().recreated() == 1).await;
    assert_eq!(endpoint.running(bench.port.now()), 1);
    handle.leg_failed(refused());
    assert_eq!(handle.order().await, Order::RetryElsewhere { after: refused() });
    bench.dispatch(&handle, &[endpoint.id]);
    handle.head_arrived(200);
    handle.first_byte();
    handle.ended();
    bench.until("the end", |bench| bench.all.table().in_flight() == 0).await;
    assert_eq!(bench.running(), 0);
}

#[actix::test]
async fn a_request_whose_driver_and_actor_are_both_gone_ends_all_the_same() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    bench.dispatch(&handle, &[]);
    handle.inject_panic();
    drop(handle);
    bench.until("the end", |bench| bench.all.table().in_flight() == 0).await;
    assert!(matches!(bench.port.ended.borrow()[..], [Verdict::Cancelled { .. }]));
    assert_eq!(bench.running(), 0);
}

#[actix::test]
async fn a_full_mailbox_is_counted_and_no_charge_is_lost() {
    let bench = Bench::new();
    let handle = bench.begin(true);
    bench.dispatch(&handle, &[]);
    for _ in 0..100 {
        handle.head_arrived(200);
    }
    assert!(bench.all.counts().overloads() > 0);
    drop(handle);
    assert_eq!(bench.running(), 0);
    bench.until("the end", |bench| bench.all.table().in_flight() == 0).await;
    assert_eq!(bench.port.ended.borrow().len(), 1);
}

#[actix::test]
async fn ended_requests_are_kept_for_a_minute_and_at_most_a_thousand() {
    let bench = Bench::new();
    for _ in 0..1_100 {
        let handle = bench.begin(true);
        handle.refused();
        assert_eq!(handle.order().await, Order::GiveUp(GiveUp::Refusal));
    }
    assert_eq!(bench.all.table().list(bench.port.now()).len(), 1_000);
    bench.pass(Duration::from_secs(61));
    assert_eq!(bench.all.table().list(bench.port.now()).len(), 0);
    assert_eq!(bench.all.table().in_flight(), 0);
}

#[actix::test]
async fn a_request_that_waits_at_an_engine_found_dead_by_probes_is_ordered_elsewhere() {
    let bench = Bench::new();
    let handle = bench.begin(false);
    let first = bench.dispatch(&handle, &[]);
    bench.until("the dispatch", |_| handle.phase() == Phase::Prefilling).await;
    for _ in 0..3 {
        bench.port.router.report(first.id, Signal::ProbeFailed(Cause::Silent), bench.port.now());
    }
    let after = LegFailure::new(LegFault::EndpointLost(Cause::Silent));
    assert_eq!(handle.order().await, Order::RetryElsewhere { after });
    assert_eq!(bench.running(), 0);
}

#[actix::test]
async fn when_the_replica_ends_every_request_is_told_how_to_end() {
    let bench = Bench::new();
    let streaming = bench.begin(true);
    bench.dispatch(&streaming, &[]);
    streaming.head_arrived(200);
    streaming.first_byte();
    let waiting = bench.begin(false);
    bench.dispatch(&waiting, &[]);
    bench.all.end_all();
    assert_eq!(streaming.order().await, Order::EndWithErrorEvent(EndCause::Shutdown));
    assert_eq!(waiting.order().await, Order::GiveUp(GiveUp::Unavailable));
    assert_eq!(bench.running(), 0);
}
