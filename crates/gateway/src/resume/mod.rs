//! Going on with a stream that broke: what the client has of the answer, what asks another engine for the rest, and how
//! the rest is made to look like the same stream.
//!
//! The main choice: nothing here runs while a stream is well but the copying of its events ([`Memory`]); they are read
//! when it breaks, or in batches so that little is kept of a long one. All of it is a matter of bytes: no I/O, no clock.
//!
//! Left out on purpose: whether a request may be resumed at all (its shape says so), where to (routing), how often (the
//! lifecycle).

mod body;
mod said;
mod stitch;

use routing::lifecycle::NoResume;
use routing::request::Route;

pub(crate) use body::{continued, continued_prompt};
pub(crate) use said::Said;
pub(crate) use stitch::Stitch;

/// Events that are kept unread, in bytes. 64 KiB: some 250 tokens; a stream that is shorter is read only if it breaks.
const UNREAD_BYTES_MAX: usize = 64 << 10;

/// What the client has of a stream, as it came, to be read when it is needed.
#[derive(Debug)]
pub(crate) struct Memory {
    unread: Vec<u8>,
    said: Said,
    /// What may be kept, in bytes.
    bytes_max: usize,
    lost: Option<NoResume>,
}

impl Memory {
    /// Of a stream on this route, of which as many bytes may be kept.
    pub(crate) const fn new(route: Route, bytes_max: usize) -> Self {
        Self { unread: Vec::new(), said: Said::new(route), bytes_max, lost: None }
    }

    /// Whether anything more is of use.
    pub(crate) const fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// The client is sent this.
    pub(crate) fn keep(&mut self, piece: &[u8]) {
        if self.lost.is_some() {
            return;
        }
        self.unread.extend_from_slice(piece);
        if self.unread.len() >= UNREAD_BYTES_MAX {
            self.read();
        }
        if self.lost.is_none() && self.unread.len() + self.said.text().len() > self.bytes_max {
            self.lose(NoResume::TooLong);
        }
    }

    /// What was said so far.
    ///
    /// # Errors
    /// If it is too long, or more than a text.
    pub(crate) fn so_far(&mut self) -> Result<&mut Said, NoResume> {
        self.read();
        if self.lost.is_none() && !self.unread.is_empty() {
            // Half an event has been let through.
            self.lose(NoResume::Unreadable);
        }
        match self.lost {
            Some(why) => Err(why),
            None => Ok(&mut self.said),
        }
    }

    fn read(&mut self) {
        if self.lost.is_some() {
            return;
        }
        match self.said.take(&self.unread) {
            Ok(read) => {
                self.unread.drain(..read);
            }
            Err(why) => self.lose(why),
        }
    }

    fn lose(&mut self, why: NoResume) {
        self.unread = Vec::new();
        self.lost = Some(why);
    }
}

#[cfg(test)]
mod tests;
