//! Between the gossip and the core: what this replica tells, and what it hears.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use actors::{Clock, PeerEvent};
use gossip::{Facts, GossipEvent};
use routing::facts::{LedgerRecord, LoadRow, Pulse, QueueRow, StagedRow};
use routing::{ReplicaId, Router};
use tokio::sync::mpsc::{self, error::TrySendError};
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

    fn queue(&self) -> QueueRow {
        self.router.queue_row(self.clock.now())
    }

    fn staged(&self) -> (Vec<Arc<StagedRow>>, Vec<ReplicaId>) {
        (self.router.staged_rows(), self.router.heirs())
    }

    fn take_ledger(&self, max: usize) -> Vec<LedgerRecord> {
        self.router.take_ledger(max)
    }

    fn snapshot_page(&self, cursor: Option<u64>, limit: usize) -> (Vec<LedgerRecord>, Option<u64>) {
        self.router.snapshot_page(cursor, limit)
    }
}

/// Hands what the gossip hears to the actors, in their words. Waits where they don't keep up, so that the gossip
/// waits too and catches up afterwards; `delayed` counts how often.
pub(crate) async fn translate(
    mut events: mpsc::Receiver<GossipEvent>,
    peers: mpsc::Sender<PeerEvent>,
    delayed: Arc<AtomicU64>,
) {
    while let Some(event) = events.recv().await {
        let event = match event {
            GossipEvent::Heartbeat { replica } => PeerEvent::Heartbeat { replica },
            GossipEvent::Pulse { replica, pulse } => PeerEvent::Pulse { replica, pulse },
            GossipEvent::Load { replica, push } => PeerEvent::Load { replica, push },
            GossipEvent::Queue { replica, push } => PeerEvent::Queue { replica, push },
            GossipEvent::Staged { replica, push } => PeerEvent::Staged { replica, push },
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
        match peers.try_send(event) {
            Ok(()) => {}
            Err(TrySendError::Full(event)) => {
                delayed.fetch_add(1, Ordering::Relaxed);
                if peers.send(event).await.is_err() {
                    return;
                }
            }
            Err(TrySendError::Closed(_)) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_event_that_has_to_wait_is_counted_and_not_lost() {
        let replica = |number: usize| ReplicaId::new(&format!("replica-{number}"));
        let (heard, events) = mpsc::channel(8);
        let (to_actors, mut peer_events) = mpsc::channel(2);
        for number in 0..5 {
            heard.send(GossipEvent::Heartbeat { replica: replica(number) }).await.unwrap();
        }
        drop(heard);
        let delayed = Arc::new(AtomicU64::new(0));
        let translating = tokio::spawn(translate(events, to_actors, Arc::clone(&delayed)));
        // The test runs on one thread: whenever it yields, the translation goes on until it has to wait.
        tokio::task::yield_now().await;
        assert_eq!(delayed.load(Ordering::Relaxed), 1, "two fit, the third waits");
        for number in 0..5 {
            assert_eq!(peer_events.recv().await, Some(PeerEvent::Heartbeat { replica: replica(number) }));
        }
        assert_eq!(peer_events.recv().await, None);
        translating.await.unwrap();
    }
}
