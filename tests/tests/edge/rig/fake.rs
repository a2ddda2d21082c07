//! An engine that answers as it is told, request by request, and counts who asks for what.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    pub path: String,
    /// The head, in lower case.
    pub head: String,
    pub body: Vec<u8>,
}

/// What the engine does with it.
#[derive(Clone, Debug)]
pub enum Answer {
    /// A whole reply: status, headers in the form `Name: value\r\n...`, body.
    Whole(u16, &'static str, String),
    /// These events, each followed by a pause, then `[DONE]`.
    Events(Vec<String>, Duration),
    /// These events, then nothing more; the connection stays open.
    Stalled(Vec<String>),
    /// These events; when told to go on those, then `[DONE]`.
    Then(Vec<String>, Arc<Notify>, Vec<String>),
    /// These events, then the connection is cut.
    Cut(Vec<String>),
    /// Nothing; the connection stays open until the other side closes it.
    Silence,
}

impl Answer {
    pub fn ok(body: &str) -> Self {
        Self::Whole(200, "", body.to_owned())
    }

    pub fn status(status: u16) -> Self {
        let body = format!(r#"{{"error":{{"message":"as told","type":"t","param":null,"code":{status}}}}}"#);
        Self::Whole(status, "", body)
    }

    /// A chat completion that says that it used these tokens.
    pub fn completion(prompt_tokens: u32, completion_tokens: u32) -> Self {
        Self::Whole(200, "", completion(prompt_tokens, completion_tokens))
    }

    /// What is in a reply in one piece.
    pub fn body(&self) -> &str {
        match self {
            Self::Whole(_, _, body) => body,
            _ => "",
        }
    }

    /// A stream of `tokens` pieces, one every `pause`.
    pub fn stream(tokens: usize, pause: Duration) -> Self {
        Self::Events((0..tokens).map(piece).collect(), pause)
    }
}

fn completion(prompt_tokens: u32, completion_tokens: u32) -> String {
    serde_json::json!({
        "id": "c-1", "object": "chat.completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens},
    })
    .to_string()
}

/// One piece of a streamed chat.
pub fn piece(number: usize) -> String {
    serde_json::json!({
        "id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "sim",
        "choices": [{"index": 0, "delta": {"content": format!("word{number} ")}, "finish_reason": null}],
    })
    .to_string()
}

type Script = Box<dyn Fn(&Asked) -> Answer + Send + Sync>;

/// The engine. Answers probes and lists the model `sim` unless its script says otherwise.
pub struct Fake {
    pub address: SocketAddr,
    seen: Arc<Seen>,
    accepting: JoinHandle<()>,
}

struct Seen {
    script: Script,
    counts: Mutex<BTreeMap<String, usize>>,
    last: Mutex<Option<Asked>>,
    open: AtomicUsize,
}

impl Fake {
    /// An engine whose generating requests are answered by `script`; it is well and serves `sim`.
    pub async fn start(script: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_raw(move |asked| match asked.path.as_str() {
            "/health" => Answer::ok(""),
            "/v1/models" => Answer::ok(r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#),
            "/metrics" | "/tokenize" => Answer::status(404),
            _ => script(asked),
        })
        .await
    }

    /// An engine for which `script` answers everything, probes too.
    pub async fn start_raw(script: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let seen = Arc::new(Seen {
            script: Box::new(script),
            counts: Mutex::default(),
            last: Mutex::default(),
            open: AtomicUsize::new(0),
        });
        let shared = Arc::clone(&seen);
        let accepting = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { serve(stream, &shared).await });
            }
        });
        Self { address, seen, accepting }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Requests for this path.
    pub fn asked(&self, path: &str) -> usize {
        self.seen.counts.lock().get(path).copied().unwrap_or(0)
    }

    /// Requests other than probes, scrapes, lists of models and counts of tokens.
    pub fn served(&self) -> usize {
        let counts = self.seen.counts.lock();
        counts.iter().filter(|(path, _)| !is_aside(path)).map(|(_, count)| count).sum()
    }

    /// The last of them.
    pub fn last(&self) -> Option<Asked> {
        self.seen.last.lock().clone()
    }

