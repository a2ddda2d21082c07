//! One decision of the core: how long it takes, and how much memory it rests on.
//!
//! `cargo bench --bench decision -- --json decision.json`
//!
//! A router that has a million prefix blocks indexed, in paths of 64 behind eight common ones, decides on
//! prompts of 64 blocks that it knows. `choose` decides, charges and notes the placement; giving the charge
//! back is not timed. `explain` only decides. With `a pair`, half of the endpoints prefill for the other half.
//! Times are of single calls, so the clock's own cost (about 30 ns) is in them.

use std::fmt::Write as _;
use std::hint::black_box;
use std::path::PathBuf;

use anyhow::{Context as _, anyhow};
use benches::blocks::path;
use benches::process::own_resident_bytes;
use benches::times::Times;
use clap::Parser;
use rand::SeedableRng as _;
use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::facts::LedgerRecord;
use routing::policy::SplitMode;
use routing::prefix::{PrefixIndex, Slot};
use routing::request::{RequestShape, Route, ShapeRules};
use routing::settings::Settings as RouterSettings;
use routing::{EndpointId, Moment, ReplicaId, Rng, Router};
use serde::Serialize;

/// Blocks of every prompt.
const PROMPT_BLOCKS: usize = 64;
/// Leading blocks that all prompts share.
const COMMON_BLOCKS: usize = 8;
/// The model that everybody serves.
const MODEL: &str = "sim";
/// Decisions before the clock runs.
const WARM_UP: usize = 200;

/// Time of one decision, and memory of the index
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    /// Endpoints to decide among
    #[arg(long, value_delimiter = ',', default_value = "4,100,1000,10000")]
    endpoints: Vec<usize>,
    /// Prefix blocks in the index
    #[arg(long, default_value_t = 1_000_000)]
    blocks: usize,
    /// Decisions that are timed
    #[arg(long, default_value_t = 20_000)]
    decisions: usize,
    /// Write the figures here, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// A quick run that shows that everything works
    #[arg(long)]
    short: bool,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    #[serde(skip)]
    bench: bool,
}

