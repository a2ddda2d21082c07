//! What can go wrong when gossip starts. Once it runs, trouble is counted and outlived.

use std::io;
use std::net::SocketAddr;

/// Why gossip could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GossipError {
    /// A setting is out of range.
    #[error("{key} = {value:?}: allowed is {allowed}")]
    Config {
        /// The flag or config key.
        key: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        allowed: &'static str,
    },
    /// One of the three ports can't be opened.
    #[error(
        "can't open {what} at {address} for gossip, which needs UDP and TCP at its port and UDP at the next one: \
         {source}"
    )]
    Port {
        /// Which of the three.
        what: &'static str,
        /// Where.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// No port with all three free was found.
    #[error("found no port at {address} where UDP, TCP and the next UDP port are free, in {tries} tries")]
    NoFreePort {
        /// Where it looked.
        address: SocketAddr,
        /// How often.
        tries: usize,
    },
    /// The gossip library did not start.
    #[error("gossip did not start: {0}")]
    Library(#[source] anyhow::Error),
}

impl GossipError {
    /// Whether the same call can succeed later without a change of settings.
    pub const fn may_retry(&self) -> bool {
        match self {
            Self::Config { .. } => false,
            Self::Port { .. } | Self::NoFreePort { .. } | Self::Library(_) => true,
        }
    }
}
