//! One connection to an engine, and the exchange on it.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::pin;
use std::rc::Weak;
use std::task::{Context, Poll, ready};

use actix_web::http::Method;
use bytes::{Buf, Bytes, BytesMut};
use routing::EndpointId;
use routing::retry::LegFault;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::framing::Framing;
use super::head::{self, Head, Parsed};
use super::pool::{Pool, READ_BYTES_MIN};

/// A request's body on its way to an engine.
#[derive(Debug)]
pub(crate) enum OutBody {
    /// The client's bytes, all of them.
    Whole(Bytes),
    /// The client's bytes as they come.
    Streamed {
        /// Where they come from; an error says that the client broke off.
        chunks: mpsc::Receiver<Result<Bytes, ClientBrokeOff>>,
        /// How many there will be, if the client has said so; else they go out in chunks.
        length: Option<u64>,
    },
}

/// The client's body ended before its end: the engine must not take what came for all.
#[derive(Debug, thiserror::Error)]
#[error("the client's body broke off")]
pub(crate) struct ClientBrokeOff;

/// What is still to be written of a request.
#[derive(Debug)]
struct Sending {
    /// The head, or what frames the next part.
    front: BytesMut,
    /// The next part of the body.
    part: Bytes,
    /// What frames its end.
    back: &'static [u8],
    /// Where further parts come from.
    more: Option<mpsc::Receiver<Result<Bytes, ClientBrokeOff>>>,
    chunked: bool,
}

/// Why sending stopped.
enum SendFault {
    Io(io::Error),
    ClientBrokeOff,
}

impl Sending {
    fn new(head: BytesMut, body: OutBody) -> Self {
        match body {
            OutBody::Whole(part) => Self { front: head, part, back: b"", more: None, chunked: false },
            OutBody::Streamed { chunks, length } => Self {
                front: head,
                part: Bytes::new(),
                back: b"",
                more: Some(chunks),
                chunked: length.is_none(),
            },
        }
    }

    fn poll(&mut self, stream: &TcpStream, context: &mut Context<'_>) -> Poll<Result<(), SendFault>> {
        loop {
            while self.front.has_remaining() || self.part.has_remaining() || !self.back.is_empty() {
                let slices = [IoSlice::new(&self.front), IoSlice::new(&self.part), IoSlice::new(self.back)];
                match stream.try_write_vectored(&slices) {
                    Ok(0) => return Poll::Ready(Err(SendFault::Io(io::ErrorKind::WriteZero.into()))),
                    Ok(written) => self.advance(written),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        ready!(stream.poll_write_ready(context)).map_err(SendFault::Io)?;
                    }
                    Err(error) => return Poll::Ready(Err(SendFault::Io(error))),
                }
            }
            let Some(more) = &mut self.more else { return Poll::Ready(Ok(())) };
            match ready!(more.poll_recv(context)) {
                Some(Ok(part)) if part.is_empty() => {}
                Some(Ok(part)) => self.next(part),
                Some(Err(ClientBrokeOff)) => return Poll::Ready(Err(SendFault::ClientBrokeOff)),
                None => {
                    self.more = None;
                    if self.chunked {
                        self.back = b"0\r\n\r\n";
                    }
                }
            }
        }
    }

    fn next(&mut self, part: Bytes) {
        if self.chunked {
            self.front.extend_from_slice(format!("{:x}\r\n", part.len()).as_bytes());
            self.back = b"\r\n";
        }
        self.part = part;
    }

    fn advance(&mut self, mut written: usize) {
        let front = written.min(self.front.len());
        self.front.advance(front);
        written -= front;
        let part = written.min(self.part.len());
        self.part.advance(part);
        self.back = &self.back[written - part..];
    }
}

/// A connection with a request on it.
#[derive(Debug)]
pub(super) struct Exchange {
    stream: TcpStream,
    buffer: BytesMut,
    sending: Option<Sending>,
    method: Method,
}

/// How an exchange failed before its reply's head.
pub(super) enum ExchangeFault {
    /// Nothing at all had come back: on a connection that had been idle, the engine may just have closed it.
    Silently(LegFault),
    /// Something had.
    Otherwise(LegFault),
}

impl Exchange {
    /// `buffer` is what is read into.
    pub(super) fn new(
        stream: TcpStream,
        buffer: BytesMut,
        method: Method,
        head: BytesMut,
        body: OutBody,
    ) -> Self {
        Self { stream, buffer, sending: Some(Sending::new(head, body)), method }
    }

