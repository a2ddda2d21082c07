//! The headline: how soon the first token comes when several engines queue and cache, through several routers,
//! in one run on the same chats.
//!
//! `cargo bench --bench headline -- --seeds 1,2,3 --json headline.json`
//!
//! Four engines (FIFO prefill, LRU cache of blocks) are started anew for each arm and seed. Sixteen clients in
//! closed loop hold chats of four turns that belong to twelve tenants; the system prompts of all tenants share
//! 2 KB and each tenant's own part has 6 KB. Time to first token is the queue plus 83 us for each token of the
//! prompt that is not cached (`8b-h100` at three times its speed, without its fixed part): about 190 ms for a
//! prompt that is cached nowhere and 10 ms for a warm turn. A cache holds two fifths of the tenants' prompts
//! and the chats under way: enough for a router that keeps tenants together, too little for one that does not.
//!
//! The arms, interleaved: `round-robin` (the clients themselves, over the engines), `haproxy` (leastconn, HTTP
//! mode, over the engines), `one` and `three` (replicas of Grapevine; three stand behind HAProxy in TCP mode)
//! and `oracle` (which knows every queue and cache, see [`benches::oracle`]).

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use benches::arms::{self, Arms};
use benches::fleet::Fleet;
use benches::options::Common;
use benches::spread::Spread;
use benches::way::{Programs, Way};
use clap::{Parser, ValueEnum};
use engine::{Config, Profile};
use grapevine::load::{self, ChatShape, Limits, Live, Order, Pace, Plan, Source, Target, Targets};
use serde::Serialize;

/// The target, and what a later version is to reach, over HAProxy's mean time to first token.
const TARGET_OVER_HAPROXY: f64 = 0.5;
/// The target for the busiest engine's requests over the mean.
const TARGET_BUSIEST: f64 = 1.35;
/// Bytes of text that the simulated engines take for a token.
const BYTES_PER_TOKEN: f64 = 4.0;
/// Chats in a run with `--short`.
const SHORT_CHATS: u64 = 32;

/// Time to first token over engines that queue and cache: Grapevine, HAProxy, an oracle
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    arms: Arms<Arm>,
    /// Clients in closed loop
    #[arg(long, default_value_t = 16)]
    clients: usize,
    /// Chats in each run
    #[arg(long, default_value_t = 240)]
    chats: u64,
    /// Turns of each chat
    #[arg(long, default_value_t = 4)]
    turns: u32,
    /// Tenants
    #[arg(long, default_value_t = 12)]
    tenants: u64,
    /// Bytes of system prompt that all tenants share
    #[arg(long, default_value_t = 2_000)]
    common_bytes: usize,
    /// Bytes of system prompt of each tenant's own
    #[arg(long, default_value_t = 6_000)]
    tenant_bytes: usize,
    /// Bytes of a chat's first message
    #[arg(long, default_value_t = 1_000)]
    first_bytes: usize,
    /// Bytes of each later message
    #[arg(long, default_value_t = 400)]
    turn_bytes: usize,
    /// Tokens of each answer
    #[arg(long, default_value_t = 16)]
    output_tokens: u32,
    /// Time between an answer and the client's next turn, in ms
    #[arg(long, default_value_t = 30)]
    think_ms: u64,
    /// Fixed part of a prefill before it is divided by the engine's speed, in ms
    #[arg(long, default_value_t = 0.0)]
    prefill_base_ms: f64,
    /// How many times faster than `8b-h100` each engine is; one engine for each number
    #[arg(long, value_delimiter = ',', default_value = "3,3,3,3")]
    speeds: Vec<f64>,
    /// An engine's cache as a share of what all tenants' prompts and all chats under way fill
    #[arg(long, default_value_t = 0.4)]
    cache_share: f64,
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
    Oracle,
}

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Haproxy => "HAProxy leastconn",
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
    requests_per_engine: Vec<u64>,
    busiest_over_mean: f64,
    report: load::Report,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if settings.common.short {
        settings.arms.seeds.truncate(1);
        settings.chats = SHORT_CHATS;
    }
    ensure!(!settings.speeds.is_empty(), "--speeds names no engine");
    let programs = Programs::find(&settings.common)?;
    let arms =
        settings.arms.chosen(|arm| programs.haproxy.is_some() || !matches!(arm, Arm::Haproxy | Arm::Three));
    let runs = arms::interleaved(arms, &settings.arms.seeds, |arm, seed| {
        let run = measure(arm, seed, &settings, &programs)
            .with_context(|| format!("{} with seed {seed}", arm.name()))?;
        eprintln!(
            "seed {seed}  {:<26} {:>7.1} ms to the first token on average, {} failed",
            arm.name(),
            run.report.ttft_ms.mean.unwrap_or(f64::NAN),
            run.report.failed()
        );
        Ok(run)
    })?;
    print!("{}", table(&settings, &runs)?);
    settings.common.write(&serde_json::json!({ "settings": settings, "runs": runs }))
}

