//! What is answered: texts, usage, streams, continuations.

use crate::harness::{Got, ask, exchange, post};
use engine::{Config, Engine, Profile};
use serde_json::{Value, json};

async fn instant() -> Engine {
    Engine::start(Config::profile(Profile::Instant)).await.expect("starts")
}

fn chat(content: &str, more: &Value) -> String {
    let mut body =
        json!({"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 8});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body.to_string()
}

#[tokio::test]
async fn streamed_and_whole_replies_say_the_same() {
    let engine = instant().await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let whole = ask(&engine, path, &chat("Hello", &json!({"prompt": "Hello"}))).await;
        let streamed = ask(&engine, path, &chat("Hello", &json!({"prompt": "Hello", "stream": true}))).await;
        assert_eq!(whole.status, 200, "{:?}", whole.body);
        assert_eq!(whole.text(), streamed.text());
        assert_eq!(whole.text().len(), 8 * 6);
        assert_eq!(streamed.events().last().map(String::as_str), Some("[DONE]"));
    }
}

#[tokio::test]
async fn a_text_prompt_with_the_first_words_of_its_answer_is_answered_with_the_rest() {
    let engine = instant().await;
    let prompt = "Once upon a time";
    let body = |prompt: &str, max: u32| json!({"prompt": prompt, "max_tokens": max}).to_string();
    let whole = ask(&engine, "/v1/completions", &body(prompt, 20)).await.text();
    let cut = 7 * 6;
    let rest = ask(&engine, "/v1/completions", &body(&format!("{prompt}{}", &whole[..cut]), 13)).await.text();
    assert_eq!(rest, whole[cut..]);
}

#[tokio::test]
async fn a_chat_with_a_partial_last_message_is_continued() {
    let engine = instant().await;
    let whole = ask(&engine, "/v1/chat/completions", &chat("Hi", &json!({"max_tokens": 20}))).await.text();
    let partial = json!({
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": whole[..30]}],
        "continue_final_message": true, "add_generation_prompt": false, "max_tokens": 15, "stream": true,
    });
    let rest = ask(&engine, "/v1/chat/completions", &partial.to_string()).await.text();
    assert_eq!(rest, whole[30..]);
}

#[tokio::test]
async fn token_ids_and_their_text_are_the_same_prompt() {
    let engine = instant().await;
    let tokens = ask(&engine, "/tokenize", &json!({"prompt": "Hello world!"}).to_string()).await.json();
    let from_ids = json!({"prompt": tokens["tokens"], "max_tokens": 4, "return_token_ids": true}).to_string();
    let from_ids = ask(&engine, "/v1/completions", &from_ids).await;
    let from_text = ask(&engine, "/v1/completions", r#"{"prompt":"Hello world!","max_tokens":4}"#).await;
    assert_eq!(from_ids.text(), from_text.text());
    let said = json!({"tokens": from_ids.json()["choices"][0]["token_ids"]}).to_string();
    assert_eq!(ask(&engine, "/detokenize", &said).await.json()["prompt"], from_ids.text());
}

#[tokio::test]
async fn lists_and_samples_give_a_choice_each() {
    let engine = instant().await;
    for (prompt, prompt_tokens) in
        [(json!(["one", "two"]), 2), (json!([[1, 2, 3], [4]]), 4), (json!(["only", "these!!"]), 3)]
    {
        let body = json!({"prompt": prompt, "n": 3, "max_tokens": 2}).to_string();
        let reply = ask(&engine, "/v1/completions", &body).await.json();
        let mut texts: Vec<&str> = reply["choices"]
            .as_array()
            .expect("choices")
            .iter()
            .map(|c| c["text"].as_str().expect("text"))
            .collect();
        assert_eq!(texts.len(), 6);
        assert_eq!(reply["usage"]["prompt_tokens"], prompt_tokens);
        assert_eq!(reply["usage"]["completion_tokens"], 12);
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), 6, "all differ");
    }
}

