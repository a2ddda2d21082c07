//! The replicas as the hub last saw them, for the tasks that only need to read.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::RwLock;
use routing::{Moment, ReplicaId};

use crate::stats::PeerStatus;
use crate::wire::{Head, Position};

#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) replica: ReplicaId,
    pub(crate) generation: u64,
    pub(crate) address: Option<SocketAddr>,
    pub(crate) lived: Option<Moment>,
    pub(crate) goodbye: bool,
    /// Whether it may be pushed to and pulled from.
    pub(crate) live: bool,
    pub(crate) upto: Head,
    /// Where `upto` was a while ago, so that what was handed on up to it has been applied.
    pub(crate) settled: Head,
}

#[derive(Default)]
pub(crate) struct Directory {
    known: RwLock<Arc<[Known]>>,
    targets: RwLock<Arc<[SocketAddr]>>,
}

impl Directory {
    pub(crate) fn publish(&self, known: Vec<Known>) {
        let targets = known.iter().filter(|k| k.live).filter_map(|k| k.address).collect();
        *self.known.write() = known.into();
        *self.targets.write() = targets;
    }

    /// The live replicas' ports P.
    pub(crate) fn targets(&self) -> Arc<[SocketAddr]> {
        Arc::clone(&self.targets.read())
    }

    pub(crate) fn known(&self) -> Arc<[Known]> {
        Arc::clone(&self.known.read())
    }

    pub(crate) fn status(&self, now: Moment) -> Vec<PeerStatus> {
        let status = |known: &Known| PeerStatus {
            replica: known.replica.clone(),
            address: known.address,
            generation: known.generation,
            age: known.lived.map(|lived| now.since(lived)),
            goodbye: known.goodbye,
            ledger_sequence: known.upto.sequence,
        };
        self.known().iter().map(status).collect()
    }

    pub(crate) fn positions(&self) -> Vec<Position> {
        let position = |known: &Known| Position {
            replica: known.replica.clone(),
            generation: known.generation,
            head: known.settled,
        };
        self.known().iter().map(position).collect()
    }
}
