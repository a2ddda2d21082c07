//! One measurement, and the order of all.

use std::time::Duration;

use anyhow::ensure;
use benches::canned::Kind;
use benches::closed_loop;
use benches::process::{self, Process};
use serde::Serialize;

use crate::Settings;
use crate::bodies::Body;
use crate::stand::{Programs, Stand, Through, Way};

/// What is sent, and how it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Cell {
    pub(crate) kind: Kind,
    pub(crate) body: Body,
    pub(crate) connections: usize,
}

/// One proxy, measured once.
#[derive(Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) cell: Cell,
    pub(crate) through: Through,
    pub(crate) repeat: usize,
    pub(crate) answered: usize,
    pub(crate) failed: usize,
    pub(crate) first_failure: Option<String>,
    /// Microseconds of CPU per answered request; of nobody for `direct`.
    pub(crate) proxy_us: f64,
    pub(crate) engines_us: f64,
    pub(crate) generator_us: f64,
    /// To the reply's end; for paced streams to its first bytes.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) per_second: f64,
    /// Of `direct` none.
    pub(crate) peak_resident_bytes: u64,
}

impl Settings {
    /// Requests of one measurement: enough for a steady figure, few enough that the whole table takes minutes.
    fn requests(&self, cell: Cell) -> usize {
        let Cell { kind, body, connections } = cell;
        if kind == Kind::Paced {
            // A stream takes half a second whatever it passes through.
            return (self.requests / 100).clamp(connections, 5 * connections);
        }
        let by_kind = if kind == Kind::Burst { 5 } else { 1 };
        let by_body = if body == Body::Long { 4 } else { 1 };
        let by_connections = if connections == 1 { 4 } else { 1 };
        (self.requests / (by_kind * by_body * by_connections)).max(2 * connections)
    }
}

/// Every cell of one kind of reply, each way `repeats` times; appends to `commands` how each was started.
pub(crate) fn all_of(
    settings: &Settings,
    kind: Kind,
    programs: &Programs,
    commands: &mut Vec<String>,
) -> anyhow::Result<Vec<Row>> {
    let stand = Stand::up(settings, kind, programs)?;
    if commands.is_empty() {
        let processes = stand.ways().into_iter().filter_map(|way| way.process);
        commands.extend(processes.map(|process| process.command_line().to_owned()));
    }
    let mut rows = Vec::new();
    for body in &settings.bodies {
        let bodies = body.all(kind.streams());
        for connections in &settings.concurrency {
            let cell = Cell { kind, body: *body, connections: *connections };
            for repeat in 0..settings.repeats {
                for way in stand.ways() {
                    rows.push(one(settings, &stand, &way, cell, &bodies, repeat)?);
                }
            }
        }
    }
    Ok(rows)
}

fn one(
    settings: &Settings,
    stand: &Stand,
    way: &Way<'_>,
    cell: Cell,
    bodies: &[Vec<u8>],
    repeat: usize,
) -> anyhow::Result<Row> {
    let requests = settings.requests(cell);
    let warm_up = (requests / 10).max(cell.connections);
    closed_loop::run(way.address, cell.connections, warm_up, bodies);
    if let Some(process) = way.process {
        process.forget_peak()?;
    }
    let cpu = || -> anyhow::Result<[Duration; 3]> {
        let proxy = way.process.map_or(Ok(Duration::ZERO), Process::cpu)?;
        Ok([proxy, stand.engines.cpu()?, process::own_cpu()?])
    };
    let before = cpu()?;
    let counts = closed_loop::run(way.address, cell.connections, requests, bodies);
    let after = cpu()?;
    let name = way.through.name();
    ensure!(counts.answered > 0, "{name}, {cell:?}: {:?}", counts.first_failure);
    let [proxy_us, engines_us, generator_us] =
        [0, 1, 2].map(|at| after[at].saturating_sub(before[at]).as_secs_f64() * 1e6 / counts.answered as f64);
    let times = if cell.kind == Kind::Paced { &counts.first_bytes } else { &counts.whole };
    let row = Row {
        cell,
        through: way.through,
        repeat,
        answered: counts.answered,
        failed: counts.failed,
        first_failure: counts.first_failure,
        proxy_us,
        engines_us,
        generator_us,
        p50_us: times.at_us(0.5),
        p99_us: times.at_us(0.99),
        per_second: counts.answered as f64 / counts.took.as_secs_f64(),
        peak_resident_bytes: way.process.map_or(Ok(0), Process::peak_resident_bytes)?,
    };
    eprintln!(
        "{:?} {:?} x {} #{repeat}: {name:<14} {proxy_us:>8.1} us (engines {engines_us:.1}, generator {generator_us:.1}), p50 {:.0} us, p99 {:.0} us, {} failed {}",
        cell.kind,
        cell.body,
        cell.connections,
        row.p50_us,
        row.p99_us,
        row.failed,
        row.first_failure.as_deref().unwrap_or_default()
    );
    Ok(row)
}
