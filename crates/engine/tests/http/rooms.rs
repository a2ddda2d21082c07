//! Both legs at once, in the rooms of SGLang's bootstrap exchange. Fields and rules are those of its source, not
//! recorded from a real engine.

use std::time::Duration;

use engine::{Config, Connector, Engine, Profile, Role, SchedulerKind};
use serde_json::{Value, json};

use crate::handoff::{plain, prompt};
use crate::harness::{DEADLINE, Got, ask, exchange, metric, post, until};
use crate::surface::tiny;

const TEXT: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

struct Pair {
    p: Engine,
    d: Engine,
}

impl Pair {
    async fn start(config: impl Fn() -> Config) -> Self {
        let start = |role| Engine::start(config().with_role(role, Connector::Bootstrap));
        Self { p: start(Role::Prefill).await.expect("starts"), d: start(Role::Decode).await.expect("starts") }
    }

    /// A request as a router sends it to both.
    fn in_room(&self, body: &Value, room: Value) -> String {
        let mut body = body.clone();
        let address = self.p.side_addr().expect("a bootstrap server");
        body["bootstrap_host"] = json!(address.ip().to_string());
        body["bootstrap_port"] = json!(address.port());
        body["bootstrap_room"] = room;
        body.to_string()
    }

    async fn both(&self, path: &str, body: &str) -> (Got, Got) {
        let both = async { tokio::join!(ask(&self.p, path, body), ask(&self.d, path, body)) };
        tokio::time::timeout(DEADLINE, both).await.expect("in time")
    }

    async fn nothing_is_left(&self) {
        until("nothing is left", || {
            let (p, d) = (self.p.stats(), self.d.stats());
            let held = p.running + p.waiting + p.pinned_blocks + d.running + d.waiting + d.fetching;
            (held, p.rooms, p.kv_ratio, d.kv_ratio) == (0, 0, 0.0, 0.0)
        })
        .await;
    }
}

#[tokio::test]
async fn the_legs_meet_and_the_answer_is_that_of_one_engine() {
    for scheduler in [SchedulerKind::Step, SchedulerKind::Fifo] {
        for profile in [Profile::Instant, Profile::Llama8bH100] {
            let pair = Pair::start(|| {
                let Config { timing, transfer, .. } = Config::fifo(profile, 1_000.0);
                Config { scheduler, timing, transfer, ..tiny() }
            })
            .await;
            for (room, stream) in [(1_u64 << 62, false), (7, true)] {
                let chat = json!({"messages": [{"role": "user", "content": format!("{room} ").repeat(300)}], "max_tokens": 8, "stream": stream});
                let (prefill, decode) = pair.both(CHAT, &pair.in_room(&chat, json!(room))).await;
                assert_eq!((prefill.status.as_u16(), decode.status.as_u16()), (200, 200));
                let expected = plain(CHAT, &chat).await;
                assert_eq!(decode.text(), expected, "{scheduler:?} {profile:?} {stream}");
                // Whatever was asked for, a prefill engine says one word.
                assert_eq!(prefill.text(), expected[..6]);
                pair.nothing_is_left().await;
            }
            let (p, d) = (pair.p.stats(), pair.d.stats());
            assert_eq!((p.staged, p.expired, d.transfers, d.transfers_failed, d.spoiled), (2, 0, 2, 0, 0));
            assert_eq!(d.fetched_tokens, d.prompt_tokens - d.cached_tokens);
            assert_eq!(p.generation_tokens, 2);
        }
    }
}

#[tokio::test]
async fn neither_side_computes_before_the_other_has_come() {
    let pair = Pair::start(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 4});
    let request = pair.in_room(&body, json!(7));
    for prefill_first in [true, false] {
        let (first, second) = if prefill_first { (&pair.p, &pair.d) } else { (&pair.d, &pair.p) };
        let before = (pair.p.stats().prompt_tokens, pair.d.stats().generation_tokens);
        let late = async {
            until("the first is there", || pair.p.stats().rooms == 1).await;
            assert_eq!((pair.p.stats().prompt_tokens, pair.d.stats().generation_tokens), before);
            assert_eq!(metric(&pair.p, "sim:bootstrap_rooms{model_name=\"tiny\"}").await, 1.0);
            ask(second, TEXT, &request).await
        };
        let (first, second) = tokio::join!(ask(first, TEXT, &request), late);
        let decode = if prefill_first { second } else { first };
        assert_eq!(decode.text(), plain(TEXT, &body).await);
        pair.nothing_is_left().await;
        for engine in [&pair.p, &pair.d] {
            engine.clear_cache();
        }
    }
}

#[tokio::test]
async fn every_prompt_and_sample_has_a_room_of_its_own() {
    let pair = Pair::start(tiny).await;
    let texts = |got: &Got| -> Vec<Value> {
        let choices = got.json()["choices"].as_array().cloned().unwrap_or_default();
        choices.iter().map(|choice| choice["text"].clone()).collect()
    };
    let alone = Engine::start(tiny()).await.expect("starts");
    let prompts = json!([prompt(1), prompt(2), prompt(3)]);
    for (body, room, sequences) in [
        (json!({"prompt": prompts, "max_tokens": 4}), json!([11, 12, 13]), 3),
        (json!({"prompt": prompts, "max_tokens": 4}), json!(20), 3),
        (json!({"prompt": prompt(4), "max_tokens": 4, "n": 4}), json!(30), 4),
        (json!({"prompt": [prompt(5), prompt(6)], "max_tokens": 4, "n": 2}), json!([41, 42, 43, 44]), 4),
    ] {
        let (prefill, decode) = pair.both(TEXT, &pair.in_room(&body, room)).await;
        assert_eq!(prefill.status, 200, "{:?}", prefill.body);
        assert_eq!(texts(&decode), texts(&ask(&alone, TEXT, &body.to_string()).await));
        assert_eq!(texts(&decode).len(), sequences);
        pair.nothing_is_left().await;
    }
    assert_eq!((pair.p.stats().staged, pair.d.stats().transfers), (14, 14));
}

