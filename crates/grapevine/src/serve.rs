//! `serve`: one replica as a process, with its signals.

use std::process::ExitCode;

use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, warn};

use crate::config::{Config, Sources, read};
use crate::log;
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
    let _log = match log::start(&config) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("grapevine: no thread for the log: {error}");
            return ExitCode::FAILURE;
        }
    };
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
