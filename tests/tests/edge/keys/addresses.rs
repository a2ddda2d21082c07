//! Where a replica listens, what it is called, how many threads it has, what it logs.

use std::process::Stdio;
use std::time::Duration;

use grapevine::ports;
use serde_json::Value;

use crate::rig::{Answer, Fake, Node, Process, eventually, get, try_get};

#[actix_web::test]
pub(super) async fn listeners_are_where_they_are_said_to_be() {
    let own = ports::find(1).expect("free ports").remove(0);
    let [public, admin, gossip] = [own.public, own.admin, own.gossip].map(|address| address.to_string());
    let flags = [
        ("listen", public.as_str()),
        ("admin", admin.as_str()),
        ("gossip", gossip.as_str()),
        ("replica_id", "a-name"),
    ];
    let node = Node::start_unready(&flags).await;
    assert_eq!(get(own.public, "/livez").await.status, 200);
    assert_eq!(get(own.admin, "/cluster").await.json()["replica"], "a-name");
    assert_eq!(node.replica.gossip_address(), own.gossip);
    assert!(std::net::UdpSocket::bind(own.gossip).is_err(), "the gossip port is taken");
}

#[actix_web::test]
pub(super) async fn a_replica_bound_to_every_address_is_reached_at_the_advertised_one() {
    let port = ports::find(1).expect("free ports").remove(0).gossip.port();
    let (bound, reached) = (format!("0.0.0.0:{port}"), format!("127.0.0.1:{port}"));
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let flags = [("gossip", bound.as_str()), ("advertise", reached.as_str())];
    let node = Node::over(&[engine.url()], &flags).await;
    let peer = Node::over(&[engine.url()], &[("seed", reached.as_str())]).await;
    eventually("the peer to know where it is", async || {
        let stats = peer.replica.gossip().stats();
        let seen = stats.peers.iter().find(|seen| seen.replica.as_str() == node.name)?;
        (seen.address?.to_string() == reached).then_some(())
    })
    .await;
}

/// The names of the threads of a process.
fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

fn arguments(own: &ports::ReplicaPorts, more: &[&str]) -> Vec<String> {
    let addresses = [("--listen", own.public), ("--admin", own.admin), ("--gossip", own.gossip)];
    let mut all = vec!["serve".to_owned()];
    for (flag, address) in addresses {
        all.extend([flag.to_owned(), address.to_string()]);
    }
    all.extend(more.iter().map(|each| (*each).to_owned()));
    all
}

/// A process with these flags, once it answers.
async fn process(more: &[&str], log: Stdio) -> (Process, ports::ReplicaPorts) {
    let own = ports::find(1).expect("free ports").remove(0);
    let arguments = arguments(&own, more);
    let process = Process::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), log);
    eventually("it answers", async || try_get(own.public, "/livez").await).await;
    (process, own)
}

#[actix_web::test]
pub(super) async fn as_many_threads_serve_as_workers_are_asked_for() {
    let (few, _) = process(&["--workers", "1", "--log", "off"], Stdio::inherit()).await;
    let (many, _) = process(&["--workers", "9", "--log", "off"], Stdio::inherit()).await;
    eventually("eight threads more", async || (threads(many.pid()) == threads(few.pid()) + 8).then_some(()))
        .await;
}

#[actix_web::test]
pub(super) async fn the_log_has_the_wanted_lines_in_the_wanted_form() {
    let engine = Fake::start(|_| Answer::stream(3, Duration::from_millis(1))).await;
    let mut logs = Vec::new();
    for (filter, format) in [("info", "text"), ("info", "json"), ("gateway=debug", "text"), ("error", "text")]
    {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let flags = ["--endpoint", &engine.url(), "--log", filter, "--log-format", format];
        let (mut process, own) = process(&flags, Stdio::from(file.reopen().expect("a file"))).await;
        eventually("ready", async || (get(own.public, "/readyz").await.status == 200).then_some(())).await;
        let sent = crate::rig::post_as(
            own.public,
            "/v1/chat/completions",
            "X-Request-Id: the-one\r\nX-SLO-TTFT-MS: 60000\r\nX-SLO-TPOT-MS: 60000\r\n",
            crate::rig::chat("hello", true),
        );
        assert_eq!(sent.await.status, 200);
        process.signal("INT");
        assert_eq!(process.ended().await, Some(0));
        logs.push(std::fs::read_to_string(file.path()).expect("a log"));
    }
    let [text, json, debug, quiet] = logs.try_into().unwrap_or_else(|_| panic!("four logs"));
    assert!(text.contains("serving") && text.contains("the-one") && !text.contains("chosen"), "{text}");
    let lines: Vec<Value> = json
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}")))
        .collect();
    let request =
        lines.iter().find(|line| line["id"] == "the-one").unwrap_or_else(|| panic!("not in {json}"));
    assert_eq!((&request["level"], &request["status"]), (&Value::from("INFO"), &Value::from(200)));
    assert_eq!((&request["qoe"], &request["slo_ttft"]), (&Value::from(1.0), &Value::from("met")));
    assert!(request.get("slo_e2e").is_none(), "no target was set for the whole");
    assert!(
        debug.contains("chosen") && debug.contains("candidates") && !debug.contains("serving"),
        "{debug}"
    );
    assert_eq!(quiet, "");
}

#[actix_web::test]
pub(super) async fn a_log_that_nobody_reads_costs_counted_lines_and_no_request() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let (_process, own) = process(&["--endpoint", &engine.url()], Stdio::piped()).await;
    eventually("ready", async || (get(own.public, "/readyz").await.status == 200).then_some(())).await;
    // A line names the model that was asked for: these fill the pipe and what may wait for it.
    let long = crate::rig::chat("hello", false).replace("\"sim\"", &format!("\"{}\"", "m".repeat(1 << 20)));
    eventually("lines to be lost", async || {
        assert_eq!(crate::rig::post(own.public, "/v1/chat/completions", &long).await.status, 404);
        let page = get(own.admin, "/metrics").await;
        let text = page.text();
        let lost = text.lines().find_map(|line| line.strip_prefix("grapevine_log_lines_dropped_total "))?;
        (lost != "0").then_some(())
    })
    .await;
    let sent = crate::rig::post(own.public, "/v1/chat/completions", crate::rig::chat("hello", false)).await;
    assert_eq!(sent.status, 200);
}
