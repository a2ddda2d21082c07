//! The binary itself, as a process.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::PATIENCE;

/// Runs `grapevine` with these arguments to its end. It sees no variables of the test's own environment that
/// are meant for it.
pub fn run(arguments: &[&str]) -> Output {
    let mut child = command(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().expect("a child").is_none() {
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("{arguments:?} did not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("its output")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(tests::program());
    command.args(arguments);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("GRAPEVINE_")) {
        command.env_remove(name);
    }
    command
}

/// A `grapevine` that runs until it is told to end, or dropped.
pub struct Process {
    child: Child,
}

impl Process {
    pub fn start(arguments: &[&str], log: Stdio) -> Self {
        let child = command(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the binary starts");
        Self { child }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal by its name, `TERM` or `HUP`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill -{name}");
    }

    /// Its exit code, once it has ended by itself.
    pub async fn ended(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the process did not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
