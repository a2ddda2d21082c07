//! Affinity under replicas: what several copies of a router make of the same chats.
//!
//! `cargo bench --bench replicas`
//!
//! The chats and engines of [`benches::closed_chats`] through 1, 2, 4 and 8 copies of each router behind HAProxy in TCP
//! mode, which spreads connections; so one chat's turns come to any copy. Engines and copies are started anew for each
//! run, routers and numbers of copies interleaved within each seed. A router whose copies know nothing of each other
//! sees only its share of the prompts and of the load; HAProxy over the engines (leastconn, one copy) is what a
//! balancer without any knowledge of prompts makes of them. [`benches::peer`] says how the peers are started.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use benches::arms::{self, Arms};
use benches::closed_chats::{Ran, Shape};
use benches::fleet::Fleet;
use benches::machine::{self, Machine};
use benches::options::{Common, target_folder};
use benches::peer::{Chosen, Peer, Sharing};
use benches::spread::Spread;
use benches::way::{Programs, Way};
use clap::{Parser, ValueEnum};
use grapevine::chart::{Chart, Panel, Scale};
use serde::Serialize;

/// Hit rate and time to first token through 1 to 8 copies of each router
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    arms: Arms<Product>,
    /// Numbers of copies
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    copies: Vec<usize>,
    /// Routers from PyPI
    #[arg(long, value_enum, value_delimiter = ',', default_value = "all")]
    peers: Vec<Chosen>,
    #[command(flatten)]
    #[serde(flatten)]
    shape: Shape,
    /// Write a chart here [default: replicas.svg in the build folder]
    #[arg(long)]
    svg: Option<PathBuf>,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
}

/// What there are copies of.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Product {
    Grapevine,
    SglangRouter,
    Smg,
    /// SMG whose copies are connected by its mesh.
    SmgMesh,
    VllmRouter,
    Haproxy,
}

impl Product {
    fn name(self) -> &'static str {
        match self {
            Self::Grapevine => "Grapevine",
            Self::SglangRouter => "sglang-router",
            Self::Smg => "smg",
            Self::SmgMesh => "smg with its mesh",
            Self::VllmRouter => "vllm-router",
            Self::Haproxy => "HAProxy leastconn",
        }
    }

    fn peer(self) -> Option<(Peer, Sharing)> {
        match self {
            Self::SglangRouter => Some((Peer::SglangRouter, Sharing::Nothing)),
            Self::Smg => Some((Peer::Smg, Sharing::Nothing)),
            Self::SmgMesh => Some((Peer::Smg, Sharing::Mesh)),
            Self::VllmRouter => Some((Peer::VllmRouter, Sharing::Nothing)),
            Self::Grapevine | Self::Haproxy => None,
        }
    }

    fn is_there(self, programs: &Programs) -> bool {
        self.peer().is_none_or(|(peer, _)| programs.peer(peer).is_some())
    }

    /// Whether so many copies make sense.
    fn has(self, copies: usize, programs: &Programs) -> bool {
        match self {
            Self::Haproxy => copies == 1 && programs.haproxy.is_some(),
            // One copy has nobody to share with.
            Self::SmgMesh => copies > 1 && programs.haproxy.is_some(),
            _ => copies == 1 || programs.haproxy.is_some(),
        }
    }
}

/// One run.
#[derive(Serialize)]
struct Run {
    router: Product,
    copies: usize,
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
    settings.common.json_or("replicas.json")?;
    let load_before = machine::load();
    let programs = Programs::find(&settings.common, &settings.peers)?;
    let routers = settings.arms.chosen(|router| router.is_there(&programs));
    let arms: Vec<(Product, usize)> = settings
        .copies
        .iter()
        .flat_map(|copies| routers.iter().map(|router| (*router, *copies)))
        .filter(|(router, copies)| router.has(*copies, &programs))
        .collect();
    let runs = arms::interleaved(arms, &settings.arms.seeds, |(router, copies), seed| {
        let run = measure(router, copies, seed, &settings, &programs)
            .with_context(|| format!("{copies} x {} with seed {seed}", router.name()))?;
        eprintln!(
            "seed {seed}  {copies} x {:<18} {:>7.1} ms to the first token on average, hit rate {:.3}, {} failed",
            router.name(),
            run.ran.mean_ms(),
            run.ran.report.hit_rate.unwrap_or(f64::NAN),
            run.ran.failed()
        );
        Ok(run)
    })?;
    let machine = Machine::read(load_before);
    print!("{machine}{}", table(&settings, &runs)?);
    let svg = settings.svg.clone().map_or_else(|| Ok(target_folder()?.join("replicas.svg")), anyhow::Ok)?;
    std::fs::write(&svg, chart(&settings, &runs).to_string())
        .with_context(|| format!("writing {}", svg.display()))?;
    println!("chart: {}", svg.display());
    let peers = &programs.peers;
    settings
        .common
        .write(&serde_json::json!({ "machine": machine, "settings": settings, "peers": peers, "runs": runs }))
}

