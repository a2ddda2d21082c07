//! Follows a server-sent-event stream on the side while its bytes pass untouched.
//!
//! Bytes leave in whole events: an event is of no use to a client before its blank line, and a decision
//! about an event (drop a false `[DONE]`, hold back an abort's ending) needs all of it. Searches are byte
//! searches; JSON is parsed only for events that carry a finish reason, an error or `[DONE]`.

use bytes::{Bytes, BytesMut};
use memchr::memchr2;
use smallvec::SmallVec;

use super::event::{self, Marks, Words};
use super::usage::Usage;

/// Longest event that is looked at as a whole, in bytes: room for a base64 image. A longer one passes as it
/// comes, unread.
const EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Bytes of an overlong event kept back so that its end is recognised across a cut.
const BOUNDARY_BYTES: usize = 3;

/// Whose event vocabulary a stream speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Chat and text completions: ends with `[DONE]`.
    Completions,
    /// The Responses API: ends with a `response.completed` event (or `.incomplete`, `.failed`).
    Responses,
}

/// How a stream stands, judged by the events that have passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Nothing has announced the end.
    #[default]
    Open,
    /// A finish reason came (or the Responses API's last event), but no `[DONE]`.
    Finished,
    /// `[DONE]` came.
    Done,
    /// The engine gave up on the request (`finish_reason: "abort"`): its `[DONE]`, if any, is false.
    Aborted,
    /// The engine reported an error inside the stream.
    Failed,
}

/// What may be written now, in order.
pub(crate) type Pieces = SmallVec<[Bytes; 2]>;

/// What one push has brought.
#[derive(Debug, Default)]
pub(crate) struct Pushed {
    /// Bytes to write, whole events.
    pub(crate) pieces: Pieces,
    /// Events other than comments among them (or among those dropped).
    pub(crate) events: u32,
}

/// The side scanner of one stream.
#[derive(Debug)]
pub(crate) struct Scanner {
    dialect: Dialect,
    pending: BytesMut,
    /// No event ends before this offset of `pending`.
    scanned: usize,
    inside_long: bool,
    ending: Ending,
    events: u32,
    error_is_clients: bool,
    error_event: Option<Bytes>,
    content_seen: bool,
    tokens: u32,
    usage: Option<Bytes>,
    response_id: Option<Bytes>,
}

