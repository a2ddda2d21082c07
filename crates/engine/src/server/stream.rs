//! A streamed reply: turns the progress of a flight into events, all that are due in one write, and breaks off
//! the way a planned fault says.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Sleep, sleep};

use crate::fault::Fault;
use crate::flight::Phase;
use crate::rank::Seat;

use super::Server;
use super::error::ApiError;
use super::reply::{Drip, Failure};
use super::script::{Api, DONE, Ending, Script, ending};

/// See the module.
pub(crate) struct EventStream {
    server: Arc<Server>,
    seat: Seat,
    script: Script,
    open: String,
    /// Tokens of each choice that are out, and whether its last event is.
    said: Vec<u32>,
    ended: Vec<bool>,
    fault: Option<Fault>,
    state: State,
    drip: Option<Drip>,
    thaw: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !matches!(self.state, State::Over | State::Struck { .. }) {
            self.server.traffic.requests_abandoned.fetch_add(1, Ordering::Relaxed);
        }
    }
}

enum State {
    Unopened,
    Open,
    /// The fault has struck; the connection flushes what it was given at the first look in this state, and is
    /// reset at the second.
    Struck {
        flushed: bool,
    },
    /// Nothing comes any more but, with a pause given, comments.
    Stalled {
        every: Option<Duration>,
        pause: Option<Pin<Box<Sleep>>>,
    },
    Over,
}

impl EventStream {
    pub(crate) fn new(server: Arc<Server>, seat: Seat, script: Script, fault: Option<Fault>) -> Self {
        let drip = fault.and_then(Fault::drip).map(|(bytes, every)| Drip {
            rest: Bytes::new(),
            bytes,
            every,
            pause: None,
        });
        let choices = script.choices.len();
        Self {
            server,
            seat,
            open: script.event_open(),
            script,
            said: vec![0; choices],
            ended: vec![false; choices],
            fault,
            state: State::Unopened,
            drip,
            thaw: None,
        }
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        if self.frozen(cx) {
            return Poll::Pending;
        }
        if let Some(drip) = &mut self.drip
            && !drip.rest.is_empty()
        {
            return drip.poll(cx).map(|piece| piece.map(Ok));
        }
        match self.next(cx) {
            Poll::Ready(Some(Ok(bytes))) if self.drip.is_some() => {
                let Some(drip) = &mut self.drip else { return Poll::Pending };
                drip.rest = bytes;
                drip.poll(cx).map(|piece| piece.map(Ok))
            }
            other => other,
        }
    }

    fn frozen(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.server.faults.frozen() {
            self.thaw = None;
            return false;
        }
        let thaw = self.thaw.get_or_insert_with(|| Box::pin(self.server.faults.thawed()));
        let frozen = thaw.as_mut().poll(cx).is_pending();
        if !frozen {
            self.thaw = None;
        }
        frozen
    }

    fn next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        match &mut self.state {
            State::Unopened | State::Open => self.progress(cx),
            State::Struck { flushed: false } => {
                self.state = State::Struck { flushed: true };
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            State::Struck { flushed: true } => Poll::Ready(Some(Err(Failure::Reset))),
            State::Stalled { every: None, .. } => Poll::Pending,
            State::Stalled { every: Some(every), pause } => {
                let pause = pause.get_or_insert_with(|| Box::pin(sleep(*every)));
                if pause.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                let next = tokio::time::Instant::now() + *every;
                pause.as_mut().reset(next);
                Poll::Ready(Some(Ok(Bytes::from_static(b": ping\n\n"))))
            }
            State::Over => Poll::Ready(None),
        }
    }

