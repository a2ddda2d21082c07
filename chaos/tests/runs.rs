//! The runner itself, on small clusters: what it says, and that nothing it started is left.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// A scenario of two replicas and two engines, one of each kind killed, that also has this rule.
fn scenario(folder: &Path, for_ms: u64, rule: &str) -> String {
    let text = format!(
        r#"
about = "small"
[cluster]
replicas = 2
engines = 2
profile = "instant"
speed = 1.0
[load]
clients = 4
for_ms = {for_ms}
turns = 3
tenants = 2
first_bytes = 600
turn_bytes = 100
answer_tokens = 8
retries = 2
[[fault]]
at_ms = 500
verb = "kill"
target = "replica-any"
[[hold]]
{rule}
"#
    );
    let file = folder.join("small.toml");
    std::fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

fn chaos(folder: &Path, scenario: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_chaos"));
    command.args(["run", scenario, "--balancer", "clients", "--out"]).arg(folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Processes whose output goes into this folder.
fn left_behind(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let outputs = entries.filter_map(|entry| std::fs::read_link(entry.path().join("fd/1")).ok());
    outputs.filter(|output| output.starts_with(folder)).map(|output| output.display().to_string()).collect()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn finish(child: Child) -> (Output, String) {
    let output = child.wait_with_output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

#[test]
fn a_run_in_which_all_rules_hold_ends_with_0_and_leaves_its_result_and_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let file = scenario(folder.path(), 1_500, "rule = \"only-cut-requests-fail\"");
    let (output, text) = finish(chaos(folder.path(), &file).spawn().unwrap());
    assert_eq!(output.status.code(), Some(0), "{text}");
    let result = std::fs::read(folder.path().join("small/result.json")).unwrap();
    let result: serde_json::Value = serde_json::from_slice(&result).unwrap();
    assert_eq!(result["holds"], true, "{text}");
    assert_eq!(result["faults"][0]["verb"], "kill");
    assert!(result["answered"].as_u64().is_some_and(|answered| answered > 0), "{text}");
    assert_eq!(left_behind(folder.path()), Vec::<String>::new());
}

#[test]
fn a_broken_rule_ends_with_1_and_says_what_was_seen() {
    let folder = tempfile::tempdir().unwrap();
    let file = scenario(folder.path(), 600, "rule = \"answered\"\nat_least = 1000000");
    let (output, text) = finish(chaos(folder.path(), &file).spawn().unwrap());
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("BROKEN answered") && text.contains("1000000 wanted"), "{text}");
    assert_eq!(left_behind(folder.path()), Vec::<String>::new());
}

#[test]
fn a_run_that_is_asked_to_end_takes_its_processes_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = scenario(folder.path(), 60_000, "rule = \"nothing-fails\"");
    let child = chaos(folder.path(), &file).spawn().unwrap();
    wait_until("it starts processes", || left_behind(folder.path()).len() >= 3);
    let asked = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(asked.success());
    let (output, text) = finish(child);
    assert_eq!(output.status.code(), Some(2), "{text}");
    wait_until("killed processes are gone", || left_behind(folder.path()).is_empty());
}

#[test]
fn an_unknown_scenario_is_answered_with_those_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let (output, text) = finish(chaos(folder.path(), "kill-everything").spawn().unwrap());
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("kill-one-replica"), "{text}");
}
