//! One UDP port to the other replicas: seals and counts what goes out, throws away what does not belong.
//!
//! With a key, a sender's datagrams count only after it has shown that it is there now: it is sent a
//! random number and has to send it back, sealed. Only datagrams that it makes after that are taken, each
//! once. So neither yesterday's datagrams nor those of a minute ago can be played to anyone.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::Rng;
use routing::Moment;
use tokio::net::UdpSocket;

use crate::clock::Clock;
use crate::envelope::{DATAGRAM_BYTES_MAX, Header, Sealer};
use crate::faults::Fate;
use crate::fragments::{self, Fragments};
use crate::replay::Window;
use crate::stats::Counters;
use crate::{Faults, FrameKind, Rejection};

/// Senders whose windows are kept. A replica's restart is a new sender; the longest silent is forgotten and
/// would have to prove itself again.
const SENDERS_MAX: usize = 1_024;
/// Addresses known to be our own: a machine has a few.
const ECHOES_MAX: usize = 64;
/// Questions open at a time. Only holders of the key can make one be asked.
const CHALLENGES_MAX: usize = 256;
/// How long an answer may take.
const CHALLENGE_PATIENCE: Duration = Duration::from_secs(2);
/// How soon the same question is sent again.
const CHALLENGE_EVERY: Duration = Duration::from_millis(100);
/// After an error of the socket itself, so that a broken one does not spin.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// Which of the two UDP ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    Pulse,
    Ledger,
}

impl Port {
    /// The port P of the replica whose datagrams come from (or go to) this address.
    fn base(self, mut address: SocketAddr) -> SocketAddr {
        if self == Self::Ledger {
            address.set_port(address.port().wrapping_sub(1));
        }
        address
    }

    const fn carries(self, kind: FrameKind) -> bool {
        match kind {
            FrameKind::Pulse | FrameKind::Push | FrameKind::Staged | FrameKind::Queue => {
                matches!(self, Self::Pulse)
            }
            FrameKind::Ledger => matches!(self, Self::Ledger),
            FrameKind::Prove => true,
            FrameKind::Pull => false,
        }
    }
}

/// What a port hands on: the kind, the sender's address and the opened body.
pub(crate) type Deliver = Box<dyn Fn(FrameKind, SocketAddr, Vec<u8>) + Send + Sync>;

pub(crate) struct Link {
    port: Port,
    socket: UdpSocket,
    sealer: Arc<Sealer>,
    sender: u64,
    counter: AtomicU64,
    proofs: Mutex<Proofs>,
    /// Where this link's own datagrams came back from.
    echoes: Mutex<BTreeSet<SocketAddr>>,
    faults: Option<Arc<Faults>>,
    counters: Arc<Counters>,
    clock: Clock,
}

#[derive(Default)]
struct Proofs {
    proven: HashMap<u64, Proven>,
    asked: HashMap<u64, Asked>,
}

struct Asked {
    question: u128,
    at: Moment,
    sent: Moment,
}

struct Proven {
    window: Window,
    heard: Moment,
}

/// The body of a `Prove` datagram: the question and the answer.
#[derive(serde::Serialize, serde::Deserialize)]
enum Prove {
    Question(u128),
    Answer(u128),
}

impl Link {
    pub(crate) fn new(
        port: Port,
        socket: UdpSocket,
        sealer: Arc<Sealer>,
        faults: Option<Arc<Faults>>,
        counters: Arc<Counters>,
        clock: Clock,
    ) -> Self {
        let sender = rand::rng().random();
        let (counter, proofs) = (AtomicU64::new(1), Mutex::default());
        let echoes = Mutex::default();
        Self { port, socket, sealer, sender, counter, proofs, echoes, faults, counters, clock }
    }

    /// Whether what was sent to this address came back from it: it is another name of this replica. (Or
    /// somebody plays our datagrams to us: it must not keep us from talking to anyone.)
    pub(crate) fn is_echo(&self, address: &SocketAddr) -> bool {
        self.echoes.lock().contains(address)
    }

    /// Sends a message in as many datagrams as it takes. What can't be sent is lost, as on any network.
    pub(crate) async fn send(self: &Arc<Self>, kind: FrameKind, to: SocketAddr, message: &[u8]) {
        self.send_all(kind, &[to], message).await;
    }

    /// Sends the same datagrams to several; they are sealed once, and count once for each receiver.
    pub(crate) async fn send_all(self: &Arc<Self>, kind: FrameKind, to: &[SocketAddr], message: &[u8]) {
        let Some(parts) = fragments::split(message) else {
            return self.counters.values_oversized.up();
        };
        let count = parts.len() as u8;
        let first = self.counter.fetch_add(u64::from(count), Ordering::Relaxed);
        for (part, body) in (0..count).zip(parts) {
            let counter = first + u64::from(part);
            let header = Header { kind, part, parts: count, sender: self.sender, counter };
            let datagram = self.sealer.close(header, body);
            for &to in to {
                self.dispatch(kind, to, &datagram).await;
            }
        }
    }

