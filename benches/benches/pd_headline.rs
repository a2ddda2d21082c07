//! The headline where engines have roles: how soon the first token comes, and how many requests have all their
//! tokens in time, when two engines prefill and two decode, through several routers, in one run on the same chats.
//!
//! `cargo bench --bench pd_headline -- --seeds 1,2,3 --json pd_headline.json`
//!
//! Four engines (FIFO prefill, LRU cache of blocks) are started anew for each arm and seed. A prompt of 12 KB takes
//! 0.45 s; whoever decodes beside a prompt is four times as slow, and every other request that decodes adds 15% to
//! tokens and prompts. Fourteen clients in closed loop hold chats of two turns, of which four in ten begin with 12 KB and the others
//! with 0.4 KB. A request is within its limits when its first token comes in 0.35 s (1.05 s where a long chat
//! begins) and its tokens 30 ms apart, on average over the stream.
//!
//! The arms, interleaved: `haproxy` (leastconn, HTTP mode, over the same engines without roles), `always` (three
//! replicas of Grapevine with `--split always`), `one` and `three` (replicas with `--policy pd-cost`; three stand
//! behind HAProxy in TCP mode) and `oracle` (which knows every queue and cache, see [`benches::oracle`]).

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use benches::arms::{self, Arms};
use benches::chats::{self, Class, LONG_FACTOR, Mix, Pace, Sample};
use benches::fleet::Fleet;
use benches::options::Common;
use benches::roles::{Engines, Figures};
use benches::spread::Spread;
use benches::way::{Programs, Way};
use clap::{Parser, ValueEnum};
use serde::Serialize;

/// The target for the mean time to first token, over HAProxy's.
const TARGET_OVER_HAPROXY: f64 = 0.6;
/// The target for requests within both limits.
const TARGET_WITHIN: f64 = 0.9;
/// Chats in a run with `--short`.
const SHORT_CHATS: u64 = 28;

/// Time to first token over engines that prefill and decode: Grapevine, HAProxy, an oracle
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    arms: Arms<Arm>,
    #[command(flatten)]
    engines: Engines,
    /// Clients in closed loop
    #[arg(long, default_value_t = 14)]
    clients: usize,
    /// Chats in each run
    #[arg(long, default_value_t = 100)]
    chats: u64,
    /// Chats that begin long, 0 to 1
    #[arg(long, default_value_t = 0.4)]
    long_share: f64,
    /// Bytes of a long chat's first message
    #[arg(long, default_value_t = 12_000)]
    long_bytes: usize,
    /// Bytes of all other messages
    #[arg(long, default_value_t = 400)]
    short_bytes: usize,
    /// Tokens of each answer
    #[arg(long, default_value_t = 64)]
    output_tokens: u32,
    /// Time between an answer and the client's next turn, in ms
    #[arg(long, default_value_t = 300)]
    think_ms: u64,
    /// To the first token, in ms; three times as long where a long chat begins
    #[arg(long, default_value_t = 350.0)]
    ttft_ms: f64,
    /// Between tokens on average over a stream, in ms
    #[arg(long, default_value_t = 30.0)]
    tpot_ms: f64,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
}

impl Settings {
    fn mix(&self) -> Mix {
        Mix {
            long_share: self.long_share,
            long_bytes: self.long_bytes,
            short_bytes: self.short_bytes,
            turns: 2,
            output_tokens: self.output_tokens,
            think: Duration::from_millis(self.think_ms),
            classes: vec![Class { priority: 2, ttft_ms: self.ttft_ms, tpot_ms: self.tpot_ms }],
        }
    }
}

/// What stands between the clients and the engines.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Arm {
    Haproxy,
    Always,
    One,
    Three,
    Oracle,
}

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::Haproxy => "HAProxy leastconn, engines whole",
            Self::Always => "Grapevine, three replicas, always split",
            Self::One => "Grapevine, one replica",
            Self::Three => "Grapevine, three replicas",
            Self::Oracle => "oracle",
        }
    }
}

/// One run of one arm.
#[derive(Serialize)]
struct Run {
    arm: Arm,
    seed: u64,
    figures: Figures,
    /// Prefills that were handed over.
    splits: u64,
    /// First turns of long chats.
    long_starts: usize,
    /// Requests that each engine got, prefill legs among them.
    requests_per_engine: Vec<u64>,
    samples: Vec<Sample>,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if settings.common.short {
        settings.arms.seeds.truncate(1);
        settings.chats = SHORT_CHATS;
    }
    let programs = Programs::find(&settings.common, &[])?;
    let arms =
        settings.arms.chosen(|arm| programs.haproxy.is_some() || matches!(arm, Arm::One | Arm::Oracle));
    let runs = arms::interleaved(arms, &settings.arms.seeds, |arm, seed| {
        let run = measure(arm, seed, &settings, &programs)
            .with_context(|| format!("{} with seed {seed}", arm.name()))?;
        eprintln!(
            "seed {seed}  {:<40} {:>6.0} ms to the first token on average, {:.3} within limits, {} split, {} failed",
            arm.name(),
            run.figures.ttft_mean_ms,
            run.figures.within,
            run.splits,
            run.figures.failed
        );
        Ok(run)
    })?;
    print!("{}", table(&settings, &runs)?);
    settings.common.write(&serde_json::json!({ "settings": settings, "runs": runs }))
}

