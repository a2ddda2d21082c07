//! Affinity follows what engines render, not how clients write it.

use serde_json::{Value, json};
use tests::{Chat, Cluster, Fleet, MODEL, PATIENCE, Plan, Talker, until, words};

/// One message in another form that renders the same.
fn in_parts(message: &Value) -> Value {
    json!({"content": [{"type": "text", "text": message["content"]}], "role": message["role"]})
}

/// JSON with every letter of every string escaped, keys left as they are.
fn escaped(body: &Value) -> String {
    let escape =
        |text: &str| -> String { text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect() };
    match body {
        Value::String(text) => format!("\"{}\"", escape(text)),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(escaped).collect::<Vec<_>>().join(" ,\n\t"))
        }
        Value::Object(fields) => {
            // The other way round than they were written.
            let fields = fields.iter().rev().map(|(key, value)| format!("\"{key}\" : {}", escaped(value)));
            format!("{{ {} }}", fields.collect::<Vec<_>>().join(" , "))
        }
        other => other.to_string(),
    }
}

/// The same chat as body `form` of five.
fn written(chat: &Chat, form: usize) -> (String, bool) {
    let mut body = chat.body();
    match form % 5 {
        0 => (body.to_string(), false),
        1 => (serde_json::to_string_pretty(&body).expect("JSON"), false),
        2 => {
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
            body["temperature"] = json!(0.5);
            (body.to_string(), true)
        }
        3 => (escaped(&body), false),
        _ => {
            body["messages"] = chat.messages().iter().map(in_parts).collect();
            body["user"] = json!("somebody");
            body["stream"] = json!(true);
            (body.to_string(), true)
        }
    }
}

#[tokio::test]
async fn a_chat_stays_at_home_however_each_turn_is_written() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let talker = Talker::default();
    let (mut stayed, mut later) = (0, Vec::new());
    for number in 0..20 {
        let mut chat = Chat::new(&format!("chat {number}"), &words("system", 340));
        let mut home: Option<String> = None;
        for turn in 0..5 {
            chat.say(if turn == 0 { 2_500 } else { 400 });
            let form = number + turn;
            let (body, streamed) = written(&chat, form);
            let through = replicas[(number + turn) % 3];
            let outcome = talker.send_bytes(through, "/v1/chat/completions", body.into(), streamed).await;
            assert_eq!(outcome.verdict, Ok(()));
            let endpoint = outcome.endpoint.expect("replies name their endpoint");
            match &home {
                None => home = Some(endpoint),
                Some(home) if *home == endpoint => stayed += 1,
                Some(_) => later.push(form % 5),
            }
            chat.answered(&outcome.text);
        }
    }
    assert!(stayed >= 78, "{stayed} of 80 stayed; those that left were written in the forms {later:?}");
}

/// Sends growing prompts to `/v1/completions` and expects them at home: `prompt` makes the body's prompt of
/// a text of words.
async fn assert_completions_stay(what: &str, prompt: impl Fn(&str) -> Value) {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let replicas = cluster.public();
    let talker = Talker::default();
    let (mut stayed, mut later) = (0, 0);
    for number in 0..20 {
        let mut text = words(&format!("document {number}"), 2_500);
        let mut home: Option<String> = None;
        for turn in 0..4 {
            let body = json!({"model": MODEL, "prompt": prompt(&text), "max_tokens": 4});
            let outcome = talker.send(replicas[(number + turn) % 3], "/v1/completions", &body).await;
            assert_eq!(outcome.status, Some(200), "{what}: {:?}", outcome.verdict);
            let endpoint = outcome.endpoint.expect("replies name their endpoint");
            match &home {
                None => home = Some(endpoint),
                Some(home) => {
                    later += 1;
                    stayed += usize::from(*home == endpoint);
                }
            }
            text.push_str(&words(&format!("document {number} part {turn}"), 700));
        }
    }
    assert!(stayed * 100 >= later * 95, "{what}: {stayed} of {later} at home");
    let used = fleet.requests().iter().filter(|requests| **requests > 0).count();
    assert_eq!(used, 4, "{what}: {:?}", fleet.requests());
}

#[tokio::test]
async fn growing_text_prompts_stay_at_home() {
    assert_completions_stay("text", |text| json!(text)).await;
}

#[tokio::test]
async fn growing_token_id_prompts_stay_at_home() {
    // A token a letter, so that ids grow as the text does.
    assert_completions_stay("token ids", |text| text.bytes().map(|byte| u32::from(byte) + 1_000).collect())
        .await;
}

#[tokio::test]
async fn growing_lists_of_prompts_stay_at_home() {
    assert_completions_stay("a list", |text| json!([text, "and one that is always the same"])).await;
}

#[tokio::test]
async fn growing_lists_of_token_id_prompts_stay_at_home() {
    assert_completions_stay("a list of token ids", |text| {
        json!([text.bytes().map(|byte| u32::from(byte) + 1_000).collect::<Vec<_>>(), [7, 8, 9]])
    })
    .await;
}

#[tokio::test]
async fn the_same_messages_are_cold_behind_other_tools_and_another_salt() {
    let fleet = Fleet::instant(4).await;
    let cluster = Cluster::start(Plan::new(3, &fleet.urls())).await;
    let mut chat = Chat::new("chat", &words("system", 340));
    let mut body = chat.say(2_500).body();
    body["tools"] = json!([{"type": "function", "function": {"name": "weather", "parameters": {}}}]);
    let home = Talker::default().chat(cluster.public()[0], &body).await.endpoint;
    let other_tools = {
        let mut other = body.clone();
        other["tools"][0]["function"]["name"] = json!("time");
        other
    };
    let no_tools = chat.body();
    let salted = {
        let mut other = body.clone();
        other["cache_salt"] = json!("theirs");
        other
    };
    for replica in cluster.replicas() {
        let admin = replica.admin();
        until("the prompt is warm", PATIENCE, async || {
            let warm = admin.explain_chat(&body).await.warm_at(&home);
            if warm > 0 { Ok(()) } else { Err(format!("{}: {warm} tokens", replica.name)) }
        })
        .await;
        for (what, other) in [("other tools", &other_tools), ("no tools", &no_tools), ("a salt", &salted)] {
            let explained = admin.explain_chat(other).await;
            let warm: u64 = explained.candidates.values().map(|each| each.warm_tokens).sum();
            assert_eq!(warm, 0, "{}: with {what}: {explained:?}", replica.name);
        }
    }
}
