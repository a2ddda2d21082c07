use serde_json::Value;

use super::*;
use crate::load::reply::{Failure, PromptDetails, Usage};

const SLO: Slo = Slo { ttft_ms: 1_000.0, tpot_ms: 20.0, total_ms: None };

fn answered(endpoint: &str, ttft_ms: u64) -> Outcome {
    let details = PromptDetails { cached_tokens: Some(30) };
    Outcome {
        verdict: Ok(()),
        status: Some(200),
        headers: hyper::HeaderMap::new(),
        endpoint: Some(endpoint.to_owned()),
        ttft: Some(Duration::from_millis(ttft_ms)),
        e2e: Duration::from_millis(ttft_ms + 20),
        gaps: vec![Duration::from_millis(10); 2],
        usage: Some(Usage { prompt_tokens: 40, completion_tokens: 3, prompt_tokens_details: Some(details) }),
        content_events: 3,
        text: String::new(),
    }
}

fn failed(kind: ErrorKind) -> Outcome {
    Outcome { verdict: Err(Failure::new(kind, "why")), ..answered("a", 9000) }
}

fn record(live: &Live, outcome: &Outcome, turn: u32, home: Option<&str>) {
    live.record(&Finished { outcome, turn, home, retries: 0, slo: Some(&SLO) });
}

#[test]
fn the_json_has_the_documented_keys() {
    let live = Live::new();
    record(&live, &answered("a", 100), 0, None);
    record(&live, &failed(ErrorKind::Status(503)), 0, None);
    let json: Value = serde_json::to_value(live.report()).unwrap();
    for key in ["requests", "errors", "ttft_ms", "itl_ms", "e2e_ms", "hit_rate", "per_endpoint"] {
        assert!(json.get(key).is_some(), "{key}");
    }
    for times in ["ttft_ms", "itl_ms", "e2e_ms"] {
        for key in ["mean", "p50", "p90", "p99"] {
            assert!(json[times][key].is_number(), "{times}.{key}");
        }
    }
    for (ratios, keys) in [("qoe", ["mean", "p50", "p10"]), ("slo_met", ["ttft", "tpot", "both"])] {
        for key in keys {
            assert!(json[ratios][key].is_number(), "{ratios}.{key}");
        }
    }
    assert_eq!(json["requests"], 2);
    assert_eq!(json["errors"], serde_json::json!({"status 503": 1}));
    assert_eq!(json["per_endpoint"], serde_json::json!({"a": 2}));
    assert_eq!(json["hit_rate"], 0.75);
}

#[test]
fn times_are_those_of_whole_answers_to_three_digits() {
    let live = Live::new();
    for ttft_ms in 1..=100 {
        record(&live, &answered("a", ttft_ms), 0, None);
    }
    record(&live, &failed(ErrorKind::Truncated), 0, None);
    let times = live.report().ttft_ms;
    let near = |value: Option<f64>, wanted: f64| (value.unwrap() / wanted - 1.0).abs() < 0.001;
    assert!(near(times.p50, 50.0) && near(times.p90, 90.0) && near(times.p99, 99.0), "{times:?}");
    assert!(near(times.mean, 50.5) && near(times.max, 100.0), "{times:?}");
    assert!(near(live.report().itl_ms.mean, 10.0));
}

#[test]
fn streams_are_judged_by_what_they_expected_and_failed_ones_count_nothing() {
    let live = Live::new();
    for _ in 0..8 {
        record(&live, &answered("a", 100), 0, None);
    }
    // Three tokens, 1 s late, and taken in within 60 ms: an area of 90 of 90 + 3 x 1,000.
    record(&live, &answered("a", 2_000), 0, None);
    record(&live, &failed(ErrorKind::Truncated), 0, None);
    let report = live.report();
    let late = 90.0 / 3_090.0;
    assert!((report.qoe.mean.unwrap() - (8.0 + late) / 10.0).abs() < 1e-9, "{:?}", report.qoe);
    assert_eq!((report.qoe.p50, report.qoe.p10), (Some(1.0), Some(0.0)));
    assert_eq!(report.slo_met, SloMet { ttft: Some(0.8), tpot: Some(0.9), both: Some(0.8) });
    // Replies in one piece have no quality.
    let whole = Live::new();
    whole.record(&Finished { outcome: &answered("a", 1), turn: 0, home: None, retries: 0, slo: None });
    assert_eq!((whole.report().qoe, whole.report().slo_met), (Ratios::default(), SloMet::default()));
}

#[test]
fn nothing_measured_is_absent_not_zero() {
    let json = serde_json::to_value(Live::new().report()).unwrap();
    assert!(
        json["ttft_ms"]["p99"].is_null() && json["hit_rate"].is_null() && json["follow_up_at_home"].is_null()
    );
}

#[test]
fn engines_that_count_no_cached_tokens_do_not_lower_the_hit_rate() {
    let live = Live::new();
    let silent = Usage { prompt_tokens: 1000, completion_tokens: 1, prompt_tokens_details: None };
    record(&live, &Outcome { usage: Some(silent), ..answered("a", 1) }, 0, None);
    assert_eq!(live.report().hit_rate, None);
    record(&live, &answered("a", 1), 0, None);
    assert_eq!(live.report().hit_rate, Some(0.75));
}

#[test]
fn a_follow_up_is_at_home_where_its_chats_first_turn_was() {
    let live = Live::new();
    record(&live, &answered("a", 1), 0, None);
    record(&live, &answered("a", 1), 1, Some("a"));
    record(&live, &answered("b", 1), 2, Some("a"));
    record(&live, &answered("a", 1), 3, Some("a"));
    record(&live, &Outcome { endpoint: None, ..answered("", 1) }, 4, Some("a"));
    let report = live.report();
    assert_eq!((report.follow_ups, report.follow_up_at_home), (3, Some(2.0 / 3.0)));
    assert_eq!(report.busiest_over_mean(), Some(1.5));
}

#[test]
fn a_request_is_in_flight_until_its_guard_is_gone() {
    let live = Live::new();
    let guard = live.begin();
    assert_eq!((live.started(), live.in_flight(), live.ended(), live.report().abandoned), (1, 1, 0, 1));
    drop(guard);
    assert_eq!((live.started(), live.in_flight(), live.ended()), (1, 0, 1));
}

#[test]
fn endless_endpoint_names_are_counted_together() {
    let live = Live::new();
    for name in 0..ENDPOINTS_MAX + 10 {
        record(&live, &answered(&format!("e{name}"), 1), 0, None);
    }
    let report = live.report();
    assert_eq!((report.per_endpoint.len(), report.per_endpoint["(others)"]), (ENDPOINTS_MAX + 1, 10));
}

#[test]
fn the_table_shows_what_went_wrong_and_how_often() {
    let live = Live::new();
    record(&live, &answered("http://e1", 12), 0, None);
    record(&live, &failed(ErrorKind::Connect), 0, None);
    live.chat_broken();
    let table = live.report().to_string();
    for part in [
        "2 requests",
        "1 failed",
        "first token",
        "12.0",
        "http://e1",
        "0.500 mean",
        "connect",
        "why",
        "1 chats ended early",
    ] {
        assert!(table.contains(part), "{part:?} in\n{table}");
    }
}
