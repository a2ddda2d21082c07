//! Times the hot steps of a decision's input: reading a chat body, and asking and telling the prefix index.
//!
//! `cargo run --release -p routing --example index_speed`

use std::hint::black_box;
use std::time::Instant;

use routing::prefix::{PrefixIndex, Slot, WarmDepths};
use routing::request::{RequestShape, Route, ShapeRules};
use routing::{BlockHash, Moment};

fn main() {
    read_bodies();
    ask_index();
    ask_index_of_many();
    fill_to_the_brim();
}

/// ns for each of `count` runs.
fn time(name: &str, count: u32, mut run: impl FnMut(u32)) {
    let mut each: Vec<u64> = (0..count)
        .map(|at| {
            let start = Instant::now();
            run(at);
            start.elapsed().as_nanos() as u64
        })
        .collect();
    each.sort_unstable();
    let share = |share: f64| each[(each.len() as f64 * share) as usize];
    println!("{name:<44} p50 {:>7} ns   p99 {:>7} ns", share(0.5), share(0.99));
}

fn read_bodies() {
    let rules = ShapeRules::default();
    let words = "The quick brown fox said \\\"jump\\\"\\nand jumped over the lazy dog. ";
    for (name, bytes) in [("4 KB chat", 4 << 10), ("64 KB chat", 64 << 10)] {
        let turn = words.repeat(bytes / words.len() / 4);
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"system","content":"{turn}"}},{{"role":"user","content":"{turn}"}},{{"role":"assistant","content":"{turn}"}},{{"role":"user","content":"{turn}"}}],"stream":true,"max_tokens":256,"temperature":0.7}}"#
        );
        time(&format!("read {name} ({} bytes)", body.len()), 20_000, |_| {
            black_box(
                RequestShape::read(Route::ChatCompletions, &[("host", "h")], body.as_bytes(), &rules).ok(),
            );
        });
    }
    let ids: Vec<String> = (0..4_096).map(|id| (id * 31 % 128_000).to_string()).collect();
    let body = format!(r#"{{"model":"m","prompt":[{}]}}"#, ids.join(","));
    time(&format!("read 4,096 token ids ({} bytes)", body.len()), 5_000, |_| {
        black_box(RequestShape::read(Route::Completions, &[("host", "h")], body.as_bytes(), &rules).ok());
    });
}

fn ask_index() {
    const PROMPT: usize = 64;
    const COMMON: usize = 8;
    let index = PrefixIndex::new(64 << 20);
    let prompts = 1_000_000 / (PROMPT - COMMON);
    let before = resident_bytes();
    for prompt in 0..prompts as u64 {
        index.place(
            &path(prompt, COMMON, PROMPT),
            Slot::new((prompt % 100) as u16),
            Moment::from_millis(prompt),
        );
    }
    println!(
        "{} blocks, {} pairs: {:.1} bytes a pair as counted, {:.1} more resident; {} evicted",
        index.blocks(),
        index.pairs(),
        index.bytes() as f64 / index.pairs() as f64,
        (resident_bytes() - before) as f64 / index.pairs() as f64,
        index.evicted(),
    );
    let mut out = WarmDepths::default();
    let paths: Vec<Vec<BlockHash>> =
        (0..10_000).map(|at| path(at * 7 % prompts as u64, COMMON, PROMPT)).collect();
    time("warm_depths, 64 blocks, all warm somewhere", 10_000, |at| {
        index.warm_depths(&paths[at as usize], &mut out);
        black_box(&out);
    });
    let half: Vec<Vec<BlockHash>> = paths
        .iter()
        .map(|path| {
            path.iter()
                .take(30)
                .copied()
                .chain((0..34).map(|at| BlockHash::from_raw(mix(path[30].raw() + at))))
                .collect()
        })
        .collect();
    time("warm_depths, 64 blocks, 30 warm", 10_000, |at| {
        index.warm_depths(&half[at as usize], &mut out);
        black_box(&out);
    });
    time("place, 64 blocks, all known", 10_000, |at| {
        let prompt = u64::from(at) * 7 % prompts as u64;
        index.place(&paths[at as usize], Slot::new((prompt % 100) as u16), Moment::from_millis(20_000));
    });
    time("place, 64 blocks, 56 new", 10_000, |at| {
        let own = path(1 << 40 | u64::from(at), COMMON, PROMPT);
        index.place(&own, Slot::new((at % 100) as u16), Moment::from_millis(20_000));
    });
}

/// 16 common blocks at each of 10,000 endpoints.
fn ask_index_of_many() {
    const ENDPOINTS: u64 = 10_000;
    let index = PrefixIndex::new(64 << 20);
    for prompt in 0..ENDPOINTS {
        index.place(&path(prompt, 16, 64), Slot::new(prompt as u16), Moment::from_millis(prompt));
    }
    println!(
        "{} pairs: {:.1} bytes a pair as counted",
        index.pairs(),
        index.bytes() as f64 / index.pairs() as f64
    );
    let mut out = WarmDepths::default();
    time("warm_depths, 16 of 64 blocks at 10,000", 5_000, |at| {
        index.warm_depths(&path(u64::from(at), 16, 64), &mut out);
        black_box(&out);
    });
    time("place there, 64 blocks, all known", 5_000, |at| {
        index.place(&path(u64::from(at), 16, 64), Slot::new(at as u16), Moment::from_millis(20_000));
    });
}

/// Twice as much as fits.
fn fill_to_the_brim() {
    let before = resident_bytes();
    let index = PrefixIndex::new(64 << 20);
    for prompt in 0..120_000 {
        index.place(&path(prompt, 8, 64), Slot::new((prompt % 100) as u16), Moment::from_millis(prompt));
    }
    println!(
        "full: {} pairs, {} bytes: {:.1} a pair as counted, {:.1} resident",
        index.pairs(),
        index.bytes(),
        index.bytes() as f64 / index.pairs() as f64,
        (resident_bytes() - before) as f64 / index.pairs() as f64,
    );
    time("place, 64 blocks, 56 new, 56 evicted", 10_000, |at| {
        let own = path(1 << 40 | u64::from(at), 8, 64);
        index.place(&own, Slot::new((at % 100) as u16), Moment::from_millis(200_000));
    });
}

/// A prompt's blocks: the first `common` are everybody's.
fn path(prompt: u64, common: usize, blocks: usize) -> Vec<BlockHash> {
    (0..blocks as u64)
        .map(|at| if at < common as u64 { at } else { prompt << 8 | at })
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

/// Resident memory of this process, by Linux's count; 0 elsewhere.
fn resident_bytes() -> i64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|line| line.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok()));
    pages.unwrap_or(0) * 4_096
}
