//! Engines that compute nothing: the same few bytes for every chat, so that proxies can be told apart.
//!
//! A thread for each connection and blocking sockets: a reply costs one read and one write. They run in a
//! process of their own, so that their cost is known and is nobody else's.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;

/// Chunks of a stream that have content; two more carry the finish reason with the usage, and the end.
pub const CONTENT_CHUNKS: usize = 98;

/// Chunks of a stream in all.
pub const CHUNKS: usize = CONTENT_CHUNKS + 2;

/// Between two chunks of a paced stream.
pub const PACE: Duration = Duration::from_millis(5);

/// The longest request head that is read.
const HEAD_BYTES_MAX: u64 = 64 << 10;

/// The longest body that is read.
const BODY_BYTES_MAX: usize = 1 << 20;

/// How chats are answered.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// In one small piece of JSON.
    Whole,
    /// As a stream whose chunks are all written at once.
    Burst,
    /// As a stream with a chunk every [`PACE`].
    Paced,
}

impl Kind {
    /// Whether chats ask for a stream.
    pub fn streams(self) -> bool {
        self != Self::Whole
    }
}

/// The ready-made bytes of one kind of reply.
struct Replies {
    head: Vec<u8>,
    chunks: Vec<Vec<u8>>,
    pace: Option<Duration>,
}

/// Serves at `addresses` for ever, one engine at each.
///
/// # Errors
/// When an address can't be listened on.
pub fn serve(addresses: &[SocketAddr], kind: Kind) -> anyhow::Result<()> {
    let replies = Arc::new(Replies::new(kind));
    let mut listening = Vec::new();
    for address in addresses {
        let listener = TcpListener::bind(address).with_context(|| format!("listening on {address}"))?;
        let replies = Arc::clone(&replies);
        listening.push(thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let replies = Arc::clone(&replies);
                // A connection that fails ends; what was lost is counted where it was asked for.
                thread::spawn(move || answer_all(&stream, &replies));
            }
        }));
    }
    for thread in listening {
        ensure!(thread.join().is_ok(), "an engine's thread panicked");
    }
    Ok(())
}

fn answer_all(stream: &TcpStream, replies: &Replies) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::with_capacity(32 << 10, stream);
    let mut writer = stream;
    let mut body = Vec::new();
    while let Some(request) = read_request(&mut reader, &mut body)? {
        match request.path.as_str() {
            "/v1/chat/completions" => {
                writer.write_all(&replies.head)?;
                for (at, chunk) in replies.chunks.iter().enumerate() {
                    // Between two chunks only: after the last one the next request may be here at once.
                    if let Some(pace) = replies.pace.filter(|_| at > 0) {
                        thread::sleep(pace);
                    }
                    writer.write_all(chunk)?;
                }
            }
            "/v1/models" => {
                writer.write_all(&whole(
                    "application/json",
                    r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#,
                ))?;
            }
            "/health" => writer.write_all(&whole("text/plain", ""))?,
            _ => writer.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")?,
        }
        if request.closes {
            return Ok(());
        }
    }
    Ok(())
}

/// What is read of a request.
struct Request {
    path: String,
    /// Whether the client wants the connection to end with the reply.
    closes: bool,
}

/// The next request, its body read into `body`; `None` at the connection's end.
fn read_request(reader: &mut BufReader<&TcpStream>, body: &mut Vec<u8>) -> anyhow::Result<Option<Request>> {
    let mut path = None;
    let mut closes = false;
    let mut body_bytes = 0;
    let mut line = String::new();
    let mut head = reader.take(HEAD_BYTES_MAX);
    loop {
        line.clear();
        if head.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let text = line.trim_end();
        if text.is_empty() {
            break;
        }
        let Some(_) = &path else {
            path = text.split(' ').nth(1).map(str::to_owned);
            continue;
        };
        let Some((name, value)) = text.split_once(':') else { bail!("{text:?} is no header") };
        if name.eq_ignore_ascii_case("content-length") {
            body_bytes = value.trim().parse()?;
        }
        closes |= name.eq_ignore_ascii_case("connection") && value.trim().eq_ignore_ascii_case("close");
        ensure!(!name.eq_ignore_ascii_case("transfer-encoding"), "chunked requests are not understood");
    }
    ensure!(body_bytes <= BODY_BYTES_MAX, "a body of {body_bytes} bytes");
    body.resize(body_bytes, 0);
    reader.read_exact(body)?;
    Ok(path.map(|path| Request { path, closes }))
}

impl Replies {
    fn new(kind: Kind) -> Self {
        if kind == Kind::Whole {
            let json = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"A small answer of a few words."},"finish_reason":"stop"}],"usage":{"prompt_tokens":1024,"total_tokens":1032,"completion_tokens":8,"prompt_tokens_details":{"cached_tokens":768}}}"#;
            return Self { head: whole("application/json", json), chunks: Vec::new(), pace: None };
        }
        let event = |choices: &str, usage: &str| {
            let id = "chatcmpl-9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d";
            format!(
                "data: {{\"id\":\"{id}\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"sim\",\"choices\":[{choices}]{usage}}}\n\n"
            )
        };
        let content =
            event(r#"{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}"#, "");
        let last = event(
            r#"{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop"}"#,
            r#","usage":{"prompt_tokens":1024,"total_tokens":1122,"completion_tokens":98,"prompt_tokens_details":{"cached_tokens":768}}"#,
        );
        let mut events = vec![content; CONTENT_CHUNKS];
        events.extend([last, "data: [DONE]\n\n".to_owned()]);
        let mut chunks: Vec<Vec<u8>> =
            events.iter().map(|event| format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()).collect();
        if let Some(end) = chunks.last_mut() {
            end.extend_from_slice(b"0\r\n\r\n");
        }
        let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        if kind == Kind::Burst {
            return Self { head: [head, chunks.concat()].concat(), chunks: Vec::new(), pace: None };
        }
        Self { head, chunks, pace: Some(PACE) }
    }
}

fn whole(content_type: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}
