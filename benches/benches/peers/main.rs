//! CPU, latency, throughput and memory of Grapevine beside nginx, HAProxy and the Rust routers on PyPI.
//!
//! `cargo bench --bench peers`
//!
//! The routers are installed into environments under the build folder, which needs the network the first time; nginx
//! and HAProxy are taken from the path. `--peers none` measures without the routers. All stand in front of the same
//! four canned engines in a process of their own and get the same bodies from the same generator: chats of 0.3, 4 and
//! 100 KB whose beginnings are shared as those of tenants are, over 1, 32 and 256 connections, answered in one small
//! piece, as a stream of 100 chunks written at once, and as one with a chunk every 5 ms. Every repeat measures each of
//! them once, one after another, beginning with `direct`: the engines alone, without a proxy. What they and the
//! generator cost by themselves is told.
//!
//! CPU is that of the process and its descendants (found in `/proc`, read by the kernel's clocks) between the end of a
//! warm-up and the last reply. Latency is that to the end of a reply, for paced streams to its first bytes. Grapevine
//! runs with its defaults (policy `cost`, an info line for each request, to a file), the peers as [`benches::peer`]
//! says; all have a thread for each core.

mod bodies;
mod chart;
mod measure;
mod stand;
mod table;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context as _;
use benches::canned::{self, Kind};
use benches::machine::{self, Machine};
use benches::options::{Common, target_folder};
use benches::peer::Chosen;
use clap::{Parser, ValueEnum as _};
use serde::Serialize;

use crate::bodies::Body;
use crate::stand::Programs;

/// CPU, latency, throughput and memory: nginx, HAProxy, routers from PyPI, Grapevine
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    /// Kinds of reply [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Kinds of body [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    bodies: Vec<Body>,
    /// Connections, each with one request at a time
    #[arg(long, value_delimiter = ',', default_value = "1,32,256")]
    concurrency: Vec<usize>,
    /// Routers from PyPI
    #[arg(long, value_enum, value_delimiter = ',', default_value = "all")]
    peers: Vec<Chosen>,
    /// Engines
    #[arg(long, default_value_t = 4)]
    engines: usize,
    /// Times that each is measured
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Requests of one measurement with small replies; fewer with streams, long bodies or one connection
    #[arg(long, default_value_t = 5_000)]
    requests: usize,
    /// Write a chart here [default: peers.svg in the build folder]
    #[arg(long)]
    svg: Option<PathBuf>,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
    /// Be the engines at these addresses
    #[arg(long, hide = true, value_delimiter = ',')]
    #[serde(skip)]
    canned: Vec<SocketAddr>,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if !settings.canned.is_empty() {
        let kind = settings.kinds.first().copied().context("--canned needs --kinds")?;
        return canned::serve(&settings.canned, kind);
    }
    if settings.common.short {
        settings.requests = settings.requests.min(1_000);
        settings.repeats = 1;
    }
    if settings.kinds.is_empty() {
        settings.kinds = Kind::value_variants().to_vec();
    }
    if settings.bodies.is_empty() {
        settings.bodies = Body::value_variants().to_vec();
    }
    settings.common.json_or("peers.json")?;
    let svg = settings.svg.clone().map_or_else(|| Ok(target_folder()?.join("peers.svg")), anyhow::Ok)?;
    let programs = Programs::find(&settings)?;
    let load_before = machine::load();
    let mut rows = Vec::new();
    let mut commands = Vec::new();
    for kind in settings.kinds.clone() {
        rows.extend(measure::all_of(&settings, kind, &programs, &mut commands)?);
    }
    let machine = Machine::read(load_before);
    print!("{machine}{}", table::all(&settings, &programs.peers, &rows)?);
    println!("\nHow each was started:\n");
    for command in &commands {
        println!("    {command}");
    }
    std::fs::write(&svg, chart::cpu(&settings, &rows).to_string())
        .with_context(|| format!("writing {}", svg.display()))?;
    println!("\nchart: {}", svg.display());
    let peers = &programs.peers;
    settings.common.write(&serde_json::json!({
        "machine": machine, "settings": settings, "peers": peers, "commands": commands, "rows": rows
    }))
}
