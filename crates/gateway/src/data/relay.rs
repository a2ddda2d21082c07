//! The body of a reply that is still coming.

use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, MessageBody};
use actors::lifecycle::{LifecycleHandle, Order};
use bytes::{BufMut, Bytes, BytesMut};
use routing::lifecycle::EndCause;
use routing::request::Route;
use routing::retry::{LegFailure, LegFault};

use super::leg::{Leg, More, Reader};
use crate::errors::EdgeError;
use crate::stream::Ending;
use crate::worker::Worker;

/// Relays a reply to its end and tells the lifecycle what happens. Dropping it before means that the client
/// is gone, which closes the engine's connection as well.
pub(crate) struct Relay {
    worker: Rc<Worker>,
    handle: LifecycleHandle,
    leg: Leg,
    size: BodySize,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Bytes come.
    Relaying,
    /// The leg failed; the lifecycle will say how to end.
    AwaitingOrder,
    /// The lifecycle knows the end; what is left of the reply still goes out.
    Settled,
    /// Only what is ready goes out.
    Ending,
    /// What is ready goes out, and then the connection is cut.
    Cutting,
}

/// The reply can't be completed; its connection is closed so that the client can tell.
#[derive(Debug)]
pub(crate) struct CutShort;

impl fmt::Display for CutShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the engine's reply broke off")
    }
}

impl std::error::Error for CutShort {}

impl Relay {
    /// A relay of `leg`, which has bytes ready: the first byte is there.
    pub(crate) fn new(worker: Rc<Worker>, handle: LifecycleHandle, leg: Leg, size: BodySize) -> Self {
        handle.first_byte();
        let mut relay = Self { worker, handle, leg, size, stage: Stage::Relaying };
        relay.note_progress();
        relay.settle_if_over();
        relay
    }

    fn note_progress(&mut self) {
        let now = self.worker.now();
        self.handle.progress(now);
        if let Some(tokens @ 1..) = self.leg.take_tokens() {
            self.handle.tokens(tokens, now);
        }
    }

    /// Settles the end as soon as it is known, which is before the last bytes go out: a client that has seen
    /// them may come back at once, and must find its charge gone.
    fn settle_if_over(&mut self) {
        if self.stage != Stage::Relaying {
            return;
        }
        let over = match self.leg.reader() {
            Reader::Events(scanner) => scanner.ending() == Ending::Done,
            Reader::Whole(_) | Reader::Blind => self.leg.is_over(),
        };
        if over {
            self.settle();
        }
    }

    fn settle(&mut self) {
        self.stage = Stage::Settled;
        close(&self.worker, &self.handle, self.leg.reader());
    }

    fn fail(&mut self, fault: LegFault) {
        self.stage = Stage::AwaitingOrder;
        self.handle.leg_failed(LegFailure::new(fault));
    }

    fn obey(&mut self, order: Order) {
        self.leg.hang_up();
        let cause = match order {
            Order::EndWithErrorEvent(cause) => Some(cause),
            Order::CutReply(_)
            | Order::GiveUp(_)
            | Order::RetryElsewhere { .. }
            | Order::DecodeElsewhere { .. } => None,
        };
        self.stage = match (cause, self.leg.reader()) {
            // The engine has said so itself.
            (Some(_), Reader::Events(scanner)) if scanner.ending() == Ending::Failed => Stage::Ending,
            (Some(cause), Reader::Events(scanner)) => {
                let event = error_event(self.handle.shape().route, &cause, scanner.is_mid_event());
                self.leg.append(event);
                Stage::Ending
            }
            _ => Stage::Cutting,
        };
    }
}

/// Tells the lifecycle of a reply's proper end, with what was read of it.
pub(crate) fn close(worker: &Worker, handle: &LifecycleHandle, reader: &Reader) {
    let usage = reader.usage();
    handle.note(|account| {
        if let Reader::Events(scanner) = reader {
            account.events = scanner.events();
        }
        if let Some(usage) = usage {
            account.prompt_tokens = Some(usage.prompt_tokens);
            account.output_tokens = Some(usage.output_tokens);
            account.cached_tokens = usage.cached_tokens;
        }
    });
    if handle.shape().route == Route::Responses
        && let Some(id) = reader.response_id()
    {
        worker.pin_response(id, handle);
    }
    handle.ended();
}

/// The event that tells a client of the end, in the words of its API. `mid_event` says that part of another
/// event has been written, which is ended first.
fn error_event(route: Route, cause: &EndCause, mid_event: bool) -> Bytes {
    let json = EdgeError::of_end(cause).json();
    let mut event = BytesMut::with_capacity(json.len() + 64);
    if mid_event {
        event.put_slice(b"\n\n");
    }
    if route == Route::Responses {
        event.put_slice(b"event: error\ndata: {\"type\":\"error\",");
        event.put_slice(&json[1..]);
    } else {
        event.put_slice(b"data: ");
        event.put_slice(&json);
    }
    event.put_slice(b"\n\n");
    event.freeze()
}

impl MessageBody for Relay {
    type Error = CutShort;

    fn size(&self) -> BodySize {
        self.size
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, CutShort>>> {
        let relay = &mut *self;
        loop {
            if let Some(piece) = relay.leg.pop() {
                relay.handle.client_behind(true);
                relay.handle.note(|account| account.bytes += piece.len() as u64);
                return Poll::Ready(Some(Ok(piece)));
            }
            match relay.stage {
                Stage::Ending => return Poll::Ready(None),
                Stage::Cutting => return Poll::Ready(Some(Err(CutShort))),
                Stage::Relaying | Stage::AwaitingOrder => {
                    if let Poll::Ready(order) = relay.handle.poll_order(context) {
                        relay.obey(order);
                        continue;
                    }
                    if relay.stage == Stage::AwaitingOrder {
                        return Poll::Pending;
                    }
                }
                Stage::Settled => {}
            }
            let more = match relay.leg.poll_more(context) {
                Poll::Pending => {
                    relay.handle.client_behind(false);
                    return Poll::Pending;
                }
                Poll::Ready(more) => more,
            };
            match (more, relay.stage) {
                (More::Bytes { events }, _) => {
                    if events > 0 {
                        relay.note_progress();
                    }
                    relay.settle_if_over();
                }
                (More::Whole, Stage::Relaying) => {
                    relay.settle();
                    relay.stage = Stage::Ending;
                }
                // The client has all that counts.
                (More::Whole | More::Failed(_), Stage::Settled) => relay.stage = Stage::Ending,
                (More::Failed(fault), _) => relay.fail(fault),
                (More::Whole, _) => relay.stage = Stage::Ending,
            }
        }
    }
}
