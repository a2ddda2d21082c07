//! Who listens to whom, and for how long silence is borne.

use std::io::Write as _;
use std::process::Stdio;

use gossip::Rejection;
use grapevine::ports;

use crate::rig::{Answer, Fake, Node, Process, eventually, get, until};

/// The names that a replica knows, its own left out, with whether each lives.
async fn others(node: &Node) -> Vec<(String, bool)> {
    let cluster = get(node.admin(), "/cluster").await.json();
    let all = cluster["replicas"].as_array().cloned().unwrap_or_default();
    let each =
        all.iter().map(|each| (each["id"].as_str().unwrap_or_default().to_owned(), each["live"] == true));
    each.filter(|(id, _)| *id != node.name).collect()
}

async fn knows(node: &Node, other: &Node) {
    eventually(&format!("{} to know {}", node.name, other.name), async || {
        others(node).await.contains(&(other.name.clone(), true)).then_some(())
    })
    .await;
}

/// A replica without engines, which gossips all the same.
async fn alone(flags: &[(&'static str, &str)]) -> Node {
    Node::start_unready(flags).await
}

#[actix_web::test]
pub(super) async fn replicas_with_a_seed_find_each_other_and_others_don_t() {
    let first = alone(&[]).await;
    let seed = first.replica.gossip_address().to_string();
    let stranger = alone(&[]).await;
    let second = alone(&[("seed", &seed)]).await;
    knows(&first, &second).await;
    knows(&second, &first).await;
    assert_eq!(others(&stranger).await, []);
    assert_eq!(others(&first).await.len(), 1);
}

/// `same` can talk to `first`, `other` can't: when the first has thrown away what the other said, and yet
/// knows its fellow, the key has done its work.
async fn check_kept_apart(first: &Node, same: &Node, other: &Node, causes: &[Rejection]) {
    knows(first, same).await;
    knows(same, first).await;
    until("the other to be refused", || {
        let stats = first.replica.gossip().stats();
        causes.iter().any(|cause| stats.rejected(*cause) > 0)
    })
    .await;
    assert!(others(first).await.iter().all(|(id, _)| *id != other.name));
    assert_eq!(others(other).await, []);
}

#[actix_web::test]
pub(super) async fn replicas_of_another_cluster_are_not_listened_to() {
    let first = alone(&[("cluster_id", "one")]).await;
    let seed = first.replica.gossip_address().to_string();
    let other = alone(&[("cluster_id", "two"), ("seed", &seed)]).await;
    let same = alone(&[("cluster_id", "one"), ("seed", &seed)]).await;
    check_kept_apart(&first, &same, &other, &[Rejection::Cluster]).await;
}

#[actix_web::test]
pub(super) async fn replicas_without_the_key_are_not_listened_to() {
    let key = |digit: &str| {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(digit.repeat(64).as_bytes()).expect("written");
        file
    };
    let (ours, theirs) = (key("a"), key("b"));
    let (ours, theirs) = (ours.path().display().to_string(), theirs.path().display().to_string());
    let first = alone(&[("cluster_key_file", &ours)]).await;
    let seed = first.replica.gossip_address().to_string();
    let keyless = alone(&[("seed", &seed)]).await;
    let wrong = alone(&[("seed", &seed), ("cluster_key_file", &theirs)]).await;
    let same = alone(&[("seed", &seed), ("cluster_key_file", &ours)]).await;
    check_kept_apart(&first, &same, &keyless, &[Rejection::Unsealed]).await;
    check_kept_apart(&first, &same, &wrong, &[Rejection::Seal, Rejection::Cluster]).await;
}

#[actix_web::test]
pub(super) async fn a_silent_replica_is_dead_when_it_has_been_silent_as_long_as_said() {
    let own = ports::find(1).expect("free ports").remove(0);
    let [public, admin, seed] = [own.public, own.admin, own.gossip].map(|address| address.to_string());
    let arguments = ["serve", "--listen", &public, "--admin", &admin, "--gossip", &seed];
    let named = ["--replica-id", "silent", "--log", "warn"];
    let silent = Process::start(&[&arguments[..], &named[..]].concat(), Stdio::inherit());
    let quick = alone(&[("seed", &seed), ("dead_after_ms", "400")]).await;
    let slow = alone(&[("seed", &seed), ("dead_after_ms", "60000")]).await;
    let seen = |live: bool| ("silent".to_owned(), live);
    for node in [&quick, &slow] {
        eventually("the mortal one", async || others(node).await.contains(&seen(true)).then_some(())).await;
    }
    // Stopped rather than killed: a refused connection would tell of its end before any silence does.
    silent.signal("STOP");
    eventually("the quick one to give it up", async || {
        others(&quick).await.contains(&seen(false)).then_some(())
    })
    .await;
    assert!(others(&slow).await.contains(&seen(true)), "the slow one still waits");
}

#[actix_web::test]
pub(super) async fn a_replica_that_finds_nobody_waits_as_long_as_said() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let url = engine.url();
    // A seed that exists and never answers.
    let nobody = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let seed = nobody.local_addr().expect("bound").to_string();
    let flags = [("endpoint", url.as_str()), ("seed", seed.as_str())];
    let patient = alone(&[flags[0], flags[1], ("snapshot_wait_ms", "600000")]).await;
    let hasty = Node::start(&[flags[0], flags[1], ("snapshot_wait_ms", "100")]).await;
    assert_eq!(hasty.chat("hi").await.status, 200);
    let ready = get(patient.public(), "/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(ready.json()["missing"].to_string().contains("snapshot"), "{}", ready.text());
}
