//! When a request is split, and what is said of it.

use engine::Role;
use serde_json::Value;

use super::{Pairs, engines, instant, text};
use crate::rig::{Node, chat, eventually, post};

fn url_in<'a>(list: &'a Value, url: &str) -> &'a Value {
    let all = list.as_array().expect("candidates");
    all.iter().find(|each| each["url"] == url).unwrap_or_else(|| panic!("{url} in {list}"))
}

#[actix_web::test]
async fn long_cold_prompts_are_split_short_and_warm_ones_are_not_and_it_is_said_why() {
    let prefill = engines(2, Role::Prefill, &instant()).await;
    let pairs = Pairs::with(prefill, 2, &[("split", "auto")]).await;
    let long = text("long and cold", 8_000);
    let explained = pairs.explain(chat(&long, false)).await;
    assert_eq!((&explained["split"]["split"], &explained["split"]["reason"]), (&true.into(), &"paid".into()));
    let prefill = explained["prefill"].as_str().expect("a prefill endpoint");
    assert!(pairs.prefill.iter().any(|engine| engine.url() == prefill), "{explained}");
    assert_eq!(explained["prefill_candidates"].as_array().map(Vec::len), Some(2), "{explained}");
    assert!(explained["split"]["pair_ms"].as_f64() < explained["split"]["whole_ms"].as_f64(), "{explained}");

    pairs.chat(&long).await;
    assert_eq!((Pairs::asked(&pairs.prefill), pairs.taken()), (1, 1));
    pairs.node.at_rest().await;
    for (body, reason) in [(text("short", 64), "short"), (long, "warm")] {
        let explained = pairs.explain(chat(&body, false)).await;
        assert_eq!(explained["split"]["reason"], reason, "{explained}");
        assert!(explained["prefill"].is_null());
        pairs.chat(&body).await;
        pairs.node.at_rest().await;
    }
    assert_eq!((Pairs::asked(&pairs.prefill), Pairs::asked(&pairs.decode)), (1, 3));
    let metrics = pairs.metrics().await;
    for (split, reason) in [("yes", "paid"), ("no", "short"), ("no", "warm")] {
        let labels = [format!("split=\"{split}\""), format!("reason=\"{reason}\"")];
        assert_eq!(metrics.sum("pd_split_total", &labels.each_ref().map(String::as_str)), 1.0, "{reason}");
    }
}

#[actix_web::test]
pub(crate) async fn split_says_whether_prompts_are_ever_or_always_split() {
    for (mode, prefilled) in [("never", 0), ("always", 1)] {
        let prefill = engines(1, Role::Prefill, &instant()).await;
        let pairs = Pairs::with(prefill, 1, &[("split", mode)]).await;
        pairs.chat(&text("a prompt", if mode == "never" { 8_000 } else { 20 })).await;
        assert_eq!(Pairs::asked(&pairs.prefill), prefilled, "{mode}");
    }
}

#[actix_web::test]
async fn what_one_side_has_warm_the_other_has_not() {
    let prefill = engines(1, Role::Prefill, &instant()).await;
    let pairs = Pairs::with(prefill, 1, &[("split", "never")]).await;
    let prompt = text("the same prefix", 2_000);
    pairs.chat(&prompt).await;
    pairs.node.at_rest().await;
    let endpoints = [&pairs.prefill[0], &pairs.decode[0]];
    let urls = endpoints.map(engine::Engine::url);
    let split = Node::over(
        &[format!("{},role=prefill", urls[0]), format!("{},role=decode", urls[1])],
        &[("split", "always"), ("seed", &pairs.node.replica.gossip_address().to_string())],
    )
    .await;
    let explained = eventually("the placement to be known", async || {
        let explained = post(split.admin(), "/explain", chat(&prompt, false)).await.json();
        let warm = url_in(&explained["candidates"], &urls[1])["warm_tokens"].as_u64();
        (warm > Some(1_000)).then_some(explained)
    })
    .await;
    assert_eq!(url_in(&explained["prefill_candidates"], &urls[0])["warm_tokens"], 0, "{explained}");
}

#[actix_web::test]
pub(crate) async fn each_leg_is_chosen_by_its_own_policy() {
    let prefill = engines(2, Role::Prefill, &instant()).await;
    let flags = [("split", "always"), ("prefill_policy", "round-robin"), ("decode_policy", "least-load")];
    let pairs = Pairs::with(prefill, 2, &flags).await;
    let explained = pairs.explain(chat("hi", false)).await;
    assert_eq!(
        (&explained["split"]["policy"], &explained["policy"]),
        (&"round-robin".into(), &"least-load".into())
    );
    for number in 0..4 {
        pairs.chat(&text(&format!("prompt {number}"), 50)).await;
    }
    let asked: Vec<u64> = pairs.prefill.iter().map(|each| Pairs::asked(std::slice::from_ref(each))).collect();
    assert_eq!(asked, [2, 2]);
    let decisions = pairs.metrics().await;
    assert_eq!(decisions.sum("decisions_total", &["policy=\"round-robin\""]), 4.0);
}

#[actix_web::test]
async fn a_configuration_without_decode_is_told_what_is_missing() {
    let only = engines(1, Role::Prefill, &instant()).await;
    let node = Node::start_unready(&[("endpoint", &format!("{},role=prefill", only[0].url()))]).await;
    eventually("it is said", async || {
        let reply = node.chat("hi").await;
        assert_eq!(reply.status, 503, "{}", reply.text());
        reply.text().contains("role decode").then_some(())
    })
    .await;
}
