//! Server-sent events out of a byte stream that may be cut anywhere.
//!
//! Follows the event stream format of the HTML standard as far as OpenAI-style replies use it: `data` lines
//! joined by a line feed, comments and other fields skipped, an event dispatched at its blank line. An event
//! that the stream's end leaves without its blank line is not an event.

use memchr::memchr2;

/// The largest event read: far above any reply with log-probabilities, far below what could hurt.
pub(super) const EVENT_BYTES_MAX: usize = 4 << 20;

/// An event larger than `EVENT_BYTES_MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Oversize;

/// Splits a stream of chunks into events. It keeps its buffers between events and allocates nothing in the
/// steady state.
#[derive(Debug, Default)]
pub struct Splitter {
    /// The start of a line whose end has not come yet.
    line: Vec<u8>,
    /// The data of the event so far.
    data: Vec<u8>,
    /// Whether the event has a data line: an empty one counts.
    has_data: bool,
    /// The last chunk ended in a carriage return: a line feed that follows belongs to it.
    after_return: bool,
}

impl Splitter {
    /// Reads one chunk and calls `on_event` with the data of each event that it completes.
    pub fn push(&mut self, chunk: &[u8], mut on_event: impl FnMut(&[u8])) -> Result<(), Oversize> {
        let mut rest = chunk;
        loop {
            if self.after_return && !rest.is_empty() {
                self.after_return = false;
                rest = rest.strip_prefix(b"\n").unwrap_or(rest);
            }
            let Some(end) = memchr2(b'\n', b'\r', rest) else { break };
            self.after_return = rest[end] == b'\r';
            if self.line.is_empty() {
                self.end_line(&rest[..end], &mut on_event)?;
            } else {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(&rest[..end]);
                let ended = self.end_line(&line, &mut on_event);
                line.clear();
                self.line = line;
                ended?;
            }
            rest = &rest[end + 1..];
        }
        if self.line.len() + rest.len() > EVENT_BYTES_MAX {
            return Err(Oversize);
        }
        self.line.extend_from_slice(rest);
        Ok(())
    }

    fn end_line(&mut self, line: &[u8], on_event: &mut impl FnMut(&[u8])) -> Result<(), Oversize> {
        if line.is_empty() {
            if self.has_data {
                on_event(&self.data);
            }
            self.data.clear();
            self.has_data = false;
            return Ok(());
        }
        let value = match line.strip_prefix(b"data") {
            Some(b"") => &[][..],
            Some([b':', value @ ..]) => value.strip_prefix(b" ").unwrap_or(value),
            _ => return Ok(()), // a comment or another field
        };
        if self.data.len() + value.len() > EVENT_BYTES_MAX {
            return Err(Oversize);
        }
        if self.has_data {
            self.data.push(b'\n');
        }
        self.has_data = true;
        self.data.extend_from_slice(value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(chunks: &[&[u8]]) -> Vec<String> {
        let mut splitter = Splitter::default();
        let mut events = Vec::new();
        for chunk in chunks {
            splitter.push(chunk, |data| events.push(String::from_utf8_lossy(data).into_owned())).unwrap();
        }
        events
    }

    const STREAM: &[u8] =
        b": keep-alive\r\n\r\ndata: {\"a\":1}\n\nevent: x\ndata:two\r\ndata:  lines\r\n\r\n\
        id: 7\n\ndata\n\ndata: \xc3\xa9\r\rdata: [DONE]\n\ndata: cut";
    const EVENTS: [&str; 5] = ["{\"a\":1}", "two\n lines", "", "é", "[DONE]"];

    #[test]
    fn fields_comments_and_line_ends_follow_the_standard() {
        assert_eq!(events(&[STREAM]), EVENTS);
    }

    #[test]
    fn a_cut_at_any_byte_changes_nothing() {
        for cut in 0..=STREAM.len() {
            let (left, right) = STREAM.split_at(cut);
            assert_eq!(events(&[left, right]), EVENTS, "cut at {cut}");
        }
        let bytes: Vec<&[u8]> = STREAM.chunks(1).collect();
        assert_eq!(events(&bytes), EVENTS);
    }

    #[test]
    fn an_event_without_end_is_refused_not_kept() {
        let mut splitter = Splitter::default();
        let chunk = vec![b'x'; 1 << 20];
        let results: Vec<_> = (0..8).map(|_| splitter.push(&chunk, |_| ())).collect();
        assert!(results.contains(&Err(Oversize)));
        assert!(splitter.line.len() <= EVENT_BYTES_MAX);
    }

    #[test]
    fn many_data_lines_count_as_one_event() {
        let mut splitter = Splitter::default();
        let line = [b"data: ", vec![b'x'; 1 << 20].as_slice(), b"\n"].concat();
        assert!((0..8).any(|_| splitter.push(&line, |_| ()).is_err()));
    }

    proptest! {
        #[test]
        fn any_cutting_of_any_stream_gives_the_same_events(
            stream in proptest::collection::vec(prop::sample::select(b"data: \n\r:x".to_vec()), 0..120),
            cuts in proptest::collection::vec(0usize..120, 0..8),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect();
            prop_assert_eq!(events(&pieces), events(&[&stream]));
        }
    }
}
