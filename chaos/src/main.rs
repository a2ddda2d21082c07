//! Breaks a running cluster on a timeline, under load, and judges what the clients saw.
//!
//! The main choice: a scenario is data (`chaos/scenarios/*.toml`): a cluster, a load, faults at their times, and
//! rules that must hold. The processes are real ones, so that `kill -9` is one. They are this very program, started
//! again as `chaos grapevine ...`, so that what is broken is what was built.
//!
//! Left out on purpose: faults of the network between replicas; those have an in-process harness in `gossip`.

mod balancer;
mod evidence;
mod fleet;
mod judge;
mod load;
mod play;
mod report;
mod scenario;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::balancer::Balancing;
use crate::play::{Options, Played};
use crate::scenario::Scenario;

/// The word behind which this program is `grapevine`.
const AS_GRAPEVINE: &str = "grapevine";

/// Exit status when a rule is broken.
const BROKEN: u8 = 1;
/// Exit status when a scenario could not be read or played.
const FAULTY: u8 = 2;

/// Breaks a cluster under load and checks what must hold
#[derive(Parser)]
#[command(name = "chaos", version)]
struct Arguments {
    #[command(subcommand)]
    ask: Ask,
}

#[derive(Subcommand)]
enum Ask {
    /// Names the scenarios
    List,
    /// Plays scenarios, one after the other
    Run {
        /// Names from `list`, or files
        #[arg(required = true, value_name = "NAME|FILE")]
        scenarios: Vec<String>,
        /// Settles the texts and which process is hit [default: the scenario's]
        #[arg(long)]
        seed: Option<u64>,
        /// What stands between clients and replicas
        #[arg(long, value_enum, default_value_t)]
        balancer: Balancing,
        /// Where logs and result.json go, in a folder for each scenario
        #[arg(long, value_name = "DIR", default_value = "target/chaos")]
        out: PathBuf,
        /// A grapevine binary to play with in place of this build
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|word| word == AS_GRAPEVINE) {
        arguments.remove(0);
        return grapevine::run(arguments);
    }
    let outcome = match Arguments::parse().ask {
        Ask::List => list(),
        Ask::Run { scenarios, seed, balancer, out, program } => {
            run(&scenarios, &Options { seed, balancing: balancer, out, program })
        }
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("chaos: {error:#}");
        ExitCode::from(FAULTY)
    })
}

fn list() -> anyhow::Result<ExitCode> {
    for name in scenario::names()? {
        println!("{name:<24} {}", Scenario::find(&name)?.about);
    }
    Ok(ExitCode::SUCCESS)
}

fn run(names: &[String], options: &Options) -> anyhow::Result<ExitCode> {
    // All of them are read before the first is played: a fault in the last one should not cost the others' time.
    let scenarios = names.iter().map(|name| Scenario::find(name)).collect::<anyhow::Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut all_hold = true;
    for scenario in &scenarios {
        match runtime.block_on(play::play(scenario, options))? {
            Played::ToTheEnd(verdict) => all_hold &= verdict.holds(),
            Played::Interrupted => return Ok(ExitCode::from(FAULTY)),
        }
    }
    Ok(if all_hold { ExitCode::SUCCESS } else { ExitCode::from(BROKEN) })
}
