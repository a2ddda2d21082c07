//! Grapevine itself, as its users run it: `grapevine serve`, one process for each replica.

use std::fmt::Display;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use grapevine::ports::{self, ReplicaPorts};
use tempfile::TempDir;

use crate::process::Process;
use crate::wait;

/// Replicas that run and know of each other.
#[derive(Debug)]
pub struct Replicas {
    ports: Vec<ReplicaPorts>,
    /// Their processes, in the order of their ports.
    pub processes: Vec<Process>,
    log: TempDir,
}

impl Replicas {
    /// Starts `count` replicas in front of `endpoints` (addresses, each perhaps with `,role=..` and the like behind
    /// it), with `more` arguments for each, and waits until all are ready.
    ///
    /// # Errors
    /// When one does not start, with the end of its log.
    pub fn start(
        program: &Path,
        count: usize,
        endpoints: &[impl Display],
        more: &[String],
    ) -> anyhow::Result<Self> {
        let ports = ports::find(count)?;
        let log = tempfile::tempdir()?;
        let mut replicas = Self { ports, processes: Vec::new(), log };
        for at in 0..count {
            let mut command = Command::new(program);
            let own = replicas.ports[at];
            command.arg("serve").args(["--replica-id", &format!("bench-{at}")]);
            for (flag, address) in
                [("--listen", own.public), ("--admin", own.admin), ("--gossip", own.gossip)]
            {
                command.args([flag, &address.to_string()]);
            }
            for other in replicas.ports.iter().filter(|ports| ports.public != own.public) {
                command.args(["--seed", &other.gossip.to_string()]);
            }
            for endpoint in endpoints {
                command.args(["--endpoint", &format!("http://{endpoint}")]);
            }
            command.args(more).stderr(File::create(replicas.log_of(at))?);
            replicas.processes.push(Process::start(&mut command)?);
        }
        for at in 0..count {
            wait::until_ok(replicas.ports[at].public, "/readyz").with_context(|| replicas.last_words(at))?;
        }
        Ok(replicas)
    }

    /// Where clients connect.
    pub fn public(&self) -> Vec<SocketAddr> {
        self.ports.iter().map(|ports| ports.public).collect()
    }

    /// Where operators connect.
    pub fn admin(&self) -> Vec<SocketAddr> {
        self.ports.iter().map(|ports| ports.admin).collect()
    }

    fn log_of(&self, at: usize) -> PathBuf {
        self.log.path().join(format!("{at}.log"))
    }

    fn last_words(&self, at: usize) -> String {
        const LINES: usize = 10;
        let log = std::fs::read_to_string(self.log_of(at)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

/// The release build of `grapevine`, made now unless `given` names another.
///
/// # Errors
/// When it can't be built.
pub fn program(given: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        ensure!(given.is_file(), "{} is no program", given.display());
        return Ok(given);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace's folder")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--package", "grapevine"]).current_dir(root);
    ensure!(command.status()?.success(), "cargo could not build grapevine");
    // Benches are built into the same folder of the same target directory.
    let own = std::env::current_exe()?;
    let built = own.parent().and_then(Path::parent).context("the build folder")?.join("grapevine");
    ensure!(built.is_file(), "{} is not there: name it by --grapevine", built.display());
    Ok(built)
}
