//! Limits of the legs.

use engine::{Fault, Role};

use super::bytes::staged;
use super::{Pairs, engines, instant, text};
use crate::rig::{Answer, Fake, Node, chat};

/// A split request over a prefill and a decode engine of which one says nothing: what the client gets.
async fn answered(prefill: Answer, decode: Answer, flags: &[(&'static str, &str)]) -> (u16, String) {
    let silent = Fake::start(move |_| prefill.clone()).await;
    let decode = Fake::start(move |_| decode.clone()).await;
    let endpoints = [format!("{},role=prefill", silent.url()), format!("{},role=decode", decode.url())];
    let node = Node::over(&endpoints, &[flags, &[("split", "always")]].concat()).await;
    let reply = node.post("/v1/chat/completions", chat("hi", true)).await;
    node.at_rest().await;
    (reply.status, reply.text().to_owned())
}

#[actix_web::test]
pub(crate) async fn each_leg_has_a_limit_of_its_own_that_ends_it_alone_or_is_said() {
    // A leg that is late is tried elsewhere, and its endpoint is not gone to again.
    for (key, side) in [("prefill_timeout_ms", "prefill"), ("handoff_timeout_ms", "decode")] {
        let flags = [("split", "always"), (key, "300")];
        let pairs = Pairs::with(engines(2, Role::Prefill, &instant()).await, 2, &flags).await;
        let late = if side == "prefill" { &pairs.prefill } else { &pairs.decode };
        late[0].fail(Fault::Freeze, None);
        for number in 0..64 {
            if Pairs::asked(&late[..1]) > 0 {
                break;
            }
            let body = chat(&text(&format!("prompt {number}"), 100), true);
            let reply = pairs.node.post("/v1/chat/completions", body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        pairs.node.at_rest().await;
        let reason = format!("reason=\"{}-timeout\"", key.trim_end_matches("_timeout_ms"));
        let failed =
            pairs.metrics().await.sum("handoff_failures_total", &[&format!("leg=\"{side}\""), &reason]);
        assert!(failed >= 1.0, "{side}");
    }
    // Where nobody else is left, the client is told which limit it was.
    let one = [("tries_max", "1")];
    for (key, prefill, decode, code) in [
        ("handoff_timeout_ms", staged(), Answer::Silence, "handoff_timeout"),
        ("first_byte_timeout_ms", Answer::Silence, Answer::Silence, "first_byte_timeout"),
    ] {
        let (status, text) = answered(prefill, decode, &[one[0], (key, "300")]).await;
        assert_eq!(status, 504, "{text}");
        assert!(text.contains(&format!("\"code\":\"{code}\"")), "{text}");
    }
}
