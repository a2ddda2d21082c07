//! The tables and verdicts of a run, in Markdown.

use std::fmt::Write as _;

use benches::canned::{CHUNKS, Kind};
use benches::peer::Installed;
use benches::spread::Spread;

use crate::Settings;
use crate::bodies::Body;
use crate::measure::{Cell, Row};
use crate::stand::Through;

/// The cell that the bounds on CPU are for, given the kind.
const REFERENCE: (Body, usize) = (Body::Chat, 32);

/// What Grapevine's CPU may be, in another's of the same run.
const TARGETS: [(Kind, Over, f64); 4] = [
    (Kind::Whole, Over::One(Through::Nginx), 1.75),
    (Kind::Whole, Over::BestPeer, 1.0 / 3.5),
    (Kind::Burst, Over::One(Through::Haproxy), 2.0),
    (Kind::Paced, Over::One(Through::Haproxy), 1.2),
];

/// Whose figure of the same repeat another is divided by.
#[derive(Clone, Copy)]
enum Over {
    One(Through),
    /// The peer with the least.
    BestPeer,
}

impl Over {
    fn name(self) -> &'static str {
        match self {
            Self::One(through) => through.name(),
            Self::BestPeer => "the best peer",
        }
    }
}

/// How a kind of reply is called.
pub(crate) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Whole => "one piece",
        Kind::Burst => "stream at once",
        Kind::Paced => "stream, a chunk every 5 ms",
    }
}

/// By how much CPU per request is divided for what is told.
pub(crate) fn per(kind: Kind) -> f64 {
    if kind == Kind::Paced { CHUNKS as f64 } else { 1.0 }
}

/// What was measured, in its order.
pub(crate) fn ways(rows: &[Row]) -> Vec<Through> {
    let mut ways = Vec::new();
    for row in rows {
        if !ways.contains(&row.through) {
            ways.push(row.through);
        }
    }
    ways
}

/// The rows of one cell and one way.
struct Runs<'a> {
    all: &'a [Row],
    cell: Cell,
}

impl<'a> Runs<'a> {
    fn of(&self, through: Through) -> impl Iterator<Item = &'a Row> {
        let cell = self.cell;
        self.all.iter().filter(move |row| row.cell == cell && row.through == through)
    }

    fn figure(&self, through: Through, value: impl Fn(&Row) -> Option<f64>) -> Option<Spread> {
        Spread::of(&self.of(through).filter_map(value).collect::<Vec<f64>>())
    }

    /// A figure in another's of the same repeat.
    fn over(&self, through: Through, over: Over, value: impl Fn(&Row) -> f64) -> Option<Spread> {
        self.figure(through, |row| {
            let same = self.all.iter().filter(|other| other.cell == self.cell && other.repeat == row.repeat);
            let others = same.filter(|other| match over {
                Over::One(through) => other.through == through,
                Over::BestPeer => other.through.is_peer(),
            });
            let other = others.map(&value).min_by(f64::total_cmp)?;
            (other > 0.0).then(|| value(row) / other)
        })
    }

    /// What a way adds to the latency without a proxy, in us.
    fn added(&self, through: Through, value: impl Fn(&Row) -> f64) -> Option<Spread> {
        self.figure(through, |row| {
            let direct = self.of(Through::Direct).find(|direct| direct.repeat == row.repeat)?;
            (through != Through::Direct).then(|| value(row) - value(direct))
        })
    }
}

/// All tables: the reference cells in full, the others in brief, what failed, and the verdicts.
pub(crate) fn all(settings: &Settings, peers: &[Installed], rows: &[Row]) -> anyhow::Result<String> {
    let mut out = String::new();
    for installed in peers {
        writeln!(out, "{} {}", installed.peer.name(), installed.version)?;
    }
    for kind in &settings.kinds {
        let (body, connections) = REFERENCE;
        if settings.bodies.contains(&body) && settings.concurrency.contains(&connections) {
            full(&mut out, settings, &Runs { all: rows, cell: Cell { kind: *kind, body, connections } })?;
        }
    }
    for kind in &settings.kinds {
        let unit = if *kind == Kind::Paced { "chunk" } else { "request" };
        let title = format!("{}: us of CPU per {unit}, median", kind_name(*kind));
        brief(&mut out, settings, rows, *kind, &title, |runs, way| {
            let spread =
                runs.figure(way, |row| (way != Through::Direct).then_some(row.proxy_us / per(*kind)));
            Spread::show_middle(spread.as_ref(), 1)
        })?;
        let title = format!("{}: added latency, p50 / p99 in us, medians", kind_name(*kind));
        brief(&mut out, settings, rows, *kind, &title, |runs, way| {
            let [p50, p99] = [runs.added(way, |row| row.p50_us), runs.added(way, |row| row.p99_us)];
            format!("{} / {}", Spread::show_middle(p50.as_ref(), 0), Spread::show_middle(p99.as_ref(), 0))
        })?;
        let title = format!("{}: requests per second, median", kind_name(*kind));
        brief(&mut out, settings, rows, *kind, &title, |runs, way| {
            Spread::show_middle(runs.figure(way, |row| Some(row.per_second)).as_ref(), 0)
        })?;
        let title = format!("{}: peak resident MiB, most", kind_name(*kind));
        brief(&mut out, settings, rows, *kind, &title, |runs, way| {
            let spread =
                runs.figure(way, |row| (way != Through::Direct).then_some(mib(row.peak_resident_bytes)));
            spread.map_or_else(|| "-".to_owned(), |spread| format!("{:.0}", spread.most))
        })?;
    }
    failures(&mut out, rows)?;
    verdicts(&mut out, settings, rows)?;
    Ok(out)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn full(out: &mut String, settings: &Settings, runs: &Runs<'_>) -> anyhow::Result<()> {
    let Cell { kind, body, connections } = runs.cell;
    let unit = if kind == Kind::Paced { "chunk" } else { "request" };
    writeln!(
        out,
        "\n{}, {} bodies, {connections} connections, {} repeats; us of CPU per {unit}, median (least-most)\n",
        kind_name(kind),
        body.name(),
        settings.repeats
    )?;
    writeln!(
        out,
        "| through | us | x nginx | x HAProxy | x best peer | added p50 us | added p99 us | requests / s | peak MiB | engines us | generator us | failed |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|---|---|---|")?;
    for way in ways(runs.all) {
        let is_proxy = way != Through::Direct;
        let own = runs.figure(way, |row| is_proxy.then_some(row.proxy_us / per(kind)));
        let over = |over| {
            let spread = runs.over(way, over, |row| row.proxy_us).filter(|_| is_proxy);
            Spread::show(spread.as_ref(), 2)
        };
        let [p50, p99] = [runs.added(way, |row| row.p50_us), runs.added(way, |row| row.p99_us)];
        let peak = runs.figure(way, |row| is_proxy.then_some(mib(row.peak_resident_bytes)));
        let middle = |value: fn(&Row) -> f64, per: f64, digits| {
            Spread::show_middle(runs.figure(way, |row| Some(value(row) / per)).as_ref(), digits)
        };
        writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            way.name(),
            Spread::show(own.as_ref(), 1),
            over(Over::One(Through::Nginx)),
            over(Over::One(Through::Haproxy)),
            over(Over::BestPeer),
            Spread::show_middle(p50.as_ref(), 0),
            Spread::show_middle(p99.as_ref(), 0),
            middle(|row| row.per_second, 1.0, 0),
            Spread::show_middle(peak.as_ref(), 0),
            middle(|row| row.engines_us, per(kind), 1),
            middle(|row| row.generator_us, per(kind), 1),
            runs.of(way).map(|row| row.failed).sum::<usize>()
        )?;
    }
    Ok(())
}