    async fn dispatch(self: &Arc<Self>, kind: FrameKind, to: SocketAddr, datagram: &[u8]) {
        self.counters.sent(kind, datagram.len());
        match self.faults.as_ref().map_or(Fate::Send, |faults| faults.fate(kind, self.port.base(to))) {
            Fate::Drop => {}
            Fate::Send => drop(self.socket.send_to(datagram, to).await),
            Fate::Delay(delay) => {
                let (link, datagram) = (Arc::clone(self), datagram.to_vec());
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    drop(link.socket.send_to(&datagram, to).await);
                });
            }
        }
    }

    /// Receives for ever.
    pub(crate) async fn run(self: Arc<Self>, deliver: Deliver) {
        // One byte more than any of ours, to tell a longer one.
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX + 1];
        let mut fragments = Fragments::default();
        loop {
            let (length, from) = match self.socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                // Windows tells of a datagram too long for the buffer in this way.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => continue,
                Err(error) => {
                    tracing::debug!(%error, "gossip socket");
                    tokio::time::sleep(ERROR_PAUSE).await;
                    continue;
                }
            };
            match self.accept(&buffer[..length], from, &mut fragments).await {
                Ok(Some((kind, message))) => deliver(kind, from, message),
                Ok(None) => {}
                Err(cause) => {
                    tracing::trace!(%from, cause = cause.as_str(), "datagram thrown away");
                    self.counters.reject(cause);
                }
            }
        }
    }

    async fn accept(
        self: &Arc<Self>,
        datagram: &[u8],
        from: SocketAddr,
        fragments: &mut Fragments,
    ) -> Result<Option<(FrameKind, Vec<u8>)>, Rejection> {
        let (header, body) = self.sealer.open(datagram)?;
        if header.sender == self.sender {
            let mut echoes = self.echoes.lock();
            if echoes.len() < ECHOES_MAX {
                echoes.insert(from);
            }
            return Err(Rejection::Own);
        }
        let idle_proof = header.kind == FrameKind::Prove && !self.sealer.is_keyed();
        if !self.port.carries(header.kind) || idle_proof {
            return Err(Rejection::Kind);
        }
        let now = self.clock.now();
        if header.kind == FrameKind::Prove {
            self.counters.received(header.kind, datagram.len());
            return self.prove(header, &body, from, now).await.map(|()| None);
        }
        if self.sealer.is_keyed() && !self.admit(header, now)? {
            if let Some(question) = self.ask(header.sender, now) {
                self.tell(&Prove::Question(question), from).await;
            }
            return Err(Rejection::Unproven);
        }
        self.counters.received(header.kind, datagram.len());
        Ok(fragments.offer(header, body, now)?.map(|message| (header.kind, message)))
    }

    /// Whether the sender is proven; an error if the datagram was seen before.
    fn admit(&self, header: Header, now: Moment) -> Result<bool, Rejection> {
        let mut proofs = self.proofs.lock();
        let Some(proven) = proofs.proven.get_mut(&header.sender) else { return Ok(false) };
        if !proven.window.admit(header.counter) {
            return Err(Rejection::Replayed);
        }
        proven.heard = now;
        Ok(true)
    }

    /// The question for the sender, unless it was sent just now.
    fn ask(&self, sender: u64, now: Moment) -> Option<u128> {
        let mut proofs = self.proofs.lock();
        proofs.asked.retain(|_, asked| now.since(asked.at) < CHALLENGE_PATIENCE);
        if let Some(asked) = proofs.asked.get_mut(&sender) {
            let again = now.since(asked.sent) >= CHALLENGE_EVERY;
            return again.then(|| {
                asked.sent = now;
                asked.question
            });
        }
        if proofs.asked.len() >= CHALLENGES_MAX {
            return None;
        }
        let question = rand::rng().random();
        proofs.asked.insert(sender, Asked { question, at: now, sent: now });
        Some(question)
    }

    async fn prove(
        self: &Arc<Self>,
        header: Header,
        body: &[u8],
        from: SocketAddr,
        now: Moment,
    ) -> Result<(), Rejection> {
        match crate::codec::decode(body).map_err(|_| Rejection::Malformed)? {
            Prove::Question(question) => self.tell(&Prove::Answer(question), from).await,
            Prove::Answer(answer) => {
                let mut proofs = self.proofs.lock();
                let asked = proofs.asked.get(&header.sender).filter(|asked| asked.question == answer);
                asked.ok_or(Rejection::Replayed)?;
                proofs.asked.remove(&header.sender);
                if proofs.proven.len() >= SENDERS_MAX {
                    let silent = proofs.proven.iter().min_by_key(|(_, p)| p.heard).map(|(&sender, _)| sender);
                    silent.and_then(|sender| proofs.proven.remove(&sender));
                }
                let window = Window::after(header.counter);
                proofs.proven.insert(header.sender, Proven { window, heard: now });
            }
        }
        Ok(())
    }

    async fn tell(self: &Arc<Self>, prove: &Prove, to: SocketAddr) {
        if let Some(body) = crate::codec::encode(prove) {
            self.send(FrameKind::Prove, to, &body).await;
        }
    }
}
