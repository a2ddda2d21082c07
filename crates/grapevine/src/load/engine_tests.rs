//! The driver against simulated engines: what it reports is what they counted.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use engine::{Config, Engine, Fault, Profile, Route};

use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

async fn engine() -> Engine {
    Engine::start(Config::profile(Profile::Instant)).await.unwrap()
}

fn plan(engine: &Engine, api: Api, source: Source) -> Plan {
    let target = Target::new(&engine.url(), api.default_path()).unwrap();
    let pace = Pace::Closed { clients: 4, order: Order::Chats };
    let mut plan = Plan::new(Targets::new(vec![target]).unwrap(), source, pace);
    plan.envelope.api = api;
    plan.wire.request_timeout = Duration::from_secs(10);
    plan
}

fn chats(sessions: u64, turns: u32) -> Source {
    let shape = ChatShape { sessions: Some(sessions), turns, max_tokens: 8, ..ChatShape::default() };
    Source::Chat(Arc::new(shape))
}

async fn drive_to_end(plan: Plan) -> Report {
    tokio::time::timeout(DEADLINE, drive(plan, Live::new(), pending())).await.expect("the run hangs")
}

#[tokio::test]
async fn the_report_agrees_with_what_the_engine_counted() {
    for (api, stream) in
        [(Api::Chat, true), (Api::Chat, false), (Api::Completions, true), (Api::Completions, false)]
    {
        let engine = engine().await;
        let mut plan = plan(&engine, api, chats(6, 4));
        plan.envelope.stream = stream;
        let report = drive_to_end(plan).await;
        let stats = engine.stats();
        assert_eq!((report.requests, report.failed()), (24, 0), "{:?}", report.error_details);
        assert_eq!(report.prompt_tokens, stats.prompt_tokens);
        assert_eq!(report.cached_tokens, stats.cached_tokens);
        assert_eq!((report.output_tokens, stats.generation_tokens), (24 * 8, 24 * 8));
        // A later turn finds all before its own 400 bytes, answers included: 2840 + 3240 + 3640 of the
        // 13,760 bytes that a chat's four turns send.
        assert!(report.hit_rate.unwrap() > 0.6, "{api:?} {:?}", report.hit_rate);
    }
}

#[tokio::test]
async fn a_trace_costs_the_engine_the_tokens_it_recorded_and_shares_what_it_shared() {
    let trace = include_str!("samples/mooncake_conversation.jsonl");
    let trace = Trace::read(trace.as_bytes(), &Reading::default()).unwrap();
    let input_tokens: u64 = trace.rows.iter().map(|row| u64::from(row.input_tokens)).sum();
    let output_tokens: u64 = trace.rows.iter().map(|row| u64::from(row.output_tokens)).sum();
    let engine = engine().await;
    let mut plan = plan(&engine, Api::Completions, Source::Trace(Arc::new(trace)));
    plan.pace = Pace::Closed { clients: 1, order: Order::Chats };
    let report = drive_to_end(plan).await;
    assert_eq!(
        (report.failed(), report.prompt_tokens, report.output_tokens),
        (0, input_tokens, output_tokens)
    );
    // Ten rows share id 0 and nothing else: nine find its 512 tokens.
    assert_eq!(report.cached_tokens, 9 * 512);
}

#[tokio::test]
async fn faults_of_an_engine_are_told_apart() {
    let status = Fault::Status { status: 503, retry_after_s: None };
    for (fault, kinds) in [
        (status, &["status 503"][..]),
        (Fault::Reset, &["reset"]),
        (Fault::ResetAfter { tokens: 2 }, &["reset", "truncated"]),
        (Fault::ErrorEventAfter { tokens: 2 }, &["error-event"]),
        (Fault::AbortAfter { tokens: 2 }, &["abort"]),
    ] {
        let engine = engine().await;
        engine.fail(fault, Some(1));
        let mut plan = plan(&engine, Api::Chat, chats(5, 1));
        plan.pace = Pace::Closed { clients: 1, order: Order::Chats };
        let report = drive_to_end(plan).await;
        assert_eq!((report.requests, report.failed()), (5, 1), "{fault:?} {:?}", report.errors);
        assert!(
            report.errors.keys().all(|kind| kinds.contains(&kind.as_str())),
            "{fault:?} {:?}",
            report.errors
        );
    }
}

#[tokio::test]
async fn a_retried_refusal_is_no_failure_even_of_the_last_request() {
    let engine = engine().await;
    engine.fail(Fault::Status { status: 429, retry_after_s: Some(1) }, Some(1));
    let mut plan = plan(&engine, Api::Chat, chats(9, 1));
    plan.limits.retries_max = 1;
    plan.limits.requests_max = Some(2);
    let report = drive_to_end(plan).await;
    assert_eq!((report.requests, report.failed(), report.retries), (2, 0, 1));
    assert_eq!(engine.requests(Route::Chat), 3);
}

/// Runs the command against an engine that fails its first `failures` requests.
fn command(flags: &[&str], failures: u64) -> anyhow::Result<Report> {
    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engine = runtime.block_on(engine());
    if failures > 0 {
        engine.fail(Fault::Status { status: 500, retry_after_s: None }, Some(failures));
    }
    let url = engine.url();
    let words = ["load", "--target", &url, "--sessions", "3", "--turns", "1", "--quiet"];
    let command = <Command as clap::Parser>::try_parse_from(words.iter().chain(flags)).unwrap();
    run(&command.options)
}

#[test]
fn the_command_writes_its_report_where_asked() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report.json");
    let report = command(&["--json", path.to_str().unwrap()], 1).unwrap();
    assert_eq!((report.requests, report.failed()), (3, 1), "errors alone do not fail the command");
    let written: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((written.requests, written.errors), (3, report.errors));
    assert!(written.ttft_ms.p50.is_some());
}

#[test]
fn the_command_fails_on_errors_when_asked_and_on_a_path_it_cannot_write() {
    assert!(command(&["--fail-on-error"], 0).is_ok());
    let failed = command(&["--fail-on-error"], 1).unwrap_err();
    assert!(failed.to_string().contains("1 of 3 requests failed"), "{failed}");
    let unwritable = command(&["--json", "/no/such/directory/report.json"], 0).unwrap_err();
    assert!(format!("{unwritable:#}").contains("--json /no/such/directory/report.json"), "{unwritable:#}");
}

#[test]
fn a_faulty_option_is_told_apart_from_a_failed_run() {
    let refused = command(&["--speed", "2"], 0).unwrap_err();
    assert!(refused.is::<Faults>(), "{refused}");
}
