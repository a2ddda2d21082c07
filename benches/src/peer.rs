//! Other routers for inference that are written in Rust, from PyPI, as their users start them.
//!
//! The main choice: each is installed into an environment of its own under the build folder (two of them bring a
//! script of the same name) and started by that script, with what its documentation gives for plain HTTP workers and
//! nothing that slows it down: its default policy, which is to follow prefixes; no retries; a log of warnings.
//!
//! Left out: versions. The newest is installed, once; the folder `peers` may be removed for newer ones.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;
use tempfile::TempDir;

use crate::options::target_folder;
use crate::process::Process;
use crate::wait;

/// The time for one step of an installation.
const INSTALL_MAX: Duration = Duration::from_secs(300);

/// Between two looks at it.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A router to compare with.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// SGLang's.
    SglangRouter,
    /// Shepherd Model Gateway, which grew out of it.
    Smg,
    /// vLLM's.
    VllmRouter,
}

impl Peer {
    /// The name of its package, and of its script.
    pub fn name(self) -> &'static str {
        match self {
            Self::SglangRouter => "sglang-router",
            Self::Smg => "smg",
            Self::VllmRouter => "vllm-router",
        }
    }

    /// What comes first on its command line.
    fn subcommand(self) -> Option<&'static str> {
        match self {
            Self::SglangRouter | Self::Smg => Some("launch"),
            Self::VllmRouter => None,
        }
    }

    /// How it calls a log of warnings.
    fn warnings(self) -> &'static str {
        match self {
            Self::SglangRouter | Self::Smg => "warn",
            Self::VllmRouter => "warning",
        }
    }
}

/// Which peers a run has.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Chosen {
    /// Every one.
    All,
    /// None: nothing is installed.
    None,
    /// This one.
    SglangRouter,
    /// This one.
    Smg,
    /// This one.
    VllmRouter,
}

impl Chosen {
    fn peers(self) -> &'static [Peer] {
        match self {
            Self::All => Peer::value_variants(),
            Self::None => &[],
            Self::SglangRouter => &[Peer::SglangRouter],
            Self::Smg => &[Peer::Smg],
            Self::VllmRouter => &[Peer::VllmRouter],
        }
    }
}

/// A peer that is there.
#[derive(Clone, Debug, Serialize)]
pub struct Installed {
    /// Which.
    pub peer: Peer,
    /// Its version.
    pub version: String,
    #[serde(skip)]
    script: PathBuf,
}

/// Installs what was chosen and is not there yet. What can't be is left out, and why is printed.
///
/// # Errors
/// When the build folder can't be told.
pub fn install(chosen: &[Chosen]) -> anyhow::Result<Vec<Installed>> {
    let folder = target_folder()?.join("peers");
    let is_chosen = |peer: &&Peer| chosen.iter().any(|chosen| chosen.peers().contains(peer));
    let mut installed = Vec::new();
    for peer in Peer::value_variants().iter().filter(is_chosen) {
        match install_one(*peer, &folder.join(peer.name())) {
            Ok(there) => installed.push(there),
            Err(why) => println!("skipped: {} could not be installed from PyPI: {why:#}", peer.name()),
        }
    }
    Ok(installed)
}

fn install_one(peer: Peer, folder: &Path) -> anyhow::Result<Installed> {
    let script = folder.join("bin").join(peer.name());
    if !script.is_file() {
        eprintln!("installing {} into {}", peer.name(), folder.display());
        std::fs::create_dir_all(folder)?;
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))?;
        let mut pip = Command::new(folder.join("bin").join("pip"));
        run(pip.args(["install", "--quiet", "--disable-pip-version-check", peer.name()]))?;
        ensure!(script.is_file(), "its package brings no {}", script.display());
    }
    let ask = format!("import importlib.metadata as m; print(m.version('{}'))", peer.name());
    let told = Command::new(folder.join("bin").join("python")).args(["-c", &ask]).output()?;
    ensure!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr).trim());
    let version = String::from_utf8_lossy(&told.stdout).trim().to_owned();
    Ok(Installed { peer, version, script })
}

/// Runs a command to its end, with a deadline.
fn run(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let errors = tempfile::NamedTempFile::new()?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors.reopen()?);
    let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > INSTALL_MAX {
            child.kill()?;
            child.wait()?;
            bail!("{name} took over {INSTALL_MAX:?}");
        }
        std::thread::sleep(LOOK_EVERY);
    };
    let told = std::fs::read_to_string(errors.path()).unwrap_or_default();
    ensure!(status.success(), "{name}: {}", last_lines(&told));
    Ok(())
}

fn last_lines(text: &str) -> String {
    const LINES: usize = 10;
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Whether copies of a peer tell each other what they know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Each is alone.
    Nothing,
    /// SMG's mesh.
    Mesh,
}

/// Copies of one peer that run; gone when dropped.
#[derive(Debug)]
pub struct Copies {
    /// Where clients connect.
    pub addresses: Vec<SocketAddr>,
    /// Their processes, in that order.
    pub processes: Vec<Process>,
    log: TempDir,
}

impl Copies {
    /// Starts `count` copies in front of `engines` and waits until each can use them all.
    ///
    /// # Errors
    /// When one does not start, with the end of its log; when a peer has no way of sharing.
    pub fn start(
        installed: &Installed,
        count: usize,
        sharing: Sharing,
        engines: &[SocketAddr],
    ) -> anyhow::Result<Self> {
        let free = || (0..count).map(|_| wait::free_address()).collect::<anyhow::Result<Vec<_>>>();
        let (addresses, metrics, mesh) = (free()?, free()?, free()?);
        ensure!(sharing == Sharing::Nothing || installed.peer == Peer::Smg, "only smg has a mesh");
        let mut copies = Self { addresses, processes: Vec::new(), log: tempfile::tempdir()? };
        for at in 0..count {
            let mut command = Command::new(&installed.script);
            command.args(installed.peer.subcommand());
            let own = copies.addresses[at];
            command.args(["--host", &own.ip().to_string(), "--port", &own.port().to_string()]);
            command.arg("--worker-urls").args(engines.iter().map(|engine| format!("http://{engine}")));
            command.args(["--policy", "cache_aware", "--disable-retries"]);
            command.args(["--log-level", installed.peer.warnings()]);
            // There is no flag against them: each copy has them at a port of its own, where nobody asks.
            command.args(["--prometheus-host", &metrics[at].ip().to_string()]);
            command.args(["--prometheus-port", &metrics[at].port().to_string()]);
            if sharing == Sharing::Mesh {
                command.args(["--enable-mesh", "--mesh-server-name", &format!("copy-{at}")]);
                command.args(["--mesh-host", &mesh[at].ip().to_string()]);
                command.args(["--mesh-port", &mesh[at].port().to_string()]);
                let others = mesh.iter().filter(|address| **address != mesh[at]);
                command.arg("--mesh-peer-urls").args(others.map(ToString::to_string));
            }
            let log = copies.log_of(at);
            copies.processes.push(Process::start_logged(&mut command, &log)?);
        }
        let all_there = format!("\"healthy_workers\":{}", engines.len());
        for (at, address) in copies.addresses.iter().enumerate() {
            wait::until_told(*address, "/readiness", &all_there).with_context(|| copies.last_words(at))?;
        }
        Ok(copies)
    }

    fn log_of(&self, at: usize) -> PathBuf {
        self.log.path().join(format!("{at}.log"))
    }

    fn last_words(&self, at: usize) -> String {
        last_lines(&std::fs::read_to_string(self.log_of(at)).unwrap_or_default())
    }
}
