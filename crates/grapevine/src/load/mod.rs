//! `grapevine load`: drives OpenAI-style endpoints and measures what a client sees.
//!
//! Three parts, each of use alone:
//! - what to ask ([`Workload`]): pure and seeded, generated chats or a recorded trace;
//! - when and where ([`Plan`], [`drive`]): open or closed loop, over one or several targets;
//! - what came back ([`Live`], [`Report`]): readable while the run goes on.
//!
//! The main choice: one thread, one pool of connections, replies parsed in place. The generator shares its
//! machine with what it measures, so its own CPU is kept small rather than its rate large. It judges replies
//! as a strict client would: an error event, a missing `[DONE]` or finish reason, or `finish_reason: abort`
//! is a failed request, whatever the HTTP status was.
//!
//! Left out: TLS, and checking the answers' text.

mod arrivals;
mod body;
mod client;
mod drive;
mod options;
mod plan;
mod progress;
mod reply;
mod report;
mod sse;
mod statistics;
mod text;
mod trace;
mod workload;

#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod loopback_tests;

use std::io::Write as _;

use anyhow::{Context, ensure};

pub use self::arrivals::{Poisson, SPREAD_MAX, spread};
pub use self::body::{Api, Envelope, Speaker, Transcript};
pub use self::client::{Client, Outcome, Target, Wire};
pub use self::drive::drive;
pub use self::options::{Faults, Options};
pub use self::plan::{Limits, Order, Pace, Plan, Spread, Targets};
pub use self::reply::{ErrorKind, Failure, PromptDetails, Usage};
pub use self::report::{Milliseconds, Report};
pub use self::sse::{Oversize, Splitter};
pub use self::statistics::Live;
pub use self::text::BYTES_PER_TOKEN;
pub use self::trace::{Arrivals, BLOCK_TOKENS, Prompt, Reading, Row, Trace};
pub use self::workload::{ChatShape, Conversation, Request, Source, Workload};

/// Runs `grapevine load`: progress on standard error, the table on standard output, JSON where asked.
///
/// Starts a runtime of its own: call it outside of any. Ctrl-C ends the run early, with its report; a second
/// one does not wait for the answers under way.
///
/// # Errors
/// [`Faults`] for options that make no run; what kept the JSON file from being written; and, with
/// `--fail-on-error`, that a request failed.
pub fn run(options: &Options) -> anyhow::Result<Report> {
    let plan = options.plan()?;
    // Made before the run: a path that can't be written should not cost one.
    let json = options.json.as_ref().map(|path| {
        let file =
            std::fs::File::create(path).with_context(|| format!("cannot write --json {}", path.display()));
        file.map(|file| (path, file))
    });
    let json = json.transpose()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        let live = Live::new();
        let end = progress::End::of(&plan);
        let driven = drive(plan, live.clone(), interrupts(1));
        tokio::select! {
            report = driven => report,
            () = interrupts(2) => live.report(),
            () = progress::show(end, &live), if !options.quiet => unreachable!("the bar is drawn until dropped"),
        }
    });
    if let Some((path, file)) = json {
        write_json(file, &report).with_context(|| format!("cannot write --json {}", path.display()))?;
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{report}")?;
    if options.fail_on_error {
        ensure!(report.failed() == 0, "{} of {} requests failed", report.failed(), report.requests);
    }
    Ok(report)
}

/// Resolves at the `count`th Ctrl-C. Where the signal can't be had, the run just can't be ended early.
async fn interrupts(count: u32) {
    for _ in 0..count {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

fn write_json(file: std::fs::File, report: &Report) -> anyhow::Result<()> {
    let mut file = std::io::BufWriter::new(file);
    serde_json::to_writer_pretty(&mut file, report)?;
    writeln!(file)?;
    file.flush()?;
    Ok(())
}
