//! The figures as a chart: one panel for the hit rate, one for the mean time to first token, a line for each policy.

use std::fmt;

use super::report::{Report, Row};

/// Measures in SVG units.
const PANEL: (f64, f64) = (360.0, 240.0);
const MARGIN: (f64, f64) = (64.0, 40.0);
const LEGEND_LINE: f64 = 16.0;
/// Colours that differ for most eyes (Okabe and Ito, 2008), used again when there are more lines.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];

/// A report as an SVG document.
pub(super) struct Chart<'a>(pub(super) &'a Report);

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

impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let along = Along::of(self.0);
        let lines = distinct(self.0.results.iter().map(|row| along.line(row, self.0)));
        let width = 2.0 * (PANEL.0 + MARGIN.0) + MARGIN.1;
        let height = PANEL.1 + 2.0 * MARGIN.1 + LEGEND_LINE * (lines.len() + 1) as f64;
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">"#
        )?;
        writeln!(f, r#"<rect width="100%" height="100%" fill="white"/>"#)?;
        let times = self.0.results.iter().map(|row| row.figures.ttft_mean_ms);
        let panels = [
            Panel {
                title: "hit rate",
                figure: |row| row.figures.hit_rate,
                scale: Scale::Linear { most: 1.0 },
            },
            Panel {
                title: "mean time to first token, ms",
                figure: |row| row.figures.ttft_mean_ms,
                scale: Scale::decades(times),
            },
        ];
        for (at, panel) in panels.into_iter().enumerate() {
            panel.draw(f, self.0, along, &lines, MARGIN.0 + at as f64 * (PANEL.0 + MARGIN.0))?;
        }
        for (at, line) in lines.iter().enumerate() {
            let y = PANEL.1 + 2.0 * MARGIN.1 + LEGEND_LINE * (at as f64 + 0.5);
            let (x, colour) = (MARGIN.0, colour(at));
            writeln!(f, r#"<rect x="{x}" y="{}" width="10" height="10" fill="{colour}"/>"#, y - 9.0)?;
            writeln!(f, r#"<text x="{}" y="{y}">{line}</text>"#, x + 16.0)?;
        }
        writeln!(f, "</svg>")
    }
}

fn colour(line: usize) -> &'static str {
    COLOURS[line % COLOURS.len()]
}

/// What a vertical axis shows.
enum Scale {
    /// From zero to this.
    Linear { most: f64 },
    /// Powers of ten from one exponent to another: a policy that fails takes thousands of times as long.
    Decades { from: i32, to: i32 },
}

impl Scale {
    /// The decades that hold all of these.
    fn decades(all: impl Iterator<Item = f64>) -> Self {
        let exponents: Vec<f64> = all.map(|value| value.max(1e-3).log10()).collect();
        let least = exponents.iter().copied().fold(f64::INFINITY, f64::min);
        let most = exponents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if exponents.is_empty() {
            return Self::Decades { from: 0, to: 1 };
        }
        let from = least.floor() as i32;
        Self::Decades { from, to: (most.ceil() as i32).max(from + 1) }
    }

    /// How high a value stands, 0 to 1.
    fn height(&self, value: f64) -> f64 {
        match *self {
            Self::Linear { most } => value / most,
            Self::Decades { from, to } => (value.max(1e-3).log10() - f64::from(from)) / f64::from(to - from),
        }
    }

    fn marks(&self) -> Vec<f64> {
        match *self {
            Self::Linear { most } => (0..=4).map(|part| most * f64::from(part) / 4.0).collect(),
            Self::Decades { from, to } => (from..=to).map(|exponent| 10_f64.powi(exponent)).collect(),
        }
    }
}

/// One of the chart's two halves.
struct Panel {
    title: &'static str,
    figure: fn(&Row) -> f64,
    scale: Scale,
}

impl Panel {
    fn draw(
        &self,
        f: &mut fmt::Formatter<'_>,
        report: &Report,
        along: Along,
        lines: &[String],
        left: f64,
    ) -> fmt::Result {
        let values = along.values(report);
        let (top, bottom) = (MARGIN.1, MARGIN.1 + PANEL.1);
        let x_of = |at: usize| left + PANEL.0 * (at as f64 + 0.5) / values.len().max(1) as f64;
        let y_of = |value: f64| bottom - PANEL.1 * self.scale.height(value);
        writeln!(f, r#"<text x="{left}" y="{}" font-weight="bold">{}</text>"#, top - 12.0, self.title)?;
        for value in self.scale.marks() {
            let y = y_of(value);
            writeln!(f, r##"<path d="M{left} {y:.1} h{}" stroke="#dddddd"/>"##, PANEL.0)?;
            writeln!(f, r#"<text x="{}" y="{:.1}" text-anchor="end">{value}</text>"#, left - 6.0, y + 4.0)?;
        }
        for (at, value) in values.iter().enumerate() {
            let (x, y) = (x_of(at), bottom + 16.0);
            writeln!(f, r#"<text x="{x:.1}" y="{y}" text-anchor="middle">{value}</text>"#)?;
        }
        let (middle, below) = (left + PANEL.0 / 2.0, bottom + 32.0);
        writeln!(f, r#"<text x="{middle}" y="{below}" text-anchor="middle">{}</text>"#, along.name())?;
        for (number, line) in lines.iter().enumerate() {
            let rows = report.results.iter().filter(|row| along.line(row, report) == *line);
            let points: Vec<(f64, f64)> = rows
                .map(|row| {
                    let at = values.iter().position(|value| *value == along.value(row)).unwrap_or(0);
                    (x_of(at), y_of((self.figure)(row)))
                })
                .collect();
            let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let (path, colour) = (path.join(" "), colour(number));
            writeln!(f, r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>"#)?;
            for (x, y) in points {
                writeln!(f, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#)?;
            }
        }
        Ok(())
    }
}
