//! `grapevine lab`: what a policy would do to a workload, in virtual time.
//!
//! The command line makes a grid of policies, engines, replicas and gossip intervals; the crate `lab` plays it; the
//! figures become a table, JSON and a chart. Nothing here decides anything.

mod chart;
mod options;
mod report;

#[cfg(test)]
mod tests;

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use self::options::Options;
pub use self::report::{Report, Row};
use crate::load::Faults;

/// Runs `grapevine lab`: progress on standard error, the table on standard output, JSON and a chart where asked.
///
/// # Errors
/// [`Faults`] for options or files that make no run; and what kept a result from being written.
pub fn run(options: &Options) -> anyhow::Result<Report> {
    let grid = options.grid()?;
    // Made before the runs: a path that can't be written should not cost them.
    let json = options.json.as_deref().map(|path| create(path, "--json")).transpose()?;
    let svg = options.svg.as_deref().map(|path| create(path, "--svg")).transpose()?;
    let bar = progress(grid.cells.len(), options.quiet);
    let scenarios: Vec<_> = grid.cells.iter().map(|cell| cell.scenario.clone()).collect();
    let figures = ::lab::sweep(&scenarios, options.threads(), &|_| bar.inc(1));
    bar.finish_and_clear();
    let figures = figures.map_err(|faults| Faults(faults.iter().map(ToString::to_string).collect()))?;
    let report = Report::of(&grid, figures);
    if let Some(mut file) = json {
        serde_json::to_writer_pretty(&mut file, &report).context("cannot write --json")?;
        writeln!(file).and_then(|()| file.flush()).context("cannot write --json")?;
    }
    if let Some(mut file) = svg {
        write!(file, "{}", chart::chart(&report))
            .and_then(|()| file.flush())
            .context("cannot write --svg")?;
    }
    write!(std::io::stdout().lock(), "{report}")?;
    Ok(report)
}

fn create(path: &Path, flag: &str) -> anyhow::Result<std::io::BufWriter<std::fs::File>> {
    let file = std::fs::File::create(path);
    let file = file.map_err(|error| Faults(vec![format!("{flag} {}: {error}", path.display())]))?;
    Ok(std::io::BufWriter::new(file))
}

/// Nothing is drawn when standard error is not a terminal.
fn progress(runs: usize, quiet: bool) -> ProgressBar {
    if quiet {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(runs as u64), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{elapsed:>5} [{bar:40}] {pos}/{len} runs") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(std::time::Duration::from_millis(250));
    bar
}
