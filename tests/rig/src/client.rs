//! A client that says exactly what it is told to.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::PATIENCE;

/// One connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

/// A reply, taken apart.
#[derive(Debug)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// The headers in their order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, its framing taken off.
    pub body: Vec<u8>,
    /// Whether the body came to its proper end.
    pub complete: bool,
}

impl Reply {
    /// The only value of a header.
    ///
    /// # Panics
    /// If it came twice.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(key, _)| key == name);
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(values.next().is_none(), "{name} came twice: {:?}", self.headers);
        value
    }

    /// The body as text.
    ///
    /// # Panics
    /// If it is none.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap_or_else(|_| panic!("no text: {:?}", self.body))
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.text()))
    }

    /// The code of an error in OpenAI's shape.
    ///
    /// # Panics
    /// If the body has another shape.
    pub fn error_code(&self) -> String {
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("no error: {json}"));
        for key in ["message", "type", "param", "code"] {
            assert!(error.contains_key(key), "{key} is missing: {json}");
        }
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "no message: {json}");
        error["code"].as_str().unwrap_or_else(|| panic!("code is no text: {json}")).to_owned()
    }
}

impl Connection {
    /// Connects.
    ///
    /// # Panics
    /// If nobody listens there.
    pub async fn open(address: SocketAddr) -> Self {
        Self::try_open(address).await.unwrap_or_else(|error| panic!("no connection to {address}: {error}"))
    }

    async fn try_open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, read: Vec::new() })
    }

    /// Sends as much as the other side takes: it may have answered and closed before the end.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.try_send(bytes).await;
    }

    /// Sends, and says when the other side takes no more.
    ///
    /// # Errors
    /// When the connection is closed or broken.
    pub async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref()).await
    }

    /// Ends our half of the connection.
    pub async fn finish_writing(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Reads until `needle` has come; what was read stays for [`Self::reply`].
    ///
    /// # Panics
    /// If the connection ends before, or nothing comes for [`PATIENCE`].
    pub async fn read_until(&mut self, needle: &str) {
        while !self.read.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            let more = self.read_more().await;
            assert!(more, "ended before {needle:?}: {:?}", String::from_utf8_lossy(&self.read));
        }
    }

    /// The next reply on this connection.
    ///
    /// # Panics
    /// If there is none.
    pub async fn reply(&mut self) -> Reply {
        self.reply_to(true).await.expect("a reply")
    }

    /// The next reply, `None` when the connection ends before its head. A reply to HEAD has no body
    /// whatever its headers say.
    ///
    /// # Panics
    /// If nothing comes for [`PATIENCE`], or a chunk has no length.
    pub async fn reply_to(&mut self, has_body: bool) -> Option<Reply> {
        let head_end = loop {
            if let Some(at) = self.read.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.read_more().await {
                return None;
            }
        };
        let head: Vec<u8> = self.read.drain(..head_end).collect();
        let head = String::from_utf8_lossy(&head).into_owned();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let header = |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        let (body, complete) = if !has_body {
            (Vec::new(), true)
        } else if header("transfer-encoding").is_some_and(|value| value == "chunked") {
            self.chunked().await
        } else if let Some(length) = header("content-length") {
            self.sized(length.parse().ok()?).await
        } else {
            while self.read_more().await {}
            (std::mem::take(&mut self.read), true)
        };
        Some(Reply { status, headers, body, complete })
    }

    async fn sized(&mut self, length: usize) -> (Vec<u8>, bool) {
        while self.read.len() < length {
            if !self.read_more().await {
                return (std::mem::take(&mut self.read), false);
            }
        }
        (self.read.drain(..length).collect(), true)
    }

    async fn chunked(&mut self) -> (Vec<u8>, bool) {
        let mut body = Vec::new();
        loop {
            let Some(line) = self.line().await else { return (body, false) };
            let length = usize::from_str_radix(&line, 16).expect("a chunk's length");
            while self.read.len() < length + 2 {
                if !self.read_more().await {
                    body.append(&mut self.read);
                    return (body, false);
                }
            }
            body.extend(self.read.drain(..length));
            self.read.drain(..2);
            if length == 0 {
                return (body, true);
            }
        }
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.read.windows(2).position(|window| window == b"\r\n") {
                let line = self.read.drain(..at + 2).collect::<Vec<u8>>();
                return String::from_utf8(line[..at].to_vec()).ok();
            }
            if !self.read_more().await {
                return None;
            }
        }
    }

    async fn read_more(&mut self) -> bool {
        let mut buffer = vec![0; 64 << 10];
        match timeout(PATIENCE, self.stream.read(&mut buffer)).await.expect("nothing came in time") {
            Ok(0) | Err(_) => false,
            Ok(read) => {
                self.read.extend_from_slice(&buffer[..read]);
                true
            }
        }
    }
}

/// A request with a JSON body, `headers` in the form `Name: value\r\n...`.
pub fn request(method: &str, path: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut bytes = format!(
        "{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// One request on a connection of its own.
///
/// # Panics
/// If there is no reply.
pub async fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: impl AsRef<[u8]>,
) -> Reply {
    let mut connection = Connection::open(address).await;
    connection.send(request(method, path, headers, body)).await;
    connection.reply_to(method != "HEAD").await.unwrap_or_else(|| panic!("no reply to {method} {path}"))
}

/// Gets a page.
pub async fn get(address: SocketAddr, path: &str) -> Reply {
    ask(address, "GET", path, "", "").await
}

/// Gets a page, if there is anybody to answer.
pub async fn try_get(address: SocketAddr, path: &str) -> Option<Reply> {
    let mut connection = Connection::try_open(address).await.ok()?;
    connection.send(request("GET", path, "", "")).await;
    connection.reply_to(true).await
}

/// Posts a JSON body.
pub async fn post(address: SocketAddr, path: &str, body: impl AsRef<[u8]>) -> Reply {
    post_as(address, path, "", body).await
}

/// Posts a JSON body with these headers.
pub async fn post_as(address: SocketAddr, path: &str, headers: &str, body: impl AsRef<[u8]>) -> Reply {
    ask(address, "POST", path, headers, body).await
}
