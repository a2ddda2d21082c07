//! The figures as a chart: one panel for the hit rate, one for the mean time to first token, a line for each policy.

use super::report::{Report, Row};
use crate::chart::{Chart, Panel, Scale};

/// A report as a chart.
pub(super) fn chart(report: &Report) -> Chart {
    let along = Along::of(report);
    let values = along.values(report);
    let lines = distinct(report.results.iter().map(|row| along.line(row, report)));
    let points = |figure: fn(&Row) -> f64| {
        let points_of = |line: &String| {
            let rows = report.results.iter().filter(|row| along.line(row, report) == *line);
            let at = |row| values.iter().position(|value| *value == along.value(row)).unwrap_or(0);
            rows.map(|row| (at(row), figure(row))).collect()
        };
        lines.iter().map(points_of).collect()
    };
    let times = report.results.iter().map(|row| row.figures.ttft_mean_ms);
    let panels = vec![
        Panel {
            title: "hit rate".to_owned(),
            scale: Scale::Linear { most: 1.0 },
            points: points(|row| row.figures.hit_rate),
        },
        Panel {
            title: "mean time to first token, ms".to_owned(),
            scale: Scale::decades(times),
            points: points(|row| row.figures.ttft_mean_ms),
        },
    ];
    Chart { along: along.name().to_owned(), values, lines, panels, columns: 2 }
}

/// What lies along the horizontal axis: the first of these that the report has several of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Along {
    Replicas,
    Gossip,
    Engines,
}

impl Along {
    fn of(report: &Report) -> Self {
        let all = [Self::Replicas, Self::Gossip, Self::Engines];
        all.into_iter().find(|along| along.values(report).len() > 1).unwrap_or(Self::Replicas)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Replicas => "replicas",
            Self::Gossip => "ms between pushes",
            Self::Engines => "engines",
        }
    }

    fn value(self, row: &Row) -> String {
        match self {
            Self::Replicas => row.replicas.to_string(),
            Self::Gossip => row.gossip_ms.map_or("never".to_owned(), |ms| ms.to_string()),
            Self::Engines => row.engines.to_string(),
        }
    }

    /// What tells a row's line from others.
    fn line(self, row: &Row, report: &Report) -> String {
        let others = [Self::Replicas, Self::Gossip, Self::Engines].into_iter().filter(|other| *other != self);
        let told = others.filter(|other| other.values(report).len() > 1);
        let told: String = told.map(|other| format!(", {} {}", other.value(row), other.name())).collect();
        format!("{}{told}", row.policy)
    }

    /// The values that occur, in the order of the rows.
    fn values(self, report: &Report) -> Vec<String> {
        distinct(report.results.iter().map(|row| self.value(row)))
    }
}

fn distinct(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = Vec::new();
    for each in all {
        if !seen.contains(&each) {
            seen.push(each);
        }
    }
    seen
}
