//! Replicas as processes.

use std::fs::File;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use grapevine::ports::{self, ReplicaPorts};
use tempfile::TempDir;

use crate::admin::Admin;
use crate::program::program;
use crate::until::{PATIENCE, until};

/// How often a cluster is started anew when a port was taken by somebody else in between.
const STARTS_MAX: u32 = 3;
/// Lines of each replica's log that a failing test shows.
const LOG_LINES_SHOWN: usize = 30;

/// What a cluster should be.
#[derive(Clone, Debug)]
pub struct Plan {
    replicas: usize,
    endpoints: Vec<String>,
    settings: String,
    flags: Vec<String>,
}

impl Plan {
    /// Replicas in front of these endpoints, everything else by default.
    pub fn new(replicas: usize, endpoints: &[String]) -> Self {
        Self { replicas, endpoints: endpoints.to_vec(), settings: String::new(), flags: Vec::new() }
    }

    /// Adds lines to the configuration file that all replicas read.
    #[must_use]
    pub fn settings(mut self, toml: &str) -> Self {
        self.settings.push_str(toml);
        self.settings.push('\n');
        self
    }

    /// Adds flags, the same for all replicas.
    #[must_use]
    pub fn flags(mut self, flags: &[&str]) -> Self {
        self.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
        self
    }

    fn toml(&self) -> String {
        let endpoints: Vec<String> = self.endpoints.iter().map(|url| format!("{url:?}")).collect();
        format!("endpoint = [{}]\n{}", endpoints.join(", "), self.settings)
    }
}

/// One replica, running or dead.
#[derive(Debug)]
pub struct Replica {
    /// Its name.
    pub name: String,
    ports: ReplicaPorts,
    child: Option<Child>,
    log: PathBuf,
}

impl Replica {
    /// Where clients connect.
    pub const fn public(&self) -> SocketAddr {
        self.ports.public
    }

    /// Where other replicas connect.
    pub const fn gossip(&self) -> SocketAddr {
        self.ports.gossip
    }

    /// What its operator sees.
    pub fn admin(&self) -> Admin {
        Admin::at(self.ports.admin)
    }

    /// Whether it runs.
    pub const fn is_running(&self) -> bool {
        self.child.is_some()
    }

    /// Its process.
    ///
    /// # Panics
    /// If it does not run.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running replica").id()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its resident memory, in bytes.
    ///
    /// # Panics
    /// Where `/proc` does not say.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a resident set");
        let kib = line.trim().trim_end_matches("kB").trim();
        kib.parse::<u64>().expect("a number") * 1_024
    }

    /// Ends it without a warning, as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself; then there is nothing to kill.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Sends it a signal by name, such as `HUP`.
    ///
    /// # Panics
    /// If it can't be sent.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -s {name} {}", self.pid())]).status();
        assert!(sent.is_ok_and(|status| status.success()), "SIG{name} can't be sent");
    }

    /// Waits for it to end by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        let what = format!("{} ends", self.name);
        let child = self.child.as_mut().expect("a running replica");
        let status = until(&what, PATIENCE, async || match child.try_wait() {
            Ok(Some(status)) => Ok(status),
            other => Err(format!("{other:?}")),
        })
        .await;
        self.child = None;
        status
    }
}

/// Replicas that know each other. Ends with the test; a failing test shows what they logged.
#[derive(Debug)]
pub struct Cluster {
    plan: Plan,
    replicas: Vec<Replica>,
    directory: TempDir,
}

impl Cluster {
    /// Starts what `plan` says and waits until every replica is ready and has heard of all others.
    ///
    /// # Panics
    /// If that does not happen.
    pub async fn start(plan: Plan) -> Self {
        let cluster = Self::begin(plan).await;
        cluster.wait_until_whole().await;
        cluster
    }

    /// Starts what `plan` says without waiting for readiness.
    ///
    /// # Panics
    /// If a replica ends at once.
    pub async fn begin(plan: Plan) -> Self {
        for _ in 1..STARTS_MAX {
            let mut cluster = Self::spawn(plan.clone());
            if cluster.lives().await {
                return cluster;
            }
        }
        let mut cluster = Self::spawn(plan);
        assert!(cluster.lives().await, "a replica ended at once");
        cluster
    }

