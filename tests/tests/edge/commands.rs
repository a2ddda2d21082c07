//! The commands as a script sees them: what they print and how they end.

use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;

use grapevine::ports;
use serde_json::Value;

use crate::rig::{Answer, Fake, Node, Process, chat, eventually, run, try_get};

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("written");
    file
}

/// Runs and checks the exit code, and that standard error holds all of these.
fn check(arguments: &[&str], code: i32, told: &[&str]) -> String {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}{out}");
    for part in told {
        assert!(error.contains(part), "{arguments:?}: {part} is not in {error}");
    }
    out
}

#[test]
fn a_faulty_configuration_ends_with_2_and_one_message_that_names_every_fault() {
    let bad = file("listen = \"nowhere\"\ncolour = 7\ntries_max = 99\n[policy]\nname = \"guess\"\n");
    let path = bad.path().display().to_string();
    for command in ["serve", "check"] {
        check(
            &[command, "--config", &path, "--colour", "red", "--endpoint", "ftp://x", "--workers", "none"],
            2,
            &[
                "6 faults",
                "listen",
                "nowhere",
                "colour",
                "tries_max",
                "99",
                "guess",
                "--colour",
                "ftp://x",
                "workers",
            ]
            .map(|part| if part == "6 faults" { "faults" } else { part }),
        );
        check(&[command, "--policy", "cost,tie_ms=-1"], 2, &["policy.cost.tie_ms", "-1", "allowed"]);
        check(
            &[command, "--policy", "cost,foo=1,tie_ms=-1", "--endpoint-filter", "kv-pressure,kv_ratio_max=7"],
            2,
            &["3 faults", "policy.cost.foo", "policy.cost.tie_ms", "filter.kv-pressure.kv_ratio_max"],
        );
        check(&[command, "--itl-ms", "inf"], 2, &["1 fault\n", "itl_ms"]);
        check(&[command, "--endpoint-filter", "sieve"], 2, &["sieve", "queue-percentile", "kv-pressure"]);
        check(&[command, "--affinity", "love"], 2, &["love", "prefix-longest"]);
        check(&[command, "--config", "/nonexistent.toml"], 2, &["/nonexistent.toml"]);
    }
}

/// Nobody promises that the environment or a command line is text.
#[test]
fn arguments_and_variables_that_are_no_text_are_faults_only_where_they_are_ours() {
    let odd = std::ffi::OsStr::from_bytes(b"\xff");
    let mut command = std::process::Command::new(tests::program());
    let output = command.arg("check").env("SOMEBODYS", odd).output().expect("it runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let output =
        command.env("GRAPEVINE_LISTEN", odd).args(["--admin".as_ref(), odd]).output().expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("listen") && error.contains("admin"), "{error}");
}

/// What only the gossip or the log library can judge is still found before anything starts.
#[test]
fn check_finds_what_serve_would_stumble_over() {
    let not_a_key = file("not a key");
    let path = not_a_key.path().display().to_string();
    for command in ["check", "serve"] {
        check(&[command, "--cluster-key-file", &path, "--listen", "127.0.0.1:0"], 2, &["cluster_key_file"]);
        check(&[command, "--log", "grapevine=loud"], 2, &["log", "loud"]);
        check(&[command, "--gossip", "0.0.0.0:7946"], 2, &["advertise"]);
        check(&[command, "--replica-id", &"é".repeat(60)], 2, &["replica_id"]);
        check(&[command, "--seed", "somewhere:65535"], 2, &["seed"]);
        check(&[command, "--gossip", "127.0.0.1:65535"], 2, &["gossip"]);
        check(&[command, "--admin", "127.0.0.1:7", "--listen", "127.0.0.1:7"], 2, &["admin", "its own"]);
    }
}

#[test]
fn check_says_so_when_there_is_nothing_wrong_and_prints_the_reference() {
    assert!(check(&["check"], 0, &[]).contains("no faults"));
    let good = file("policy = \"session\"\nendpoint = [\"http://e:1,role=decode,dp=2\"]\n");
    check(&["check", "--config", &good.path().display().to_string()], 0, &[]);
    let reference = check(&["check", "--reference"], 0, &[]);
    for key in grapevine::config::KEYS {
        assert!(reference.contains(&format!("`{}`", key.name)), "{} is not in the reference", key.name);
    }
}

