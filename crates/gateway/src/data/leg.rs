//! One try at one endpoint, as far as its reply's bytes go.

use std::collections::VecDeque;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use routing::request::Route;
use routing::retry::LegFault;

use crate::resume::Stitch;
use crate::stream::{Dialect, Ending, Pieces, Scanner, Tail, Usage};
use crate::upstream::{Head, ReplyBody};

/// The most of a reply in one piece that is held until the rest is there, in bytes: more than almost all answers
/// are, and no burden with ten thousand of them under way.
const HELD_BYTES_MAX: usize = 64 << 10;

/// How a reply's bytes are read along.
#[derive(Debug)]
pub(crate) enum Reader {
    /// As a stream of events.
    Events(Box<Scanner>),
    /// As one piece of JSON.
    Whole(Tail),
    /// Not at all: a format we do not know, or a compressed one.
    Blind,
}

impl Reader {
    /// The reader for a reply with these headers on this route.
    pub(crate) fn of(route: Route, head: &Head) -> Self {
        let kind = head.get("content-type").unwrap_or_default();
        let is = |name: &[u8]| kind.get(..name.len()).is_some_and(|start| start.eq_ignore_ascii_case(name));
        let plain =
            head.get("content-encoding").is_none_or(|encoding| encoding.eq_ignore_ascii_case(b"identity"));
        if !plain || !(200..300).contains(&head.status) {
            return Self::Blind;
        }
        match route {
            Route::Other => Self::Blind,
            Route::Responses if is(b"text/event-stream") => {
                Self::Events(Box::new(Scanner::new(Dialect::Responses)))
            }
            _ if is(b"text/event-stream") => Self::Events(Box::new(Scanner::new(Dialect::Completions))),
            _ if is(b"application/json") => Self::Whole(Tail::default()),
            _ => Self::Blind,
        }
    }

    /// The engine's word on tokens so far.
    pub(crate) fn usage(&self) -> Option<Usage> {
        match self {
            Self::Events(scanner) => scanner.usage(),
            Self::Whole(tail) => tail.usage(),
            Self::Blind => None,
        }
    }

    /// The id of the response (Responses API), once it has passed.
    pub(crate) fn response_id(&self) -> Option<&str> {
        match self {
            Self::Events(scanner) => scanner.response_id(),
            Self::Whole(tail) => tail.response_id(),
            Self::Blind => None,
        }
    }
}

/// A reply on its way.
#[derive(Debug)]
pub(crate) struct Leg {
    /// `None` once it was hung up on.
    upstream: Option<ReplyBody>,
    reader: Reader,
    /// Where it continues a stream that broke.
    stitch: Option<Stitch>,
    ready: VecDeque<Bytes>,
    over: bool,
}

/// What reading on has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum More {
    /// Bytes; whether they say something (an SSE comment does not).
    Bytes {
        /// Events among them, or 1 for a part of a reply that is no stream of events.
        events: u32,
    },
    /// The reply is whole, to its last byte.
    Whole,
    /// It can't become whole any more.
    Failed(LegFault),
}

impl Leg {
    pub(crate) fn new(upstream: ReplyBody, reader: Reader) -> Self {
        Self { upstream: Some(upstream), reader, stitch: None, ready: VecDeque::new(), over: false }
    }

    /// The same, as what continues a stream that broke: what is ready, and what will be, becomes part of that.
    pub(crate) fn stitched(mut self, stitch: Stitch) -> Self {
        let ready = self.ready.iter().map(|piece| stitch.joined(piece));
        self.ready = ready.filter(|piece| !piece.is_empty()).collect();
        self.stitch = Some(stitch);
        self
    }

