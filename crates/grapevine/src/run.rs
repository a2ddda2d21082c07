//! From the arguments to the exit status: what the binary does, for other binaries too.

use std::process::ExitCode;

use crate::cli::{Ask, parse};
use crate::{config, demo, explain, lab, load, serve};

/// Does what `arguments` (the program's name first) ask for: 0 when it worked, 2 for a fault in what was asked,
/// 1 for what went wrong on the way.
///
/// Starts runtimes of its own: call it outside of any.
pub fn run(arguments: Vec<String>) -> ExitCode {
    let ask = match parse(arguments) {
        Ok(ask) => ask,
        Err(error) => error.exit(),
    };
    match ask {
        Ask::Serve(sources) => serve::run(&sources),
        Ask::Check { reference: true, .. } => {
            print!("{}", config::reference());
            ExitCode::SUCCESS
        }
        Ask::Check { sources, .. } => match config::read(&sources) {
            Ok(_) => {
                println!("the configuration has no faults");
                ExitCode::SUCCESS
            }
            Err(faults) => {
                eprintln!("grapevine: {faults}");
                ExitCode::from(2)
            }
        },
        Ask::Engine(options) => end(on_runtime(engine(*options))),
        Ask::Demo(options) => end(on_runtime(demo::run(&options))),
        Ask::Load(options) => end(load::run(&options).map(drop)),
        Ask::Lab(options) => end(lab::run(&options).map(drop)),
        Ask::Explain(options) => end(on_runtime(explain::run(&options))),
    }
}

fn on_runtime(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}

async fn engine(options: engine::Options) -> anyhow::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            // Without a handler for Ctrl-C the system's own way of ending stays.
            Ok(()) = tokio::signal::ctrl_c() => {}
        }
    };
    Ok(engine::serve(options, shutdown).await?)
}

/// Faults in what was asked for end with 2, what went wrong on the way with 1.
fn end(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    eprintln!("grapevine: {error:#}");
    let faulty = error.is::<load::Faults>() || error.is::<engine::ConfigError>() || is_engine_config(&error);
    ExitCode::from(if faulty { 2 } else { 1 })
}

fn is_engine_config(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(engine::EngineError::Config(_)))
}
