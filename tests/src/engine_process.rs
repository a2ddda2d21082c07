//! Engines as processes, for what can only be done to one: `kill -9`, and stopping it where it stands.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use grapevine::{fetch, ports};

use crate::fleet::MODEL;
use crate::program::program;
use crate::until::{PATIENCE, until};

/// How long one look at its health may take.
const HEALTH_LIMIT: Duration = Duration::from_secs(1);

/// A simulated engine. Ends with the test.
#[derive(Debug)]
pub struct EngineProcess {
    child: Child,
    address: SocketAddr,
}

impl EngineProcess {
    /// An engine with these flags, ready.
    ///
    /// # Panics
    /// If it does not come to answer.
    pub async fn start(flags: &[&str]) -> Self {
        let address = ports::find(1).expect("a free port")[0].public;
        let mut command = Command::new(program());
        command.args(["engine", "--model", MODEL, "--listen", &address.to_string()]).args(flags);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let engine = Self { child: command.spawn().expect("an engine can be started"), address };
        until("the engine answers", PATIENCE, async || {
            let health = fetch::get(&format!("{}/health", engine.url()), None, HEALTH_LIMIT).await;
            health.map(drop).map_err(|error| format!("{error:#}"))
        })
        .await;
        engine
    }

    /// Where it serves.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The same.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends it without a warning, as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends it a signal by name, such as `STOP`.
    ///
    /// # Panics
    /// If it can't be sent.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("sh").args(["-c", &format!("kill -s {name} {}", self.child.id())]).status();
        assert!(sent.is_ok_and(|status| status.success()), "SIG{name} can't be sent");
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