    /// Writes the request and reads the reply's head; an engine may answer before it has read all.
    pub(super) fn poll_head(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<(Head, Framing, bool), ExchangeFault>> {
        let mut write_fault = None;
        if let Some(sending) = &mut self.sending {
            match sending.poll(&self.stream, context) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => self.sending = None,
                Poll::Ready(Err(SendFault::ClientBrokeOff)) => {
                    return Poll::Ready(Err(ExchangeFault::Otherwise(LegFault::Reset)));
                }
                // The reason may be waiting to be read.
                Poll::Ready(Err(SendFault::Io(error))) => write_fault = Some(error),
            }
        }
        loop {
            match head::take(&mut self.buffer, &self.method) {
                Ok(Parsed::Whole { head, framing, keep_alive }) => {
                    let reusable = keep_alive && self.sending.is_none();
                    return Poll::Ready(Ok((head, framing, reusable)));
                }
                Ok(Parsed::Interim) => continue,
                Ok(Parsed::Partial) => {}
                Err(head::Garbled) => return Poll::Ready(Err(ExchangeFault::Otherwise(LegFault::Garbled))),
            }
            match self.poll_read(context) {
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Err(self.broken())),
                Poll::Pending if write_fault.is_some() => return Poll::Ready(Err(self.broken())),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Whether all of the request was written.
    pub(super) const fn is_sent(&self) -> bool {
        self.sending.is_none()
    }

    fn broken(&self) -> ExchangeFault {
        if self.buffer.is_empty() {
            ExchangeFault::Silently(LegFault::Reset)
        } else {
            ExchangeFault::Otherwise(LegFault::Reset)
        }
    }

    fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(READ_BYTES_MIN);
        pin!(self.stream.read_buf(&mut self.buffer)).poll(context)
    }
}

/// The body of a reply, read straight from its connection. When it is over the connection goes back to its
/// pool; dropped before, it is closed.
#[derive(Debug)]
pub(crate) struct ReplyBody {
    exchange: Option<Exchange>,
    framing: Framing,
    home: Option<(Weak<Pool>, EndpointId)>,
}

impl ReplyBody {
    pub(super) fn new(exchange: Exchange, framing: Framing, home: Option<(Weak<Pool>, EndpointId)>) -> Self {
        let mut body = Self { exchange: Some(exchange), framing, home };
        body.go_home_if_over();
        body
    }

    /// Whether its last byte has been read.
    pub(crate) fn is_over(&self) -> bool {
        self.framing == Framing::Over
    }

    /// The next bytes, `None` at the end.
    pub(crate) fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, LegFault>>> {
        loop {
            let Some(exchange) = &mut self.exchange else { return Poll::Ready(None) };
            let Ok(data) = self.framing.take(&mut exchange.buffer) else {
                self.exchange = None;
                return Poll::Ready(Some(Err(LegFault::Garbled)));
            };
            self.go_home_if_over();
            if !data.is_empty() {
                return Poll::Ready(Some(Ok(data)));
            }
            let Some(exchange) = &mut self.exchange else { return Poll::Ready(None) };
            if let Some(sending) = &mut exchange.sending
                && sending.poll(&exchange.stream, context).is_ready()
            {
                exchange.sending = None;
            }
            match ready!(exchange.poll_read(context)) {
                Ok(1..) => {}
                Ok(0) if self.framing == Framing::UntilClose => {
                    self.framing = Framing::Over;
                    self.exchange = None;
                    return Poll::Ready(None);
                }
                Ok(0) | Err(_) => {
                    self.exchange = None;
                    return Poll::Ready(Some(Err(LegFault::Truncated)));
                }
            }
        }
    }

    /// The next bytes, `None` at the end.
    pub(crate) async fn data(&mut self) -> Option<Result<Bytes, LegFault>> {
        std::future::poll_fn(|context| self.poll_data(context)).await
    }

    fn go_home_if_over(&mut self) {
        if self.framing != Framing::Over {
            return;
        }
        let Some(exchange) = self.exchange.take() else { return };
        // Bytes behind the end belong to nothing that was asked for: such a connection is not used again.
        let is_clean = exchange.buffer.is_empty() && exchange.sending.is_none();
        if let (true, Some((pool, endpoint))) = (is_clean, self.home.take())
            && let Some(pool) = pool.upgrade()
        {
            pool.put(endpoint, exchange.stream, exchange.buffer);
        }
    }
}
