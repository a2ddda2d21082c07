//! What requests leave behind: nothing.

use std::time::Duration;

use engine::{Config, Engine, Profile};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::rig::{Connection, Node, chat, get, request, until};

/// Half of a second's work of an engine: every phase is there for a while.
const LEAVE_WITHIN_MS: u64 = 60;

/// Five hundred clients leave at random points, over engines that queue, prefill and stream.
#[actix_web::test]
async fn five_hundred_aborts_at_random_points_leave_every_map_and_gauge_at_zero() {
    const SEED: u64 = 42;
    let mut config = Config::profile(Profile::Llama8bH100);
    config.limits.running_max = 4;
    let engines = [
        Engine::start(config.clone()).await.expect("an engine"),
        Engine::start(config).await.expect("an engine"),
    ];
    let node = Node::over(&engines.each_ref().map(Engine::url), &[("scrape_every_ms", "50")]).await;
    let mut rng = StdRng::seed_from_u64(SEED);
    let mut clients = Vec::new();
    for n in 0..500 {
        let prompt = format!("{n} {}", "word ".repeat(rng.random_range(1..400)));
        let headers = if n % 3 == 0 { format!("X-Session-Id: s{}\r\n", n % 40) } else { String::new() };
        let mut bytes =
            request("POST", "/v1/chat/completions", &headers, chat(&prompt, rng.random_bool(0.7)));
        if rng.random_bool(0.1) {
            bytes.truncate(rng.random_range(1..bytes.len()));
        }
        let stays = Duration::from_millis(rng.random_range(0..LEAVE_WITHIN_MS));
        let address = node.public();
        clients.push(actix_web::rt::spawn(async move {
            let mut connection = Connection::open(address).await;
            connection.send(bytes).await;
            tokio::time::sleep(stays).await;
        }));
        if n % 16 == 15 {
            for client in clients.drain(..) {
                client.await.expect("a client");
            }
        }
    }
    for client in clients {
        client.await.expect("a client");
    }
    node.at_rest().await;
    until("the engines to be rid of it all", || {
        engines.iter().all(|engine| {
            let stats = engine.stats();
            stats.running == 0 && stats.waiting == 0
        })
    })
    .await;
    let page = get(node.admin(), "/metrics").await;
    let page = page.text();
    for gauge in ["grapevine_requests_in_flight", "grapevine_endpoint_running"] {
        let mut lines = page.lines().filter(|line| line.starts_with(gauge)).peekable();
        assert!(lines.peek().is_some(), "{gauge} is not there");
        for line in lines {
            assert!(line.ends_with(" 0"), "seed {SEED}: {line}");
        }
    }
    let cancelled = page.lines().any(|line| {
        line.starts_with("grapevine_requests_total")
            && !line.ends_with(" 0")
            && line.contains(r#"code="499""#)
    });
    assert!(cancelled, "nobody left before the head: the test tests nothing\n{page}");
    assert!(engines.iter().any(|engine| engine.stats().aborted > 0), "nobody left an engine's stream");
}