#[tokio::test]
async fn the_next_turn_finds_prompt_and_answer_in_the_cache() {
    let engine = instant().await;
    let question = "Tell me all about block hashes, please, and leave nothing out of it. ".repeat(8);
    let first = ask(&engine, "/v1/chat/completions", &chat(&question, &json!({"max_tokens": 64}))).await;
    let next = json!({"messages": [
        {"role": "user", "content": question},
        {"role": "assistant", "content": first.text()},
        {"role": "user", "content": "And then?"},
    ], "max_tokens": 2});
    let usage = ask(&engine, "/v1/chat/completions", &next.to_string()).await.json()["usage"].clone();
    let before = first.json()["usage"]["prompt_tokens"].as_u64().expect("a count");
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
    // All but the last token of the answer was computed; what does not fill a block of 16 is not cached.
    assert_eq!(cached, (before + 63) / 16 * 16);
}

#[tokio::test]
async fn answers_end_by_themselves_where_the_engine_says_and_resumed_ones_there_too() {
    let config = Config { natural_tokens: Some(10), ..Config::profile(Profile::Instant) };
    let engine = Engine::start(config).await.expect("starts");
    let finish = |reply: &Got| reply.json()["choices"][0]["finish_reason"].clone();
    let completion = |more: Value| chat("Hi", &more);
    let natural = ask(&engine, "/v1/chat/completions", &completion(json!({"max_tokens": 50}))).await;
    assert_eq!((natural.text().len(), finish(&natural)), (60, json!("stop")));
    let short = ask(&engine, "/v1/chat/completions", &completion(json!({"max_tokens": 4}))).await;
    assert_eq!((short.text().len(), finish(&short)), (24, json!("length")));
    let ignoring = json!({"max_tokens": 30, "ignore_eos": true});
    let ignoring = ask(&engine, "/v1/chat/completions", &completion(ignoring)).await;
    assert_eq!((ignoring.text().len(), finish(&ignoring)), (180, json!("length")));
    let at_least = json!({"max_tokens": 30, "min_tokens": 12});
    let at_least = ask(&engine, "/v1/chat/completions", &completion(at_least)).await;
    assert_eq!((at_least.text().len(), finish(&at_least)), (72, json!("stop")));
    for (said, left) in [(6, 4), (10, 0)] {
        let partial = json!({
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": natural.text()[..said * 6]}],
            "continue_final_message": true, "add_generation_prompt": false, "max_tokens": 50,
        });
        let rest = ask(&engine, "/v1/chat/completions", &partial.to_string()).await;
        assert_eq!((rest.text().len(), finish(&rest)), (left * 6, json!("stop")));
        let mut streamed = partial;
        streamed["stream"] = json!(true);
        let streamed = ask(&engine, "/v1/chat/completions", &streamed.to_string()).await;
        assert_eq!(streamed.text(), rest.text());
        assert!(streamed.body.ends_with(b"data: [DONE]\n\n"));
    }
}

#[tokio::test]
async fn usage_comes_where_it_was_asked_for() {
    let engine = instant().await;
    let with =
        |options: Value| chat("Hello", &json!({"stream": true, "max_tokens": 3, "stream_options": options}));
    let events = |got: &Got| -> Vec<Value> {
        got.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
    };
    let none = events(&ask(&engine, "/v1/chat/completions", &chat("Hello", &json!({"stream": true}))).await);
    assert!(none.iter().all(|chunk| chunk.get("usage").is_none()));
    let end = events(&ask(&engine, "/v1/chat/completions", &with(json!({"include_usage": true}))).await);
    let usages = end.iter().filter(|chunk| chunk.get("usage").is_some()).count();
    assert_eq!((usages, end.last().expect("chunks")["choices"].clone()), (1, json!([])));
    let always = json!({"include_usage": true, "continuous_usage_stats": true});
    let always = events(&ask(&engine, "/v1/chat/completions", &with(always)).await);
    let counts: Vec<_> = always.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts, [Some(0), Some(1), Some(2), Some(3), Some(3)]);
}

#[tokio::test]
async fn a_given_request_id_names_the_completion() {
    let engine = instant().await;
    let request = post("/v1/chat/completions", &chat("Hi", &json!({})), &[("x-request-id", "my \"id\"")]);
    let got = exchange(&engine, request).await.expect("an answer");
    assert_eq!(got.headers["x-request-id"], "my \"id\"");
    assert_eq!(got.json()["id"], "chatcmpl-my \"id\"");
}
