//! Times the hot steps of a decision's input: reading a chat body, and asking and telling the prefix index.
//!
//! `cargo bench --bench index`

use std::hint::black_box;

use benches::blocks::{mix, path};
use benches::process::own_resident_bytes;
use benches::times::Times;
use routing::prefix::{PrefixIndex, Slot, WarmDepths};
use routing::request::{RequestShape, Route, ShapeRules};
use routing::{BlockHash, Moment};

fn main() {
    read_bodies();
    ask_index();
    ask_index_of_many();
    fill_to_the_brim();
}

/// Prints how long each of `count` runs took.
fn time(name: &str, count: usize, run: impl FnMut(usize)) {
    let times = Times::of(count, run);
    println!("{name:<44} p50 {:>7.2} us   p99 {:>7.2} us", times.at_us(0.5), times.at_us(0.99));
}

/// Resident memory of this process, in bytes; 0 where that can't be known.
fn resident_bytes() -> f64 {
    own_resident_bytes().unwrap_or(0) as f64
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
        (resident_bytes() - before) / index.pairs() as f64,
        index.evicted(),
    );
    let mut out = WarmDepths::default();
    let paths: Vec<Vec<BlockHash>> =
        (0..10_000).map(|at| path(at * 7 % prompts as u64, COMMON, PROMPT)).collect();
    time("warm_depths, 64 blocks, all warm somewhere", 10_000, |at| {
        index.warm_depths(&paths[at], &mut out);
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
        index.warm_depths(&half[at], &mut out);
        black_box(&out);
    });
    time("place, 64 blocks, all known", 10_000, |at| {
        let prompt = (at as u64) * 7 % prompts as u64;
        index.place(&paths[at], Slot::new((prompt % 100) as u16), Moment::from_millis(20_000));
    });
    time("place, 64 blocks, 56 new", 10_000, |at| {
        let own = path(1 << 40 | (at as u64), COMMON, PROMPT);
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
        index.warm_depths(&path(at as u64, 16, 64), &mut out);
        black_box(&out);
    });
    time("place there, 64 blocks, all known", 5_000, |at| {
        index.place(&path(at as u64, 16, 64), Slot::new(at as u16), Moment::from_millis(20_000));
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
        (resident_bytes() - before) / index.pairs() as f64,
    );
    time("place, 64 blocks, 56 new, 56 evicted", 10_000, |at| {
        let own = path(1 << 40 | (at as u64), 8, 64);
        index.place(&own, Slot::new((at % 100) as u16), Moment::from_millis(200_000));
    });
}
