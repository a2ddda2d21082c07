//! A recorded trace through three replicas and eight simulated engines: token hit rate and time to first token
//! of several policies, one after another on the same requests.
//!
//! `cargo bench --bench mooncake -- --trace conversation_trace.jsonl --json mooncake.json`
//!
//! The trace is Mooncake's (FAST'25): <https://github.com/kvcache-ai/Mooncake>, `conversation_trace.jsonl`,
//! Apache-2.0. It is not part of this repository. Everything runs `--speed` times faster than recorded, the
//! engines too, and times are told as the slow engines would have them. Engines are `8b-h100`, 1.4 times as fast
//! (together they then compute 1.1 times what the trace asks for with nothing cached), with vLLM's step loop; a
//! cache has 6,000 blocks of 512 tokens. The clients go over the replicas in turn, request by request.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use benches::fleet::Fleet;
use benches::options::Common;
use benches::replicas::Replicas;
use clap::Parser;
use engine::{Config, Profile};
use grapevine::load::{BLOCK_TOKENS, Milliseconds, Report};
use serde::Serialize;

/// How much of the trace a run with `--short` takes.
const SHORT_TRACE: &str = "1min";

/// Policies on a recorded trace: hit rate and time to first token
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    /// The trace, Mooncake JSON lines or Azure CSV; nothing is measured without one
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Only its beginning, in the trace's own time
    #[arg(long, default_value = "10min")]
    until_trace: String,
    /// How many times faster than recorded, engines included
    #[arg(long, default_value_t = 5.0)]
    speed: f64,
    /// How many times faster than `8b-h100` an engine is
    #[arg(long, default_value_t = 1.4)]
    engine_speed: f64,
    /// Policies, each measured with engines and replicas of its own
    #[arg(long, value_delimiter = ',', default_value = "cost,round-robin")]
    policies: Vec<String>,
    /// Replicas
    #[arg(long, default_value_t = 3)]
    replicas: usize,
    /// Engines
    #[arg(long, default_value_t = 8)]
    engines: usize,
    /// Blocks of 512 tokens in each engine's cache
    #[arg(long, default_value_t = 6_000)]
    cache_blocks: u32,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
}

/// One policy's run.
#[derive(Serialize)]
struct Run {
    policy: String,
    busiest_over_mean: f64,
    requests_per_engine: Vec<u64>,
    report: Report,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if settings.common.short {
        settings.until_trace = SHORT_TRACE.to_owned();
    }
    let Some(trace) = settings.trace.clone() else {
        println!("skipped: no --trace FILE");
        return Ok(());
    };
    let program = settings.common.program()?;
    let runs: Vec<Run> = settings
        .policies
        .iter()
        .map(|policy| run(&settings, &program, &trace, policy).with_context(|| format!("policy {policy}")))
        .collect::<anyhow::Result<_>>()?;
    print!("{}", table(&settings, &trace, &runs)?);
    settings.common.write(&serde_json::json!({ "settings": settings, "runs": runs }))
}

fn run(settings: &Settings, program: &Path, trace: &Path, policy: &str) -> anyhow::Result<Run> {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.timing = config.timing.sped_up(settings.speed * settings.engine_speed);
    config.limits.kv_blocks = settings.cache_blocks * (BLOCK_TOKENS as u32 / config.limits.block_tokens);
    let fleet = Fleet::start(vec![config; settings.engines])?;
    let serve = settings.common.serve_arguments(&["--policy", policy]);
    let replicas = Replicas::start(program, settings.replicas, &fleet.addresses(), &serve)?;
    let folder = tempfile::tempdir()?;
    let json = folder.path().join("load.json");
    let mut command = Command::new(program);
    command.arg("load").arg("--workload").arg(trace).arg("--json").arg(&json);
    command.args(["--until-trace", &settings.until_trace, "--speed", &settings.speed.to_string()]);
    command.args(["--model", "sim", "--ignore-eos"]);
    for address in replicas.public() {
        command.args(["--target", &format!("http://{address}")]);
    }
    eprintln!("{policy}: {command:?}");
    ensure!(command.stdout(Stdio::null()).status()?.success(), "`grapevine load` failed");
    let report: Report = serde_json::from_slice(&std::fs::read(&json)?)?;
    let requests_per_engine = fleet.chats();
    let total: u64 = requests_per_engine.iter().sum();
    ensure!(total > 0, "no engine got a request");
    let busiest = requests_per_engine.iter().max().copied().unwrap_or(0);
    let busiest_over_mean = busiest as f64 * requests_per_engine.len() as f64 / total as f64;
    Ok(Run { policy: policy.to_owned(), busiest_over_mean, requests_per_engine, report })
}

fn table(settings: &Settings, trace: &Path, runs: &[Run]) -> anyhow::Result<String> {
    let mut out = String::new();
    writeln!(
        out,
        "\n{}, first {}, at {} times its speed; {} replicas, {} engines ({} x 8b-h100); times multiplied by that speed\n",
        trace.file_name().unwrap_or_default().to_string_lossy(),
        settings.until_trace,
        settings.speed,
        settings.replicas,
        settings.engines,
        settings.engine_speed,
    )?;
    writeln!(
        out,
        "| policy | requests | failed | token hit rate | TTFT mean s | p50 | p99 | end to end mean s | busiest / mean |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
    let seconds = |ms: Option<f64>| {
        ms.map_or_else(|| "-".to_owned(), |ms| format!("{:.2}", ms * settings.speed / 1_000.0))
    };
    for Run { policy, busiest_over_mean, report, .. } in runs {
        let Milliseconds { mean, p50, p99, .. } = report.ttft_ms;
        writeln!(
            out,
            "| {policy} | {} | {} | {} | {} | {} | {} | {} | {busiest_over_mean:.2} |",
            report.requests,
            report.failed() + report.abandoned,
            report.hit_rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}")),
            seconds(mean),
            seconds(p50),
            seconds(p99),
            seconds(report.e2e_ms.mean),
        )?;
    }
    writeln!(out)?;
    Ok(out)
}
