//! Keys that change which endpoint is chosen, or what is said of it.

use serde_json::{Value, json};

use crate::rig::{Answer, Fake, Node, chat, eventually, get, post, post_as};

async fn engines() -> [Fake; 3] {
    let engine = async || Fake::start(|_| Answer::completion(20, 1)).await;
    [engine().await, engine().await, engine().await]
}

async fn explained(node: &Node, body: impl AsRef<[u8]>) -> Value {
    post(node.admin(), "/explain", body).await.json()
}

fn candidate<'a>(explained: &'a Value, url: &str) -> &'a Value {
    let all = explained["candidates"].as_array().expect("candidates");
    all.iter().find(|each| each["url"] == url).expect("the candidate")
}

/// Three engines of which one says that it queues.
async fn one_that_queues() -> [Fake; 3] {
    let engine = async |waiting: u32| {
        Fake::start_raw(move |asked| match asked.path.as_str() {
            "/metrics" => {
                Answer::ok(&format!("vllm:num_requests_running 4\nvllm:num_requests_waiting {waiting}\n"))
            }
            "/v1/models" => Answer::ok(r#"{"data":[{"id":"sim"}]}"#),
            _ => Answer::completion(20, 1),
        })
        .await
    };
    [engine(20).await, engine(0).await, engine(0).await]
}

#[actix_web::test]
pub(super) async fn a_filter_leaves_out_the_endpoint_that_queues() {
    let engines = one_that_queues().await;
    let urls = engines.each_ref().map(Fake::url);
    let scraped = [("scrape_every_ms", "20")];
    let without = Node::over(&urls, &scraped).await;
    let with = Node::over(&urls, &[scraped[0], ("endpoint_filter", "queue-percentile,percentile=0.5")]).await;
    let dropped = async |node: &Node| {
        let explained = explained(node, chat("hello", false)).await;
        candidate(&explained, &urls[0])["dropped_by"].clone()
    };
    eventually("the queue to be seen", async || (dropped(&with).await == "queue-percentile").then_some(()))
        .await;
    assert!(dropped(&without).await.is_null());
}

#[actix_web::test]
pub(super) async fn an_affinity_before_least_load_brings_a_prompt_back() {
    let engines = engines().await;
    let urls = engines.each_ref().map(Fake::url);
    let plain = Node::over(&urls, &[("policy", "least-load")]).await;
    let with = Node::over(&urls, &[("policy", "least-load"), ("affinity", "prefix-longest")]).await;
    let prompt = "a prompt of several blocks ".repeat(200);
    for (node, reason) in [(&plain, "least-load"), (&with, "prefix-holder")] {
        assert_eq!(node.chat(&prompt).await.status, 200);
        node.at_rest().await;
        assert_eq!(explained(node, chat(&prompt, false)).await["reason"], reason);
    }
}

#[actix_web::test]
pub(super) async fn only_the_configured_header_names_a_session() {
    let engines = engines().await;
    let node = Node::over(&engines.each_ref().map(Fake::url), &[("session_header", "x-tenant")]).await;
    for header in ["X-Tenant: ours\r\n", "X-Session-Id: not-ours\r\n"] {
        let reply = post_as(node.public(), "/v1/chat/completions", header, chat("hi", false)).await;
        assert_eq!(reply.status, 200);
    }
    assert_eq!(get(node.admin(), "/sessions/ours").await.status, 200);
    assert_eq!(get(node.admin(), "/sessions/not-ours").await.status, 404);
}

#[actix_web::test]
pub(super) async fn the_user_names_a_session_only_if_it_is_said_so() {
    let engines = engines().await;
    let urls = engines.each_ref().map(Fake::url);
    let mut body: Value = serde_json::from_str(&chat("hi", false)).expect("JSON");
    body["user"] = json!("jane");
    for (switch, status) in [("false", 404), ("true", 200)] {
        let node = Node::over(&urls, &[("session_from_user", switch)]).await;
        assert_eq!(node.post("/v1/chat/completions", body.to_string()).await.status, 200);
        assert_eq!(get(node.admin(), "/sessions/jane").await.status, status, "{switch}");
    }
}

#[actix_web::test]
pub(super) async fn replies_say_how_they_were_routed_only_if_asked_to() {
    let engines = engines().await;
    let urls = engines.each_ref().map(Fake::url);
    for switch in ["false", "true"] {
        let node = Node::over(&urls, &[("explain_headers", switch)]).await;
        let reply = node.chat("hi").await;
        let said = ["x-grapevine-replica", "x-grapevine-endpoint", "x-grapevine-decision"]
            .map(|header| reply.header(header).is_some());
        assert_eq!(said, [switch == "true"; 3]);
        assert!(reply.header("x-request-id").is_some());
    }
}

#[actix_web::test]
pub(super) async fn assumed_speeds_and_sizes_are_what_costs_are_made_of() {
    let engines = engines().await;
    let url = [engines[0].url()];
    let body = chat(&"words of a prompt ".repeat(500), false);
    let seen = async |flags: &[(&'static str, &str)]| {
        let node = Node::over(&url, flags).await;
        let explained = explained(&node, &body).await;
        let own = candidate(&explained, &url[0]);
        let endpoint = get(node.admin(), "/endpoints").await.json()[0].clone();
        let number = |value: &Value| value.as_f64().expect("a number");
        (number(&own["cost_ms"]), number(&own["uncached_tokens"]), number(&endpoint["itl_us"]))
    };
    let (cost, tokens, itl) = seen(&[]).await;
    let (slow, same, _) = seen(&[("prefill_us_per_token", "2500")]).await;
    assert!(same == tokens && slow > 5.0 * cost, "{slow} ms against {cost} ms");
    let (_, fewer, _) = seen(&[("bytes_per_token", "8")]).await;
    assert!((fewer * 2.0 - tokens).abs() < 4.0, "{fewer} tokens against {tokens}");
    let (_, _, slower) = seen(&[("itl_ms", "120")]).await;
    assert!((slower - 10.0 * itl).abs() < 1.0, "{slower} us against {itl} us");
}

#[actix_web::test]
pub(super) async fn every_key_of_an_endpoint_is_shown_and_its_role_models_and_ranks_count() {
    let [one, two, three] = engines().await;
    let keys = "role=prefill,group=g,zone=z,connector=vllm-nixl,bootstrap=10.0.0.1:8998";
    let first = format!("{},{keys}", one.url());
    let (second, third) = (format!("{},model=only-this", two.url()), format!("{},dp=2", three.url()));
    let node = Node::start(&[("endpoint", &first), ("endpoint", &second), ("endpoint", &third)]).await;
    let shown = eventually("all in use", async || {
        let shown = get(node.admin(), "/endpoints").await.json();
        let all = shown.as_array().cloned().unwrap_or_default();
        all.iter().all(|each| each["standing"] == "ready").then_some(all)
    })
    .await;
    let of =
        |url: &str| shown.iter().find(|each| each["url"] == url).unwrap_or_else(|| panic!("{url}")).clone();
    let prefill = of(&one.url());
    for (key, value) in keys.split(',').filter_map(|pair| pair.split_once('=')) {
        assert_eq!(prefill[key], value, "{key}");
    }
    assert_eq!(of(&two.url())["models"], json!(["only-this"]));
    let ranks = [0, 1].map(|rank| of(&format!("{}#{rank}", three.url()))["id"].clone());
    assert_ne!(ranks[0], ranks[1]);
    // The prefill side alone serves nobody, and each model goes to who has it.
    for (model, engine) in [("only-this", &two), ("sim", &three)] {
        let body = chat("hi", false).replace("\"sim\"", &format!("\"{model}\""));
        assert_eq!(node.post("/v1/chat/completions", body).await.status, 200);
        assert_eq!(engine.served(), 1, "{model}");
    }
    assert!(three.last().is_some_and(|asked| asked.head.contains("x-data-parallel-rank: ")));
    assert_eq!(one.served(), 0);
}
