//! Starts the tasks of one replica's gossip and holds them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use chitchat::ChitchatId;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::AbortHandle;

use crate::board::Board;
use crate::clock::{self, Clock};
use crate::directory::Directory;
use crate::envelope::Sealer;
use crate::hop::{Feed, Hop};
use crate::hub::{self, Hub, INPUTS_MAX, Input};
use crate::ledger::Log;
use crate::link::{Deliver, Link, Port};
use crate::publish::{Goodbye, Publisher};
use crate::repair::Repairs;
use crate::shared::{Shared, ledger_address};
use crate::stats::{Counters, GossipStats, PeerStatus};
use crate::{Facts, FrameKind, GossipConfig, GossipError, GossipEvent, join, ports, seeds, serve};

/// How long goodbye may take.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(1);
/// Between two new beginnings after the gossip library gave up.
const LIBRARY_PAUSE: Duration = Duration::from_secs(1);

/// A replica's running gossip. Dropping it ends it without a goodbye, as a crash would.
pub struct Gossip {
    shared: Arc<Shared>,
    address: SocketAddr,
    nudged: Arc<Notify>,
    goodbyes: mpsc::Sender<Goodbye>,
    tasks: Vec<AbortHandle>,
}

/// Opens the ports and begins to gossip.
///
/// Facts are asked for, and events sent, from tasks on the current tokio runtime, until the [`Gossip`] is
/// dropped or nobody receives the events any more. Events wait for room in their channel; gossip catches up
/// by itself with whoever receives slowly.
///
/// # Errors
///
/// If a setting is out of range or one of the three ports can't be opened.
pub async fn start(
    config: GossipConfig,
    facts: Arc<dyn Facts>,
    events: mpsc::Sender<GossipEvent>,
) -> Result<Gossip, GossipError> {
    config.validate()?;
    let ports = ports::open(config.listen).await?;
    let address = ports.address;
    let mut advertised = config.advertise.unwrap_or(address);
    if advertised.port() == 0 {
        advertised.set_port(address.port());
    }
    let clock = Clock::start();
    let counters = Arc::new(Counters::default());
    let sealer = Arc::new(Sealer::new(&config.cluster_id, &config.keys));
    let generation = config.generation.unwrap_or_else(clock::generation);
    let link = |port, socket| {
        let (sealer, faults, counters) = (Arc::clone(&sealer), config.faults.clone(), Arc::clone(&counters));
        Arc::new(Link::new(port, socket, sealer, faults, counters, clock))
    };
    let pulse_link = link(Port::Pulse, ports.pulse);
    let ledger_link = link(Port::Ledger, ports.ledger);
    let (pulse_feed, ledger_feed) = (Arc::new(Feed::default()), Arc::new(Feed::default()));
    let posted = Arc::new(Notify::new());
    let board = async |kind: FrameKind, link: &Arc<Link>, feed: &Arc<Feed>, address, every| {
        let (link, feed, counters) = (Arc::clone(link), Arc::clone(feed), Arc::clone(&counters));
        let id = ChitchatId::new(config.replica.as_str(), generation, address);
        let cluster_id = format!("{}/{}", config.cluster_id, kind.as_str());
        let hop = Hop { kind, link, feed, counters };
        Board::open(hop, id, cluster_id, every, Arc::clone(&posted)).await.map_err(GossipError::Library)
    };
    let pulse_board =
        board(FrameKind::Pulse, &pulse_link, &pulse_feed, advertised, config.pulse_every).await?;
    let ledger_at = ledger_address(advertised);
    let ledger_board =
        board(FrameKind::Ledger, &ledger_link, &ledger_feed, ledger_at, config.ledger_every).await?;
    let shared = Arc::new(Shared {
        advertised,
        clock,
        counters: Arc::clone(&counters),
        sealer,
        generation: AtomicU64::new(generation),
        directory: Directory::default(),
        log: Mutex::new(Log::new(config.log_bytes_max)),
        facts,
        joined: AtomicBool::new(false),
        seeded: AtomicBool::new(!config.seeds.is_empty()),
        pulse_link: Arc::clone(&pulse_link),
        pulse_board,
        ledger_board,
        events,
        config,
    });
    let (inputs, hub_inputs) = mpsc::channel(INPUTS_MAX);
    let (goodbyes, publisher_goodbyes) = mpsc::channel(1);
    let nudged = Arc::new(Notify::new());
    let pulse_deliver = deliver(pulse_feed, inputs.clone(), Arc::clone(&counters));
    let ledger_deliver = deliver(ledger_feed, inputs.clone(), counters);
    let hub = Hub::new(Arc::clone(&shared), Repairs::new(Arc::clone(&shared), inputs.clone()));
    let tasks = [
        tokio::spawn(pulse_link.run(pulse_deliver)),
        tokio::spawn(ledger_link.run(ledger_deliver)),
        tokio::spawn(hub.run(hub_inputs, posted)),
        tokio::spawn(Publisher::new(Arc::clone(&shared)).run(Arc::clone(&nudged), publisher_goodbyes)),
        tokio::spawn(serve::run(Arc::clone(&shared), ports.pulls)),
        tokio::spawn(seeds::run(Arc::clone(&shared))),
        tokio::spawn(watch_library(Arc::clone(&shared), inputs.clone())),
        tokio::spawn(join::run(Arc::clone(&shared), inputs)),
    ];
    let tasks = tasks.iter().map(tokio::task::JoinHandle::abort_handle).collect();
    Ok(Gossip { shared, address, nudged, goodbyes, tasks })
}

