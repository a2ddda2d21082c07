//! An engine that follows a script, to the byte.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use super::until;

/// What a fake engine does once it has read a request.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Sends these bytes.
    Send(Vec<u8>),
    /// Sends them one by one.
    Dribble(Vec<u8>),
    /// Waits for [`Fake::go_on`].
    Await,
    /// Waits for the other side to close.
    AwaitClose,
    /// Waits as long.
    Pause(Duration),
    /// Closes the connection with a reset.
    Reset,
    /// Serves the next request on this connection with the rest of the script.
    Next,
}

impl Step {
    /// A whole reply of this status and type.
    pub(crate) fn reply(status: u16, kind: &str, body: &str) -> Self {
        Self::Send(
            format!(
                "HTTP/1.1 {status} Whatever\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
            .into_bytes(),
        )
    }

    /// The head of a stream of events.
    pub(crate) fn stream_head() -> Self {
        Self::Send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
                .to_vec(),
        )
    }

    /// A chunk of a stream.
    pub(crate) fn chunk(text: &str) -> Self {
        Self::Send(format!("{:x}\r\n{text}\r\n", text.len()).into_bytes())
    }

    /// The end of a stream.
    pub(crate) fn end() -> Self {
        Self::Send(b"0\r\n\r\n".to_vec())
    }
}

/// The engine.
pub(crate) struct Fake {
    pub(crate) url: String,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    requests: Mutex<Vec<Vec<u8>>>,
    closed: AtomicUsize,
    go_on: Notify,
}

impl Fake {
    /// Starts an engine that plays `script` on each connection.
    pub(crate) async fn start(script: Vec<Step>) -> Self {
        Self::start_each(vec![script]).await
    }

    /// The first connection gets the first script and so on; the last script is for all the rest.
    pub(crate) async fn start_each(scripts: Vec<Vec<Step>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Seen::default());
        let shared = Arc::clone(&seen);
        tokio::spawn(async move {
            let mut number = 0;
            while let Ok((stream, _)) = listener.accept().await {
                let script = scripts[number.min(scripts.len() - 1)].clone();
                number += 1;
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { play(stream, script, &shared).await });
            }
        });
        Self { url, seen }
    }

    /// The requests that came, head and body as they were.
    pub(crate) fn requests(&self) -> Vec<Vec<u8>> {
        self.seen.requests.lock().clone()
    }

    /// The only request that came: its head in lower case and its body.
    pub(crate) fn only_request(&self) -> (String, Vec<u8>) {
        let requests = self.requests();
        assert_eq!(requests.len(), 1, "requests");
        let at = requests[0].windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        (
            String::from_utf8(requests[0][..at].to_vec()).unwrap().to_lowercase(),
            requests[0][at + 4..].to_vec(),
        )
    }

    pub(crate) fn go_on(&self) {
        self.seen.go_on.notify_one();
    }

    /// Waits until the gateway has closed as many connections.
    pub(crate) async fn closed(&self, connections: usize) {
        until("the gateway to close", || self.seen.closed.load(Ordering::SeqCst) >= connections).await;
    }

    /// Waits until as many requests have come.
    pub(crate) async fn asked(&self, requests: usize) {
        until("a request to come", || self.seen.requests.lock().len() >= requests).await;
    }
}

async fn play(mut stream: TcpStream, script: Vec<Step>, seen: &Seen) {
    let _ = stream.set_nodelay(true);
    let Some(request) = read_request(&mut stream).await else { return };
    seen.requests.lock().push(request);
    for step in script {
        match step {
            Step::Send(bytes) => {
                if stream.write_all(&bytes).await.is_err() {
                    seen.closed.fetch_add(1, Ordering::SeqCst);
                    return;
                }
            }
            Step::Dribble(bytes) => {
                for byte in bytes {
                    if stream.write_all(&[byte]).await.is_err() {
                        return;
                    }
                    tokio::task::yield_now().await;
                }
            }
            Step::Await => seen.go_on.notified().await,
            Step::AwaitClose => {
                let mut buffer = [0; 1024];
                while matches!(stream.read(&mut buffer).await, Ok(1..)) {}
                seen.closed.fetch_add(1, Ordering::SeqCst);
                return;
            }
            Step::Pause(span) => tokio::time::sleep(span).await,
            Step::Reset => {
                let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
                return;
            }
            Step::Next => match read_request(&mut stream).await {
                Some(request) => seen.requests.lock().push(request),
                None => return,
            },
        }
    }
}

/// Reads one request with its body, sized or chunked.
async fn read_request(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut read = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        if let Some(at) = read.windows(4).position(|window: &[u8]| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&read[..at]).to_lowercase();
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            let whole = match length {
                Some(length) => read.len() >= at + 4 + length,
                None if head.contains("transfer-encoding: chunked") => read.ends_with(b"0\r\n\r\n"),
                None => true,
            };
            if whole {
                return Some(read);
            }
        }
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => read.extend_from_slice(&buffer[..count]),
        }
    }
}
