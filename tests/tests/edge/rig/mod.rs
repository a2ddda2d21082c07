//! What these tests stand on: replicas in this process, and an engine that answers as it is told.

mod fake;
mod node;
mod process;

pub use fake::{Answer, Asked, Fake, piece};
pub use node::{Node, sources};
pub use process::{Process, run};
pub use test_rig::{
    Connection, PATIENCE, Reply, ask, eventually, get, post, post_as, request, try_get, until,
};

/// A chat's body.
pub fn chat(content: &str, stream: bool) -> String {
    serde_json::json!({
        "model": "sim",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "stream": stream,
    })
    .to_string()
}
