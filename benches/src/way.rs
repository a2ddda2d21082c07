//! What stands between clients and engines while it is measured.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use engine::Config;

use crate::front::{self, Front, HaproxyMode};
use crate::options::Common;
use crate::oracle::Oracle;
use crate::peer::{self, Chosen, Copies, Installed, Peer, Sharing};
use crate::replicas::Replicas;

/// The programs that ways are made of.
#[derive(Clone, Debug)]
pub struct Programs {
    /// HAProxy, where it is installed.
    pub haproxy: Option<PathBuf>,
    /// Grapevine.
    pub grapevine: PathBuf,
    /// Other routers.
    pub peers: Vec<Installed>,
}

impl Programs {
    /// Finds them, or says that HAProxy is not there; installs the peers that were chosen.
    ///
    /// # Errors
    /// When Grapevine has to be built and can't be.
    pub fn find(common: &Common, peers: &[Chosen]) -> anyhow::Result<Self> {
        let haproxy = front::haproxy_program();
        if haproxy.is_none() {
            println!(
                "skipped: HAProxy is not installed (apt-get install haproxy), so neither it nor several copies of a router behind it are measured"
            );
        }
        Ok(Self { haproxy, grapevine: common.program()?, peers: peer::install(peers)? })
    }

    /// A peer that was chosen and could be installed.
    pub fn peer(&self, peer: Peer) -> Option<&Installed> {
        self.peers.iter().find(|installed| installed.peer == peer)
    }

    /// What spreads connections over several copies; nothing for one.
    fn front_of(&self, copies: &[SocketAddr]) -> anyhow::Result<Option<Front>> {
        (copies.len() > 1).then(|| self.haproxy(HaproxyMode::TcpLeastconn, copies)).transpose()
    }

    fn haproxy(&self, mode: HaproxyMode, servers: &[SocketAddr]) -> anyhow::Result<Front> {
        front::haproxy(self.haproxy.as_ref().context("HAProxy is not installed")?, mode, servers)
    }
}

/// A way to the engines; gone when dropped.
pub enum Way {
    /// The clients themselves know them.
    Direct(Vec<SocketAddr>),
    /// HAProxy balances requests.
    Haproxy(Front),
    /// Replicas of Grapevine, several of them behind HAProxy that balances connections.
    Replicas {
        /// Them.
        replicas: Replicas,
        /// What spreads the clients over them.
        front: Option<Front>,
    },
    /// Copies of another router, several of them behind HAProxy in the same way.
    Peers {
        /// Them.
        copies: Copies,
        /// What spreads the clients over them.
        front: Option<Front>,
    },
    /// The router that knows everything.
    Oracle(Oracle),
}

impl Way {
    /// HAProxy that gives each request to the engine with the fewest.
    ///
    /// # Errors
    /// When it does not start.
    pub fn haproxy(programs: &Programs, engines: &[SocketAddr]) -> anyhow::Result<Self> {
        Ok(Self::Haproxy(programs.haproxy(HaproxyMode::HttpLeastconn, engines)?))
    }

    /// So many replicas in front of `endpoints`, as [`Replicas::start`] takes them.
    ///
    /// # Errors
    /// When one does not start.
    pub fn replicas(
        programs: &Programs,
        count: usize,
        endpoints: &[impl std::fmt::Display],
        serve: &[String],
    ) -> anyhow::Result<Self> {
        let replicas = Replicas::start(&programs.grapevine, count, endpoints, serve)?;
        let front = programs.front_of(&replicas.public())?;
        Ok(Self::Replicas { replicas, front })
    }

    /// So many copies of another router.
    ///
    /// # Errors
    /// When it is not installed or one does not start.
    pub fn peers(
        programs: &Programs,
        peer: Peer,
        sharing: Sharing,
        count: usize,
        engines: &[SocketAddr],
    ) -> anyhow::Result<Self> {
        let installed = programs.peer(peer).with_context(|| format!("{} is not there", peer.name()))?;
        let copies = Copies::start(installed, count, sharing, engines)?;
        let front = programs.front_of(&copies.addresses)?;
        Ok(Self::Peers { copies, front })
    }

    /// The oracle, over engines that were started just now with these configurations.
    ///
    /// # Errors
    /// When it can't listen.
    pub fn oracle(engines: &[SocketAddr], configs: Vec<Config>) -> anyhow::Result<Self> {
        Ok(Self::Oracle(Oracle::start(engines.iter().copied().zip(configs))?))
    }

    /// Where clients connect.
    pub fn targets(&self) -> Vec<SocketAddr> {
        match self {
            Self::Direct(engines) => engines.clone(),
            Self::Haproxy(front)
            | Self::Replicas { front: Some(front), .. }
            | Self::Peers { front: Some(front), .. } => vec![front.address],
            Self::Replicas { replicas, front: None } => replicas.public(),
            Self::Peers { copies, front: None } => copies.addresses.clone(),
            Self::Oracle(oracle) => vec![oracle.address()],
        }
    }
}
