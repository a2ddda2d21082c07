//! What a replica needs to be told before it can gossip, and the bounds that it keeps.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use routing::ReplicaId;

use crate::{Faults, GossipError};

/// Settings of one replica's gossip. [`GossipConfig::new`] fills in the defaults.
#[derive(Clone, Debug)]
pub struct GossipConfig {
    /// This replica's name, unique in the cluster; 1 to 64 bytes.
    pub replica: ReplicaId,
    /// Replicas of different clusters ignore each other.
    pub cluster_id: String,
    /// UDP P (pulse and pushes), UDP P + 1 (ledger) and TCP P (pulls) are opened here. Port 0 looks for a
    /// P where all three are free.
    pub listen: SocketAddr,
    /// How others reach `listen`; the same address if `None`. Port 0 means the port that was opened.
    /// An unspecified address (0.0.0.0, ::) is refused: nobody could reach it.
    pub advertise: Option<SocketAddr>,
    /// Other replicas, `host:port` or `address:port`. Names are looked up again and again, for ever.
    pub seeds: Vec<String>,
    /// With a key everything is sealed. The first key seals, the first two open: to change the key, roll
    /// out (old, new), then (new, old), then (new).
    pub keys: Vec<ClusterKey>,
    /// How often the pulse gossips and is rewritten, if it changed.
    pub pulse_every: Duration,
    /// How often the ledger gossips.
    pub ledger_every: Duration,
    /// Time between two pushes on average; after a pause a few go out at once.
    pub push_every: Duration,
    /// A replica with nothing to push says so, to each peer, this often: the proof that it lives.
    pub keepalive_every: Duration,
    /// How long a joiner waits for a snapshot before it goes on without.
    pub snapshot_wait: Duration,
    /// Pushes to all peers together stay under this many bytes/s; what does not fit goes the slower way.
    pub push_bytes_per_second_max: u64,
    /// The pulse is rewritten less often when its copies would cost more than this many bytes/s, but at
    /// least once a second.
    pub pulse_bytes_per_second_max: u64,
    /// Own ledger records kept for those who missed some, in encoded bytes; older ones cost a snapshot.
    pub log_bytes_max: usize,
    /// Makes the network lose, delay and cut; `None` outside of tests.
    pub faults: Option<Arc<Faults>>,
    /// Which incarnation of the replica this is; `None` takes the wall clock in microseconds.
    pub generation: Option<u64>,
}

impl GossipConfig {
    /// The defaults for a replica called `replica` that listens at `listen`.
    pub fn new(replica: ReplicaId, listen: SocketAddr) -> Self {
        Self {
            replica,
            cluster_id: "grapevine".to_owned(),
            listen,
            advertise: None,
            seeds: Vec::new(),
            keys: Vec::new(),
            pulse_every: Duration::from_millis(100),
            ledger_every: Duration::from_millis(200),
            push_every: Duration::from_millis(2),
            keepalive_every: Duration::from_millis(500),
            snapshot_wait: Duration::from_secs(5),
            push_bytes_per_second_max: 1_000_000,
            pulse_bytes_per_second_max: 48_000,
            log_bytes_max: 4 << 20,
            faults: None,
            generation: None,
        }
    }

    /// Checks what can be checked before anything is opened.
    pub(crate) fn validate(&self) -> Result<(), GossipError> {
        let fault = |key, value: String, allowed| Err(GossipError::Config { key, value, allowed });
        let name = self.replica.as_str();
        if name.is_empty() || name.len() > REPLICA_NAME_BYTES_MAX {
            return fault("replica-id", name.to_owned(), "1 to 64 bytes");
        }
        if self.cluster_id.is_empty() || self.cluster_id.len() > REPLICA_NAME_BYTES_MAX {
            return fault("cluster-id", self.cluster_id.clone(), "1 to 64 bytes");
        }
        if self.advertise.unwrap_or(self.listen).ip().is_unspecified() {
            let value = self.advertise.unwrap_or(self.listen).to_string();
            return fault(
                "advertise",
                value,
                "an address that the other replicas can reach, not 0.0.0.0 or ::",
            );
        }
        if self.keys.len() > KEYS_MAX {
            return fault("cluster-key-file", format!("{} keys", self.keys.len()), "at most 2 keys");
        }
        for seed in &self.seeds {
            let port = seed.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
            if port.is_none_or(|port| port == 0 || port == u16::MAX) {
                return fault("seed", seed.clone(), "host:port with a port from 1 to 65534");
            }
        }
        let spans = [
            ("pulse-every", self.pulse_every),
            ("ledger-every", self.ledger_every),
            ("push-every", self.push_every),
            ("keepalive-every", self.keepalive_every),
        ];
        for (key, span) in spans {
            if span < Duration::from_millis(1) || span > Duration::from_secs(10) {
                return fault(key, format!("{span:?}"), "1 ms to 10 s");
            }
        }
        Ok(())
    }
}

/// Longest name of a replica or cluster: it is repeated in every push.
pub(crate) const REPLICA_NAME_BYTES_MAX: usize = 64;
/// One key seals; a second is accepted while keys change.
pub(crate) const KEYS_MAX: usize = 2;

/// The secret that the replicas of a cluster share: 32 bytes for XChaCha20-Poly1305.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// The key with these bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads 64 hex digits or 44 characters of base64, as `openssl rand -hex 32` and `-base64 32` print.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let bytes = if text.len() == 64 {
            (0..64).step_by(2).map(|i| u8::from_str_radix(text.get(i..i + 2)?, 16).ok()).collect()
        } else {
            base64::engine::general_purpose::STANDARD.decode(text).ok()
        };
        bytes.and_then(|bytes: Vec<u8>| bytes.try_into().ok()).map(Self)
    }

    pub(crate) const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_openssl_prints_them() {
        let key = ClusterKey::from_bytes([0xab; 32]);
        assert_eq!(ClusterKey::parse(&format!("{}\n", "ab".repeat(32))), Some(key.clone()));
        assert_eq!(ClusterKey::parse("q6urq6urq6urq6urq6urq6urq6urq6urq6urq6urq6s="), Some(key));
        for bad in ["", "secret", &"zz".repeat(32), &"ä".repeat(32)] {
            assert_eq!(ClusterKey::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_bad_setting_is_named_with_its_value_and_what_is_allowed() {
        let good = GossipConfig::new(ReplicaId::new("a"), ([127, 0, 0, 1], 0).into());
        assert!(good.validate().is_ok());
        let check = |change: &dyn Fn(&mut GossipConfig), key: &str| {
            let mut config = good.clone();
            change(&mut config);
            let message = config.validate().expect_err(key).to_string();
            assert!(message.contains(key), "{message}");
        };
        check(&|c| c.listen = ([0, 0, 0, 0], 7946).into(), "advertise");
        check(&|c| c.advertise = Some(([0, 0, 0, 0], 7946).into()), "advertise");
        check(&|c| c.replica = ReplicaId::new(""), "replica-id");
        check(&|c| c.seeds = vec!["nowhere".to_owned()], "seed");
        check(&|c| c.seeds = vec!["nowhere:65535".to_owned()], "seed");
        check(&|c| c.keys = vec![ClusterKey::from_bytes([0; 32]); 3], "cluster-key-file");
        check(&|c| c.push_every = Duration::ZERO, "push-every");
    }
}
