use clap::Parser;
use routing::request::Slo;

use super::*;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    options: Options,
}

fn options(flags: &str) -> Options {
    let words = ["load", "--target", "http://127.0.0.1:1"].into_iter().chain(flags.split_whitespace());
    Command::try_parse_from(words).unwrap_or_else(|error| panic!("{flags}: {error}")).options
}

fn plan(flags: &str) -> Plan {
    options(flags).plan().unwrap_or_else(|faults| panic!("{flags}: {faults}"))
}

const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/load/samples/mooncake_conversation.jsonl");

#[test]
fn chats_run_in_a_closed_loop_and_traces_at_their_times() {
    assert_eq!(plan("").pace, Pace::Closed { clients: 16, order: Order::Chats });
    assert_eq!(plan("--concurrency 3 --order turns").pace, Pace::Closed { clients: 3, order: Order::Turns });
    assert_eq!(plan("--rate 2.5").pace, Pace::Poisson { requests_per_second: 2.5 });
    assert_eq!(plan(&format!("--workload {TRACE}")).pace, Pace::Recorded { speed: 1.0 });
    assert_eq!(plan(&format!("--workload {TRACE} --speed 10")).pace, Pace::Recorded { speed: 10.0 });
    let closed = plan(&format!("--workload {TRACE} --concurrency 2"));
    assert_eq!(closed.pace, Pace::Closed { clients: 2, order: Order::Chats });
}

#[test]
fn chats_end_by_themselves_unless_the_run_has_an_end() {
    assert_eq!(plan("").requests_total(), Some(400));
    assert_eq!(plan("--sessions 3 --turns 2").requests_total(), Some(6));
    assert_eq!(plan("--requests 1000").requests_total(), Some(1000));
    assert_eq!(plan("--for 20s").requests_total(), None);
    assert_eq!(plan("--for 20s --sessions 7").requests_total(), Some(35));
}

#[test]
fn every_chat_measure_reaches_the_plan() {
    let flags = "--sessions 1 --turns 2 --tenants 3 --common-bytes 4 --tenant-bytes 5 --first-bytes 6 \
                 --turn-bytes 7 --max-tokens 8 --think-ms 9";
    let Source::Chat(shape) = plan(flags).source else { panic!("not chats") };
    let wanted = ChatShape {
        sessions: Some(1),
        turns: 2,
        tenants: 3,
        common_bytes: 4,
        tenant_bytes: 5,
        first_bytes: 6,
        turn_bytes: 7,
        max_tokens: 8,
        think: Duration::from_millis(9),
    };
    assert_eq!(*shape, wanted);
}

#[test]
fn every_trace_option_reaches_the_trace() {
    let trace = |flags: &str| match plan(&format!("--workload {TRACE} {flags}")).source {
        Source::Trace(trace) => trace,
        Source::Chat(_) => panic!("not a trace"),
    };
    assert!(trace("--until-trace 3s").rows.len() < trace("").rows.len());
    assert_eq!(trace("--max-tokens 5").rows.iter().map(|row| row.output_tokens).max(), Some(5));
    assert_eq!(trace("--arrivals recorded").rows[1].at, Duration::ZERO);
    assert_ne!(trace("--arrivals spread").rows[1].at, Duration::ZERO);
    assert_ne!(trace("--seed 1"), trace("--seed 2"));
}

#[test]
fn what_requests_expect_is_sent_and_is_what_answers_are_judged_by() {
    let planned = plan("--priority 1 --slo-ttft-ms 300 --slo-tpot-ms 12.5");
    let sent =
        ["x-request-priority", "x-slo-ttft-ms", "x-slo-tpot-ms"].map(|name| &planned.wire.headers[name]);
    assert_eq!(sent, ["1", "300", "12.5"]);
    let slo = |ttft_ms, tpot_ms| Slo { ttft_ms, tpot_ms, total_ms: None };
    assert_eq!(planned.wire.slo(), slo(300.0, 12.5));
    assert_eq!(plan("--header x-request-priority:3").wire.slo(), slo(3_000.0, 100.0));
    assert_eq!(plan("").wire.slo(), slo(2_000.0, 50.0));
}

#[test]
fn every_request_option_reaches_the_plan() {
    let planned = plan(
        "--api completions --model m --no-stream --ignore-eos --header x-a:1 --header x-b:2 --session-header x-s \
         --endpoint-header x-e --connect-timeout 1s --timeout 7s --retries 2 --fresh-connections --spread session \
         --drain 3s --rate 1 --in-flight-max 5 --requests 6 --for 8s --seed 9",
    );
    let envelope =
        Envelope { api: Api::Completions, model: Some("m".into()), stream: false, ignore_eos: true };
    assert_eq!(planned.envelope, envelope);
    let wire = &planned.wire;
    assert_eq!((wire.headers["x-a"].as_bytes(), wire.headers["x-b"].as_bytes()), (&b"1"[..], &b"2"[..]));
    assert_eq!(wire.session_header.as_ref().map(HeaderName::as_str), Some("x-s"));
    assert_eq!(wire.endpoint_header.as_str(), "x-e");
    assert_eq!(
        (wire.connect_timeout, wire.request_timeout),
        (Duration::from_secs(1), Duration::from_secs(7))
    );
    assert!(wire.fresh_connections);
    let limits = Limits {
        requests_max: Some(6),
        run_max: Some(Duration::from_secs(8)),
        drain_max: Duration::from_secs(3),
        in_flight_max: 5,
        retries_max: 2,
    };
    assert_eq!((planned.limits, planned.spread, planned.seed), (limits, Spread::Session, 9));
    assert!(plan("--no-stream --stream").envelope.stream);
}

#[test]
fn all_faults_are_named_together() {
    let mut options =
        options("--turns 0 --rate -1 --header x --session-header é --endpoint-path v1 --speed 2");
    options.targets.push("https://x".into());
    let message = options.plan().unwrap_err().to_string();
    for part in
        ["--turns", "--rate", "--header", "--session-header", "--endpoint-path", "--speed needs a trace"]
    {
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn a_fault_names_the_value_and_what_is_allowed() {
    let check = |flags: &str, wants: &[&str]| {
        let message = options(flags).plan().unwrap_err().to_string();
        assert!(wants.iter().all(|want| message.contains(want)), "{flags}: {message}");
    };
    check("--target https://a", &["--target", "https://a", "http://"]);
    check("--target 127.0.0.1:80", &["127.0.0.1:80"]);
    check("--workload /no/such/file", &["--workload", "/no/such/file"]);
    check("--for 1s --order turns", &["--order turns", "--sessions"]);
    check("--concurrency 2 --in-flight-max 3", &["--in-flight-max", "open loop"]);
    check(&format!("--workload {TRACE} --turns 3"), &["--turns", "generated chats"]);
    check(&format!("--workload {TRACE} --rate 3 --arrivals recorded"), &["--arrivals", "recorded times"]);
}
