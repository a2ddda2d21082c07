//! What engines say to each other: JSON, each behind its length.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The block numbers of a prompt of 16 million tokens fit; more is no frame.
const FRAME_BYTES_MAX: u32 = 16 << 20;

/// From the decode to the prefill engine.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    /// What these blocks hold.
    Read {
        /// The engine that is meant, and what the two must have in common.
        engine_id: String,
        model: String,
        block_tokens: u32,
        blocks: Vec<u32>,
    },
    /// A request's blocks are no longer needed.
    Done { request_id: String, pulled: bool },
    /// To meet the prefill leg of this room; answered when that is computed.
    Join { room: i64, model: String, block_tokens: u32 },
    /// The KV of the room has arrived.
    Received,
}

/// From the prefill to the decode engine.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Told {
    /// What the blocks hold, in order.
    Contents(Vec<Option<u64>>),
    /// Noted; nothing comes of it when the request is not known (any more), as in vLLM.
    Noted,
    /// It cannot be, and why.
    Refused(String),
}

/// Sends one frame.
pub(crate) async fn send(line: &mut TcpStream, frame: &impl Serialize) -> io::Result<()> {
    let body = serde_json::to_vec(frame)?;
    let length = u32::try_from(body.len()).ok().filter(|&length| length <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut bytes = Vec::with_capacity(4 + body.len());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&body);
    line.write_all(&bytes).await
}

/// Receives one frame; the end of the connection is an error.
pub(crate) async fn receive<F: DeserializeOwned>(line: &mut TcpStream) -> io::Result<F> {
    let length = line.read_u32().await?;
    if length > FRAME_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length as usize];
    line.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}

/// Waits until the other side has closed, or broken the rule that it says nothing now.
pub(crate) async fn gone(line: &mut TcpStream) {
    // Any byte, the end and an error mean the same here: it is not waiting any more.
    let _ = line.read_u8().await;
}
