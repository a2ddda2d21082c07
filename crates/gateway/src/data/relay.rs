//! The body of a reply that is still coming.

use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use actix_web::body::{BodySize, MessageBody};
use actors::lifecycle::{LifecycleHandle, Order};
use bytes::{BufMut, Bytes, BytesMut};
use routing::lifecycle::EndCause;
use routing::request::Route;
use routing::retry::{LegFailure, LegFault};

use super::leg::{Leg, More, Reader};
use super::resumption::{Resumed, Resumption};
use crate::errors::EdgeError;
use crate::stream::Ending;
use crate::worker::Worker;

/// Relays a reply to its end and tells the lifecycle what happens. Dropping it before means that the client
/// is gone, which closes the engine's connection as well.
pub(crate) struct Relay {
    state: State,
    size: BodySize,
}

#[expect(clippy::large_enum_variant, reason = "nearly all live and die as the large one")]
enum State {
    /// The reply comes.
    Live(Live),
    /// It broke, and is about to come from elsewhere.
    Resuming(Pin<Box<dyn Future<Output = Live>>>),
    /// Between the two.
    Between,
}

/// A reply that comes from one endpoint.
struct Live {
    worker: Rc<Worker>,
    handle: LifecycleHandle,
    leg: Leg,
    stage: Stage,
    /// What is kept of a stream that goes on elsewhere if it breaks.
    resumption: Option<Box<Resumption>>,
}

/// What a turn of a reply has come to.
enum Turn {
    /// Bytes, or the end.
    Out(Option<Result<Bytes, CutShort>>),
    /// It broke after this, and is to go on elsewhere.
    Resume(LegFailure),
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
    pub(crate) fn new(
        worker: Rc<Worker>,
        handle: LifecycleHandle,
        leg: Leg,
        size: BodySize,
        resumption: Option<Box<Resumption>>,
    ) -> Self {
        Self { state: State::Live(Live::begin(worker, handle, leg, resumption)), size }
    }
}

impl Live {
    fn begin(
        worker: Rc<Worker>,
        handle: LifecycleHandle,
        leg: Leg,
        resumption: Option<Box<Resumption>>,
    ) -> Self {
        handle.first_byte();
        let mut live = Self { worker, handle, leg, stage: Stage::Relaying, resumption };
        live.note_progress();
        live.settle_if_over();
        live
    }

    /// The same reply from elsewhere, or its end.
    async fn resume(self, after: LegFailure) -> Self {
        let Self { worker, handle, mut leg, stage: _, resumption } = self;
        leg.hang_up();
        note_events(&handle, &leg);
        match Resumption::go_on(resumption, &worker, handle, &leg, after).await {
            Resumed::Comes { handle, leg, resumption } => Self::begin(worker, handle, *leg, Some(resumption)),
            Resumed::Ended { handle, order } => {
                let mut live = Self { worker, handle, leg, stage: Stage::AwaitingOrder, resumption: None };
                live.obey(order);
                live
            }
        }
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
        close(&self.worker, &self.handle, &self.leg);
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
            | Order::ResumeElsewhere { .. }
            | Order::DecodeElsewhere { .. } => None,
        };
        let said = self.leg.take_error_event();
        self.stage = match (cause, self.leg.reader()) {
            // The engine has said so itself.
            (Some(_), Reader::Events(scanner)) if scanner.ending() == Ending::Failed => {
                said.into_iter().for_each(|event| self.leg.append(event));
                Stage::Ending
            }
            (Some(cause), Reader::Events(scanner)) => {
                let event = error_event(self.handle.shape().route, &cause, scanner.is_mid_event());
                self.leg.append(event);
                Stage::Ending
            }
            _ => Stage::Cutting,
        };
    }
}

/// Notes the events of a leg that is over: a stream may have several.
fn note_events(handle: &LifecycleHandle, leg: &Leg) {
    if let Reader::Events(scanner) = leg.reader() {
        handle.note(|account| account.events = account.events.saturating_add(scanner.events()));
    }
}

/// Tells the lifecycle of a reply's proper end, with what was read of it.
pub(crate) fn close(worker: &Worker, handle: &LifecycleHandle, leg: &Leg) {
    let usage = leg.usage();
    note_events(handle, leg);
    handle.note(|account| {
        if let Some(usage) = usage {
            account.prompt_tokens = Some(usage.prompt_tokens);
            account.output_tokens = Some(usage.output_tokens);
            account.cached_tokens = usage.cached_tokens;
        }
    });
    if handle.shape().route == Route::Responses
        && let Some(id) = leg.reader().response_id()
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

impl Live {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Turn> {
        loop {
            if let Some(piece) = self.leg.pop() {
                self.handle.client_behind(true);
                self.handle.note(|account| account.bytes += piece.len() as u64);
                if let Some(resumption) = &mut self.resumption {
                    resumption.keep(&piece);
                }
                return Poll::Ready(Turn::Out(Some(Ok(piece))));
            }
            match self.stage {
                Stage::Ending => return Poll::Ready(Turn::Out(None)),
                Stage::Cutting => return Poll::Ready(Turn::Out(Some(Err(CutShort)))),
                Stage::Relaying | Stage::AwaitingOrder => match self.handle.poll_order(context) {
                    Poll::Ready(Order::ResumeElsewhere { after }) => {
                        return Poll::Ready(Turn::Resume(after));
                    }
                    Poll::Ready(order) => {
                        self.obey(order);
                        continue;
                    }
                    Poll::Pending if self.stage == Stage::AwaitingOrder => return Poll::Pending,
                    Poll::Pending => {}
                },
                Stage::Settled => {}
            }
            let more = match self.leg.poll_more(context) {
                Poll::Pending => {
                    self.handle.client_behind(false);
                    return Poll::Pending;
                }
                Poll::Ready(more) => more,
            };
            match (more, self.stage) {
                (More::Bytes { events }, _) => {
                    if events > 0 {
                        self.note_progress();
                    }
                    self.settle_if_over();
                }
                (More::Whole, Stage::Relaying) => {
                    self.settle();
                    self.stage = Stage::Ending;
                }
                // The client has all that counts.
                (More::Whole | More::Failed(_), Stage::Settled) => self.stage = Stage::Ending,
                (More::Failed(fault), _) => self.fail(fault),
                (More::Whole, _) => self.stage = Stage::Ending,
            }
        }
    }
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
        loop {
            match &mut self.state {
                State::Live(live) => match ready!(live.poll(context)) {
                    Turn::Out(out) => return Poll::Ready(out),
                    Turn::Resume(after) => {
                        if let State::Live(live) = std::mem::replace(&mut self.state, State::Between) {
                            self.state = State::Resuming(Box::pin(live.resume(after)));
                        }
                    }
                },
                State::Resuming(resuming) => {
                    let live = ready!(resuming.as_mut().poll(context));
                    self.state = State::Live(live);
                }
                State::Between => return Poll::Ready(None),
            }
        }
    }
}