fn measure(arm: Arm, seed: u64, settings: &Settings, programs: &Programs) -> anyhow::Result<Run> {
    let configs = engines(settings);
    let fleet = Fleet::start(configs.clone())?;
    let engines = fleet.addresses();
    let way = stand_up(arm, settings, programs, &engines, configs)?;
    let report = drive(seed, settings, &way.targets())?;
    let requests_per_engine = fleet.chats();
    let (busiest, total) =
        (requests_per_engine.iter().max().copied().unwrap_or(0), requests_per_engine.iter().sum::<u64>());
    ensure!(total > 0, "no engine got a request");
    let busiest_over_mean = busiest as f64 * requests_per_engine.len() as f64 / total as f64;
    Ok(Run { arm, seed, requests_per_engine, busiest_over_mean, report })
}

fn stand_up(
    arm: Arm,
    settings: &Settings,
    programs: &Programs,
    engines: &[SocketAddr],
    configs: Vec<Config>,
) -> anyhow::Result<Way> {
    let replicas = |count| Way::replicas(programs, count, engines, &settings.common.serve_arguments(&[]));
    match arm {
        Arm::RoundRobin => Ok(Way::Direct(engines.to_vec())),
        Arm::Haproxy => Way::haproxy(programs, engines),
        Arm::One => replicas(1),
        Arm::Three => replicas(3),
        Arm::Oracle => Way::oracle(engines, configs),
    }
}

fn engines(settings: &Settings) -> Vec<Config> {
    let tokens = |bytes: f64| bytes / BYTES_PER_TOKEN;
    let prompts = settings.common_bytes as f64 + settings.tenants as f64 * settings.tenant_bytes as f64;
    let turns = f64::from(settings.turns);
    let chat = tokens(settings.first_bytes as f64 + (turns - 1.0) * settings.turn_bytes as f64)
        + turns * f64::from(settings.output_tokens);
    let working_set_tokens = tokens(prompts) + settings.clients as f64 * chat;
    let config = |speed: &f64| {
        let mut config = Config::fifo(Profile::Llama8bH100, *speed);
        config.timing.prefill_base = Duration::from_secs_f64(settings.prefill_base_ms / 1_000.0 / speed);
        let block_tokens = f64::from(config.limits.block_tokens);
        config.limits.kv_blocks = (settings.cache_share * working_set_tokens / block_tokens).ceil() as u32;
        config
    };
    settings.speeds.iter().map(config).collect()
}

