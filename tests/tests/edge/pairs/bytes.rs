//! What each engine is sent, and what the client gets.

use std::time::Duration;

use serde_json::{Value, json};

use super::{CHAT, Pairs, alone, said, text};
use crate::rig::{Answer, Connection, Fake, Node, get, piece, post_as, request};

#[actix_web::test]
async fn each_prompt_is_prefilled_once_and_answered_as_one_engine_would() {
    let pairs = Pairs::always(2, 2).await;
    for (number, stream) in [false, true, true, false, true, false].into_iter().enumerate() {
        let content = text(&format!("prompt {number}"), 300);
        let (path, mut body) = if number % 3 == 2 {
            ("/v1/completions", json!({"model": "sim", "prompt": content, "max_tokens": 9}))
        } else {
            let messages = json!([{"role": "user", "content": content}]);
            (CHAT, json!({"model": "sim", "messages": messages, "max_completion_tokens": 9}))
        };
        body["stream"] = json!(stream);
        if stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        let id = format!("X-Request-Id: pair-{number}\r\n");
        let got = post_as(pairs.node.public(), path, &id, body.to_string()).await;
        assert_eq!(got.status, 200, "{}", got.text());
        let wanted = alone(path, &body, &format!("pair-{number}")).await;
        let without_cached = |mut all: Vec<Value>| {
            // Tokens that were taken over count as cached.
            all.iter_mut().filter_map(|each| each.get_mut("usage")).for_each(|usage| {
                if let Some(usage) = usage.as_object_mut() {
                    usage.remove("prompt_tokens_details");
                }
            });
            all
        };
        assert_eq!(without_cached(said(&got)), without_cached(said(&wanted)), "{number}");
        let urls = |engines: &[engine::Engine]| engines.iter().map(engine::Engine::url).collect::<Vec<_>>();
        let header = |name| got.header(name).map(str::to_owned).unwrap_or_default();
        assert!(urls(&pairs.prefill).contains(&header("x-grapevine-prefill-endpoint")), "{:?}", got.headers);
        assert!(urls(&pairs.decode).contains(&header("x-grapevine-endpoint")), "{:?}", got.headers);
    }
    pairs.node.at_rest().await;
    assert_eq!((Pairs::asked(&pairs.prefill), Pairs::asked(&pairs.decode)), (6, 6));
    assert_eq!((pairs.staged(), pairs.taken(), pairs.pinned(), pairs.spoiled()), (6, 6, 0, 0));
    let metrics = pairs.metrics().await;
    assert_eq!(metrics.sum("pd_split_total", &["split=\"yes\"", "reason=\"always\""]), 6.0);
    for (phase, role) in [("prefilling", "prefill"), ("handed-off", "decode"), ("decoding", "decode")] {
        let labels = [format!("phase=\"{phase}\""), format!("role=\"{role}\"")];
        let labels = labels.each_ref().map(String::as_str);
        assert_eq!(metrics.sum("request_phase_seconds_count", &labels), 6.0, "{phase}");
    }
    assert_eq!(metrics.sum("kv_released_total", &[]), 0.0);
    let shown = get(pairs.node.admin(), "/requests/pair-0").await.json();
    assert_eq!(shown["phase"], "finished");
    assert!(
        shown["prefill_endpoint"].is_string() && shown["endpoint"] != shown["prefill_endpoint"],
        "{shown}"
    );
}

/// A pair of engines that answer as they are told.
async fn told(prefill: Answer, decode: impl Fn() -> Answer + Send + Sync + 'static) -> (Fake, Fake, Node) {
    let prefill = Fake::start(move |_| prefill.clone()).await;
    let decode = Fake::start(move |_| decode()).await;
    let endpoints = [format!("{},role=prefill", prefill.url()), format!("{},role=decode", decode.url())];
    let node = Node::over(&endpoints, &[("split", "always")]).await;
    (prefill, decode, node)
}

const PARAMS: &str =
    r#"{"do_remote_prefill": true,"remote_block_ids":[[1, 2]],  "remote_port":15600,"odd":1.50}"#;

pub(super) fn staged() -> Answer {
    Answer::ok(&format!(r#"{{"id":"c","choices":[],"kv_transfer_params":{PARAMS},"usage":null}}"#))
}

#[actix_web::test]
async fn the_decode_leg_is_the_client_s_own_bytes_with_what_the_prefill_said() {
    let (prefill, decode, node) = told(staged(), || Answer::completion(3, 2)).await;
    let body = r#"{ "model":"sim", "big":123456789012345678901, "messages":[{"role":"user","content":"\u00e9"}], "stop":"x","min_tokens":2 ,"stop":"y"}"#;
    let reply = post_as(node.public(), CHAT, "X-Request-Id: one-id\r\n", body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let sent = |fake: &Fake| {
        let asked = fake.last().expect("a leg");
        assert!(asked.head.contains("x-request-id: one-id"), "{}", asked.head);
        String::from_utf8(asked.body).expect("UTF-8")
    };
    let own = body.strip_suffix('}').expect("an object");
    assert_eq!(sent(&decode), format!("{own},\"kv_transfer_params\":{PARAMS}}}"));
    let first: Value = serde_json::from_str(&sent(&prefill)).expect("JSON");
    assert_eq!((&first["max_tokens"], &first["min_tokens"]), (&json!(1), &Value::Null));
    assert_eq!(first["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(reply.text(), Answer::completion(3, 2).body());
}

#[actix_web::test]
async fn a_stream_comes_as_the_decode_engine_sends_it() {
    let (_prefill, decode, node) = told(staged(), || Answer::Stalled(vec![piece(0), piece(1)])).await;
    let mut client = Connection::open(node.public()).await;
    client.send(request("POST", CHAT, "", crate::rig::chat("hi", true))).await;
    client.read_until("word1").await;
    assert_eq!(decode.open(), 1, "it is not at its end");
    drop(client);
    node.at_rest().await;

    let (_prefill, _decode, node) = told(staged(), || Answer::stream(5, Duration::ZERO)).await;
    let reply = node.post(CHAT, crate::rig::chat("hi", true)).await;
    let events: String = (0..5).map(|number| format!("data: {}\n\n", piece(number))).collect();
    assert_eq!(reply.text(), format!("{events}data: [DONE]\n\n"));
}

#[actix_web::test]
async fn an_engine_s_refusal_of_the_prompt_is_the_client_s_answer() {
    let (prefill, decode, node) = told(Answer::status(400), || Answer::completion(1, 1)).await;
    let reply = node.chat("hi").await;
    assert_eq!((reply.status, reply.text()), (400, Answer::status(400).body()));
    assert_eq!((prefill.served(), decode.served()), (1, 0));
    node.at_rest().await;
}

#[actix_web::test]
async fn parameters_that_a_client_sends_are_refused() {
    let (prefill, decode, node) = told(staged(), || Answer::completion(1, 1)).await;
    for field in [
        r#""kv_transfer_params":{"do_remote_prefill":true}"#,
        r#""bootstrap_room":1"#,
        r#""bootstrap_host":"h""#,
    ] {
        let body = format!(r#"{{"model":"sim","messages":[],{field}}}"#);
        assert_eq!(node.post(CHAT, body).await.status, 400, "{field}");
    }
    assert_eq!((prefill.served(), decode.served()), (0, 0));
}
