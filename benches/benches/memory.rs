//! Memory under prompts and sessions that never come again: it must stop growing where its caps are.
//!
//! `cargo bench --bench memory -- --json memory.json`
//!
//! One replica, one engine that answers at once, and requests through real sockets: each has a prompt of its own
//! behind a common beginning, and a session of its own. What the process takes (resident, by Linux's count) is
//! read beside what it says of its maps, every tenth of the way. What counts is that the last rows are alike.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, anyhow, ensure};
use benches::canned::{self, Kind};
use benches::options::Common;
use benches::process::Process;
use benches::replicas::Replicas;
use benches::wait;
use clap::Parser;
use serde::Serialize;

/// Rows of the table.
const ROWS: usize = 10;
/// What all prompts begin with, in bytes: one block.
const COMMON_BYTES: usize = 512;
/// What each prompt has of its own, in bytes: three blocks.
const OWN_BYTES: usize = 1_536;
/// How much more the process may take in the second half, as a share: what allocators do.
const GROWTH_RATIO_MAX: f64 = 0.1;

/// Memory of a replica under prompts that are all different
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    /// Requests, each with a prompt and a session of its own
    #[arg(long, default_value_t = 1_000_000)]
    requests: usize,
    /// Cap of the prefix index, in bytes; far below what the prompts need
    #[arg(long, default_value_t = 32 << 20)]
    index_bytes_max: usize,
    /// Cap of the session table
    #[arg(long, default_value_t = 100_000)]
    session_table_max: usize,
    /// Connections
    #[arg(long, default_value_t = 16)]
    connections: usize,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
    /// Be the engine at this address
    #[arg(long, hide = true)]
    #[serde(skip)]
    canned: Option<SocketAddr>,
}

/// The replica at one moment.
#[derive(Serialize)]
struct Row {
    requests: usize,
    seconds: f64,
    resident_bytes: u64,
    index_bytes: u64,
    index_evicted: u64,
    sessions: u64,
    sessions_evicted: u64,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if let Some(address) = settings.canned {
        return canned::serve(&[address], Kind::Whole);
    }
    if settings.common.short {
        settings.requests = settings.requests.min(20_000);
        settings.index_bytes_max = settings.index_bytes_max.min(1 << 20);
        settings.session_table_max = settings.session_table_max.min(1_000);
    }
    let rows = measure(&settings)?;
    print!("{}", table(&settings, &rows)?);
    settings.common.write(&serde_json::json!({ "settings": settings, "rows": rows }))
}

fn measure(settings: &Settings) -> anyhow::Result<Vec<Row>> {
    let program = settings.common.program()?;
    let engine = wait::free_address()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--canned", &engine.to_string()]);
    let _engine = Process::start(&mut command)?;
    wait::until_open(engine)?;
    let more = settings.common.serve_arguments(&[
        "--index-bytes-max",
        &settings.index_bytes_max.to_string(),
        "--session-table-max",
        &settings.session_table_max.to_string(),
        "--log",
        "warn",
    ]);
    let replicas = Replicas::start(&program, 1, &[engine], &more)?;
    let (public, admin) = (replicas.public()[0], replicas.admin()[0]);
    let begun = Instant::now();
    let mut rows = vec![look(&replicas.processes[0], admin, 0, begun)?];
    for step in 0..ROWS {
        let (from, to) = (settings.requests * step / ROWS, settings.requests * (step + 1) / ROWS);
        send(public, from, to, settings.connections)?;
        rows.push(look(&replicas.processes[0], admin, to, begun)?);
    }
    Ok(rows)
}