impl Scanner {
    pub(crate) fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            pending: BytesMut::new(),
            scanned: 0,
            inside_long: false,
            ending: Ending::Open,
            events: 0,
            error_is_clients: false,
            error_event: None,
            content_seen: false,
            tokens: 0,
            usage: None,
            response_id: None,
        }
    }

    /// Takes the next bytes of the stream, cut anywhere.
    pub(crate) fn push(&mut self, chunk: Bytes) -> Pushed {
        let mut pushed = Pushed::default();
        let (buffer, resume) = if self.pending.is_empty() {
            (chunk, 0)
        } else {
            self.pending.extend_from_slice(&chunk);
            (self.pending.split().freeze(), self.scanned)
        };
        let mut start = 0;
        let mut from = resume;
        if self.inside_long {
            match event_end(&buffer, from) {
                Ok(end) => {
                    pushed.pieces.push(buffer.slice(..end));
                    self.inside_long = false;
                    (start, from) = (end, end);
                }
                Err(_) => {
                    self.hold_tail_of_long(&buffer, &mut pushed);
                    return pushed;
                }
            }
        }
        let rest = self.take_events(&buffer, start, from, &mut pushed);
        self.keep(&buffer.slice(rest.start..), rest.scanned - rest.start, &mut pushed);
        pushed
    }

    /// The stream has ended: what is left of it, judged as if it were a whole event.
    pub(crate) fn finish(&mut self) -> Pushed {
        let mut pushed = Pushed::default();
        let rest = self.pending.split().freeze();
        self.scanned = 0;
        if !rest.is_empty() {
            if self.inside_long {
                pushed.pieces.push(rest);
            } else {
                self.take_run(&rest, &[(0, rest.len())], &mut pushed);
            }
        }
        pushed
    }

    /// How the stream stands.
    pub(crate) const fn ending(&self) -> Ending {
        self.ending
    }

    /// Whether part of an event has been let through without its end.
    pub(crate) const fn is_mid_event(&self) -> bool {
        self.inside_long
    }

    /// Whether the engine's error event says that the request itself is at fault: it would be elsewhere too.
    pub(crate) const fn error_is_clients(&self) -> bool {
        self.error_is_clients
    }

    /// The engine's event that says that it failed, which has not been let through, as nothing after it has.
    pub(crate) const fn take_error_event(&mut self) -> Option<Bytes> {
        self.error_event.take()
    }

    /// Events other than comments so far.
    pub(crate) const fn events(&self) -> u32 {
        self.events
    }

    /// Events with a piece of the answer since this was last asked: one for each token, unless the engine
    /// puts several into one.
    pub(crate) const fn take_tokens(&mut self) -> u32 {
        std::mem::replace(&mut self.tokens, 0)
    }

    /// The engine's last word on tokens, if it said any.
    pub(crate) fn usage(&self) -> Option<Usage> {
        self.usage.as_deref().and_then(Usage::find_last)
    }

    /// The id of a response, once its first event has passed (Responses API only).
    pub(crate) fn response_id(&self) -> Option<&str> {
        self.response_id.as_deref().and_then(|id| std::str::from_utf8(id).ok())
    }

    fn take_events(&mut self, buffer: &Bytes, start: usize, from: usize, pushed: &mut Pushed) -> Rest {
        let mut bounds: SmallVec<[(usize, usize); 16]> = SmallVec::new();
        let (mut begin, mut from) = (start, from);
        let scanned = loop {
            match event_end(buffer, from) {
                Ok(end) => {
                    bounds.push((begin, end));
                    (begin, from) = (end, end);
                }
                Err(resume) => break resume.max(begin),
            }
        };
        if !bounds.is_empty() {
            self.take_run(buffer, &bounds, pushed);
        }
        Rest { start: begin, scanned }
    }

    /// Judges whole events that lie next to each other and lets through what may pass, in one piece if
    /// nothing has to change.
    fn take_run(&mut self, buffer: &Bytes, bounds: &[(usize, usize)], pushed: &mut Pushed) {
        let (mut from, end) = (bounds[0].0, bounds[bounds.len() - 1].1);
        let words = Words::of(&buffer[from..end], self.dialect);
        let mut to = from;
        for &(begin, end) in bounds {
            to = end;
            let event = &buffer[begin..end];
            if event::is_comment(event) {
                continue;
            }
            pushed.events += 1;
            self.events = self.events.saturating_add(1);
            if self.dialect == Dialect::Responses && self.response_id.is_none() {
                self.response_id = event::response_id(event).map(|id| buffer.slice_ref(id));
            }
            let marks = event::marks(event, words);
            if marks.usage {
                self.usage = Some(buffer.slice(begin..end));
            }
            self.count_tokens(event, &marks);
            match self.judge(&marks) {
                Fate::Pass => {}
                Fate::Drop => {
                    push_piece(&mut pushed.pieces, buffer.slice(from..begin));
                    from = end;
                }
                Fate::Hold => {
                    push_piece(&mut pushed.pieces, buffer.slice(from..begin));
                    self.error_event = Some(buffer.slice(begin..end));
                    from = end;
                }
                Fate::WithoutAbort => {
                    push_piece(&mut pushed.pieces, buffer.slice(from..begin));
                    push_piece(&mut pushed.pieces, event::without_abort(event));
                    from = end;
                }
            }
        }
        push_piece(&mut pushed.pieces, buffer.slice(from..to));
    }

    /// A chat begins with the role alone and ends with a reason or a report: those are looked at. What comes
    /// between is taken for a piece of the answer each; looking for one in all of it would cost more than all
    /// other work on an event. The Responses API has many events of other kinds, and names those with a piece.
    fn count_tokens(&mut self, event: &[u8], marks: &Marks) {
        let is_piece = match self.dialect {
            Dialect::Responses => event::is_delta(event),
            Dialect::Completions if self.content_seen && marks.is_plain() => true,
            Dialect::Completions => event::has_content(event),
        };
        self.content_seen |= is_piece;
        self.tokens = self.tokens.saturating_add(u32::from(is_piece));
    }

    fn judge(&mut self, marks: &Marks) -> Fate {
        match self.ending {
            // All that follows an abort pretends to be an ending.
            Ending::Aborted => return Fate::Drop,
            Ending::Failed if marks.done || !self.error_is_clients => return Fate::Drop,
            Ending::Failed => return Fate::Pass,
            Ending::Open | Ending::Finished | Ending::Done => {}
        }
        if marks.error {
            self.ending = Ending::Failed;
            self.error_is_clients = marks.error_is_clients;
            return if marks.error_is_clients { Fate::Pass } else { Fate::Hold };
        } else if marks.abort {
            self.ending = Ending::Aborted;
            return Fate::WithoutAbort;
        } else if marks.done {
            self.ending = Ending::Done;
        } else if marks.finish && self.ending == Ending::Open {
            self.ending = Ending::Finished;
        }
        Fate::Pass
    }

    fn keep(&mut self, rest: &Bytes, scanned: usize, pushed: &mut Pushed) {
        if rest.len() > EVENT_BYTES_MAX {
            self.inside_long = true;
            self.events = self.events.saturating_add(1);
            pushed.events += 1;
            self.hold_tail_of_long(rest, pushed);
            return;
        }
        self.pending.extend_from_slice(rest);
        self.scanned = scanned;
    }

    fn hold_tail_of_long(&mut self, buffer: &Bytes, pushed: &mut Pushed) {
        let cut = buffer.len().saturating_sub(BOUNDARY_BYTES);
        push_piece(&mut pushed.pieces, buffer.slice(..cut));
        self.pending.extend_from_slice(&buffer[cut..]);
        self.scanned = 0;
    }
}

struct Rest {
    start: usize,
    scanned: usize,
}

enum Fate {
    Pass,
    Drop,
    /// It is kept back until it is known that nobody does better.
    Hold,
    WithoutAbort,
}

fn push_piece(pieces: &mut Pieces, piece: Bytes) {
    if !piece.is_empty() {
        pieces.push(piece);
    }
}

/// Where the event that `from` lies in ends (one past its blank line), or from where to look once more
/// bytes have come. Lines end with LF, CR LF or CR.
pub(crate) fn event_end(buffer: &[u8], from: usize) -> Result<usize, usize> {
    let mut at = from;
    while let Some(found) = memchr2(b'\n', b'\r', &buffer[at..]) {
        let line_end = at + found;
        let mut next = line_end + 1;
        if buffer[line_end] == b'\r' && buffer.get(next) == Some(&b'\n') {
            next += 1;
        }
        match buffer.get(next) {
            None => return Err(line_end),
            Some(b'\n') => return Ok(next + 1),
            Some(b'\r') => return Ok(next + 1 + usize::from(buffer.get(next + 1) == Some(&b'\n'))),
            Some(_) => at = next,
        }
    }
    Err(buffer.len())
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
