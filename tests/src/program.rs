//! The product's binary.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The `grapevine` binary of this workspace, built with this test's own optimisation if it is not there or not
/// up to date: cargo knows.
///
/// # Panics
/// If it can't be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(build)
}

fn build() -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "grapevine", "--bin", "grapevine"]);
    cargo.args(["--message-format", "json-render-diagnostics"]);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null()).stderr(Stdio::inherit());
    let built = cargo.output().expect("cargo can be run");
    assert!(built.status.success(), "the grapevine binary does not build");
    let lines = String::from_utf8_lossy(&built.stdout).into_owned();
    let executable = lines.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == "grapevine")
            .then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executable.expect("cargo names the binary that it built")
}
