//! Runs the gossip library behind our own ports.
//!
//! The library reads and writes its messages only through a UDP socket, so it is given a private one on
//! loopback. What it sends goes to a socket of ours there and from it, sealed, to the network; what we have
//! opened is handed to it from one small socket for each sender, by whose port the true sender is known
//! again. Whatever comes to the private socket from elsewhere is thrown away.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chitchat::ChitchatEnvelope;
use chitchat::transport::{RecvOutcome, SendOutcome, Socket, Transport};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use crate::link::Link;
use crate::stats::Counters;
use crate::{FrameKind, Rejection};

/// Senders with a socket of their own. The one not heard for longest makes room for another.
const SENDERS_MAX: usize = 128;
/// Loopback delivers at once; a datagram that is not there by now never will be.
const HOP_PATIENCE: Duration = Duration::from_millis(50);
/// The library's largest message.
const MESSAGE_BYTES_MAX: usize = 65_507;
const ANY_LOOPBACK: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

/// The way in: from our port to the library.
#[derive(Default)]
pub(crate) struct Feed {
    state: Mutex<FeedState>,
}

#[derive(Default)]
struct FeedState {
    library: Option<SocketAddr>,
    senders: HashMap<SocketAddr, Sender>,
    clock: u64,
}

struct Sender {
    socket: std::net::UdpSocket,
    hop: SocketAddr,
    used: u64,
}

impl Feed {
    /// Hands a message to the library; `false` if it did not take it.
    pub(crate) fn deliver(&self, from: SocketAddr, message: &[u8]) -> bool {
        let mut state = self.state.lock();
        let Some(library) = state.library else { return false };
        state.clock += 1;
        let now = state.clock;
        if !state.senders.contains_key(&from) {
            if state.senders.len() >= SENDERS_MAX {
                let oldest = state.senders.iter().min_by_key(|(_, s)| s.used).map(|(&address, _)| address);
                oldest.and_then(|address| state.senders.remove(&address));
            }
            let Ok(sender) = Sender::open() else { return false };
            state.senders.insert(from, sender);
        }
        let Some(sender) = state.senders.get_mut(&from) else { return false };
        sender.used = now;
        sender.socket.send_to(message, library).is_ok()
    }

    fn true_sender(&self, hop: SocketAddr) -> Option<SocketAddr> {
        let state = self.state.lock();
        state.senders.iter().find(|(_, sender)| sender.hop == hop).map(|(&address, _)| address)
    }
}

impl Sender {
    fn open() -> std::io::Result<Self> {
        let socket = std::net::UdpSocket::bind(ANY_LOOPBACK)?;
        socket.set_nonblocking(true)?;
        let hop = socket.local_addr()?;
        Ok(Self { socket, hop, used: 0 })
    }
}

/// What the library believes to be the network.
pub(crate) struct Hop {
    pub(crate) kind: FrameKind,
    pub(crate) link: Arc<Link>,
    pub(crate) feed: Arc<Feed>,
    pub(crate) counters: Arc<Counters>,
}

#[async_trait]
impl Transport for Hop {
    async fn open(&self, _listen: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        let library = chitchat::transport::UdpSocket::open(ANY_LOOPBACK.into()).await?;
        let ours = UdpSocket::bind(ANY_LOOPBACK).await?;
        let ours_address = ours.local_addr()?;
        let library_address = library.local_addr()?;
        self.feed.state.lock().library = Some(library_address);
        let (link, feed) = (Arc::clone(&self.link), Arc::clone(&self.feed));
        let counters = Arc::clone(&self.counters);
        let buffer = vec![0; MESSAGE_BYTES_MAX].into_boxed_slice();
        let kind = self.kind;
        Ok(Box::new(HopSocket {
            kind,
            library,
            library_address,
            ours,
            ours_address,
            link,
            feed,
            counters,
            buffer,
        }))
    }
}

struct HopSocket {
    kind: FrameKind,
    library: chitchat::transport::UdpSocket,
    library_address: SocketAddr,
    ours: UdpSocket,
    ours_address: SocketAddr,
    link: Arc<Link>,
    feed: Arc<Feed>,
    counters: Arc<Counters>,
    buffer: Box<[u8]>,
}

impl HopSocket {
    /// The bytes of the message that the library just sent.
    async fn caught(&mut self) -> anyhow::Result<usize> {
        loop {
            let (length, from) = self.ours.recv_from(&mut self.buffer).await?;
            if from == self.library_address {
                return Ok(length);
            }
            self.counters.reject(Rejection::Foreign);
        }
    }
}

#[async_trait]
impl Socket for HopSocket {
    fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.library_address)
    }

    async fn send(&mut self, to: SocketAddr, envelope: ChitchatEnvelope) -> anyhow::Result<SendOutcome> {
        // A message that came after its patience must not be taken for this one.
        while self.ours.try_recv_from(&mut self.buffer).is_ok() {}
        let outcome = self.library.send(self.ours_address, envelope).await?;
        match tokio::time::timeout(HOP_PATIENCE, self.caught()).await {
            Ok(length) => self.link.send(self.kind, to, &self.buffer[..length?]).await,
            Err(_) => self.counters.hop_lost.up(),
        }
        Ok(outcome)
    }

    /// May be dropped at any await: nothing is taken from the socket before it is returned.
    async fn recv(&mut self) -> anyhow::Result<RecvOutcome> {
        loop {
            let outcome = self.library.recv().await?;
            match self.feed.true_sender(outcome.from_addr) {
                Some(from_addr) => return Ok(RecvOutcome { from_addr, ..outcome }),
                None => self.counters.reject(Rejection::Foreign),
            }
        }
    }
}
