//! What every bench that measures Grapevine itself takes on its command line.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;

use crate::replicas;

/// The options that such benches share.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Common {
    /// More arguments for `grapevine serve`, separated by spaces
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    pub serve: String,
    /// The program to measure [default: built now]
    #[arg(long)]
    pub grapevine: Option<PathBuf>,
    /// Write all that was measured here, as JSON
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// A quick run that shows that everything works
    #[arg(long)]
    pub short: bool,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    #[serde(skip)]
    pub bench: bool,
}

impl Common {
    /// The program to measure.
    ///
    /// # Errors
    /// When it has to be built and can't be.
    pub fn program(&self) -> anyhow::Result<PathBuf> {
        replicas::program(self.grapevine.clone())
    }

    /// Arguments of `grapevine serve`: the bench's own, then those that were given.
    pub fn serve_arguments(&self, own: &[&str]) -> Vec<String> {
        own.iter().copied().chain(self.serve.split_whitespace()).map(str::to_owned).collect()
    }

    /// Where the JSON goes: where that was asked for, else into the build folder.
    ///
    /// # Errors
    /// When the build folder can't be told.
    pub fn json_or(&mut self, name: &str) -> anyhow::Result<()> {
        if self.json.is_none() {
            self.json = Some(target_folder()?.join(name));
        }
        Ok(())
    }

    /// Writes what was measured where that was asked for.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write(&self, measured: &serde_json::Value) -> anyhow::Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        std::fs::write(path, serde_json::to_string_pretty(measured)?)
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// The build folder.
///
/// # Errors
/// When this program does not lie in one.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let deps = own.parent().filter(|folder| folder.ends_with("deps"));
    // This program is target/PROFILE/deps/NAME.
    let target = deps.and_then(|deps| deps.ancestors().nth(2));
    Ok(target.with_context(|| format!("{} lies in no build folder", own.display()))?.to_owned())
}
