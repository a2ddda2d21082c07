//! Asks another replica, over TCP at its port P, for records that were missed or for all it knows.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rand::Rng;
use routing::ReplicaId;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use crate::FrameKind;
use crate::codec::{self, ENCODED_BYTES_MAX};
use crate::faults::Fate;
use crate::shared::Shared;
use crate::wire::{PullReply, PullRequest, Wanted};

/// Where pulls are asked.
pub(crate) const PATH: &str = "/pull";
/// A page and its seal.
const REPLY_BYTES_MAX: usize = ENCODED_BYTES_MAX + 64;
const CONNECT_PATIENCE: Duration = Duration::from_millis(500);
const REPLY_PATIENCE: Duration = Duration::from_secs(2);

/// What a request is sealed to.
pub(crate) const REQUEST_CONTEXT: &[u8] = b"grapevine pull 1 request";

/// What the reply to the request with this nonce is sealed to, so that no other reply can stand for it.
pub(crate) fn reply_context(nonce: &[u8; 16]) -> Vec<u8> {
    [b"grapevine pull 1 reply".as_slice(), nonce].concat()
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    #[error("can't connect: {0}")]
    Connect(#[source] io::Error),
    #[error("no answer in time")]
    TimedOut,
    #[error("the connection broke: {0}")]
    Broken(#[source] hyper::Error),
    #[error("refused with status {0}")]
    Refused(http::StatusCode),
    #[error("the answer makes no sense or is not sealed with our key")]
    Malformed,
    #[error("another replica answers there")]
    Stranger,
}

impl PullError {
    /// Whether nobody listens there.
    pub(crate) fn nobody_listens(&self) -> bool {
        matches!(self, Self::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }
}

/// A connection to one replica.
pub(crate) struct Pull<'a> {
    shared: &'a Shared,
    replica: ReplicaId,
    generation: u64,
    address: SocketAddr,
    sender: SendRequest<Full<Bytes>>,
    driver: AbortHandle,
}

impl Drop for Pull<'_> {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl<'a> Pull<'a> {
    pub(crate) async fn connect(
        shared: &'a Shared,
        replica: &ReplicaId,
        generation: u64,
        address: SocketAddr,
    ) -> Result<Self, PullError> {
        shared.counters.pulls.up();
        let stream = connect(shared, address).await?;
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await.map_err(PullError::Broken)?;
        let driver = tokio::spawn(async move { drop(driver.await) }).abort_handle();
        Ok(Self { shared, replica: replica.clone(), generation, address, sender, driver })
    }

    pub(crate) async fn ask(&mut self, wanted: Wanted) -> Result<PullReply, PullError> {
        let exchange = self.exchange(wanted);
        tokio::time::timeout(REPLY_PATIENCE, exchange).await.unwrap_or(Err(PullError::TimedOut))
    }

    async fn exchange(&mut self, wanted: Wanted) -> Result<PullReply, PullError> {
        let nonce = rand::rng().random();
        let request =
            PullRequest { replica: self.replica.clone(), generation: self.generation, nonce, wanted };
        let body = codec::encode(&request).ok_or(PullError::Malformed)?;
        let body = self.shared.sealer.seal(REQUEST_CONTEXT, &body);
        self.shared.counters.sent(FrameKind::Pull, body.len());
        let request = http::Request::post(PATH)
            .header(http::header::HOST, self.address.to_string())
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| PullError::Malformed)?;
        let reply = self.sender.send_request(request).await.map_err(PullError::Broken)?;
        if reply.status() != http::StatusCode::OK {
            return Err(PullError::Refused(reply.status()));
        }
        let body = Limited::new(reply.into_body(), REPLY_BYTES_MAX).collect().await;
        let body = body.map_err(|_| PullError::Malformed)?.to_bytes();
        self.shared.counters.received(FrameKind::Pull, body.len());
        let body =
            self.shared.sealer.unseal(&reply_context(&nonce), &body).map_err(|_| PullError::Malformed)?;
        match codec::decode(&body).map_err(|_| PullError::Malformed)? {
            PullReply::NotMe => Err(PullError::Stranger),
            reply => Ok(reply),
        }
    }
}

/// Whether nobody listens at a replica's port P.
pub(crate) async fn is_deserted(shared: &Shared, address: SocketAddr) -> bool {
    connect(shared, address).await.is_err_and(|error| error.nobody_listens())
}

async fn connect(shared: &Shared, address: SocketAddr) -> Result<TcpStream, PullError> {
    if let Some(faults) = &shared.config.faults {
        match faults.fate(FrameKind::Pull, address) {
            Fate::Send => {}
            Fate::Delay(delay) => tokio::time::sleep(delay).await,
            Fate::Drop => return Err(PullError::TimedOut),
        }
    }
    match tokio::time::timeout(CONNECT_PATIENCE, TcpStream::connect(address)).await {
        Ok(stream) => stream.map_err(PullError::Connect),
        Err(_) => Err(PullError::TimedOut),
    }
}
