//! What gossip tells the replica that runs it.

use std::net::SocketAddr;

use routing::ReplicaId;
use routing::facts::{LedgerRecord, LoadPush, Pulse, QueuePush, StagedPush};

/// One piece of news. Events come in the order in which they are to be applied.
#[derive(Clone, Debug, PartialEq)]
pub enum GossipEvent {
    /// The replica has just shown that it lives; at most every 50 ms for each. Nothing else shows that.
    Heartbeat {
        /// Who.
        replica: ReplicaId,
    },
    /// All that a replica says of itself. Told when it changed, and again now and then.
    Pulse {
        /// Who.
        replica: ReplicaId,
        /// Replaces all that was known of it.
        pulse: Pulse,
    },
    /// Load rows that changed since.
    Load {
        /// Whose.
        replica: ReplicaId,
        /// The rows; others are as they were.
        push: LoadPush,
    },
    /// What a replica has staged at prefill engines. They may overtake each other; their versions say which is newer.
    Staged {
        /// Who.
        replica: ReplicaId,
        /// All that it has staged, and some of the rows.
        push: StagedPush,
    },
    /// Who waits at a replica for room, if that has changed since its pulse.
    Queue {
        /// Where.
        replica: ReplicaId,
        /// All of its queue.
        push: QueuePush,
    },
    /// New records of a replica's ledger, usually in its order. Ones that were lost on the way come later.
    Ledger {
        /// Whose.
        replica: ReplicaId,
        /// The records.
        records: Vec<LedgerRecord>,
    },
    /// The replica is about to end: whatever was its own is over.
    Goodbye {
        /// Who.
        replica: ReplicaId,
    },
    /// The replica is silent, and its machine says that nobody listens at its port.
    Refused {
        /// Who.
        replica: ReplicaId,
    },
    /// Another live replica uses this one's name. One of them has to be renamed; until then the others
    /// listen to whichever began later.
    NameClash {
        /// Where the other one is, if it said so.
        address: Option<SocketAddr>,
    },
    /// Part of a live replica's index, for this one which joins (or missed more than can be made up).
    Snapshot {
        /// Who gives it.
        from: ReplicaId,
        /// Some records.
        records: Vec<LedgerRecord>,
        /// Whether no more follow.
        last: bool,
    },
    /// Joining is over; told once.
    SnapshotDone(Outcome),
}

/// How joining ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With the whole index of a live replica.
    Joined {
        /// Whose.
        from: ReplicaId,
        /// How many records it had.
        records: u64,
    },
    /// There are no seeds, or they are all this replica, and nobody called.
    Alone,
    /// Every live replica has just begun, too.
    AllNew,
    /// There are seeds, and none answered in time.
    Unreachable,
    /// Others are there, and none gave a whole snapshot in time.
    Interrupted {
        /// Who was asked last.
        from: ReplicaId,
    },
}

impl Outcome {
    /// The outcome as a metric label.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Joined { .. } => "joined",
            Self::Alone => "alone",
            Self::AllNew => "all_new",
            Self::Unreachable => "unreachable",
            Self::Interrupted { .. } => "interrupted",
        }
    }
}
