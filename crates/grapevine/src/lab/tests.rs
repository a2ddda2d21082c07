//! The command as a whole, over an excerpt of a published trace.

use std::path::{Path, PathBuf};

use clap::Parser;
use serde_json::Value;

use super::{Options, run};
use crate::load::Faults;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    options: Options,
}

fn options(line: &str) -> Options {
    let arguments = std::iter::once("lab").chain(line.split_whitespace());
    Cli::try_parse_from(arguments).unwrap_or_else(|error| panic!("{line}: {error}")).options
}

/// The first 400 requests of Mooncake's conversation trace (FAST'25 release, Apache-2.0).
fn excerpt() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mooncake_conversation_400.jsonl")
}

/// Runs the command and gives what it wrote.
fn written(line: &str) -> (String, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let [json, svg] = ["out.json", "out.svg"].map(|name| folder.path().join(name));
    let mut options = options(line);
    (options.json, options.svg, options.quiet) = (Some(json.clone()), Some(svg.clone()), true);
    run(&options).expect("the runs end");
    let read = |path| std::fs::read_to_string(path).expect("it was written");
    (read(json), read(svg))
}

#[test]
fn one_seed_writes_the_same_json_and_chart_and_another_a_different_one() {
    let line = |seed| {
        format!(
            "--trace {} --engines 2,3 --replicas 1,2 --policy cost,random,least-connections --gossip-ms 2,never --seed {seed}",
            excerpt().display()
        )
    };
    let first = written(&line(3));
    assert_eq!(first, written(&format!("{} --threads 1", line(3))));
    assert_ne!(first, written(&line(4)));
}

#[test]
fn every_combination_has_its_row_with_the_documented_keys() {
    let line = format!(
        "--trace {} --engines 3 --replicas 1,2 --policy cost,all-knowing --gossip-ms 2,200",
        excerpt().display()
    );
    let (json, svg) = written(&line);
    let report: Value = serde_json::from_str(&json).expect("JSON");
    let rows = report["results"].as_array().expect("results");
    let told: Vec<(&str, u64, Option<f64>)> = rows
        .iter()
        .map(|row| {
            let text = row["policy"].as_str().expect("policy");
            (text, row["replicas"].as_u64().expect("replicas"), row["gossip_ms"].as_f64())
        })
        .collect();
    let cost = |replicas, ms| ("cost", replicas, Some(ms));
    assert_eq!(told, [cost(1, 2.0), cost(2, 2.0), cost(1, 200.0), cost(2, 200.0), ("all-knowing", 1, None)]);
    for row in rows {
        assert_eq!((row["engines"].as_u64(), row["requests"].as_u64()), (Some(3), Some(400)));
        for key in ["hit_rate", "ttft_mean_ms", "ttft_p99_ms", "busiest_over_mean"] {
            assert!(row[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {row}");
        }
    }
    assert_eq!(svg.matches("<circle").count(), 2 * rows.len(), "a point in each panel for each run");
}

#[test]
fn no_engine_hits_more_than_a_cache_without_end_and_cost_takes_less_time_than_what_looks_at_no_cache() {
    let line = format!("--trace {} --replicas 1,4 --policy cost,least-load,random", excerpt().display());
    let report = run(&Options { quiet: true, ..options(&line) }).expect("the runs end");
    let ceiling = report.ceiling_hit_rate.expect("the trace shares blocks");
    // Counted apart from this code.
    assert_eq!(ceiling, 1528.0 / 11_349.0);
    for row in &report.results {
        assert!(row.figures.hit_rate <= ceiling + 0.01, "{row:?}");
        let others = report.results.iter().filter(|other| other.replicas == row.replicas);
        for other in others.filter(|_| row.policy == "cost") {
            assert!(row.figures.ttft_mean_ms <= other.figures.ttft_mean_ms, "{row:?} {other:?}");
        }
    }
}

#[test]
fn all_faults_are_named_at_once() {
    let line = "--trace /no/such/file --policy cost,cheapest --replicas 0,x --engines 8 --gossip-ms -1 \
                --loss 2 --cut 9s..3s --utilisation 0";
    let error = run(&options(line)).expect_err("nothing of it can be played");
    let Faults(faults) = error.downcast_ref().expect("they are faults in what was asked for");
    let named = [
        "--policy",
        "--replicas 0",
        "--replicas x",
        "--gossip-ms -1",
        "--cut",
        "--utilisation",
        "--loss",
        "--trace",
    ];
    assert_eq!(faults.len(), named.len(), "{faults:?}");
    for (fault, flag) in faults.iter().zip(named) {
        assert!(fault.contains(flag), "{fault} does not name {flag}");
    }
    assert!(faults[0].contains("least-connections") && faults[0].contains("prefix-ring"), "{}", faults[0]);
}

#[test]
fn flags_that_would_change_nothing_are_refused() {
    for line in [
        "--utilisation 0.5",
        "--engine fluid",
        "--arrivals recorded",
        "--until-trace 1min",
        "--figures second-half",
    ] {
        let error = run(&options(line)).expect_err(line);
        assert!(error.is::<Faults>(), "{line}: {error}");
    }
}