/// A column for each body and number of connections.
fn brief(
    out: &mut String,
    settings: &Settings,
    rows: &[Row],
    kind: Kind,
    title: &str,
    show: impl Fn(&Runs<'_>, Through) -> String,
) -> anyhow::Result<()> {
    let cells: Vec<Cell> = settings
        .bodies
        .iter()
        .flat_map(|body| settings.concurrency.iter().map(|connections| (*body, *connections)))
        .map(|(body, connections)| Cell { kind, body, connections })
        .collect();
    let heads: String =
        cells.iter().map(|cell| format!(" {} x {} |", cell.body.name(), cell.connections)).collect();
    let lines: String = cells.iter().map(|_| "---|").collect();
    writeln!(out, "\n{title}\n\n| through |{heads}\n|---|{lines}")?;
    for way in ways(rows) {
        write!(out, "| {} |", way.name())?;
        for cell in &cells {
            write!(out, " {} |", show(&Runs { all: rows, cell: *cell }, way))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn failures(out: &mut String, rows: &[Row]) -> anyhow::Result<()> {
    writeln!(out)?;
    for way in ways(rows) {
        let of_way = || rows.iter().filter(|row| row.through == way);
        let failed: usize = of_way().map(|row| row.failed).sum();
        let answered: usize = of_way().map(|row| row.answered).sum();
        let first = of_way().find_map(|row| Some((row.cell, row.first_failure.as_ref()?)));
        let first = first.map(|(cell, why)| format!("; the first in {cell:?}: {why}")).unwrap_or_default();
        writeln!(out, "{}: {failed} of {} requests failed{first}", way.name(), failed + answered)?;
    }
    Ok(())
}

fn verdicts(out: &mut String, settings: &Settings, rows: &[Row]) -> anyhow::Result<()> {
    writeln!(out)?;
    let (body, connections) = REFERENCE;
    for (kind, over, at_most) in TARGETS {
        let runs = Runs { all: rows, cell: Cell { kind, body, connections } };
        let Some(ratio) = runs.over(Through::Grapevine, over, |row| row.proxy_us) else { continue };
        writeln!(
            out,
            "{}, {} bodies, {connections} connections: CPU {} x {}; target {at_most:.2}: {}",
            kind_name(kind),
            body.name(),
            Spread::show(Some(&ratio), 2),
            over.name(),
            if ratio.median <= at_most { "met" } else { "MISSED" }
        )?;
    }
    let alone = Runs { all: rows, cell: Cell { kind: Kind::Whole, body, connections: 1 } };
    let p99 = |way| alone.added(way, |row| row.p99_us).map(|spread| spread.median);
    let best_peer = ways(rows).into_iter().filter(|way| way.is_peer()).filter_map(p99).min_by(f64::total_cmp);
    if let (Some(own), Some(best)) = (p99(Through::Grapevine), best_peer) {
        writeln!(
            out,
            "one connection, {} bodies: added p99 {own:.0} us, the best peer's {best:.0} us: {}",
            body.name(),
            if own < best { "met" } else { "MISSED" }
        )?;
    }
    let most = settings.concurrency.iter().max().copied().unwrap_or_default();
    let crowded = rows.iter().filter(|row| row.through == Through::Grapevine && row.cell.connections == most);
    let failed: usize = crowded.map(|row| row.failed).sum();
    writeln!(
        out,
        "{most} connections: {failed} failed; target 0: {}",
        if failed == 0 { "met" } else { "MISSED" }
    )?;
    Ok(())
}
