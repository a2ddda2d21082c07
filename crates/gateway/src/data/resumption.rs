//! A stream that breaks goes on elsewhere: what is kept of it for that, and the way there.

use std::rc::Rc;

use actors::lifecycle::{LifecycleHandle, Order};
use bytes::Bytes;
use routing::lifecycle::NoResume;
use routing::request::Route;
use routing::retry::LegFailure;

use super::attempt::Envelope;
use super::counting::counted;
use super::drive::{Continued, Driver};
use super::leg::{Leg, Reader};
use crate::resume::{Memory, Stitch, continued, continued_prompt};
use crate::stream::Ending;
use crate::worker::Worker;

/// What going on with a stream elsewhere needs.
pub(super) struct Resumption {
    memory: Memory,
    /// The client's own.
    body: Bytes,
    envelope: Envelope,
}

impl Resumption {
    /// For a stream that has begun; `None` if its request alone is longer than what may be kept.
    pub(super) fn of(route: Route, body: Bytes, envelope: Envelope, bytes_max: u64) -> Option<Box<Self>> {
        let room = bytes_max.checked_sub(body.len() as u64).filter(|room| *room > 0)?;
        let memory = Memory::new(route, usize::try_from(room).unwrap_or(usize::MAX));
        Some(Box::new(Self { memory, body, envelope }))
    }

    /// The client is sent this.
    pub(super) fn keep(&mut self, piece: &[u8]) {
        self.memory.keep(piece);
        if self.memory.is_lost() {
            // Other requests may need its room.
            self.body = Bytes::new();
        }
    }

    /// What asks for the rest, and makes it part of the stream.
    async fn plan(
        &mut self,
        worker: &Worker,
        handle: &LifecycleHandle,
        broken: &Leg,
    ) -> Result<(Bytes, Stitch, u32), NoResume> {
        if let Reader::Events(scanner) = broken.reader() {
            if scanner.is_mid_event() {
                return Err(NoResume::Unreadable);
            }
            if scanner.ending() == Ending::Finished {
                return Err(NoResume::Finished);
            }
        }
        let shape = handle.shape();
        let said = self.memory.so_far()?;
        if said.wants_count() && (shape.include_usage || shape.output_tokens_max.is_some()) {
            let bodies = [self.body.clone(), continued_prompt(shape.route, &self.body, said)?];
            if let Some((prompt, whole)) = counted(worker, &self.envelope, handle, bodies).await {
                said.count(prompt, whole.saturating_sub(prompt));
            }
        }
        Ok((continued(shape.route, &self.body, said)?, Stitch::to(said), said.tokens()))
    }

    /// Has the stream go on elsewhere: with the leg that does, or with the order that says how to end.
    pub(super) async fn go_on(
        resumption: Option<Box<Self>>,
        worker: &Rc<Worker>,
        handle: LifecycleHandle,
        broken: &Leg,
        after: LegFailure,
    ) -> Resumed {
        let planned = match resumption {
            // Its request was longer than what may be kept.
            None => Err(NoResume::TooLong),
            Some(mut kept) => kept.plan(worker, &handle, broken).await.map(|plan| (kept, plan)),
        };
        let (kept, (body, stitch, tokens)) = match planned {
            Ok(planned) => planned,
            Err(why) => {
                handle.unresumable(why);
                let order = handle.order().await;
                return Resumed::Ended { handle, order };
            }
        };
        let Self { memory, body: own, envelope } = *kept;
        let id = handle.id().to_owned();
        let from = handle.endpoint();
        match Driver::continuing(worker, envelope, handle, body).go_on().await {
            Continued::Ended { order, handle } => Resumed::Ended { handle, order },
            Continued::Comes { leg, handle, envelope } => {
                let to = handle.endpoint();
                tracing::info!(id, ?from, ?to, cause = after.as_str(), tokens, "a stream goes on elsewhere");
                let resumption = Box::new(Self { memory, body: own, envelope });
                Resumed::Comes { handle, leg: Box::new(leg.stitched(stitch)), resumption }
            }
        }
    }
}

/// What became of a stream that was to go on.
pub(super) enum Resumed {
    /// It does.
    Comes { handle: LifecycleHandle, leg: Box<Leg>, resumption: Box<Resumption> },
    /// It does not.
    Ended { handle: LifecycleHandle, order: Order },
}