impl Gossip {
    /// Where port P was opened.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where the others reach port P.
    pub fn advertised(&self) -> SocketAddr {
        self.shared.advertised
    }

    /// Says that facts changed: they are pushed at once, or within `push_every` while there is much to say. Cheap enough for every request.
    pub fn nudge(&self) {
        self.nudged.notify_one();
    }

    /// The same for whoever must not keep the gossip alive.
    pub fn nudger(&self) -> impl Fn() + Send + Sync + 'static {
        let nudged = Arc::clone(&self.nudged);
        move || nudged.notify_one()
    }

    /// The other replicas that were heard of in the last two minutes.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.shared.directory.status(self.shared.clock.now())
    }

    /// A look at the counters and the other replicas.
    pub fn stats(&self) -> GossipStats {
        self.shared.counters.look(self.peers())
    }

    /// Tells the others that this replica ends, and waits until they may have heard it, at most a second.
    /// From then on they take it for gone, whatever else it tells.
    pub async fn goodbye(&self) {
        let (done, told) = oneshot::channel();
        let telling = async {
            if self.goodbyes.send(done).await.is_ok() {
                let _ = told.await;
            }
        };
        let _ = tokio::time::timeout(GOODBYE_PATIENCE, telling).await;
    }
}

impl Drop for Gossip {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.shared.pulse_board.close();
        self.shared.ledger_board.close();
    }
}

/// Where a port's messages go.
fn deliver(feed: Arc<Feed>, inputs: mpsc::Sender<Input>, counters: Arc<Counters>) -> Deliver {
    Box::new(move |kind, from, message| {
        let offered = match kind {
            FrameKind::Push => Some(hub::offer_push(&inputs, &message)),
            FrameKind::Staged => Some(hub::offer_staged(&inputs, &message)),
            FrameKind::Queue => Some(hub::offer_queue(&inputs, &message)),
            _ => None,
        };
        if let Some(taken) = offered {
            if let Err(cause) = taken {
                counters.reject(cause);
            }
        } else if !feed.deliver(from, &message) {
            counters.hop_lost.up();
        }
    })
}

/// Reports when the library ends by itself: a bug in it must not end the gossip.
async fn watch_library(shared: Arc<Shared>, inputs: mpsc::Sender<Input>) {
    loop {
        let error = tokio::select! {
            ended = shared.pulse_board.ended() => ended,
            ended = shared.ledger_board.ended() => ended,
        };
        // It ends without an error when it is begun anew.
        if let Err(error) = error {
            tracing::error!(%error, "the gossip library ended; beginning anew");
            let _ = inputs.send(Input::LibraryEnded).await;
        }
        tokio::time::sleep(LIBRARY_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use routing::ReplicaId;
    use routing::facts::{LedgerRecord, Pulse};

    use super::*;

    struct Quiet;

    impl Facts for Quiet {
        fn pulse(&self) -> Pulse {
            Pulse { ready: true, ..Pulse::default() }
        }

        fn take_ledger(&self, _: usize) -> Vec<LedgerRecord> {
            Vec::new()
        }

        fn snapshot_page(&self, _: Option<u64>, _: usize) -> (Vec<LedgerRecord>, Option<u64>) {
            (Vec::new(), None)
        }
    }

    async fn until(is_so: impl Fn() -> bool) {
        let waiting = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), waiting).await.expect("it becomes so");
    }

    #[tokio::test]
    async fn the_end_of_the_library_does_not_end_the_gossip() {
        let start_one = async |name, seeds: Vec<String>| {
            let mut config = GossipConfig::new(ReplicaId::new(name), ([127, 0, 0, 1], 0).into());
            (config.seeds, config.generation) = (seeds, Some(5));
            let (events, mut incoming) = mpsc::channel(16);
            tokio::spawn(async move { while incoming.recv().await.is_some() {} });
            start(config, Arc::new(Quiet), events).await.expect("it starts")
        };
        let a = start_one("a", vec![]).await;
        let b = start_one("b", vec![a.address().to_string()]).await;
        let lives_as = |generation| {
            a.peers().iter().any(|peer| {
                peer.generation == generation && peer.age.is_some_and(|age| age < Duration::from_millis(300))
            })
        };
        until(|| lives_as(5)).await;
        b.shared.ledger_board.close();
        until(|| lives_as(6)).await;
        b.shared.pulse_board.close();
        until(|| lives_as(7)).await;
        assert_eq!(b.stats().restarts, 2);
    }
}
