//! A connection that puts into words what the HTTP server refuses without any.
//!
//! Requests that can't be parsed never reach a handler: the server answers them with an empty 400, 408 or
//! 431 of its own. Here that answer is recognised on its way out (it is the only one without a request id) and
//! gets a body in OpenAI's shape.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use actix_web::rt::net::TcpStream;
use bytes::{Buf, Bytes};
use memchr::memmem;
use routing::request::Route;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::errors::EdgeError;
use crate::request_id::RequestId;
use crate::worker::Worker;

/// A client's connection.
pub(crate) struct Outspoken {
    stream: TcpStream,
    worker: Rc<Worker>,
    /// What is written in the place of an answer without words, and how long that answer was.
    instead: Option<(Bytes, usize)>,
}

impl Outspoken {
    pub(crate) const fn new(stream: TcpStream, worker: Rc<Worker>) -> Self {
        Self { stream, worker, instead: None }
    }

    fn worded(&self, answer: &[u8]) -> Option<Bytes> {
        let status: u16 =
            std::str::from_utf8(answer.strip_prefix(b"HTTP/1.1 ")?.get(..3)?).ok()?.parse().ok()?;
        let error = EdgeError::of_unparsed(status)?;
        let head = answer.strip_suffix(b"\r\n\r\n")?;
        let is_bare = memmem::find(head, b"content-length: 0").is_some()
            && memmem::find(head, b"x-request-id").is_none()
            && memmem::find(head, b"\r\n\r\n").is_none();
        if !is_bare {
            return None;
        }
        let id = RequestId::make();
        self.worker.answered(id.as_str(), Route::Other, error.status, self.worker.now());
        let body = error.json();
        let head = format!(
            "HTTP/1.1 {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\nx-request-id: {}\r\n\r\n",
            error.status,
            body.len(),
            id.as_str()
        );
        Some([head.as_bytes(), &body].concat().into())
    }
}

impl AsyncRead for Outspoken {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Outspoken {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.instead.is_none() && bytes.starts_with(b"HTTP/1.1 4") {
            this.instead = this.worded(bytes).map(|worded| (worded, bytes.len()));
        }
        let Some((worded, length)) = &mut this.instead else {
            return Pin::new(&mut this.stream).poll_write(context, bytes);
        };
        while worded.has_remaining() {
            let written = ready!(Pin::new(&mut this.stream).poll_write(context, worded))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            worded.advance(written);
        }
        let length = *length;
        this.instead = None;
        Poll::Ready(Ok(length))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