/// Sends the requests of these numbers; all must be answered with 200.
fn send(to: SocketAddr, from: usize, until: usize, connections: usize) -> anyhow::Result<()> {
    let next = AtomicUsize::new(from);
    let next = &next;
    thread::scope(|scope| {
        let senders: Vec<_> = (0..connections)
            .map(|_| {
                scope.spawn(move || -> anyhow::Result<()> {
                    let stream = TcpStream::connect(to)?;
                    stream.set_nodelay(true)?;
                    let mut reader = BufReader::new(&stream);
                    let mut writer = &stream;
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= until {
                            return Ok(());
                        }
                        writer.write_all(&request(number))?;
                        read_reply(&mut reader)?;
                    }
                })
            })
            .collect();
        senders.into_iter().try_for_each(|sender| sender.join().map_err(|_| anyhow!("a sender panicked"))?)
    })
}

/// A chat like no other.
fn request(number: usize) -> Vec<u8> {
    let common = "You are a helpful assistant. ".repeat(COMMON_BYTES / 29 + 1);
    let own = format!("{number:016x} ").repeat(OWN_BYTES / 17 + 1);
    let body = format!(
        r#"{{"model":"sim","messages":[{{"role":"system","content":"{}"}},{{"role":"user","content":"{}"}}]}}"#,
        &common[..COMMON_BYTES],
        &own[..OWN_BYTES]
    );
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nX-Session-Id: {number}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn read_reply(reader: &mut BufReader<&TcpStream>) -> anyhow::Result<()> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    ensure!(line.starts_with("HTTP/1.1 200"), "answered with {line:?}");
    let mut length = None;
    loop {
        line.clear();
        ensure!(reader.read_line(&mut line)? > 0, "the head broke off");
        if line.trim_end().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = Some(value.trim().parse()?);
        }
    }
    let mut body = vec![0; length.context("a sized reply")?];
    reader.read_exact(&mut body)?;
    Ok(())
}

fn look(process: &Process, admin: SocketAddr, requests: usize, begun: Instant) -> anyhow::Result<Row> {
    let page = wait::get(admin, "/metrics")?;
    let figure = |name: &str| -> anyhow::Result<u64> {
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix("grapevine_")?.strip_prefix(name)?.strip_prefix(' '));
        let value: f64 = line.with_context(|| format!("no {name}"))?.trim().parse()?;
        Ok(value as u64)
    };
    Ok(Row {
        requests,
        seconds: begun.elapsed().as_secs_f64(),
        resident_bytes: process.resident_bytes()?,
        index_bytes: figure("index_bytes")?,
        index_evicted: figure("index_evicted_total")?,
        sessions: figure("sessions")?,
        sessions_evicted: figure("sessions_evicted_total")?,
    })
}

fn table(settings: &Settings, rows: &[Row]) -> anyhow::Result<String> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut out = String::new();
    writeln!(
        out,
        "\n{} prompts and sessions, all different; caps: index {:.0} MiB, {} sessions\n",
        settings.requests,
        mib(settings.index_bytes_max as u64),
        settings.session_table_max
    )?;
    writeln!(
        out,
        "| requests | after s | resident MiB | index MiB | evicted from it | sessions | evicted |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|")?;
    for row in rows {
        writeln!(
            out,
            "| {} | {:.0} | {:.1} | {:.1} | {} | {} | {} |",
            row.requests,
            row.seconds,
            mib(row.resident_bytes),
            mib(row.index_bytes),
            row.index_evicted,
            row.sessions,
            row.sessions_evicted
        )?;
    }
    let (middle, last) = (&rows[rows.len() / 2], &rows[rows.len() - 1]);
    let growth = last.resident_bytes as f64 / middle.resident_bytes as f64 - 1.0;
    let within = last.index_bytes as usize <= settings.index_bytes_max
        && last.sessions as usize <= settings.session_table_max
        && growth <= GROWTH_RATIO_MAX;
    writeln!(
        out,
        "\nIn the second half the process grew by {:.1}%. Target (caps kept, at most {:.0}%): {}",
        growth * 100.0,
        GROWTH_RATIO_MAX * 100.0,
        if within { "met" } else { "missed" }
    )?;
    Ok(out)
}
