//! What gossip counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use routing::ReplicaId;

use crate::FrameKind;

/// Why a datagram (or a pull) was thrown away. The text is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rejection {
    /// It does not begin as ours do.
    Foreign,
    /// Shorter than its header, or than its seal.
    Truncated,
    /// Longer than any that we send.
    Oversized,
    /// A version of the format that this build does not speak.
    Version,
    /// Another cluster's.
    Cluster,
    /// A kind that has no business at this port, or none at all.
    Kind,
    /// Open where a seal is needed, or sealed where no key is.
    Unsealed,
    /// Its seal does not open with our keys.
    Seal,
    /// Seen before.
    Replayed,
    /// From a sender that has not yet shown that it is there now.
    Unproven,
    /// Our own, come back.
    Own,
    /// Its seal opened and its inside makes no sense.
    Malformed,
    /// Nobody had time for it.
    Overload,
    /// An earlier incarnation of a replica that has since restarted.
    Outlived,
}

impl Rejection {
    /// All causes.
    pub const ALL: [Self; 14] = [
        Self::Foreign,
        Self::Truncated,
        Self::Oversized,
        Self::Version,
        Self::Cluster,
        Self::Kind,
        Self::Unsealed,
        Self::Seal,
        Self::Replayed,
        Self::Unproven,
        Self::Own,
        Self::Malformed,
        Self::Overload,
        Self::Outlived,
    ];

    /// The cause as a metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Foreign => "foreign",
            Self::Truncated => "truncated",
            Self::Oversized => "oversized",
            Self::Version => "version",
            Self::Cluster => "cluster",
            Self::Kind => "kind",
            Self::Unsealed => "unsealed",
            Self::Seal => "seal",
            Self::Replayed => "replayed",
            Self::Unproven => "unproven",
            Self::Own => "own",
            Self::Malformed => "malformed",
            Self::Overload => "overload",
            Self::Outlived => "outlived",
        }
    }
}

/// A look at the counters; all of them only grow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GossipStats {
    /// Bytes in each direction, headers and seals included, IP and TCP headers not.
    pub traffic: Vec<Traffic>,
    /// Datagrams and pulls thrown away, by cause; causes that never came up are left out.
    pub rejected: Vec<(Rejection, u64)>,
    /// The other replicas and when each last showed that it lives.
    pub peers: Vec<PeerStatus>,
    /// Pull connections made to fill a gap or to get a snapshot.
    pub pulls: u64,
    /// Pulls that failed.
    pub pulls_failed: u64,
    /// Pulls answered to others.
    pub pulls_served: u64,
    /// Records that arrived neither by push nor slot and had to be pulled.
    pub records_missed: u64,
    /// Times that another replica's log did not match what was received of it.
    pub ledger_diverged: u64,
    /// Bursts of pushes sent.
    pub pushes: u64,
    /// Bursts put off because the pushes' byte budget was used up.
    pub pushes_deferred: u64,
    /// Values refused because they were too large for the gossip library.
    pub values_oversized: u64,
    /// Datagrams lost on the private hop to and from the gossip library.
    pub hop_lost: u64,
    /// Own gossip begun anew: a newer one of this name was heard, or the library gave up.
    pub restarts: u64,
    /// Times that another live replica was found to use this one's name.
    pub name_clashes: u64,
    /// Times that a seed's name could not be looked up.
    pub seed_lookups_failed: u64,
}

impl GossipStats {
    /// How often a datagram was thrown away for this cause.
    pub fn rejected(&self, cause: Rejection) -> u64 {
        self.rejected.iter().find(|(c, _)| *c == cause).map_or(0, |(_, count)| *count)
    }

    /// Bytes sent and received, in all.
    pub fn bytes(&self) -> (u64, u64) {
        self.traffic.iter().fold((0, 0), |(sent, got), t| (sent + t.sent_bytes, got + t.received_bytes))
    }
}

/// Bytes of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Which.
    pub kind: FrameKind,
    /// Sent by this replica.
    pub sent_bytes: u64,
    /// Received by it and not thrown away.
    pub received_bytes: u64,
}

/// Another replica, as gossip sees it. Whether it is dead is decided elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// Who.
    pub replica: ReplicaId,
    /// Where it says that it is reached, if it said so yet.
    pub address: Option<std::net::SocketAddr>,
    /// Which incarnation.
    pub generation: u64,
    /// Since it last showed that it lives; `None` if it never did since it was first heard of.
    pub age: Option<Duration>,
    /// Whether it said goodbye.
    pub goodbye: bool,
    /// Its ledger records that arrived here without a gap: the sequence of the last.
    pub ledger_sequence: u64,
}

/// One counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, by: u64) {
        self.0.fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn up(&self) {
        self.add(1);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    sent: [Counter; FrameKind::ALL.len()],
    received: [Counter; FrameKind::ALL.len()],
    rejected: [Counter; Rejection::ALL.len()],
    pub(crate) pulls: Counter,
    pub(crate) pulls_failed: Counter,
    pub(crate) pulls_served: Counter,
    pub(crate) records_missed: Counter,
    pub(crate) ledger_diverged: Counter,
    pub(crate) pushes: Counter,
    pub(crate) pushes_deferred: Counter,
    pub(crate) values_oversized: Counter,
    pub(crate) hop_lost: Counter,
    pub(crate) restarts: Counter,
    pub(crate) name_clashes: Counter,
    pub(crate) seed_lookups_failed: Counter,
}

impl Counters {
    pub(crate) fn sent(&self, kind: FrameKind, bytes: usize) {
        self.sent[kind as usize].add(bytes as u64);
    }

    pub(crate) fn received(&self, kind: FrameKind, bytes: usize) {
        self.received[kind as usize].add(bytes as u64);
    }

    pub(crate) fn reject(&self, cause: Rejection) {
        self.rejected[cause as usize].up();
    }

    pub(crate) fn look(&self, peers: Vec<PeerStatus>) -> GossipStats {
        let traffic = |&kind: &FrameKind| Traffic {
            kind,
            sent_bytes: self.sent[kind as usize].get(),
            received_bytes: self.received[kind as usize].get(),
        };
        let rejected = |&cause: &Rejection| (cause, self.rejected[cause as usize].get());
        GossipStats {
            traffic: FrameKind::ALL.iter().map(traffic).collect(),
            rejected: Rejection::ALL.iter().map(rejected).filter(|(_, count)| *count > 0).collect(),
            peers,
            pulls: self.pulls.get(),
            pulls_failed: self.pulls_failed.get(),
            pulls_served: self.pulls_served.get(),
            records_missed: self.records_missed.get(),
            ledger_diverged: self.ledger_diverged.get(),
            pushes: self.pushes.get(),
            pushes_deferred: self.pushes_deferred.get(),
            values_oversized: self.values_oversized.get(),
            hop_lost: self.hop_lost.get(),
            restarts: self.restarts.get(),
            name_clashes: self.name_clashes.get(),
            seed_lookups_failed: self.seed_lookups_failed.get(),
        }
    }
}
