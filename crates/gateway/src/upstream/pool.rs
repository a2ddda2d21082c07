//! Idle connections of one worker, by endpoint.

use std::cell::RefCell;
use std::io;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use hashbrown::HashMap;
use routing::EndpointId;
use tokio::net::TcpStream;

/// Bytes read at once, about. 16 KiB: a burst of a hundred small chunks.
const READ_BYTES: usize = 16 << 10;
/// Room that there must be for a read; with less the buffer is grown, or begun again where it can be.
pub(super) const READ_BYTES_MIN: usize = 4 << 10;
/// Buffers kept per worker. 32: half a megabyte.
const BUFFERS_MAX: usize = 32;

/// Idle connections, the latest last.
#[derive(Debug)]
pub(super) struct Pool {
    idle: RefCell<HashMap<EndpointId, Vec<Idle>>>,
    /// Buffers that were read into, to be used again.
    buffers: RefCell<Vec<BytesMut>>,
    per_endpoint_max: usize,
    keep_for: Duration,
}

#[derive(Debug)]
struct Idle {
    stream: TcpStream,
    since: Instant,
}

impl Pool {
    /// An empty pool that also closes what nobody takes. Must be called on the worker's own thread.
    pub(super) fn new(per_endpoint_max: usize, keep_for: Duration) -> Rc<Self> {
        let pool = Rc::new(Self {
            idle: RefCell::default(),
            buffers: RefCell::default(),
            per_endpoint_max,
            keep_for,
        });
        actix_web::rt::spawn(close_old(Rc::downgrade(&pool), keep_for));
        pool
    }

    /// The connection that was used last, if it can still be used.
    pub(super) fn take(&self, endpoint: EndpointId) -> Option<TcpStream> {
        let mut idle = self.idle.borrow_mut();
        let connections = idle.get_mut(&endpoint)?;
        while let Some(Idle { stream, since }) = connections.pop() {
            if since.elapsed() > self.keep_for {
                // All others are older.
                connections.clear();
                return None;
            }
            if is_quiet(&stream) {
                return Some(stream);
            }
        }
        None
    }

    /// A buffer to read into.
    pub(super) fn buffer(&self) -> BytesMut {
        self.buffers.borrow_mut().pop().unwrap_or_else(|| BytesMut::with_capacity(READ_BYTES))
    }

    /// Takes back a connection, and the (empty) buffer that was used with it.
    pub(super) fn put(&self, endpoint: EndpointId, stream: TcpStream, buffer: BytesMut) {
        let mut buffers = self.buffers.borrow_mut();
        if buffers.len() < BUFFERS_MAX && buffer.is_empty() {
            buffers.push(buffer);
        }
        drop(buffers);
        let mut idle = self.idle.borrow_mut();
        let connections = idle.entry(endpoint).or_default();
        if connections.len() < self.per_endpoint_max {
            connections.push(Idle { stream, since: Instant::now() });
        }
    }

    fn drop_old(&self) {
        self.idle.borrow_mut().retain(|_, connections| {
            connections.retain(|idle| idle.since.elapsed() <= self.keep_for && is_quiet(&idle.stream));
            !connections.is_empty()
        });
    }
}

/// Whether the other side has neither closed an idle connection nor said anything on it.
fn is_quiet(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

async fn close_old(pool: Weak<Pool>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        match pool.upgrade() {
            Some(pool) => pool.drop_old(),
            None => return,
        }
    }
}
