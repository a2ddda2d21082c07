//! Waiting for servers that were just started.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// How long a server may take to start on a machine that is busy with other things.
const START_MAX: Duration = Duration::from_secs(30);

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long one question may take.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// Waits until `GET path` at `address` is answered with 200.
///
/// # Errors
/// When it is not within `START_MAX`.
pub fn until_ok(address: SocketAddr, path: &str) -> anyhow::Result<()> {
    until_told(address, path, "")
}

/// Waits until `GET path` at `address` is answered with 200 and these words.
///
/// # Errors
/// When it is not within `START_MAX`.
pub fn until_told(address: SocketAddr, path: &str, words: &str) -> anyhow::Result<()> {
    let begun = Instant::now();
    loop {
        match get(address, path) {
            Ok(reply) if reply.starts_with("HTTP/1.1 200") && reply.contains(words) => return Ok(()),
            other if begun.elapsed() > START_MAX => {
                bail!("http://{address}{path} did not answer 200 within {START_MAX:?}: {other:?}")
            }
            _ => std::thread::sleep(LOOK_EVERY),
        }
    }
}

/// Waits until `address` takes connections.
///
/// # Errors
/// When it does not within `START_MAX`.
pub fn until_open(address: SocketAddr) -> anyhow::Result<()> {
    let begun = Instant::now();
    while let Err(error) = TcpStream::connect_timeout(&address, ANSWER_MAX) {
        if begun.elapsed() > START_MAX {
            bail!("{address} took no connection within {START_MAX:?}: {error}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// The whole reply to `GET path`.
///
/// # Errors
/// When there is none.
pub fn get(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).context("reading the reply")?;
    Ok(reply)
}

/// An address of the loopback interface that nobody listens on now.
///
/// # Errors
/// When there is none.
pub fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}
