//! How many tokens a broken stream has said: asked of an engine that is well, because the one that said them is gone and
//! may have put several into one event.

use std::time::Duration;

use actix_web::http::Method;
use actors::lifecycle::LifecycleHandle;
use bytes::{Bytes, BytesMut};
use routing::endpoint::{Serves, Usable};
use serde::Deserialize;
use smallvec::SmallVec;

use super::attempt::Envelope;
use super::drive::Shunned;
use crate::headers::BodyLength;
use crate::upstream::{OutBody, Target};
use crate::worker::Worker;

/// vLLM's and SGLang's path for it. An engine that does not have it says so at once.
const PATH: &str = "/tokenize";
/// How long counting may take, while the client waits. 500 ms: a few ms are usual; a real engine on two busy cores that
/// was asked for eight streams at once took more than 100.
const COUNT_MAX: Duration = Duration::from_millis(500);
/// The longest answer, in bytes: the ids of a million tokens.
const REPLY_BYTES_MAX: usize = 8 << 20;

#[derive(Deserialize)]
struct Counted {
    count: u32,
}

/// Tokens of the prompts of these bodies, as some engine other than those tried counts them; `None` if there is none, or
/// it does not count, or not in time.
pub(super) async fn counted(
    worker: &Worker,
    envelope: &Envelope,
    handle: &LifecycleHandle,
    bodies: [Bytes; 2],
) -> Option<(u32, u32)> {
    let mut tried: Shunned = SmallVec::new();
    handle.add_tried(&mut tried);
    let view = worker.state.router.view();
    let model = handle.shape().model.as_deref();
    let endpoint = view.endpoints.iter().find(|each| {
        each.usable() != Usable::No
            && !tried.contains(&each.id)
            && model.is_none_or(|model| each.serves(model) != Serves::No)
    })?;
    let target = worker.upstream.target(endpoint.id, &endpoint.spec);
    let [one, other] = bodies.map(|body| count(worker, envelope, &target, body));
    let both = tokio::time::timeout(COUNT_MAX, futures_util::future::join(one, other));
    let (one, other) = both.await.ok()?;
    Some((one?, other?))
}

async fn count(worker: &Worker, envelope: &Envelope, target: &Target, body: Bytes) -> Option<u32> {
    let head = envelope.head_of(&Method::POST, PATH, target, BodyLength::Known(body.len() as u64));
    let body = OutBody::Whole(body);
    let (head, mut reply) = worker.upstream.send(target, Method::POST, head, body, None).await.ok()?;
    if head.status != 200 {
        return None;
    }
    let mut read = BytesMut::new();
    while let Some(data) = reply.data().await {
        read.extend_from_slice(&data.ok()?);
        if read.len() > REPLY_BYTES_MAX {
            return None;
        }
    }
    serde_json::from_slice(&read).ok().map(|Counted { count }| count)
}
