//! What the tasks of one replica's gossip share.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use routing::ReplicaId;
use routing::facts::{LedgerRecord, LoadRow, Pulse, QueueRow, StagedRow};
use tokio::sync::mpsc;

use crate::board::Board;
use crate::clock::Clock;
use crate::directory::Directory;
use crate::envelope::Sealer;
use crate::ledger::Log;
use crate::link::Link;
use crate::stats::Counters;
use crate::{GossipConfig, GossipEvent};

/// Where gossip gets what it tells of this replica. Called often and from gossip's own tasks: answers come
/// from memory, without waiting.
pub trait Facts: Send + Sync + 'static {
    /// All that this replica says of itself. `epoch` and `version` are filled in by gossip.
    fn pulse(&self) -> Pulse;

    /// The load rows of [`pulse`](Self::pulse) alone; asked for at every push.
    fn load(&self) -> Vec<LoadRow> {
        self.pulse().load
    }

    /// The queue of [`pulse`](Self::pulse) alone; likewise.
    fn queue(&self) -> QueueRow {
        self.pulse().queue
    }

    /// All that this replica has staged at prefill engines, by number, and who is to be told; asked for at every push.
    fn staged(&self) -> (Vec<Arc<StagedRow>>, Vec<ReplicaId>) {
        (Vec::new(), Vec::new())
    }

    /// Up to `max` of the own records that were not taken yet, oldest first.
    fn take_ledger(&self, max: usize) -> Vec<LedgerRecord>;

    /// About `limit` records of the whole index (placements, pins and operators' changes from every
    /// origin), and where to go on; begins at `None`, ends at `None`.
    fn snapshot_page(&self, cursor: Option<u64>, limit: usize) -> (Vec<LedgerRecord>, Option<u64>);
}

pub(crate) struct Shared {
    pub(crate) config: GossipConfig,
    /// Where others reach port P.
    pub(crate) advertised: SocketAddr,
    pub(crate) clock: Clock,
    pub(crate) counters: Arc<Counters>,
    pub(crate) sealer: Arc<Sealer>,
    pub(crate) generation: AtomicU64,
    pub(crate) directory: Directory,
    pub(crate) log: Mutex<Log>,
    pub(crate) facts: Arc<dyn Facts>,
    /// Whether joining is over.
    pub(crate) joined: AtomicBool,
    /// Whether the seeds name anyone but this replica, as far as is known.
    pub(crate) seeded: AtomicBool,
    pub(crate) pulse_link: Arc<Link>,
    pub(crate) pulse_board: Board,
    pub(crate) ledger_board: Board,
    pub(crate) events: mpsc::Sender<GossipEvent>,
}

impl Shared {
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }
}

/// The address of port P + 1 for the replica whose port P this is.
pub(crate) fn ledger_address(mut address: SocketAddr) -> SocketAddr {
    address.set_port(address.port().wrapping_add(1));
    address
}