#[tokio::test]
async fn a_room_that_is_in_use_is_an_error() {
    let pair = Pair::start(tiny).await;
    let body = json!({"prompt": prompt(1), "max_tokens": 4});
    let request = pair.in_room(&body, json!(7));
    let first = ask(&pair.p, TEXT, &request);
    let others = async {
        until("the room is open", || pair.p.stats().rooms == 1).await;
        assert_eq!(ask(&pair.p, TEXT, &request).await.status, 400);
        // One room for each prompt is one for both of its samples.
        let samples = json!({"prompt": [prompt(1), prompt(2)], "n": 2});
        assert_eq!(ask(&pair.p, TEXT, &pair.in_room(&samples, json!([8, 9]))).await.status, 400);
        assert_eq!(pair.p.stats().rooms, 1);
        ask(&pair.d, TEXT, &request).await
    };
    let (first, decode) = tokio::join!(first, others);
    assert_eq!((first.status.as_u16(), decode.status.as_u16()), (200, 200));
    assert_eq!(decode.text(), plain(TEXT, &body).await);
    pair.nothing_is_left().await;
}

#[tokio::test]
async fn a_request_without_a_room_or_with_the_wrong_number_is_refused() {
    let pair = Pair::start(tiny).await;
    let body = json!({"prompt": [prompt(1), prompt(2)], "max_tokens": 4});
    for engine in [&pair.p, &pair.d] {
        for request in [
            body.to_string(),
            pair.in_room(&body, json!([1, 2, 3])),
            pair.in_room(&body, json!("seven")),
            pair.in_room(&body, json!({"room": 7})),
        ] {
            assert_eq!(ask(engine, TEXT, &request).await.status, 400, "{}", &request[request.len() - 60..]);
        }
    }
    let mut nowhere = body.clone();
    nowhere["bootstrap_room"] = json!(7);
    assert_eq!(ask(&pair.d, TEXT, &nowhere.to_string()).await.status, 400);
    pair.nothing_is_left().await;
}

/// Engines that wait long for each other but take for ever to prefill.
fn slow() -> Config {
    let mut config = tiny();
    config.timing.prefill_base = Duration::from_secs(3_600);
    config
}

#[tokio::test]
async fn one_leg_that_leaves_ends_the_other_and_frees_everything() {
    for prefill_leaves in [true, false] {
        let pair = Pair::start(slow).await;
        let request = pair.in_room(&json!({"prompt": prompt(1), "max_tokens": 4}), json!(7));
        let (leaver, stayer) = if prefill_leaves { (&pair.p, &pair.d) } else { (&pair.d, &pair.p) };
        let leaving = async {
            let asking = exchange(leaver, post(TEXT, &request, &[]));
            tokio::select! {
                _ = asking => panic!("answered"),
                () = until("it is computed", || pair.p.stats().running == 1 && pair.d.stats().fetching == 1) => {}
            }
        };
        let both = async { tokio::join!(ask(stayer, TEXT, &request), leaving) };
        let (stayer, ()) = tokio::time::timeout(DEADLINE, both).await.expect("in time");
        assert_eq!(stayer.status, 500, "prefill leaves: {prefill_leaves}");
        pair.nothing_is_left().await;
    }
}

#[tokio::test]
async fn a_leg_that_is_left_alone_gives_up_and_leaves_the_room() {
    let pair = Pair::start(|| {
        let mut config = tiny();
        config.transfer.join_max = Duration::from_millis(20);
        config
    })
    .await;
    let request = pair.in_room(&json!({"prompt": prompt(1), "max_tokens": 4}), json!(7));
    for engine in [&pair.p, &pair.d] {
        let got = tokio::time::timeout(DEADLINE, ask(engine, TEXT, &request)).await.expect("in time");
        assert_eq!(got.status, 500);
        pair.nothing_is_left().await;
    }
}

#[tokio::test]
async fn a_prefill_engine_that_is_gone_ends_the_decode_leg() {
    let pair = Pair::start(slow).await;
    let request = pair.in_room(&json!({"prompt": prompt(1), "max_tokens": 4}), json!(7));
    let Pair { p, d } = pair;
    let prefill = {
        let request = request.clone();
        let address = p.addr();
        tokio::spawn(async move {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            let mut line = tokio::net::TcpStream::connect(address).await.expect("connects");
            let head = format!(
                "POST {TEXT} HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                request.len()
            );
            line.write_all(head.as_bytes()).await.expect("sends");
            line.write_all(request.as_bytes()).await.expect("sends");
            line.read_u8().await.expect_err("no answer");
        })
    };
    let kill = async {
        until("it is computed", || p.stats().running == 1 && d.stats().fetching == 1).await;
        p.kill().await;
    };
    let (got, ()) = tokio::join!(ask(&d, TEXT, &request), kill);
    assert_eq!(got.status, 500);
    prefill.await.expect("no panic");
}
