//! The processes of a run: the only place that starts, signals or ends any.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use grapevine::fetch;
use grapevine::ports::{self, ReplicaPorts};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::AS_GRAPEVINE;
use crate::balancer;
use crate::scenario::{Cluster, Kind, Name, Verb};

/// The model that the engines serve.
pub(crate) const MODEL: &str = "chaos";

/// How long one process may take to be ready; builds without optimisation on busy machines take some seconds.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long a process may take to end when asked, before it is killed.
const END_WITHIN: Duration = Duration::from_secs(5);
/// Between two looks at a process that is not ready yet.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// How long one such look may take.
const LOOK_WITHIN: Duration = Duration::from_millis(500);

/// Everything that runs. Dropping it kills what still does.
pub(crate) struct Fleet {
    folder: PathBuf,
    program: Program,
    processes: BTreeMap<Name, Process>,
    balancer: Option<Child>,
    pub(crate) replicas: Vec<ReplicaPorts>,
    pub(crate) engines: Vec<SocketAddr>,
}

/// What is started as `grapevine`.
#[derive(Clone, Debug)]
pub(crate) enum Program {
    /// This program, behind [`AS_GRAPEVINE`].
    Own(PathBuf),
    /// A binary of the caller's.
    Given(PathBuf),
}

struct Process {
    arguments: Vec<String>,
    /// `None` once it was ended on purpose and is gone.
    child: Option<Child>,
}

impl Fleet {
    /// Starts engines and replicas, and waits until each replica is ready and sees all others.
    pub(crate) async fn start(cluster: &Cluster, program: Program, folder: &Path) -> anyhow::Result<Self> {
        let mut places = ports::find(cluster.replicas + cluster.engines)?;
        let engines: Vec<SocketAddr> =
            places.split_off(cluster.replicas).iter().map(|place| place.public).collect();
        let mut fleet = Self {
            folder: folder.to_owned(),
            program,
            processes: BTreeMap::new(),
            balancer: None,
            replicas: places,
            engines,
        };
        for number in 0..cluster.engines {
            fleet.spawn(Name { kind: Kind::Engine, number }, fleet.engine(number, cluster))?;
        }
        for number in 0..cluster.replicas {
            fleet.spawn(Name { kind: Kind::Replica, number }, fleet.replica(number, cluster))?;
        }
        let names: Vec<Name> = fleet.processes.keys().copied().collect();
        for name in names {
            let path = if name.kind == Kind::Engine { "/health" } else { "/readyz" };
            let url = format!("http://{}{path}", fleet.address(name));
            fleet.wait_until(name, "ready", async || is_ok(&url).await).await?;
        }
        for number in 0..cluster.replicas {
            let name = Name { kind: Kind::Replica, number };
            let admin = fleet.replicas[number].admin;
            let sees_all = async || {
                crate::watch::look(admin).await.is_ok_and(|seen| seen.live.len() == cluster.replicas)
            };
            fleet.wait_until(name, "in touch with all others", sees_all).await?;
        }
        Ok(fleet)
    }

