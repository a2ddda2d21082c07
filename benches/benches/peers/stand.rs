//! Everything that runs while one kind of reply is measured.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use benches::canned::Kind;
use benches::front::{self, Front, HaproxyMode};
use benches::peer::{self, Copies, Installed, Peer, Sharing};
use benches::process::Process;
use benches::replicas::Replicas;
use benches::wait;
use clap::ValueEnum as _;
use serde::Serialize;

use crate::Settings;

/// What the requests pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Through {
    /// Nothing.
    Direct,
    Nginx,
    Haproxy,
    Grapevine,
    #[serde(untagged)]
    Peer(Peer),
}

impl Through {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Haproxy => "HAProxy",
            Self::Grapevine => "Grapevine",
            Self::Peer(peer) => peer.name(),
        }
    }

    pub(crate) fn is_peer(self) -> bool {
        matches!(self, Self::Peer(_))
    }
}

/// One way to the engines.
pub(crate) struct Way<'a> {
    pub(crate) through: Through,
    pub(crate) address: SocketAddr,
    /// `None` without a proxy.
    pub(crate) process: Option<&'a Process>,
}

/// The programs that are measured.
pub(crate) struct Programs {
    nginx: Option<PathBuf>,
    haproxy: Option<PathBuf>,
    grapevine: PathBuf,
    /// From PyPI.
    pub(crate) peers: Vec<Installed>,
}

impl Programs {
    /// Finds, builds and installs them; says which are not there.
    pub(crate) fn find(settings: &Settings) -> anyhow::Result<Self> {
        let on_path = |program: Option<PathBuf>, name: &str| {
            if program.is_none() {
                println!("skipped: {name} is not on the path (apt-get install {name})");
            }
            program
        };
        Ok(Self {
            nginx: on_path(front::nginx_program(), "nginx"),
            haproxy: on_path(front::haproxy_program(), "haproxy"),
            grapevine: settings.common.program()?,
            peers: peer::install(&settings.peers)?,
        })
    }
}

/// The engines and all that stands in front of them; gone when dropped.
pub(crate) struct Stand {
    pub(crate) engines: Process,
    engine_addresses: Vec<SocketAddr>,
    fronts: Vec<(Through, Front)>,
    grapevine: Replicas,
    peers: Vec<(Peer, Copies)>,
}

impl Stand {
    /// Starts it.
    pub(crate) fn up(settings: &Settings, kind: Kind, programs: &Programs) -> anyhow::Result<Self> {
        let addresses: Vec<SocketAddr> =
            (0..settings.engines).map(|_| wait::free_address()).collect::<anyhow::Result<_>>()?;
        let engines = engines(&addresses, kind)?;
        let mut fronts = Vec::new();
        if let Some(program) = &programs.nginx {
            fronts.push((Through::Nginx, front::nginx(program, &addresses)?));
        }
        if let Some(program) = &programs.haproxy {
            let front = front::haproxy(program, HaproxyMode::HttpRoundRobin, &addresses)?;
            fronts.push((Through::Haproxy, front));
        }
        let serve = settings.common.serve_arguments(&[]);
        let grapevine = Replicas::start(&programs.grapevine, 1, &addresses, &serve)?;
        let mut peers = Vec::new();
        for installed in &programs.peers {
            match Copies::start(installed, 1, Sharing::Nothing, &addresses) {
                Ok(copies) => peers.push((installed.peer, copies)),
                Err(why) => println!("skipped: {} did not start: {why:#}", installed.peer.name()),
            }
        }
        Ok(Self { engines, engine_addresses: addresses, fronts, grapevine, peers })
    }

    /// Every way to the engines, in the order in which they are measured.
    pub(crate) fn ways(&self) -> Vec<Way<'_>> {
        let direct = self.engine_addresses.first().map(|address| Way {
            through: Through::Direct,
            address: *address,
            process: None,
        });
        let fronts = self.fronts.iter().map(|(through, front)| Way {
            through: *through,
            address: front.address,
            process: Some(&front.process),
        });
        let grapevine = self.grapevine.public().into_iter().zip(&self.grapevine.processes);
        let grapevine = grapevine.map(|(address, process)| Way {
            through: Through::Grapevine,
            address,
            process: Some(process),
        });
        let peers = self.peers.iter().flat_map(|(peer, copies)| {
            copies.addresses.iter().zip(&copies.processes).map(|(address, process)| Way {
                through: Through::Peer(*peer),
                address: *address,
                process: Some(process),
            })
        });
        direct.into_iter().chain(fronts).chain(grapevine).chain(peers).collect()
    }
}

/// The canned engines, in one process that is this program.
fn engines(addresses: &[SocketAddr], kind: Kind) -> anyhow::Result<Process> {
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let kind = kind.to_possible_value().context("a kind has a name")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--canned", &list.join(","), "--kinds", kind.get_name()]);
    let engines = Process::start(&mut command)?;
    for address in addresses {
        wait::until_ok(*address, "/health")?;
    }
    Ok(engines)
}