    fn spawn(plan: Plan) -> Self {
        let directory = tempfile::tempdir().expect("a directory of the moment");
        std::fs::write(directory.path().join("grapevine.toml"), plan.toml()).expect("a configuration file");
        let found = ports::find(plan.replicas).expect("free ports");
        let replicas = found.into_iter().enumerate().map(|(at, ports)| Replica {
            name: format!("replica-{at}"),
            ports,
            child: None,
            log: directory.path().join(format!("replica-{at}.log")),
        });
        let mut cluster = Self { replicas: replicas.collect(), plan, directory };
        for at in 0..cluster.replicas.len() {
            cluster.launch(at);
        }
        cluster
    }

    fn launch(&mut self, at: usize) {
        let own = &self.replicas[at];
        let mut command = Command::new(program());
        command.args(["serve", "--workers", "1", "--explain-headers", "--log", "warn"]);
        command.args(["--replica-id", &own.name]);
        command.arg("--config").arg(self.directory.path().join("grapevine.toml"));
        let addresses =
            [("--listen", own.ports.public), ("--admin", own.ports.admin), ("--gossip", own.ports.gossip)];
        for (flag, address) in addresses {
            command.args([flag, &address.to_string()]);
        }
        for other in self.replicas.iter().filter(|other| other.name != own.name) {
            command.args(["--seed", &other.ports.gossip.to_string()]);
        }
        command.args(&self.plan.flags);
        let log = File::options().create(true).append(true).open(&own.log).expect("a log file");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.replicas[at].child = Some(command.spawn().expect("a replica can be started"));
    }

    /// Whether all replicas come as far as answering.
    async fn lives(&mut self) -> bool {
        let replicas = &mut self.replicas;
        until("all replicas answer", PATIENCE, async || {
            for replica in &mut *replicas {
                if let Some(child) = &mut replica.child
                    && let Ok(Some(_)) = child.try_wait()
                {
                    let taken = replica.log().contains("in use");
                    assert!(taken, "{} ended at once:\n{}", replica.name, replica.log());
                    return Ok(false);
                }
                if !replica.admin().is_live().await {
                    return Err(format!("{} does not answer", replica.name));
                }
            }
            Ok(true)
        })
        .await
    }

    /// Waits until every running replica is ready and knows every other running one.
    ///
    /// # Panics
    /// If that does not happen.
    pub async fn wait_until_whole(&self) {
        let running: Vec<&Replica> = self.replicas.iter().filter(|replica| replica.is_running()).collect();
        until("the cluster is whole", PATIENCE, async || {
            for replica in &running {
                let seen = replica.admin().cluster().await?;
                if !seen.ready {
                    return Err(format!("{} is not ready: {}", replica.name, seen.json["missing"]));
                }
                if let Some(missed) = running.iter().find(|other| !seen.live.contains(&other.name)) {
                    return Err(format!("{} has not heard of {}", replica.name, missed.name));
                }
            }
            Ok(())
        })
        .await;
    }

    /// The replicas.
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// One of them, to be ended.
    pub fn replica_mut(&mut self, at: usize) -> &mut Replica {
        &mut self.replicas[at]
    }

    /// Where clients connect, of all that run.
    pub fn public(&self) -> Vec<SocketAddr> {
        self.replicas.iter().filter(|replica| replica.is_running()).map(Replica::public).collect()
    }

    /// Starts a replica that has ended, under its name and on its ports.
    pub fn restart(&mut self, at: usize) {
        self.launch(at);
    }

    /// Puts other lines into the configuration file, besides the endpoints, and tells all that run.
    ///
    /// # Panics
    /// If the file can't be written.
    pub fn reconfigure(&mut self, toml: &str) {
        self.plan.settings = toml.to_owned();
        std::fs::write(self.directory.path().join("grapevine.toml"), self.plan.toml()).expect("the file");
        for replica in self.replicas.iter().filter(|replica| replica.is_running()) {
            replica.signal("HUP");
        }
    }

    /// Waits until nothing is in flight anywhere: no request, no charge, on any replica.
    ///
    /// # Panics
    /// If there is something after `limit`.
    pub async fn wait_until_idle(&self, limit: Duration) {
        until("nothing is in flight", limit, async || {
            for replica in self.replicas.iter().filter(|replica| replica.is_running()) {
                let seen = replica.admin().cluster().await?;
                if seen.in_flight > 0 || seen.charges() > 0 {
                    return Err(format!("{}: {}", replica.name, seen.json));
                }
            }
            Ok(())
        })
        .await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for replica in &mut self.replicas {
            if std::thread::panicking() {
                let log = replica.log();
                let lines: Vec<&str> = log.lines().collect();
                let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
                eprintln!("{} has logged last:\n{}", replica.name, shown.join("\n"));
            }
            replica.kill();
        }
    }
}