fn drive(seed: u64, settings: &Settings, targets: &[SocketAddr]) -> anyhow::Result<load::Report> {
    let shape = ChatShape {
        sessions: Some(settings.chats),
        turns: settings.turns,
        tenants: settings.tenants,
        common_bytes: settings.common_bytes,
        tenant_bytes: settings.tenant_bytes,
        first_bytes: settings.first_bytes,
        turn_bytes: settings.turn_bytes,
        max_tokens: settings.output_tokens,
        think: Duration::from_millis(settings.think_ms),
    };
    let path = load::Api::Chat.default_path();
    let targets: anyhow::Result<Vec<Target>> =
        targets.iter().map(|address| Target::new(&format!("http://{address}"), path)).collect();
    let pace = Pace::Closed { clients: settings.clients, order: Order::Chats };
    let mut plan = Plan::new(Targets::new(targets?)?, Source::Chat(Arc::new(shape)), pace);
    plan.envelope.model = Some("sim".to_owned());
    plan.envelope.ignore_eos = true;
    plan.seed = seed;
    plan.limits = Limits { run_max: Some(Duration::from_secs(300)), ..Limits::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(load::drive(plan, Live::new(), std::future::pending())))
}

fn table(settings: &Settings, runs: &[Run]) -> anyhow::Result<String> {
    let mut out = String::new();
    let mean_ttft = |run: &Run| run.report.ttft_ms.mean.unwrap_or(f64::NAN);
    // A run's time over another arm's with the same seed.
    let over = |run: &Run, reference: Arm| {
        let reference = runs.iter().find(|each| each.arm == reference && each.seed == run.seed)?;
        Some(mean_ttft(run) / mean_ttft(reference))
    };
    writeln!(
        out,
        "\nTime to first token, {} engines (speed {:?}), {} clients, {} chats of {} turns, {} tenants with {} common and {} own bytes, cache {} of the working set; median of seeds {:?}\n",
        settings.speeds.len(),
        settings.speeds,
        settings.clients,
        settings.chats,
        settings.turns,
        settings.tenants,
        settings.common_bytes,
        settings.tenant_bytes,
        settings.cache_share,
        settings.arms.seeds,
    )?;
    writeln!(
        out,
        "| through | mean ms | p50 | p99 | x HAProxy (least-most) | x oracle | token hit rate | busiest / mean | failed |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
    let mut verdicts = String::new();
    for arm in Arm::value_variants() {
        let of_arm: Vec<&Run> = runs.iter().filter(|run| run.arm == *arm).collect();
        let figure = |value: &dyn Fn(&Run) -> Option<f64>| {
            Spread::of(&of_arm.iter().filter_map(|run| value(run)).collect::<Vec<f64>>())
        };
        let Some(mean) = figure(&|run| run.report.ttft_ms.mean) else { continue };
        let p50 = figure(&|run| run.report.ttft_ms.p50);
        let p99 = figure(&|run| run.report.ttft_ms.p99);
        let over_haproxy = figure(&|run| over(run, Arm::Haproxy));
        let over_oracle = figure(&|run| over(run, Arm::Oracle));
        let hit_rate = figure(&|run| run.report.hit_rate);
        let busiest = figure(&|run| Some(run.busiest_over_mean));
        let failed: u64 = of_arm.iter().map(|run| run.report.failed() + run.report.abandoned).sum();
        let plain = |spread: &Option<Spread>, digits| Spread::show_middle(spread.as_ref(), digits);
        let ratio = Spread::show(over_haproxy.as_ref(), 2);
        writeln!(
            out,
            "| {} | {} | {} | {} | {ratio} | {} | {} | {} | {failed} |",
            arm.name(),
            plain(&Some(mean), 1),
            plain(&p50, 1),
            plain(&p99, 1),
            plain(&over_oracle, 2),
            plain(&hit_rate, 3),
            plain(&busiest, 2),
        )?;
        if *arm == Arm::Three {
            for (what, spread, target) in [
                ("mean time to first token over HAProxy's", over_haproxy, TARGET_OVER_HAPROXY),
                ("busiest engine over the mean", busiest, TARGET_BUSIEST),
            ] {
                let Some(spread) = spread else { continue };
                let verdict = if spread.most <= target { "met" } else { "MISSED" };
                writeln!(
                    verdicts,
                    "{}: {what}, at most {:.2} over the seeds; target {target}: {verdict}",
                    arm.name(),
                    spread.most
                )?;
            }
        }
    }
    writeln!(out, "\n{verdicts}")?;
    Ok(out)
}