    /// The engine's word on tokens so far, about the whole answer.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let usage = self.reader.usage()?;
        Some(self.stitch.as_ref().map_or(usage, |stitch| stitch.usage(usage)))
    }

    /// The engine's own event that says that it failed, if that is how it ended.
    pub(crate) fn take_error_event(&mut self) -> Option<Bytes> {
        match &mut self.reader {
            Reader::Events(scanner) => scanner.take_error_event(),
            Reader::Whole(_) | Reader::Blind => None,
        }
    }

    fn make_ready(&mut self, pieces: Pieces) {
        match &self.stitch {
            None => self.ready.extend(pieces),
            Some(stitch) => {
                let joined = pieces.iter().map(|piece| stitch.joined(piece));
                self.ready.extend(joined.filter(|piece| !piece.is_empty()));
            }
        }
    }

    /// Tokens of the answer in what came since this was last asked; `None` where they can't be told.
    pub(crate) fn take_tokens(&mut self) -> Option<u32> {
        match &mut self.reader {
            Reader::Events(scanner) => Some(scanner.take_tokens()),
            Reader::Whole(_) | Reader::Blind => None,
        }
    }

    pub(crate) const fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The next bytes for the client.
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        self.ready.pop_front()
    }

    /// Puts bytes of our own behind those that are ready.
    pub(crate) fn append(&mut self, bytes: Bytes) {
        self.ready.push_back(bytes);
    }

    /// Closes the connection to the engine.
    pub(crate) fn hang_up(&mut self) {
        self.upstream = None;
        self.over = true;
    }

    /// Whether nothing is ready.
    pub(crate) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Whether it is a reply in one piece that is short so far: the client gets nothing of it before it is whole, so
    /// that another endpoint can still serve a request whose engine gives up.
    pub(crate) fn is_held(&self) -> bool {
        let bytes = || self.ready.iter().map(Bytes::len).sum::<usize>();
        matches!(self.reader, Reader::Whole(_)) && bytes() < HELD_BYTES_MAX
    }

    /// Whether nothing more will come from the engine.
    pub(crate) fn is_over(&self) -> bool {
        self.over || self.upstream.as_ref().is_none_or(ReplyBody::is_over)
    }

    /// Everything that is ready, in one piece, if it is the whole reply.
    pub(crate) fn take_whole(&mut self) -> Option<Bytes> {
        if !self.is_over() || matches!(self.reader, Reader::Events(_)) || self.ready.len() > 1 {
            return None;
        }
        Some(self.ready.pop_front().unwrap_or_default())
    }

    /// Reads the next part of the reply, if it is there.
    pub(crate) fn poll_more(&mut self, context: &mut Context<'_>) -> Poll<More> {
        let Some(upstream) = self.upstream.as_mut().filter(|_| !self.over) else {
            return Poll::Ready(More::Whole);
        };
        Poll::Ready(match ready!(upstream.poll_data(context)) {
            Some(Ok(data)) => self.take(data),
            Some(Err(fault)) => {
                self.over = true;
                More::Failed(fault)
            }
            None => self.end(),
        })
    }

    fn take(&mut self, data: Bytes) -> More {
        match &mut self.reader {
            Reader::Events(scanner) => {
                let pushed = scanner.push(data);
                let fault = match scanner.ending() {
                    // The text before it stays; what pretends to be an ending does not.
                    Ending::Aborted => Some(LegFault::Aborted),
                    Ending::Failed if !scanner.error_is_clients() => Some(LegFault::ErrorEvent),
                    _ => None,
                };
                self.make_ready(pushed.pieces);
                match fault {
                    Some(fault) => {
                        self.over = true;
                        More::Failed(fault)
                    }
                    None => More::Bytes { events: pushed.events },
                }
            }
            Reader::Whole(tail) => {
                tail.push(&data);
                let over = self.upstream.as_ref().is_none_or(ReplyBody::is_over);
                if over && tail.is_aborted() {
                    self.over = true;
                    return More::Failed(LegFault::Aborted);
                }
                self.ready.push_back(data);
                More::Bytes { events: 1 }
            }
            Reader::Blind => {
                self.ready.push_back(data);
                More::Bytes { events: 1 }
            }
        }
    }

    fn end(&mut self) -> More {
        self.over = true;
        let scanner = match &mut self.reader {
            Reader::Events(scanner) => scanner,
            // Here the end came by itself, after the last bytes.
            Reader::Whole(tail) if tail.is_aborted() => return More::Failed(LegFault::Aborted),
            Reader::Whole(_) | Reader::Blind => return More::Whole,
        };
        let rest = scanner.finish();
        match scanner.ending() {
            Ending::Finished | Ending::Done => {
                self.make_ready(rest.pieces);
                More::Whole
            }
            // Half an event would spoil the error event that follows: it is left out.
            Ending::Open => More::Failed(LegFault::Truncated),
            Ending::Aborted => More::Failed(LegFault::Aborted),
            Ending::Failed => {
                self.make_ready(rest.pieces);
                More::Failed(LegFault::ErrorEvent)
            }
        }
    }
}