    /// Requests under way.
    pub fn open(&self) -> usize {
        self.seen.open.load(Ordering::SeqCst)
    }
}

/// Whether nothing is generated there.
fn is_aside(path: &str) -> bool {
    matches!(path, "/health" | "/v1/models" | "/metrics" | "/tokenize")
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn serve(mut stream: TcpStream, seen: &Seen) {
    let _ = stream.set_nodelay(true);
    let mut read = Vec::new();
    while let Some(asked) = read_request(&mut stream, &mut read).await {
        *seen.counts.lock().entry(asked.path.clone()).or_default() += 1;
        let is_probe = is_aside(&asked.path);
        let answer = (seen.script)(&asked);
        if !is_probe {
            *seen.last.lock() = Some(asked);
            seen.open.fetch_add(1, Ordering::SeqCst);
        }
        let goes_on = play(&mut stream, answer).await;
        if !is_probe {
            seen.open.fetch_sub(1, Ordering::SeqCst);
        }
        if !goes_on {
            return;
        }
    }
}

/// Answers; false when the connection is of no more use.
async fn play(stream: &mut TcpStream, answer: Answer) -> bool {
    let (status, headers, body) = match answer {
        Answer::Whole(status, headers, body) => (status, headers, body),
        Answer::Silence => {
            while !gone_within(stream, Duration::from_secs(60)).await {}
            return false;
        }
        Answer::Events(events, pause) => {
            if !begin_stream(stream).await {
                return false;
            }
            for event in events {
                if !send_event(stream, &event).await || (!pause.is_zero() && gone_within(stream, pause).await)
                {
                    return false;
                }
            }
            return send_event(stream, "[DONE]").await && stream.write_all(b"0\r\n\r\n").await.is_ok();
        }
        Answer::Then(events, go_on, others) => {
            if !begin_stream(stream).await {
                return false;
            }
            for event in events {
                let _ = send_event(stream, &event).await;
            }
            go_on.notified().await;
            for event in others {
                let _ = send_event(stream, &event).await;
            }
            return send_event(stream, "[DONE]").await && stream.write_all(b"0\r\n\r\n").await.is_ok();
        }
        Answer::Cut(events) => {
            if begin_stream(stream).await {
                for event in events {
                    let _ = send_event(stream, &event).await;
                }
            }
            return false;
        }
        Answer::Stalled(events) => {
            if !begin_stream(stream).await {
                return false;
            }
            for event in events {
                if !send_event(stream, &event).await {
                    return false;
                }
            }
            while !gone_within(stream, Duration::from_secs(60)).await {}
            return false;
        }
    };
    let reply = format!(
        "HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(reply.as_bytes()).await.is_ok()
}

async fn begin_stream(stream: &mut TcpStream) -> bool {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.is_ok()
}

async fn send_event(stream: &mut TcpStream, event: &str) -> bool {
    let text = format!("data: {event}\n\n");
    stream.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes()).await.is_ok()
}

/// Whether the other side leaves within `span`. It says nothing else while it waits for an answer.
async fn gone_within(stream: &mut TcpStream, span: Duration) -> bool {
    let mut byte = [0];
    matches!(tokio::time::timeout(span, stream.read(&mut byte)).await, Ok(Ok(0) | Err(_)))
}

/// Reads one request with its body, sized or chunked.
async fn read_request(stream: &mut TcpStream, read: &mut Vec<u8>) -> Option<Asked> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        if let Some(at) = read.windows(4).position(|window: &[u8]| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&read[..at]).into_owned();
            let lower = head.to_lowercase();
            let length =
                lower.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            let end = match length {
                Some(length) => (read.len() >= at + 4 + length).then_some(at + 4 + length),
                None if lower.contains("transfer-encoding: chunked") => {
                    read.ends_with(b"0\r\n\r\n").then_some(read.len())
                }
                None => Some(at + 4),
            };
            if let Some(end) = end {
                let mut words = head.split(' ');
                let asked =
                    Asked { path: words.nth(1)?.to_owned(), head: lower, body: read[at + 4..end].to_vec() };
                read.drain(..end);
                return Some(asked);
            }
        }
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => read.extend_from_slice(&buffer[..count]),
        }
    }
}
