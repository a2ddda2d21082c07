//! A load generator that costs next to nothing: a thread and a blocking connection for each client, requests
//! made beforehand, replies looked at only as far as it takes to know that they are whole.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::times::Times;

/// How long a reply may pause.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// After this time nothing more is sent: a proxy that hardly answers should not hold up the others.
const RUN_MAX: Duration = Duration::from_secs(60);

/// The end of a reply in chunks. A chunk of text ends with a line feed, so it is found nowhere else.
const CHUNKED_END: &[u8] = b"0\r\n\r\n";

/// What became of a run's requests.
#[derive(Debug, Default)]
pub struct Counts {
    /// Answered in whole with status 200.
    pub answered: usize,
    /// Not so.
    pub failed: usize,
    /// What the first failure was.
    pub first_failure: Option<String>,
    /// From the request to the first bytes of its reply, of those answered.
    pub first_bytes: Times,
    /// From the request to the end of its reply, of those answered.
    pub whole: Times,
    /// From the first request to the end of the last reply.
    pub took: Duration,
}

/// How long one reply took.
#[derive(Clone, Copy)]
struct Took {
    first_bytes: Duration,
    whole: Duration,
}

/// Sends `total` requests to `address` from `clients` connections, `bodies` in turn; fewer if that takes over
/// `RUN_MAX`.
///
/// Whole means: as long as `content-length` says, or up to the last chunk with `[DONE]` before it.
pub fn run(address: SocketAddr, clients: usize, total: usize, bodies: &[Vec<u8>]) -> Counts {
    let requests: Vec<Vec<u8>> = bodies.iter().map(|body| request(address, body)).collect();
    let next = AtomicUsize::new(0);
    let ended = Mutex::new(Vec::new());
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..clients {
            scope.spawn(|| {
                let mut connection = None;
                let mut buffer = vec![0; 64 << 10];
                let mut own = Vec::new();
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= total || begun.elapsed() > RUN_MAX {
                        break;
                    }
                    let result = ask(&mut connection, address, &requests[at % requests.len()], &mut buffer);
                    if result.is_err() {
                        connection = None;
                    }
                    own.push(result);
                }
                ended.lock().unwrap_or_else(PoisonError::into_inner).extend(own);
            });
        }
    });
    let took = begun.elapsed();
    Counts::of(ended.into_inner().unwrap_or_else(PoisonError::into_inner), took)
}

impl Counts {
    fn of(ended: Vec<Result<Took, String>>, took: Duration) -> Self {
        let answered: Vec<Took> = ended.iter().filter_map(|result| result.as_ref().ok().copied()).collect();
        let failed = ended.len() - answered.len();
        let first_failure = ended.into_iter().find_map(Result::err);
        let times =
            |of: fn(&Took) -> Duration| answered.iter().map(|took| of(took).as_nanos() as u64).collect();
        Self {
            answered: answered.len(),
            failed,
            first_failure,
            first_bytes: times(|took| took.first_bytes),
            whole: times(|took| took.whole),
            took,
        }
    }
}

fn request(address: SocketAddr, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\naccept: */*\r\ncontent-type: application/json\r\n\
         authorization: Bearer none\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn ask(
    connection: &mut Option<TcpStream>,
    address: SocketAddr,
    request: &[u8],
    buffer: &mut [u8],
) -> Result<Took, String> {
    let begun = Instant::now();
    let mut first_bytes = None;
    let stream = match connection {
        Some(stream) => stream,
        None => connection.insert(connect(address).map_err(|error| error.to_string())?),
    };
    stream.write_all(request).map_err(|error| error.to_string())?;
    let mut reply = Reply::default();
    while !reply.is_whole()? {
        // Of a long reply only its head and its end are of interest.
        reply.forget_middle();
        match stream.read(buffer) {
            Ok(0) => return Err("the connection ended in mid-reply".to_owned()),
            Ok(read) => {
                first_bytes.get_or_insert_with(|| begun.elapsed());
                reply.push(&buffer[..read]);
            }
            Err(error) => return Err(error.to_string()),
        }
    }
    let whole = begun.elapsed();
    Ok(Took { first_bytes: first_bytes.unwrap_or(whole), whole })
}

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    Ok(stream)
}

/// A reply as far as it was read.
#[derive(Default)]
struct Reply {
    bytes: Vec<u8>,
    /// Bytes of the body left out of `bytes`.
    forgotten: usize,
    head: Option<Head>,
}

/// What the head says about the body.
#[derive(Clone, Copy)]
struct Head {
    bytes: usize,
    /// `None` for chunks.
    body_bytes: Option<usize>,
}

impl Reply {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether it is all there; an error if it is not a good one.
    fn is_whole(&mut self) -> Result<bool, String> {
        let head = match self.head {
            Some(head) => head,
            None => match read_head(&self.bytes)? {
                Some(head) => *self.head.insert(head),
                None => return Ok(false),
            },
        };
        let Some(body_bytes) = head.body_bytes else {
            if !self.bytes.ends_with(CHUNKED_END) {
                return Ok(false);
            }
            let done = b"data: [DONE]";
            let is_done = self.bytes.windows(done.len()).any(|window| window == done);
            return if is_done { Ok(true) } else { Err("a stream without [DONE]".to_owned()) };
        };
        Ok(self.bytes.len() + self.forgotten >= head.bytes + body_bytes)
    }

    fn forget_middle(&mut self) {
        /// Enough for `[DONE]` and the end.
        const TAIL: usize = 256;
        let Some(head) = self.head else { return };
        let middle = head.bytes..self.bytes.len().saturating_sub(TAIL);
        if !middle.is_empty() {
            self.forgotten += middle.len();
            self.bytes.drain(middle);
        }
    }
}

fn read_head(bytes: &[u8]) -> Result<Option<Head>, String> {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let text = String::from_utf8_lossy(&bytes[..end]);
    let mut lines = text.lines();
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(status.to_owned());
    }
    let length = lines.filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok()).flatten()
    });
    Ok(Some(Head { bytes: end + 4, body_bytes: length }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(parts: &[&str]) -> Result<bool, String> {
        let mut reply = Reply::default();
        for part in parts {
            reply.push(part.as_bytes());
            reply.is_whole()?;
            reply.forget_middle();
        }
        reply.is_whole()
    }

    #[test]
    fn a_reply_is_whole_when_its_length_or_its_last_chunk_is_there() {
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
        let long = format!("400\r\n{}\r\n", "data: x\n\n".repeat(120));
        let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        for (parts, expected) in [
            (vec![head, "abc"], Ok(false)),
            (vec![head, "abc", "de"], Ok(true)),
            (vec!["HTTP/1.1 20", "0 OK\r\nContent-Length: 0\r\n", "\r\n"], Ok(true)),
            (vec![chunked, &long, "c\r\ndata: [DONE]\n\n\r\n"], Ok(false)),
            (vec![chunked, &long, "c\r\ndata: [DO", "NE]\n\n\r\n0\r\n", "\r\n"], Ok(true)),
            (vec![chunked, &long, "0\r\n\r\n"], Err("a stream without [DONE]".to_owned())),
            (vec!["HTTP/1.1 503 Busy\r\n\r\n"], Err("HTTP/1.1 503 Busy".to_owned())),
        ] {
            assert_eq!(whole(&parts), expected, "{parts:?}");
        }
    }
}
