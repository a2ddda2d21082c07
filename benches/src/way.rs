//! What stands between clients and engines while it is measured.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use engine::Config;

use crate::front::{self, Front, HaproxyMode};
use crate::options::Common;
use crate::oracle::Oracle;
use crate::replicas::Replicas;

/// The programs that ways are made of.
#[derive(Clone, Debug)]
pub struct Programs {
    /// HAProxy, where it is installed.
    pub haproxy: Option<PathBuf>,
    /// Grapevine.
    pub grapevine: PathBuf,
}

impl Programs {
    /// Finds them, or says that HAProxy is not there.
    ///
    /// # Errors
    /// When Grapevine has to be built and can't be.
    pub fn find(common: &Common) -> anyhow::Result<Self> {
        let haproxy = front::haproxy_program();
        if haproxy.is_none() {
            println!("skipped: HAProxy is not installed, so neither it nor replicas behind it are measured");
        }
        Ok(Self { haproxy, grapevine: common.program()? })
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
        let front = (count > 1)
            .then(|| programs.haproxy(HaproxyMode::TcpLeastconn, &replicas.public()))
            .transpose()?;
        Ok(Self::Replicas { replicas, front })
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
            Self::Haproxy(front) | Self::Replicas { front: Some(front), .. } => vec![front.address],
            Self::Replicas { replicas, front: None } => replicas.public(),
            Self::Oracle(oracle) => vec![oracle.address()],
        }
    }
}