fn measure(
    router: Product,
    copies: usize,
    seed: u64,
    settings: &Settings,
    programs: &Programs,
) -> anyhow::Result<Run> {
    let fleet = Fleet::start(settings.shape.engines()?)?;
    let engines: Vec<SocketAddr> = fleet.addresses();
    let way = match router.peer() {
        Some((peer, sharing)) => Way::peers(programs, peer, sharing, copies, &engines)?,
        None if router == Product::Haproxy => Way::haproxy(programs, &engines)?,
        None => Way::replicas(programs, copies, &engines, &settings.common.serve_arguments(&[]))?,
    };
    Ok(Run { router, copies, seed, ran: settings.shape.run(seed, &way.targets(), &fleet)? })
}

/// A figure of one router with so many copies, over the seeds.
fn figure(
    runs: &[Run],
    router: Product,
    copies: usize,
    value: impl Fn(&Ran) -> Option<f64>,
) -> Option<Spread> {
    let these = runs.iter().filter(|run| run.router == router && run.copies == copies);
    Spread::of(&these.filter_map(|run| value(&run.ran)).collect::<Vec<f64>>())
}

/// Where a figure is read.
type Figure = fn(&Ran) -> Option<f64>;

fn table(settings: &Settings, runs: &[Run]) -> anyhow::Result<String> {
    let mut out = String::new();
    writeln!(out, "\n{}; median (least-most) of seeds {:?}", settings.shape, settings.arms.seeds)?;
    let figures: [(&str, usize, Figure); 4] = [
        ("Token hit rate", 3, |ran| ran.report.hit_rate),
        ("Mean time to first token, ms", 1, |ran| ran.report.ttft_ms.mean),
        ("99th percentile of the time to first token, ms", 0, |ran| ran.report.ttft_ms.p99),
        ("Busiest engine over the mean", 2, |ran| Some(ran.busiest_over_mean)),
    ];
    for (title, digits, value) in figures {
        writeln!(out, "\n{title}\n")?;
        let heads: String = settings.copies.iter().map(|copies| format!(" {copies} |")).collect();
        let lines: String = settings.copies.iter().map(|_| "---|").collect();
        writeln!(out, "| copies of |{heads}\n|---|{lines}")?;
        for router in routers(runs) {
            write!(out, "| {} |", router.name())?;
            for copies in &settings.copies {
                let spread = figure(runs, router, *copies, value);
                write!(out, " {} |", Spread::show(spread.as_ref(), digits))?;
            }
            writeln!(out)?;
        }
    }
    let failed: u64 = runs.iter().map(|run| run.ran.failed()).sum();
    let requests: u64 = runs.iter().map(|run| run.ran.report.requests).sum();
    writeln!(out, "\n{failed} of {requests} requests failed")?;
    Ok(out)
}

/// Those that were measured.
fn routers(runs: &[Run]) -> Vec<Product> {
    let is_there = |router: &Product| runs.iter().any(|run| run.router == *router);
    Product::value_variants().iter().copied().filter(is_there).collect()
}

fn chart(settings: &Settings, runs: &[Run]) -> Chart {
    let routers = routers(runs);
    let points = |value: Figure| -> Vec<Vec<(usize, f64)>> {
        let of = |router: &Product| {
            let copies = settings.copies.iter().enumerate();
            copies
                .filter_map(|(at, copies)| Some((at, figure(runs, *router, *copies, value)?.median)))
                .collect()
        };
        routers.iter().map(of).collect()
    };
    let times = points(|ran| ran.report.ttft_ms.mean);
    let panels = vec![
        Panel {
            title: "token hit rate".to_owned(),
            scale: Scale::Linear { most: 1.0 },
            points: points(|ran| ran.report.hit_rate),
        },
        Panel {
            title: "mean time to first token, ms".to_owned(),
            scale: Scale::decades(times.iter().flatten().map(|(_, ms)| *ms)),
            points: times,
        },
    ];
    Chart {
        along: "copies of the router".to_owned(),
        values: settings.copies.iter().map(ToString::to_string).collect(),
        lines: routers.iter().map(|router| router.name().to_owned()).collect(),
        panels,
        columns: 2,
    }
}
