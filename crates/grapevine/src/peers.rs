//! Between the gossip and the core: what this replica tells, and what it hears.

use std::sync::Arc;

use actors::{Clock, PeerEvent};
use gossip::{Facts, GossipEvent};
use routing::Router;
use routing::facts::{LedgerRecord, LoadRow, Pulse};
use tokio::sync::mpsc;
use tracing::{info, warn};

/// This replica's own facts, read from its core when gossip asks.
pub(crate) struct OwnFacts {
    router: Arc<Router>,
    clock: Clock,
}

impl OwnFacts {
    pub(crate) const fn new(router: Arc<Router>, clock: Clock) -> Self {
        Self { router, clock }
    }
}

impl Facts for OwnFacts {
    fn pulse(&self) -> Pulse {
        self.router.pulse(self.clock.now())
    }

    fn load(&self) -> Vec<LoadRow> {
        self.router.load_rows(self.clock.now())
    }

    fn take_ledger(&self, max: usize) -> Vec<LedgerRecord> {
        self.router.take_ledger(max)
    }

    fn snapshot_page(&self, cursor: Option<u64>, limit: usize) -> (Vec<LedgerRecord>, Option<u64>) {
        self.router.snapshot_page(cursor, limit)
    }
}

/// Hands what the gossip hears to the actors, in their words.
pub(crate) async fn translate(mut events: mpsc::Receiver<GossipEvent>, peers: mpsc::Sender<PeerEvent>) {
    while let Some(event) = events.recv().await {
        let event = match event {
            GossipEvent::Heartbeat { replica } => PeerEvent::Heartbeat { replica },
            GossipEvent::Pulse { replica, pulse } => PeerEvent::Pulse { replica, pulse },
            GossipEvent::Load { replica, push } => PeerEvent::Load { replica, push },
            GossipEvent::Ledger { records, .. } => PeerEvent::Ledger { records },
            GossipEvent::Snapshot { records, .. } => PeerEvent::Snapshot { records },
            GossipEvent::Goodbye { replica } => PeerEvent::Goodbye { replica },
            GossipEvent::Refused { replica } => PeerEvent::Refused { replica },
            GossipEvent::SnapshotDone(outcome) => {
                info!(outcome = outcome.as_str(), "joined");
                PeerEvent::CaughtUp
            }
            GossipEvent::NameClash { address } => {
                warn!(
                    ?address,
                    "another live replica uses this one's name: give one of them another `replica_id`"
                );
                continue;
            }
        };
        if peers.send(event).await.is_err() {
            return;
        }
    }
}
