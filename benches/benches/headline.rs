//! The headline: how soon the first token comes when several engines queue and cache, through several routers,
//! in one run on the same chats.
//!
//! `cargo bench --bench headline -- --seeds 1,2,3 --peers all --json headline.json`
//!
//! The engines of [`benches::closed_chats`], four by default, are started anew for each arm and seed.
//!
//! The arms, interleaved: `round-robin` (the clients themselves, over the engines), `haproxy` (leastconn, HTTP
//! mode, over the engines), `one` and `three` (replicas of Grapevine; three stand behind HAProxy in TCP mode),
//! `oracle` (which knows every queue and cache, see [`benches::oracle`]), and with `--peers` one and three copies of
//! each peer, in the same places ([`benches::peer`] says how they are started). SMG has an arm more: three copies that
//! its mesh connects.

use std::fmt::Write as _;
use std::net::SocketAddr;

use anyhow::Context as _;
use benches::arms::{self, Arms};
use benches::closed_chats::{Ran, Shape};
use benches::fleet::Fleet;
use benches::options::Common;
use benches::peer::{Chosen, Peer, Sharing};
use benches::spread::Spread;
use benches::way::{Programs, Way};
use clap::{Parser, ValueEnum};
use engine::Config;
use serde::Serialize;

/// The target for Grapevine's mean time to first token, over HAProxy's.
const TARGET_OVER_HAPROXY: f64 = 0.25;
/// The same over the oracle's, which holds for harder engines and prompts as well.
const TARGET_OVER_ORACLE: f64 = 1.7;

/// Time to first token over engines that queue and cache: Grapevine, HAProxy, an oracle, others
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    arms: Arms<Arm>,
    /// Routers from PyPI beside it, one and three copies of each
    #[arg(long, value_enum, value_delimiter = ',', default_value = "none")]
    peers: Vec<Chosen>,
    #[command(flatten)]
    #[serde(flatten)]
    shape: Shape,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
}

/// What stands between the clients and the engines.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Arm {
    RoundRobin,
    Haproxy,
    One,
    Three,
    SglangRouterOne,
    SglangRouterThree,
    SmgOne,
    SmgThree,
    SmgMeshThree,
    VllmRouterOne,
    VllmRouterThree,
    Oracle,
}

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Haproxy => "HAProxy leastconn",
            Self::One => "Grapevine, one replica",
            Self::Three => "Grapevine, three replicas",
            Self::SglangRouterOne => "sglang-router, one copy",
            Self::SglangRouterThree => "sglang-router, three copies",
            Self::SmgOne => "smg, one copy",
            Self::SmgThree => "smg, three copies",
            Self::SmgMeshThree => "smg, three copies with its mesh",
            Self::VllmRouterOne => "vllm-router, one copy",
            Self::VllmRouterThree => "vllm-router, three copies",
            Self::Oracle => "oracle",
        }
    }

    /// The peer it has, with how many copies.
    fn peer(self) -> Option<(Peer, Sharing, usize)> {
        match self {
            Self::SglangRouterOne => Some((Peer::SglangRouter, Sharing::Nothing, 1)),
            Self::SglangRouterThree => Some((Peer::SglangRouter, Sharing::Nothing, 3)),
            Self::SmgOne => Some((Peer::Smg, Sharing::Nothing, 1)),
            Self::SmgThree => Some((Peer::Smg, Sharing::Nothing, 3)),
            Self::SmgMeshThree => Some((Peer::Smg, Sharing::Mesh, 3)),
            Self::VllmRouterOne => Some((Peer::VllmRouter, Sharing::Nothing, 1)),
            Self::VllmRouterThree => Some((Peer::VllmRouter, Sharing::Nothing, 3)),
            Self::RoundRobin | Self::Haproxy | Self::One | Self::Three | Self::Oracle => None,
        }
    }

    /// Whether all that it is made of is there.
    fn is_there(self, programs: &Programs) -> bool {
        match self.peer() {
            Some((peer, _, copies)) => {
                programs.peer(peer).is_some() && (copies == 1 || programs.haproxy.is_some())
            }
            None => programs.haproxy.is_some() || !matches!(self, Self::Haproxy | Self::Three),
        }
    }
}

