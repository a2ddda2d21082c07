//! Connections: accepting them, closing them politely, and resetting them on purpose.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Server;

/// How long a stopping engine lets its connections finish.
const CLOSE_MAX: Duration = Duration::from_secs(2);
/// Pause after a failed accept, which means that descriptors are short.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Whether an engine goes on serving.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Closing {
    /// It does.
    Not,
    /// It accepts nothing new and lets what is under way end.
    Politely,
    /// It is gone, and its connections are reset.
    AtOnce,
}

/// A connection that can be told to be reset when it is dropped.
struct Line {
    stream: TokioIo<TcpStream>,
    reset: Arc<AtomicBool>,
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.reset.load(Ordering::Acquire)
            && let Err(error) = self.stream.inner().set_zero_linger()
        {
            tracing::debug!(%error, "the connection ends without a reset");
        }
    }
}

/// Accepts connections until told to close.
pub(crate) async fn serve_connections(
    server: Arc<Server>,
    listener: TcpListener,
    mut closing: watch::Receiver<Closing>,
) {
    let mut lines = JoinSet::new();
    let for_lines = closing.clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    lines.spawn(serve_line(Arc::clone(&server), stream, for_lines.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = lines.join_next() => {}
            _ = other_than(&mut closing, Closing::Not) => break,
        }
    }
    drop(listener);
    let all = async { while lines.join_next().await.is_some() {} };
    if tokio::time::timeout(CLOSE_MAX, all).await.is_err() {
        lines.shutdown().await;
    }
}

async fn serve_line(server: Arc<Server>, stream: TcpStream, mut closing: watch::Receiver<Closing>) {
    server.traffic.connections_opened.fetch_add(1, Ordering::Relaxed);
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    let reset = Arc::new(AtomicBool::new(false));
    let line = Line { stream: TokioIo::new(stream), reset: Arc::clone(&reset) };
    let service = service_fn(|request| {
        let server = &server;
        async move {
            let under_way = UnderWay { server, answered: false };
            let answer = super::answer(server, request).await;
            under_way.answered();
            answer
        }
    });
    let mut connection = pin!(http1::Builder::new().half_close(false).serve_connection(line, service));
    let mut known = Closing::Not;
    let ended = loop {
        tokio::select! {
            ended = &mut connection => break ended,
            now = other_than(&mut closing, known) => {
                known = now;
                match now {
                    Closing::Not => {}
                    Closing::Politely => connection.as_mut().graceful_shutdown(),
                    Closing::AtOnce => {
                        reset.store(true, Ordering::Release);
                        break Ok(());
                    }
                }
            }
        }
    };
    if ended.is_err_and(|error| error.is_user()) {
        // The service or a body failed, and both do so only to have the connection reset.
        reset.store(true, Ordering::Release);
    }
    server.traffic.connections_closed.fetch_add(1, Ordering::Relaxed);
}

/// Waits for the engine's standing to be another than `known`. An engine whose handle is gone is gone at once.
pub(crate) async fn other_than(closing: &mut watch::Receiver<Closing>, known: Closing) -> Closing {
    closing.wait_for(|now| *now != known).await.map_or(Closing::AtOnce, |now| *now)
}

/// Counts a request as abandoned when the client leaves before its reply begins.
struct UnderWay<'a> {
    server: &'a Server,
    answered: bool,
}

impl UnderWay<'_> {
    fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.server.traffic.requests_abandoned.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Read for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl Write for Line {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }
}
