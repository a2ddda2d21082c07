//! What counts as the same prompt, and what is refused.

use super::*;

const CHAT: Route = Route::ChatCompletions;

fn read(route: Route, body: &str) -> RequestShape {
    read_with(route, &ShapeRules { block_bytes: 64, ..ShapeRules::default() }, body)
}

fn read_with(route: Route, rules: &ShapeRules, body: &str) -> RequestShape {
    match RequestShape::read(route, &[("host", "x")], body.as_bytes(), rules) {
        Ok(shape) => shape,
        Err(refused) => panic!("{body}: {refused}"),
    }
}

fn refused(route: Route, body: &[u8]) -> BadRequest {
    match RequestShape::read(route, &[("host", "x")], body, &ShapeRules::default()) {
        Ok(_) => panic!("accepted: {}", String::from_utf8_lossy(body)),
        Err(refused) => refused,
    }
}

#[test]
fn a_chat_is_a_prefix_of_its_next_turn() {
    let long = "x".repeat(200);
    let first = read(
        CHAT,
        &format!(
            r#"{{"model":"m","messages":[{{"role":"system","content":"s"}},{{"role":"user","content":"{long}"}}]}}"#
        ),
    );
    let second = read(
        CHAT,
        &format!(
            r#"{{"messages":[{{"role":"system","content":"s"}},{{"content":[{{"text":"{long}","type":"text"}}],"role":"user"}},{{"role":"assistant","content":"yes"}},{{"role":"user","content":"{long}"}}],"model":"m"}}"#
        ),
    );
    assert_eq!(first.blocks.len(), 3);
    assert!(second.blocks.starts_with(&first.blocks));
    assert_eq!(first.rendezvous, second.rendezvous);
    assert_eq!(first.conversation, second.conversation);
}

#[test]
fn malformed_bodies_are_refused() {
    for body in ["", "{", "[]", r#"{"messages":[]}"#, r#"{"messages":3}"#, r#"{"messages":[{"role":"user"}]"#]
    {
        refused(CHAT, body.as_bytes());
    }
}
