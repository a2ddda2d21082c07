//! Both legs at once, as SGLang does it.

use engine::{Config, Connector, Engine, Fault, Role};
use serde_json::{Value, json};

use super::{Pairs, alone, instant, text};
use crate::rig::{Connection, Node, chat, eventually, get, post_as, request, until};

async fn engines(prefill: usize, decode: usize) -> Pairs {
    engines_split(prefill, decode, "always").await
}

async fn engines_split(prefill: usize, decode: usize, split: &str) -> Pairs {
    let start = async |role| {
        let config: Config = instant().with_role(role, Connector::Bootstrap);
        Engine::start(config).await.expect("an engine starts")
    };
    let (mut prefills, mut decodes, mut endpoints) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..prefill {
        let engine = start(Role::Prefill).await;
        let address = engine.side_addr().expect("a bootstrap server");
        let keys = format!("role=prefill,connector=sglang-bootstrap,bootstrap={address}");
        endpoints.push(format!("{},{keys}", engine.url()));
        prefills.push(engine);
    }
    for _ in 0..decode {
        let engine = start(Role::Decode).await;
        endpoints.push(format!("{},role=decode,connector=sglang-bootstrap", engine.url()));
        decodes.push(engine);
    }
    let node = Node::over(&endpoints, &[("split", split), ("explain_headers", "true")]).await;
    Pairs { prefill: prefills, decode: decodes, node }
}

async fn nothing_is_left(pairs: &Pairs) {
    pairs.node.at_rest().await;
    until("nothing is left", || {
        pairs.prefill.iter().chain(&pairs.decode).all(|engine| {
            let stats = engine.stats();
            (stats.running, stats.waiting, stats.fetching, stats.pinned_blocks, stats.rooms)
                == (0, 0, 0, 0, 0)
        })
    })
    .await;
}

fn choices(reply: &crate::rig::Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let choices = reply.json()["choices"].as_array().cloned().unwrap_or_default();
    choices.iter().map(|choice| choice["text"].clone()).collect()
}

#[actix_web::test]
async fn every_prompt_and_sample_meets_in_a_room_of_its_own_and_is_answered_as_by_one_engine() {
    let pairs = engines(2, 2).await;
    let prompts = ["one", "two", "three"].map(|name| text(name, 100));
    let mut rooms = Vec::new();
    for (body, sequences) in [
        (json!({"model": "sim", "prompt": prompts[0], "max_tokens": 5}), 1),
        (json!({"model": "sim", "prompt": prompts, "max_tokens": 5}), 3),
        (json!({"model": "sim", "prompt": text("four", 100), "max_tokens": 5, "n": 4}), 4),
        (json!({"model": "sim", "prompt": prompts[1], "max_tokens": 5}), 1),
    ] {
        let got = post_as(pairs.node.public(), "/v1/completions", "", body.to_string()).await;
        assert_eq!(choices(&got), choices(&alone("/v1/completions", &body, "x").await), "{body}");
        assert_eq!(choices(&got).len(), sequences);
        let legs = |engines: &[Engine]| {
            let all = engines.iter().flat_map(Engine::recorded);
            let bodies = all.filter_map(|asked| serde_json::from_slice::<Value>(&asked.body).ok());
            bodies
                .filter(|leg| leg["prompt"] == body["prompt"])
                .map(|leg| leg["bootstrap_room"].clone())
                .last()
        };
        let room = legs(&pairs.prefill).expect("a prefill leg");
        assert_eq!(legs(&pairs.decode), Some(room.clone()), "both legs go to the same rooms");
        let own = room.as_array().cloned().unwrap_or_else(|| vec![room]);
        assert_eq!(own.len(), sequences);
        rooms.extend(own.iter().map(|room| room.as_u64().expect("a room")));
        nothing_is_left(&pairs).await;
    }
    let all = rooms.len();
    rooms.sort_unstable();
    rooms.dedup();
    assert_eq!(rooms.len(), all, "no room twice");
    assert_eq!(pairs.spoiled(), 0);
}

#[actix_web::test]
async fn a_decode_leg_that_is_refused_ends_its_prefill_leg_and_another_pair_serves() {
    let pairs = engines(1, 2).await;
    pairs.decode[0].fail(Fault::Status { status: 503, retry_after_s: None }, None);
    for number in 0..6 {
        pairs.chat(&text(&format!("prompt {number}"), 100)).await;
    }
    nothing_is_left(&pairs).await;
    let refused = Pairs::asked(&pairs.decode[..1]);
    assert!(refused >= 1, "the failing one was tried");
    // One that was let go before the engine had read it is not counted there.
    until("no prefill leg waits for them", || {
        let stats = pairs.prefill[0].stats();
        stats.rooms == 0 && stats.running + stats.waiting == 0
    })
    .await;
    assert!(pairs.prefill[0].stats().requests_abandoned <= refused);
    assert_eq!(pairs.node.endpoint(&pairs.prefill[0].url()).standing().as_str(), "ready");
}

#[actix_web::test]
async fn a_prefill_leg_that_is_refused_ends_its_decode_leg_and_another_pair_serves() {
    let pairs = engines(2, 1).await;
    pairs.prefill[0].fail(Fault::Status { status: 503, retry_after_s: None }, None);
    for number in 0..6 {
        pairs.chat(&text(&format!("prompt {number}"), 100)).await;
    }
    nothing_is_left(&pairs).await;
    assert!(Pairs::asked(&pairs.prefill[..1]) >= 1, "the failing one was tried");
    assert_eq!(pairs.node.endpoint(&pairs.decode[0].url()).standing().as_str(), "ready");
}

#[actix_web::test]
async fn a_client_that_leaves_ends_both_legs() {
    let pairs = engines(1, 1).await;
    // Its legs never meet.
    pairs.decode[0].freeze(true);
    let mut client = Connection::open(pairs.node.public()).await;
    client.send(request("POST", "/v1/chat/completions", "", chat(&text("leaves", 100), true))).await;
    until("the prefill leg is there", || pairs.prefill[0].stats().rooms == 1).await;
    drop(client);
    until("its room is empty", || pairs.prefill[0].stats().rooms == 0).await;
    pairs.decode[0].freeze(false);
    nothing_is_left(&pairs).await;
}

#[actix_web::test]
async fn engines_that_serve_nothing_whole_are_always_sent_pairs_and_it_is_said_why() {
    let mut pairs = engines_split(1, 1, "auto").await;
    let short = text("short", 20);
    let explained = pairs.explain(chat(&short, false)).await;
    let split = &explained["split"];
    assert_eq!((&split["split"], &split["reason"]), (&json!(true), &json!("connector-splits-only")));
    pairs.chat(&short).await;
    assert_eq!((Pairs::asked(&pairs.prefill), Pairs::asked(&pairs.decode)), (1, 1));
    nothing_is_left(&pairs).await;
    // Nobody can do without the other side, and which one is missing is said.
    pairs.prefill.remove(0).kill().await;
    eventually("it is known to be gone", async || {
        let ready = get(pairs.node.public(), "/readyz").await;
        let missing = ready.json()["missing"].as_array().cloned().unwrap_or_default();
        (ready.status == 503 && missing.contains(&json!("prefill-endpoint"))).then_some(())
    })
    .await;
    let reply = pairs.node.chat(&short).await;
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(reply.text().contains("role prefill"), "{}", reply.text());
    assert_eq!(Pairs::asked(&pairs.decode), 1);
}