    /// Starts HAProxy in front of the replicas; the address where it listens.
    pub(crate) async fn start_haproxy(&mut self, program: &Path) -> anyhow::Result<SocketAddr> {
        let place = ports::find(1)?;
        let bind = place.first().context("no free port")?.public;
        let replicas: Vec<SocketAddr> = self.replicas.iter().map(|each| each.public).collect();
        let file = self.folder.join("haproxy.cfg");
        std::fs::write(&file, balancer::configuration(bind, &replicas))?;
        let mut command = Command::new(program);
        command.arg("-db").arg("-f").arg(&file);
        self.balancer = Some(self.spawn_logged(command, "haproxy")?);
        let deadline = Instant::now() + READY_WITHIN;
        while !is_ok(&format!("http://{bind}/readyz")).await {
            if let Some(status) = self.balancer.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                bail!("haproxy ended at once: {status}, see {}", self.log("haproxy").display());
            }
            if Instant::now() > deadline {
                bail!("haproxy is not ready within {READY_WITHIN:?}");
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(bind)
    }

    /// Does what `verb` says to a process.
    pub(crate) async fn act(&mut self, verb: Verb, name: Name) -> anyhow::Result<()> {
        let process = self.processes.get_mut(&name).with_context(|| format!("there is no {name}"))?;
        if verb == Verb::Start {
            if let Some(mut old) = process.child.take() {
                let ended = timeout(END_WITHIN, old.wait()).await;
                ended.with_context(|| format!("{name} can't be started: it still runs"))??;
            }
            let arguments = process.arguments.clone();
            return self.spawn(name, arguments);
        }
        let child = process.child.as_mut().with_context(|| format!("{name} runs no more"))?;
        match verb {
            Verb::Kill => {
                child.kill().await?;
                process.child = None;
                Ok(())
            }
            Verb::Terminate => signal(child, Signal::TERM),
            Verb::Stop => signal(child, Signal::STOP),
            Verb::Continue => signal(child, Signal::CONT),
            Verb::Start => Ok(()),
        }
    }

    /// Processes that have ended, and how; those that were killed or are in `expected` are not among them.
    pub(crate) fn lost(&mut self, expected: &[Name]) -> Vec<(Name, String)> {
        let mut lost = Vec::new();
        for (name, process) in &mut self.processes {
            if let Some(child) = &mut process.child
                && !expected.contains(name)
                && let Ok(Some(status)) = child.try_wait()
            {
                lost.push((*name, status.to_string()));
            }
        }
        lost
    }

    /// Where a replica's log is.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    /// Ends everything: asked first, killed if that is not heard.
    pub(crate) async fn end(mut self) {
        let replicas_first = std::mem::take(&mut self.processes).into_values().filter_map(|each| each.child);
        let children: Vec<Child> = self.balancer.take().into_iter().chain(replicas_first).collect();
        for child in &children {
            // One that has ended already needs no signal; a stopped one hears nothing before it goes on.
            let _ = signal(child, Signal::CONT);
            let _ = signal(child, Signal::TERM);
        }
        let deadline = Instant::now() + END_WITHIN;
        for mut child in children {
            if tokio::time::timeout_at(deadline, child.wait()).await.is_err() {
                // It can only fail because it has just ended.
                let _ = child.kill().await;
            }
        }
    }

    fn engine(&self, number: usize, cluster: &Cluster) -> Vec<String> {
        let listen = self.engines[number].to_string();
        let speed = cluster.speed.to_string();
        let flags = [
            "engine",
            "--listen",
            &listen,
            "--model",
            MODEL,
            "--profile",
            &cluster.profile,
            "--speed",
            &speed,
        ];
        flags.map(str::to_owned).to_vec()
    }

    fn replica(&self, number: usize, cluster: &Cluster) -> Vec<String> {
        let own = self.replicas[number];
        let mut flags: Vec<String> = ["serve", "--explain-headers", "--log", "info", "--log-format", "json"]
            .map(str::to_owned)
            .to_vec();
        let mut add = |flag: &str, value: String| flags.extend([flag.to_owned(), value]);
        add("--replica-id", Name { kind: Kind::Replica, number }.to_string());
        add("--listen", own.public.to_string());
        add("--admin", own.admin.to_string());
        add("--gossip", own.gossip.to_string());
        for other in self.replicas.iter().filter(|other| **other != own) {
            add("--seed", other.gossip.to_string());
        }
        for engine in &self.engines {
            add("--endpoint", format!("http://{engine}"));
        }
        flags.extend(cluster.replica_flags.iter().cloned());
        flags
    }

    fn address(&self, name: Name) -> SocketAddr {
        match name.kind {
            Kind::Engine => self.engines[name.number],
            Kind::Replica => self.replicas[name.number].public,
        }
    }

    fn spawn(&mut self, name: Name, arguments: Vec<String>) -> anyhow::Result<()> {
        let mut command = match &self.program {
            Program::Own(path) => {
                let mut command = Command::new(path);
                command.arg(AS_GRAPEVINE);
                command
            }
            Program::Given(path) => Command::new(path),
        };
        command.args(&arguments);
        let child = self.spawn_logged(command, &name.to_string())?;
        self.processes.insert(name, Process { arguments, child: Some(child) });
        Ok(())
    }

    fn spawn_logged(&self, mut command: Command, name: &str) -> anyhow::Result<Child> {
        let path = self.log(name);
        let log = File::options().create(true).append(true).open(&path);
        let log = log.with_context(|| format!("{} can't be written", path.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
        command.spawn().with_context(|| format!("{name} can't be started"))
    }

    async fn wait_until(
        &mut self,
        name: Name,
        what: &str,
        holds: impl AsyncFn() -> bool,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let log = self.log(&name.to_string());
        while !holds().await {
            if let Some((name, status)) = self.lost(&[]).pop() {
                bail!("{name} ended at once: {status}, see {}", self.log(&name.to_string()).display());
            }
            if Instant::now() > deadline {
                bail!("{name} is not {what} within {READY_WITHIN:?}, see {}", log.display());
            }
            sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}

async fn is_ok(url: &str) -> bool {
    fetch::get(url, None, LOOK_WITHIN).await.is_ok_and(|reply| reply.status == 200)
}

/// Signals a child that has not been waited for, so that its number can't be another process's.
fn signal(child: &Child, signal: Signal) -> anyhow::Result<()> {
    let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    Ok(kill_process(pid.context("it has ended")?, signal)?)
}
