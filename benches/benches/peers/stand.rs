//! Everything that runs while one kind of reply is measured.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use benches::canned::Kind;
use benches::front::{self, Front, HaproxyMode};
use benches::peer::{Copies, Installed, Peer, Sharing};
use benches::process::Process;
use benches::replicas::Replicas;
use benches::wait;
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

/// The engines and all that stands in front of them; gone when dropped.
pub(crate) struct Stand {
    pub(crate) engines: Process,
    engine_addresses: Vec<SocketAddr>,
    nginx: Option<Front>,
    haproxy: Option<Front>,
    grapevine: Replicas,
    peers: Vec<(Peer, Copies)>,
}

impl Stand {
    /// Starts it.
    pub(crate) fn up(settings: &Settings, kind: Kind, peers: &[Installed]) -> anyhow::Result<Self> {
        let addresses: Vec<SocketAddr> =
            (0..settings.engines).map(|_| wait::free_address()).collect::<anyhow::Result<_>>()?;
        let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let kind = clap::ValueEnum::to_possible_value(&kind).context("a kind has a name")?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--canned", &list.join(","), "--kinds", kind.get_name()]);
        let engines = Process::start(&mut command)?;
        for address in &addresses {
            wait::until_ok(*address, "/health")?;
        }
        let installed = |program: Option<PathBuf>, name: &str| {
            if program.is_none() {
                println!("skipped: {name} is not on the path (apt-get install {name})");
            }
            program
        };
        let nginx = installed(front::nginx_program(), "nginx");
        let haproxy = installed(front::haproxy_program(), "haproxy");
        let program = settings.common.program()?;
        let mut running = Vec::new();
        for installed in peers {
            match Copies::start(installed, 1, Sharing::Nothing, &addresses) {
                Ok(copies) => running.push((installed.peer, copies)),
                Err(why) => println!("skipped: {} did not start: {why:#}", installed.peer.name()),
            }
        }
        Ok(Self {
            nginx: nginx.map(|program| front::nginx(&program, &addresses)).transpose()?,
            haproxy: haproxy
                .map(|program| front::haproxy(&program, HaproxyMode::HttpRoundRobin, &addresses))
                .transpose()?,
            grapevine: Replicas::start(&program, 1, &addresses, &settings.common.serve_arguments(&[]))?,
            peers: running,
            engines,
            engine_addresses: addresses,
        })
    }

    /// Every way to the engines.
    pub(crate) fn ways(&self) -> Vec<Way<'_>> {
        let mut ways =
            vec![Way { through: Through::Direct, address: self.engine_addresses[0], process: None }];
        for (through, front) in [(Through::Nginx, &self.nginx), (Through::Haproxy, &self.haproxy)] {
            let way = |front: &'_ Front| (front.address, through);
            if let (Some((address, through)), Some(front)) = (front.as_ref().map(way), front) {
                ways.push(Way { through, address, process: Some(&front.process) });
            }
        }
        let grapevine = self.grapevine.public().into_iter().zip(&self.grapevine.processes);
        ways.extend(grapevine.map(|(address, process)| Way {
            through: Through::Grapevine,
            address,
            process: Some(process),
        }));
        for (peer, copies) in &self.peers {
            let copies = copies.addresses.iter().zip(&copies.processes);
            ways.extend(copies.map(|(address, process)| Way {
                through: Through::Peer(*peer),
                address: *address,
                process: Some(process),
            }));
        }
        ways
    }
}