#[test]
fn an_address_in_use_ends_serve_with_2_and_names_the_key() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    check(&["serve", "--listen", &address], 2, &["listen", &address]);
    check(&["serve", "--listen", "127.0.0.1:0", "--admin", &address], 2, &["admin", &address]);
}

#[test]
fn unknown_commands_flags_and_values_end_with_2() {
    check(&["fly"], 2, &["fly"]);
    check(&["demo", "--colour"], 2, &["--colour"]);
    check(&["engine", "--speed", "0", "--block-size", "0"], 2, &["--speed", "--block-size"]);
    check(&["load"], 2, &["--target"]);
    check(&["load", "--target", "ftp://x"], 2, &["ftp://x"]);
    check(&["explain", "--body", "x"], 2, &["--admin"]);
    for help in ["--help", "--version"] {
        check(&[help], 0, &[]);
    }
}

#[actix_web::test]
async fn explain_prints_the_decision_and_ends_with_1_when_it_can_t() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let token = file("secret\n");
    let token = token.path().display().to_string();
    let node = Node::over(&[engine.url()], &[("admin_token_file", &token)]).await;
    let body = file(&chat("hello", false));
    let body = body.path().display().to_string();
    let admin = format!("http://{}", node.admin());
    let explain = async |more: &[&str], code: i32, told: &[&str]| {
        let mut arguments: Vec<String> =
            ["explain", "--admin", &admin, "--body", &body].map(str::to_owned).to_vec();
        arguments.extend(more.iter().map(|each| (*each).to_owned()));
        let told: Vec<String> = told.iter().map(|each| (*each).to_owned()).collect();
        let run = move || {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let told: Vec<&str> = told.iter().map(String::as_str).collect();
            check(&arguments, code, &told)
        };
        actix_web::rt::task::spawn_blocking(run).await.expect("it ran")
    };
    let shown = explain(&["--admin-token-file", &token], 0, &[]).await;
    assert!(shown.contains("policy cost") && shown.contains(&engine.url()), "{shown}");
    let json = explain(&["--admin-token-file", &token, "--json"], 0, &[]).await;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["chosen"], engine.url());
    explain(&[], 1, &["401"]).await;
    explain(&["--admin-token-file", &token, "--route", "/v1/files"], 1, &["400"]).await;
    assert_eq!(engine.served(), 0);
    drop(node);
    explain(&[], 1, &[&admin]).await;
}

#[actix_web::test]
async fn engine_serves_until_it_is_told_to_end_and_load_measures_it() {
    let at = ports::find(1).expect("free ports").remove(0).public;
    let mut engine = Process::start(
        &["engine", "--listen", &at.to_string(), "--profile", "instant"],
        std::process::Stdio::inherit(),
    );
    eventually("the engine", async || (try_get(at, "/health").await?.status == 200).then_some(())).await;
    let out = tempfile::NamedTempFile::new().expect("a file");
    let path = out.path().display().to_string();
    let target = format!("http://{at}");
    let arguments =
        ["load", "--target", &target, "--sessions", "4", "--turns", "2", "--json", &path].map(str::to_owned);
    let load = move || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        check(&arguments, 0, &[])
    };
    actix_web::rt::task::spawn_blocking(load).await.expect("it ran");
    let json: Value = serde_json::from_slice(&std::fs::read(out.path()).expect("written")).expect("JSON");
    assert_eq!(json["requests"], 8);
    for key in ["errors", "ttft_ms", "itl_ms", "e2e_ms", "hit_rate", "per_endpoint"] {
        assert!(json.get(key).is_some(), "{key} is missing: {json}");
    }
    for percentile in ["mean", "p50", "p90", "p99"] {
        assert!(json["e2e_ms"][percentile].is_number(), "{percentile}: {json}");
    }
    engine.signal("TERM");
    assert_eq!(engine.ended().await, Some(0));
}