fn measure(arm: Arm, seed: u64, settings: &Settings, programs: &Programs) -> anyhow::Result<Run> {
    let configs = settings.engines.configs(arm != Arm::Haproxy);
    let fleet = Fleet::start(configs.clone())?;
    let addresses = fleet.addresses();
    let replicas = |count, own: &[&str]| {
        let endpoints = settings.engines.endpoints(&addresses);
        Way::replicas(programs, count, &endpoints, &settings.common.serve_arguments(own))
    };
    let way = match arm {
        Arm::Haproxy => Way::haproxy(programs, &addresses)?,
        Arm::Always => replicas(3, &["--policy", "pd-cost", "--split", "always"])?,
        Arm::One => replicas(1, &["--policy", "pd-cost"])?,
        Arm::Three => replicas(3, &["--policy", "pd-cost"])?,
        Arm::Oracle => Way::oracle(&addresses, configs)?,
    };
    let target = *way.targets().first().context("a way has an entry")?;
    let pace = Pace::Closed { clients: settings.clients, chats: settings.chats };
    let samples = chats::run(&settings.mix(), pace, seed, target)?;
    ensure!(!samples.is_empty(), "no request was sent");
    Ok(Run {
        arm,
        seed,
        figures: Figures::of(&samples),
        splits: fleet.stats().iter().map(|stats| stats.staged).sum(),
        long_starts: samples.iter().filter(|sample| sample.long_start).count(),
        requests_per_engine: fleet.chats(),
        samples,
    })
}

fn table(settings: &Settings, runs: &[Run]) -> anyhow::Result<String> {
    let mut out = String::new();
    // A run's time over another arm's with the same seed.
    let over = |run: &Run, reference: Arm| {
        let reference = runs.iter().find(|each| each.arm == reference && each.seed == run.seed)?;
        Some(run.figures.ttft_mean_ms / reference.figures.ttft_mean_ms)
    };
    writeln!(
        out,
        "\nTime to first token, {} engines that prefill ({} us a token) and {} that decode ({} ms a token, {} x as long beside a prompt, {} more for each other), {} clients, {} chats of two turns, {} of them beginning with {} bytes; median of seeds {:?}\n",
        settings.engines.prefills,
        settings.engines.prefill_us,
        settings.engines.decodes,
        settings.engines.token_ms,
        settings.engines.beside_prefill,
        settings.engines.each_adds,
        settings.clients,
        settings.chats,
        settings.long_share,
        settings.long_bytes,
        settings.arms.seeds,
    )?;
    writeln!(
        out,
        "| through | mean ms | p50 | p99 | x HAProxy (least-most) | x oracle | within {:.2} s ({:.2} s) and {:.0} ms | ms between tokens | split / long starts | failed |",
        settings.ttft_ms / 1e3,
        settings.ttft_ms * LONG_FACTOR / 1e3,
        settings.tpot_ms,
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|")?;
    let mut verdicts = String::new();
    for arm in Arm::value_variants() {
        let of_arm: Vec<&Run> = runs.iter().filter(|run| run.arm == *arm).collect();
        if of_arm.is_empty() {
            continue;
        }
        let figure = |value: &dyn Fn(&Run) -> Option<f64>| {
            Spread::of(&of_arm.iter().filter_map(|run| value(run)).collect::<Vec<f64>>())
        };
        let middle = |value: fn(&Figures) -> f64, digits| {
            Spread::show_middle(figure(&|run| Some(value(&run.figures))).as_ref(), digits)
        };
        let over_haproxy = figure(&|run| over(run, Arm::Haproxy));
        let within = figure(&|run| Some(run.figures.within));
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} / {} | {} |",
            arm.name(),
            middle(|figures| figures.ttft_mean_ms, 0),
            middle(|figures| figures.ttft_p50_ms, 0),
            middle(|figures| figures.ttft_p99_ms, 0),
            Spread::show(over_haproxy.as_ref(), 2),
            Spread::show_middle(figure(&|run| over(run, Arm::Oracle)).as_ref(), 2),
            Spread::show(within.as_ref(), 3),
            middle(|figures| figures.tpot_mean_ms, 1),
            of_arm.iter().map(|run| run.splits).sum::<u64>(),
            of_arm.iter().map(|run| run.long_starts).sum::<usize>(),
            of_arm.iter().map(|run| run.figures.failed).sum::<usize>(),
        )?;
        if let (Arm::Three, Some(ratio), Some(within)) = (arm, over_haproxy, within) {
            let verdict = |met| if met { "met" } else { "MISSED" };
            writeln!(
                verdicts,
                "{}: mean time to first token {:.2} x HAProxy's at most, target {TARGET_OVER_HAPROXY}: {}; within both limits {:.3} at least, target {TARGET_WITHIN}: {}",
                arm.name(),
                ratio.most,
                verdict(ratio.most <= TARGET_OVER_HAPROXY),
                within.least,
                verdict(within.least >= TARGET_WITHIN),
            )?;
        }
    }
    writeln!(out, "\n{verdicts}")?;
    Ok(out)
}
