//! The demo's replicas: child processes of the same binary.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::fetch;
use crate::ports::{self, ReplicaPorts};

/// How long all replicas may take to be ready.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How long a replica may take to end when asked; its streams have ended before.
const END_WITHIN: Duration = Duration::from_secs(5);

pub(super) struct Replicas {
    ports: Vec<ReplicaPorts>,
    children: Vec<Option<Child>>,
}

impl Replicas {
    /// Starts `count` replicas over `engines`. They end with this process.
    pub(super) fn start(count: usize, engines: &[String], policy: &str) -> anyhow::Result<Self> {
        let ports = ports::find(count)?;
        let program = std::env::current_exe().context("this program's own path is unknown")?;
        let mut children = Vec::with_capacity(count);
        for (n, own) in ports.iter().enumerate() {
            let mut command = Command::new(&program);
            command.args(["serve", "--explain-headers", "--log", "warn", "--drain-settle-ms", "0"]);
            command.args(["--replica-id", &format!("replica-{n}"), "--policy", policy]);
            command.args(["--listen", &own.public.to_string(), "--admin", &own.admin.to_string()]);
            command.args(["--gossip", &own.gossip.to_string()]);
            for other in ports.iter().filter(|other| *other != own) {
                command.args(["--seed", &other.gossip.to_string()]);
            }
            for engine in engines {
                command.args(["--endpoint", engine]);
            }
            command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
            children.push(Some(command.spawn().context("a replica can't be started")?));
        }
        Ok(Self { ports, children })
    }

    /// Waits until all say that they are ready.
    pub(super) async fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        for n in 0..self.ports.len() {
            let url = format!("http://{}/readyz", self.ports[n].public);
            loop {
                if fetch::get(&url, None, Duration::from_secs(1)).await.is_ok_and(|reply| reply.status == 200)
                {
                    break;
                }
                if let Some(child) = &mut self.children[n]
                    && let Some(status) = child.try_wait()?
                {
                    bail!("replica {n} ended at once: {status}");
                }
                if Instant::now() > deadline {
                    bail!("replica {n} is not ready within {READY_WITHIN:?}");
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    pub(super) fn ports(&self) -> &[ReplicaPorts] {
        &self.ports
    }

    pub(super) fn public(&self) -> Vec<SocketAddr> {
        self.ports.iter().map(|ports| ports.public).collect()
    }

    /// How many run.
    pub(super) fn alive(&self) -> usize {
        self.children.iter().flatten().count()
    }

    /// Kills the last replica that runs, without a warning to it, and says which it was.
    pub(super) async fn kill_one(&mut self) -> usize {
        let victim = self.children.iter().rposition(Option::is_some).unwrap_or_default();
        if let Some(mut child) = self.children[victim].take() {
            // It may have ended by itself; then there is nothing to kill.
            let _ = child.kill().await;
        }
        victim
    }

    /// Ends all.
    pub(super) async fn stop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.start_kill();
        }
        for child in self.children.iter_mut().flatten() {
            let _ = tokio::time::timeout(END_WITHIN, child.wait()).await;
        }
    }
}
