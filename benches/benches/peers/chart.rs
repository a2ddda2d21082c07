//! CPU over connections: a panel for each kind of reply and body.

use benches::canned::Kind;
use benches::spread::Spread;
use grapevine::chart::{Chart, Panel, Scale};

use crate::Settings;
use crate::measure::{Cell, Row};
use crate::stand::Through;
use crate::table;

/// The medians of CPU per request, per chunk for paced streams.
pub(crate) fn cpu(settings: &Settings, rows: &[Row]) -> Chart {
    let through: Vec<Through> = table::ways(rows).into_iter().filter(|way| *way != Through::Direct).collect();
    let mut panels = Vec::new();
    for kind in &settings.kinds {
        for body in &settings.bodies {
            let median = |way: Through, connections: usize| {
                let cell = Cell { kind: *kind, body: *body, connections };
                let these = rows.iter().filter(|row| row.cell == cell && row.through == way);
                let values: Vec<f64> = these.map(|row| row.proxy_us / table::per(*kind)).collect();
                Spread::of(&values).map(|spread| spread.median)
            };
            let points: Vec<Vec<(usize, f64)>> = through
                .iter()
                .map(|way| {
                    let connections = settings.concurrency.iter().enumerate();
                    connections
                        .filter_map(|(at, connections)| Some((at, median(*way, *connections)?)))
                        .collect()
                })
                .collect();
            let unit = if *kind == Kind::Paced { "chunk" } else { "request" };
            panels.push(Panel {
                title: format!("{}, {}: us per {unit}", table::kind_name(*kind), body.name()),
                scale: Scale::decades(points.iter().flatten().map(|(_, us)| *us)),
                points,
            });
        }
    }
    Chart {
        along: "connections".to_owned(),
        values: settings.concurrency.iter().map(ToString::to_string).collect(),
        lines: through.iter().map(|way| way.name().to_owned()).collect(),
        panels,
        columns: settings.bodies.len(),
    }
}