/// One run of one arm.
#[derive(Serialize)]
struct Run {
    arm: Arm,
    seed: u64,
    #[serde(flatten)]
    ran: Ran,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if settings.common.short {
        settings.arms.seeds.truncate(1);
        settings.shape.shorten();
    }
    let programs = Programs::find(&settings.common, &settings.peers)?;
    let arms = settings.arms.chosen(|arm| arm.is_there(&programs));
    let runs = arms::interleaved(arms, &settings.arms.seeds, |arm, seed| {
        let run = measure(arm, seed, &settings, &programs)
            .with_context(|| format!("{} with seed {seed}", arm.name()))?;
        eprintln!(
            "seed {seed}  {:<31} {:>7.1} ms to the first token on average, {} failed",
            arm.name(),
            run.ran.mean_ms(),
            run.ran.failed()
        );
        Ok(run)
    })?;
    print!("{}", table(&settings, &runs)?);
    let peers = &programs.peers;
    settings.common.write(&serde_json::json!({ "settings": settings, "peers": peers, "runs": runs }))
}

fn measure(arm: Arm, seed: u64, settings: &Settings, programs: &Programs) -> anyhow::Result<Run> {
    let configs = settings.shape.engines()?;
    let fleet = Fleet::start(configs.clone())?;
    let engines = fleet.addresses();
    let way = stand_up(arm, settings, programs, &engines, configs)?;
    Ok(Run { arm, seed, ran: settings.shape.run(seed, &way.targets(), &fleet)? })
}

fn stand_up(
    arm: Arm,
    settings: &Settings,
    programs: &Programs,
    engines: &[SocketAddr],
    configs: Vec<Config>,
) -> anyhow::Result<Way> {
    let replicas = |count| Way::replicas(programs, count, engines, &settings.common.serve_arguments(&[]));
    if let Some((peer, sharing, copies)) = arm.peer() {
        return Way::peers(programs, peer, sharing, copies, engines);
    }
    match arm {
        Arm::Haproxy => Way::haproxy(programs, engines),
        Arm::One => replicas(1),
        Arm::Three => replicas(3),
        Arm::Oracle => Way::oracle(engines, configs),
        _ => Ok(Way::Direct(engines.to_vec())),
    }
}

fn table(settings: &Settings, runs: &[Run]) -> anyhow::Result<String> {
    let mut out = String::new();
    // A run's time over another arm's with the same seed.
    let over = |run: &Run, reference: Arm| {
        let reference = runs.iter().find(|each| each.arm == reference && each.seed == run.seed)?;
        Some(run.ran.mean_ms() / reference.ran.mean_ms())
    };
    writeln!(out, "\nTime to first token, {}; median of seeds {:?}\n", settings.shape, settings.arms.seeds)?;
    writeln!(
        out,
        "| through | mean ms | p50 | p99 | x HAProxy (least-most) | x oracle (least-most) | token hit rate | busiest / mean | failed |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
    let mut verdicts = String::new();
    for arm in Arm::value_variants() {
        let of_arm: Vec<&Run> = runs.iter().filter(|run| run.arm == *arm).collect();
        let figure = |value: &dyn Fn(&Run) -> Option<f64>| {
            Spread::of(&of_arm.iter().filter_map(|run| value(run)).collect::<Vec<f64>>())
        };
        let Some(mean) = figure(&|run| run.ran.report.ttft_ms.mean) else { continue };
        let p50 = figure(&|run| run.ran.report.ttft_ms.p50);
        let p99 = figure(&|run| run.ran.report.ttft_ms.p99);
        let over_haproxy = figure(&|run| over(run, Arm::Haproxy));
        let over_oracle = figure(&|run| over(run, Arm::Oracle));
        let hit_rate = figure(&|run| run.ran.report.hit_rate);
        let busiest = figure(&|run| Some(run.ran.busiest_over_mean));
        let failed: u64 = of_arm.iter().map(|run| run.ran.failed()).sum();
        let plain = |spread: &Option<Spread>, digits| Spread::show_middle(spread.as_ref(), digits);
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {failed} |",
            arm.name(),
            plain(&Some(mean), 1),
            plain(&p50, 1),
            plain(&p99, 1),
            Spread::show(over_haproxy.as_ref(), 2),
            Spread::show(over_oracle.as_ref(), 2),
            plain(&hit_rate, 3),
            plain(&busiest, 2),
        )?;
        if *arm == Arm::Three {
            for (other, spread, target) in [
                ("HAProxy's", over_haproxy, TARGET_OVER_HAPROXY),
                ("the oracle's", over_oracle, TARGET_OVER_ORACLE),
            ] {
                let Some(spread) = spread else { continue };
                let verdict = if spread.median <= target { "met" } else { "MISSED" };
                writeln!(
                    verdicts,
                    "{}: mean time to first token over {other}, {:.2} ({:.2} at most); target {target}: {verdict}",
                    arm.name(),
                    spread.median,
                    spread.most
                )?;
            }
        }
    }
    writeln!(out, "\n{verdicts}")?;
    Ok(out)
}