/// Times of one kind of call, in microseconds.
#[derive(Serialize)]
struct Timed {
    endpoints: usize,
    call: &'static str,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

/// What the index takes.
#[derive(Serialize)]
struct Memory {
    pairs: usize,
    counted_bytes_per_pair: f64,
    resident_bytes_per_pair: f64,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if settings.short {
        settings.blocks = settings.blocks.min(100_000);
        settings.decisions = settings.decisions.min(500);
    }
    let memory = memory(settings.blocks)?;
    let mut timed = Vec::new();
    for endpoints in &settings.endpoints {
        timed.extend(decide(&settings, *endpoints, Fleet::Whole)?);
        timed.extend(decide(&settings, *endpoints, Fleet::Split)?);
    }
    let mut out = String::new();
    writeln!(
        out,
        "\nOne decision, prompts of {PROMPT_BLOCKS} blocks, {} blocks indexed, us\n",
        settings.blocks
    )?;
    writeln!(out, "| endpoints | call | p50 | p99 | max |\n|---|---|---|---|---|")?;
    for row in &timed {
        writeln!(
            out,
            "| {} | {} | {:.1} | {:.1} | {:.1} |",
            row.endpoints, row.call, row.p50_us, row.p99_us, row.max_us
        )?;
    }
    writeln!(
        out,
        "\nMemory of the index: {:.1} bytes per (block, holder) as it counts itself, {:.1} resident; {} of them",
        memory.counted_bytes_per_pair, memory.resident_bytes_per_pair, memory.pairs
    )?;
    print!("{out}");
    if let Some(path) = &settings.json {
        let everything = serde_json::json!({ "settings": settings, "timed": timed, "memory": memory });
        std::fs::write(path, serde_json::to_string_pretty(&everything)?)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Who is decided among.
#[derive(Clone, Copy)]
enum Fleet {
    /// Endpoints that serve requests whole.
    Whole,
    /// As many to prefill as to decode, between which every request is split.
    Split,
}

fn decide(settings: &Settings, endpoints: usize, fleet: Fleet) -> anyhow::Result<Vec<Timed>> {
    let now = Moment::from_millis(1_000);
    let router_settings = RouterSettings { split: SplitMode::Always, ..RouterSettings::default() };
    let router =
        Router::new(ReplicaId::new("bench"), 1, router_settings).map_err(|faults| anyhow!("{faults:?}"))?;
    let mut specs = Vec::with_capacity(endpoints);
    for at in 0..endpoints {
        let role = match fleet {
            Fleet::Whole => "both",
            Fleet::Split => ["prefill", "decode"][at % 2],
        };
        let url = format!("http://10.{}.{}.{}:8000,role={role}", at >> 16, at >> 8 & 255, at & 255);
        specs.extend(EndpointSpec::parse(&url)?);
    }
    let ids: Vec<EndpointId> = specs.iter().map(EndpointSpec::id).collect();
    router.set_endpoints(specs, now);
    for id in &ids {
        router.report(*id, Signal::ProbeOk, now);
        router.set_served(*id, Served::Models(vec![MODEL.to_owned()]));
    }
    let prompts = settings.blocks / (PROMPT_BLOCKS - COMMON_BLOCKS);
    for prompt in 0..prompts {
        let endpoint = ids[prompt % ids.len()];
        let blocks = path(prompt as u64, COMMON_BLOCKS, PROMPT_BLOCKS);
        router.merge_ledger(&[LedgerRecord::Place { endpoint, blocks }], now);
    }
    let shapes: Vec<RequestShape> =
        (0..1_024).map(|at| shape((at * 7 % prompts) as u64)).collect::<anyhow::Result<_>>()?;
    let mut rng = Rng::seed_from_u64(1);
    let explain = time(settings.decisions, |at| {
        black_box(router.explain(&shapes[at % shapes.len()], now, &mut rng)).is_ok()
    })?;
    let mut held = None;
    let choose = time(settings.decisions, |at| {
        held = router.choose(&shapes[at % shapes.len()], &[], now, &mut rng).ok();
        held.is_some()
    })?;
    drop(held);
    let calls = match fleet {
        Fleet::Whole => ["explain", "choose"],
        Fleet::Split => ["explain a pair", "choose a pair"],
    };
    Ok(calls.into_iter().zip([explain, choose]).map(|(call, times)| row(endpoints, call, &times)).collect())
}

/// Times of `count` calls, which must all say that they worked, after some that are not timed. What a call
/// leaves behind is given back by the next one.
fn time(count: usize, mut call: impl FnMut(usize) -> bool) -> anyhow::Result<Times> {
    let mut failed = (0..WARM_UP).filter(|at| !call(*at)).count();
    let times = Times::of(count, |at| failed += usize::from(!call(WARM_UP + at)));
    anyhow::ensure!(failed == 0, "{failed} decisions failed");
    Ok(times)
}

fn row(endpoints: usize, call: &'static str, times: &Times) -> Timed {
    Timed { endpoints, call, p50_us: times.at_us(0.5), p99_us: times.at_us(0.99), max_us: times.at_us(1.0) }
}

/// A prompt's shape with the blocks of `path`.
fn shape(prompt: u64) -> anyhow::Result<RequestShape> {
    let rules = ShapeRules::default();
    let text = "word ".repeat(PROMPT_BLOCKS * rules.block_bytes / 5);
    let body = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{prompt} {text}"}}]}}"#);
    let no_headers: [(&str, &str); 0] = [];
    let mut shape = RequestShape::read(Route::ChatCompletions, &no_headers, body.as_bytes(), &rules)
        .map_err(|refused| anyhow!("{refused:?}"))?;
    shape.blocks = path(prompt, COMMON_BLOCKS, PROMPT_BLOCKS);
    Ok(shape)
}

fn memory(blocks: usize) -> anyhow::Result<Memory> {
    /// Far more than the blocks need: nothing is evicted.
    const BYTES_MAX: usize = 1 << 30;
    let before = own_resident_bytes()?;
    let index = PrefixIndex::new(BYTES_MAX);
    for prompt in 0..blocks / (PROMPT_BLOCKS - COMMON_BLOCKS) {
        let slot = Slot::new((prompt % 100) as u16);
        index.place(
            &path(prompt as u64, COMMON_BLOCKS, PROMPT_BLOCKS),
            slot,
            Moment::from_millis(prompt as u64),
        );
    }
    let pairs = index.pairs();
    Ok(Memory {
        pairs,
        counted_bytes_per_pair: index.bytes() as f64 / pairs as f64,
        resident_bytes_per_pair: own_resident_bytes()?.saturating_sub(before) as f64 / pairs as f64,
    })
}
