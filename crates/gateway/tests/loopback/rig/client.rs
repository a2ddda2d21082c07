//! A client that says exactly what it is told to.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::PATIENCE;

/// One connection to the gateway.
pub(crate) struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

/// A reply, taken apart.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Whether the body came to its proper end.
    pub(crate) complete: bool,
}

impl Reply {
    /// The only value of a header.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(key, _)| key == name);
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(values.next().is_none(), "{name} came twice: {:?}", self.headers);
        value
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {:?}", self.text()))
    }

    /// The code of an error in OpenAI's shape, which it must have.
    pub(crate) fn error_code(&self) -> String {
        let json = self.json();
        let error = json["error"].as_object().unwrap_or_else(|| panic!("no error: {json}"));
        for key in ["message", "type", "param", "code"] {
            assert!(error.contains_key(key), "{key} is missing: {json}");
        }
        error["code"].as_str().unwrap_or_else(|| panic!("code is no text: {json}")).to_owned()
    }
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, read: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Sends as much as the other side takes.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref()).await
    }

    /// Ends our half of the connection.
    pub(crate) async fn finish_writing(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Reads until `needle` has come.
    pub(crate) async fn read_until(&mut self, needle: &str) {
        while !self.read.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            assert!(
                self.read_more().await,
                "ended before {needle:?}: {:?}",
                String::from_utf8_lossy(&self.read)
            );
        }
    }

    /// The next reply on this connection.
    pub(crate) async fn reply(&mut self) -> Reply {
        let head_end = loop {
            if let Some(at) = self.read.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            assert!(self.read_more().await, "no head: {:?}", String::from_utf8_lossy(&self.read));
        };
        let head = String::from_utf8(self.read.drain(..head_end).collect()).unwrap();
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> = lines
            .map(|line| {
                line.split_once(": ").map(|(name, value)| (name.to_owned(), value.to_owned())).unwrap()
            })
            .collect();
        let header = |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        let (body, complete) = if header("transfer-encoding").is_some_and(|value| value == "chunked") {
            self.chunked().await
        } else if let Some(length) = header("content-length") {
            self.sized(length.parse().unwrap()).await
        } else {
            while self.read_more().await {}
            (std::mem::take(&mut self.read), true)
        };
        Reply { status, headers, body, complete }
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
            let length = usize::from_str_radix(&line, 16).unwrap();
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
                return Some(String::from_utf8(line[..at].to_vec()).unwrap());
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
pub(crate) fn request(path: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut bytes = format!(
        "POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: impl AsRef<[u8]>) -> Reply {
    let mut connection = Connection::open(address).await;
    connection.send(request(path, "", body)).await;
    connection.reply().await
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Reply {
    let mut connection = Connection::open(address).await;
    connection.send(format!("GET {path} HTTP/1.1\r\nHost: gateway\r\n\r\n")).await;
    connection.reply().await
}

/// A chat's body.
pub(crate) fn chat(stream: bool) -> String {
    format!(
        r#"{{"model":"sim","messages":[{{"role":"user","content":"Hello, who are you?"}}],"max_tokens":8,"stream":{stream}}}"#
    )
}
