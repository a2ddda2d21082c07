//! Keys that say how often something is done: each is compared with a replica that does it hardly ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gossip::FrameKind;
use routing::endpoint::Standing;

use crate::rig::{Answer, Fake, Node, until};

#[actix_web::test]
pub(super) async fn engines_are_scraped_and_probed_as_often_as_said() {
    let engine = async || {
        Fake::start_raw(|asked| match asked.path.as_str() {
            "/metrics" => Answer::ok("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"),
            _ => Answer::ok("{}"),
        })
        .await
    };
    for (key, path) in [("scrape_every_ms", "/metrics"), ("probe_every_ms", "/health")] {
        let (often, seldom) = (engine().await, engine().await);
        let _often = Node::over(&[often.url()], &[(key, "20")]).await;
        let _seldom = Node::over(&[seldom.url()], &[(key, "60000")]).await;
        until(key, || often.asked(path) >= 15).await;
        assert!(seldom.asked(path) <= 2, "{key}: {} of {}", seldom.asked(path), often.asked(path));
    }
}

#[actix_web::test]
pub(super) async fn a_silent_health_page_is_waited_for_as_long_as_said() {
    let silent = Fake::start_raw(|_| Answer::Silence).await;
    let url = silent.url();
    let hasty = Node::start_unready(&[("endpoint", url.as_str()), ("probe_timeout_ms", "20")]).await;
    let patient = Node::start_unready(&[("endpoint", url.as_str()), ("probe_timeout_ms", "600000")]).await;
    let standing = |node: &Node| node.endpoint(&url).standing();
    until("the hasty one to give it up", || matches!(standing(&hasty), Standing::Ejected { .. })).await;
    assert!(matches!(standing(&patient), Standing::Joining { .. }), "{:?}", standing(&patient));
}

/// Two replicas that know each other; the first has these flags.
async fn pair(engine: &Fake, flags: &[(&'static str, &str)]) -> (Node, Node) {
    let first = Node::over(&[engine.url()], flags).await;
    let seed = first.replica.gossip_address().to_string();
    let second = Node::over(&[engine.url()], &[("seed", &seed)]).await;
    until("both to know each other", || {
        [&first, &second]
            .iter()
            .all(|node| node.replica.gossip().stats().peers.iter().any(|seen| seen.age.is_some()))
    })
    .await;
    (first, second)
}

fn sent(node: &Node, kind: FrameKind) -> u64 {
    let stats = node.replica.gossip().stats();
    stats.traffic.iter().find(|traffic| traffic.kind == kind).map_or(0, |traffic| traffic.sent_bytes)
}

#[actix_web::test]
pub(super) async fn gossip_goes_out_as_often_as_said() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    for (key, kind) in [("pulse_every_ms", FrameKind::Pulse), ("ledger_every_ms", FrameKind::Ledger)] {
        let (often, _peer) = pair(&engine, &[(key, "20")]).await;
        let (seldom, _other) = pair(&engine, &[(key, "10000")]).await;
        let before = [&often, &seldom].map(|node| sent(node, kind));
        until(key, || sent(&often, kind) > before[0] + 30_000).await;
        let [often, seldom] = [sent(&often, kind) - before[0], sent(&seldom, kind) - before[1]];
        assert!(seldom * 2 < often, "{key}: {seldom} bytes against {often}");
    }
}

#[actix_web::test]
pub(super) async fn changes_are_pushed_as_often_as_said() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let number = Arc::new(AtomicUsize::new(0));
    let pushes = async |every: &str| {
        let (node, _peer) = pair(&engine, &[("push_every_ms", every)]).await;
        let before = node.replica.gossip().stats().pushes;
        for _ in 0..100 {
            let n = number.fetch_add(1, Ordering::SeqCst);
            assert_eq!(node.chat(&format!("number {n}")).await.status, 200);
        }
        node.at_rest().await;
        node.replica.gossip().stats().pushes - before
    };
    let (at_once, gathered) = (pushes("1").await, pushes("1000").await);
    assert!(at_once > 2 * gathered, "{at_once} pushes against {gathered}");
}
