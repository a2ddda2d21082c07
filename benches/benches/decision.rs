//! One decision of the core: how long it takes, and how much memory it rests on.
//!
//! `cargo bench --bench decision -- --json decision.json`
//!
//! A router that has a million prefix blocks indexed, in paths of 64 behind eight common ones, decides on
//! prompts of 64 blocks that it knows. `choose` decides, charges and notes the placement; giving the charge
//! back is not timed. `explain` only decides. Times are of single calls, so the clock's own cost (about 30 ns)
//! is in them.

use std::fmt::Write as _;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use clap::Parser;
use rand::SeedableRng as _;
use routing::endpoint::{EndpointSpec, Served, Signal};
use routing::facts::LedgerRecord;
use routing::prefix::{PrefixIndex, Slot};
use routing::request::{RequestShape, Route, ShapeRules};
use routing::settings::Settings as RouterSettings;
use routing::{BlockHash, EndpointId, Moment, ReplicaId, Rng, Router};
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
    let memory = memory(settings.blocks);
    let mut timed = Vec::new();
    for endpoints in &settings.endpoints {
        timed.extend(decide(&settings, *endpoints)?);
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

fn decide(settings: &Settings, endpoints: usize) -> anyhow::Result<Vec<Timed>> {
    let now = Moment::from_millis(1_000);
    let router = Router::new(ReplicaId::new("bench"), 1, RouterSettings::default())
        .map_err(|faults| anyhow!("{faults:?}"))?;
    let mut specs = Vec::with_capacity(endpoints);
    for at in 0..endpoints {
        let url = format!("http://10.{}.{}.{}:8000", at >> 16, at >> 8 & 255, at & 255);
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
        let blocks = path(prompt as u64);
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
    Ok([("explain", explain), ("choose", choose)]
        .into_iter()
        .map(|(call, times)| row(endpoints, call, times))
        .collect())
}

/// ns of each of `count` calls, which must all say that they worked. What a call leaves behind is given back
/// by the next one.
fn time(count: usize, mut call: impl FnMut(usize) -> bool) -> anyhow::Result<Vec<u64>> {
    let mut times = Vec::with_capacity(count);
    for at in 0..WARM_UP + count {
        let start = Instant::now();
        let worked = call(at);
        let took = start.elapsed().as_nanos() as u64;
        anyhow::ensure!(worked, "a decision failed");
        if at >= WARM_UP {
            times.push(took);
        }
    }
    Ok(times)
}

fn row(endpoints: usize, call: &'static str, mut times: Vec<u64>) -> Timed {
    times.sort_unstable();
    let at = |share: f64| {
        let place = (times.len() as f64 * share) as usize;
        times.get(place.min(times.len().saturating_sub(1))).map_or(0.0, |ns| *ns as f64 / 1_000.0)
    };
    Timed { endpoints, call, p50_us: at(0.5), p99_us: at(0.99), max_us: at(1.0) }
}

/// A prompt's shape with the blocks of `path`.
fn shape(prompt: u64) -> anyhow::Result<RequestShape> {
    let rules = ShapeRules::default();
    let text = "word ".repeat(PROMPT_BLOCKS * rules.block_bytes / 5);
    let body = format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{prompt} {text}"}}]}}"#);
    let no_headers: [(&str, &str); 0] = [];
    let mut shape = RequestShape::read(Route::ChatCompletions, &no_headers, body.as_bytes(), &rules)
        .map_err(|refused| anyhow!("{refused:?}"))?;
    shape.blocks = path(prompt);
    Ok(shape)
}

/// The blocks of a prompt.
fn path(prompt: u64) -> Vec<BlockHash> {
    (0..PROMPT_BLOCKS as u64)
        .map(|at| if at < COMMON_BLOCKS as u64 { at } else { prompt << 8 | at })
        .map(|word| BlockHash::from_raw(mix(word)))
        .collect()
}

/// splitmix64, a stand-in for the block hashes.
fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

fn memory(blocks: usize) -> Memory {
    /// Far more than the blocks need: nothing is evicted.
    const BYTES_MAX: usize = 1 << 30;
    let before = resident_bytes();
    let index = PrefixIndex::new(BYTES_MAX);
    for prompt in 0..blocks / (PROMPT_BLOCKS - COMMON_BLOCKS) {
        let slot = Slot::new((prompt % 100) as u16);
        index.place(&path(prompt as u64), slot, Moment::from_millis(prompt as u64));
    }
    let pairs = index.pairs();
    Memory {
        pairs,
        counted_bytes_per_pair: index.bytes() as f64 / pairs as f64,
        resident_bytes_per_pair: (resident_bytes() - before) as f64 / pairs as f64,
    }
}

/// Resident memory of this process, by Linux's count; 0 elsewhere.
fn resident_bytes() -> i64 {
    const PAGE_BYTES: i64 = 4_096;
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|line| line.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok()));
    pages.unwrap_or(0) * PAGE_BYTES
}