    fn progress(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        self.seat.flight.watch(cx);
        let mut out = String::new();
        let strikes_at = self.fault.and_then(Fault::after_tokens);
        for choice in 0..self.said.len() {
            let (phase, ready) = self.seat.flight.progress(choice);
            match phase {
                Phase::Cut => return Poll::Ready(Some(Err(Failure::Reset))),
                Phase::Failed => return self.end_with(out, &ApiError::internal()),
                Phase::CoreDied => return self.end_with(out, &ApiError::core_died()),
                Phase::Under | Phase::Complete | Phase::Aborted => {}
            }
            let limit = strikes_at.filter(|_| choice == 0).unwrap_or(u32::MAX);
            self.tell(&mut out, choice, phase, ready, limit);
        }
        if strikes_at.is_some_and(|tokens| self.said[0] >= tokens && !self.ended[0]) {
            self.strike(&mut out);
        } else if self.ended.iter().all(|&ended| ended) {
            self.script.push_end(&mut out, &self.open, &self.seat.flight, &self.said);
            self.state = State::Over;
        }
        if out.is_empty() {
            return match self.state {
                State::Struck { .. } | State::Stalled { .. } => self.next(cx),
                _ => Poll::Pending,
            };
        }
        Poll::Ready(Some(Ok(out.into())))
    }

    /// Appends what is new of one choice, up to `limit` tokens.
    fn tell(&mut self, out: &mut String, choice: usize, phase: Phase, ready: u32, limit: u32) {
        if self.ended[choice] {
            return;
        }
        let finish = self.script.choices[choice].finish;
        let ending = ending(phase, finish).filter(|_| ready < limit);
        let from = self.said[choice];
        let to = ready.min(limit);
        if from == 0 && (to > 0 || ending.is_some()) {
            self.script.settle(&self.seat.flight, choice);
            self.open_all(out);
        }
        let aborts = matches!(self.fault, Some(Fault::AbortAfter { .. }));
        for index in from..to {
            let last = index + 1 == to;
            let struck = (last && to == limit && aborts).then_some(Ending::Aborted);
            self.script.push_token(out, &self.open, choice, index, struck.or(ending.filter(|_| last)));
            self.ended[choice] |= last && (struck.is_some() || ending.is_some());
        }
        self.said[choice] = to;
        if ending == Some(Ending::Aborted) && from == to {
            // Nothing new to carry the ending: it comes with an empty text.
            let nothing = self.script.choices[choice].words;
            self.script.push_token(out, &self.open, choice, nothing, ending);
            self.ended[choice] = true;
        }
    }

    /// The chunks that open a chat, once, with the first token of any choice.
    fn open_all(&mut self, out: &mut String) {
        if matches!(self.state, State::Unopened) {
            self.state = State::Open;
            if self.script.api == Api::Chat {
                for choice in 0..self.said.len() {
                    self.script.push_role(out, &self.open, choice);
                }
            }
        }
    }

    /// Ends the stream with an error, as vLLM does when the head is out.
    fn end_with(&mut self, mut out: String, error: &ApiError) -> Poll<Option<Result<Bytes, Failure>>> {
        push_error(&mut out, error);
        self.state = State::Over;
        Poll::Ready(Some(Ok(out.into())))
    }

    fn strike(&mut self, out: &mut String) {
        self.state = match self.fault {
            Some(Fault::ErrorEventAfter { .. }) => {
                push_error(out, &ApiError::internal());
                State::Over
            }
            Some(Fault::AbortAfter { .. }) => {
                let nothing = self.script.choices[0].words;
                self.script.push_token(out, &self.open, 0, nothing, Some(Ending::Aborted));
                out.push_str(DONE);
                State::Over
            }
            Some(Fault::CommentsAfter { every_ms, .. }) => {
                State::Stalled { every: Some(Duration::from_millis(u64::from(every_ms.max(1)))), pause: None }
            }
            Some(Fault::FreezeAfter { .. }) => State::Stalled { every: None, pause: None },
            _ => State::Struck { flushed: false },
        };
    }
}

/// Appends an error and the mark at the end of a stream.
fn push_error(out: &mut String, error: &ApiError) {
    out.push_str("data: ");
    out.push_str(&String::from_utf8_lossy(&error.body));
    out.push_str("\n\n");
    out.push_str(DONE);
}
