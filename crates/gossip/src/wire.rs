//! What is inside: the values under the gossip library's keys, the pushes and the pulls.

use routing::facts::{LedgerRecord, LoadRow, ObservedRow, QueueRow, SpeedRow, StagedPush, StagedRow};
use routing::{EndpointId, ReplicaId};
use serde::{Deserialize, Serialize};

/// The key of [`Meta`] in the pulse.
pub(crate) const META_KEY: &str = "m";
/// The key of [`Waiting`] in the pulse. A replica that does not know it passes it over. (`q` was another form of it.)
pub(crate) const QUEUE_KEY: &str = "w";
/// The key of [`Head`] in the ledger.
pub(crate) const HEAD_KEY: &str = "h";
/// Parts of a pulse at most, a power of two: `p00` to `p3f`.
pub(crate) const PARTS_MAX: usize = 64;
/// Slots of the ledger: `s00` to `s0f`. At 1.2 KB each a ring is 19 KB per replica.
pub(crate) const SLOTS_MAX: usize = 16;

/// The key of part `index` of the pulse.
pub(crate) fn part_key(index: usize) -> String {
    format!("p{index:02x}")
}

/// The key of slot `index` of the ledger.
pub(crate) fn slot_key(index: usize) -> String {
    format!("s{index:02x}")
}

/// The index in `p07` or `s07`, if it is one below `limit`.
pub(crate) fn key_index(key: &str, letter: char, limit: usize) -> Option<usize> {
    let digits = key.strip_prefix(letter).filter(|digits| digits.len() == 2)?;
    usize::from_str_radix(digits, 16).ok().filter(|&index| index < limit)
}

/// The part of a pulse that is not about endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Meta {
    pub(crate) version: u64,
    pub(crate) state: Presence,
}

/// Who waits at the replica for room.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Waiting {
    /// On the scale of [`Part::version`].
    pub(crate) version: u64,
    pub(crate) queue: QueueRow,
}

/// How a replica stands in the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Presence {
    pub(crate) ready: bool,
    pub(crate) draining: bool,
    /// It is about to end.
    pub(crate) goodbye: bool,
}

/// A pulse's rows for one range of endpoint ids: those whose first `split` bits are the part's number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// Milliseconds since the replica began, made to grow with every value it tells.
    pub(crate) version: u64,
    /// There are `2^split` parts.
    pub(crate) split: u8,
    pub(crate) load: Vec<LoadRow>,
    pub(crate) observed: Vec<ObservedRow>,
    pub(crate) speed: Vec<SpeedRow>,
    pub(crate) ejected: Vec<EndpointId>,
}

/// How far a replica's ledger goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    /// Number of the last record; the first is 1.
    pub(crate) sequence: u64,
    /// Of all records up to it, chained.
    pub(crate) digest: u64,
}

impl Head {
    /// The head after one more record.
    pub(crate) fn after(self, record_digest: u64) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.digest.to_le_bytes());
        bytes[8..].copy_from_slice(&record_digest.to_le_bytes());
        Self { sequence: self.sequence + 1, digest: xxhash_rust::xxh3::xxh3_64(&bytes) }
    }
}

/// Records that follow each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    /// Number of the first; the others follow.
    pub(crate) first: u64,
    pub(crate) records: Vec<LedgerRecord>,
}

/// One push datagram.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Push {
    pub(crate) replica: ReplicaId,
    pub(crate) generation: u64,
    /// On the scale of [`Part::version`].
    pub(crate) version: u64,
    pub(crate) state: Presence,
    pub(crate) head: Head,
    /// Records new since the last push.
    pub(crate) run: Run,
    /// Load rows changed since the last push, absolute; an all-zero row says that nothing is left.
    pub(crate) load: Vec<LoadRow>,
}

/// A replica's queue, pushed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Queued {
    pub(crate) replica: ReplicaId,
    pub(crate) generation: u64,
    pub(crate) waiting: Waiting,
}

/// One datagram of what a replica has staged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staged {
    pub(crate) replica: ReplicaId,
    pub(crate) generation: u64,
    /// On the scale of [`Part::version`].
    pub(crate) version: u64,
    /// Of all that is staged the first number, and how far each of the others is from the one before.
    pub(crate) first: Option<u64>,
    pub(crate) gaps: Vec<u64>,
    pub(crate) rows: Vec<StagedRow>,
}

impl Staged {
    /// That all these numbers (ascending) are staged, without any row.
    pub(crate) fn new(replica: ReplicaId, generation: u64, version: u64, held: &[u64]) -> Self {
        let gaps = held.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Self { replica, generation, version, first: held.first().copied(), gaps, rows: Vec::new() }
    }

    /// The same in the core's words.
    pub(crate) fn into_push(self) -> StagedPush {
        let mut held: Vec<u64> = self.first.into_iter().collect();
        held.extend(self.gaps.iter().scan(self.first.unwrap_or(0), |at, gap| {
            *at = at.saturating_add(*gap);
            Some(*at)
        }));
        StagedPush { epoch: self.generation, version: self.version, held, rows: self.rows }
    }
}

/// What a replica asks another over TCP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PullRequest {
    /// Whom it asks, so that a request can't be used elsewhere or after a restart.
    pub(crate) replica: ReplicaId,
    pub(crate) generation: u64,
    /// Drawn for this request; the answer is sealed to it.
    pub(crate) nonce: [u8; 16],
    pub(crate) wanted: Wanted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Wanted {
    /// Your own records from this one on.
    Range { from: u64 },
    /// All you know, page by page; begin with `None`.
    Snapshot { cursor: Option<u64> },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum PullReply {
    /// Some of the records asked for; more may follow up to the head.
    Range { run: Run, head: Head },
    /// The records asked for are no longer kept: take a snapshot.
    Gone,
    /// One page; ask again with the cursor, if there is one.
    Snapshot { records: Vec<LedgerRecord>, cursor: Option<u64>, positions: Vec<Position>, joined: bool },
    /// Another replica than the one asked, or another incarnation of it, is here.
    NotMe,
}

/// Up to where the giver of a snapshot has a replica's ledger, its own included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    pub(crate) replica: ReplicaId,
    pub(crate) generation: u64,
    pub(crate) head: Head,
}
