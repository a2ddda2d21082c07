//! `serve`: one replica as a process, with its signals and its log.

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, warn};
use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat, Sources, read};
use crate::replica::Replica;

/// Exit status for a configuration that can't be used.
const FAULTY: u8 = 2;

/// Runs until SIGTERM or SIGINT, then drains.
pub fn run(sources: &Sources) -> ExitCode {
    let config = match read(sources) {
        Ok(config) => config,
        Err(faults) => {
            eprintln!("grapevine: {faults}");
            return ExitCode::from(FAULTY);
        }
    };
    start_log(&config);
    match actix_web::rt::System::new().block_on(serve(config, sources)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Addresses in use and the like: the configuration can't be had here and now.
            error!("{error:#}");
            eprintln!("grapevine: {error:#}");
            ExitCode::from(FAULTY)
        }
    }
}

async fn serve(config: Config, sources: &Sources) -> anyhow::Result<()> {
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let replica = Replica::start(config).await?;
    loop {
        tokio::select! {
            _ = hang_up.recv() => {
                if let Err(faults) = replica.reload(sources) {
                    error!("reload refused, nothing changed: {faults}");
                }
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    tokio::select! {
        () = replica.drain() => {}
        _ = interrupt.recv() => warn!("interrupted again: ending at once"),
    }
    Ok(())
}

fn start_log(config: &Config) {
    // The configuration admits no other filter than one that can be read.
    let filter = EnvFilter::builder().parse_lossy(&config.log);
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match config.log_format {
        LogFormat::Text => log.with_target(false).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}
