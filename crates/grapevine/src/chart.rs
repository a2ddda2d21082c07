//! Line charts as SVG: panels over one horizontal axis, with one legend for all.
//!
//! The main choice: a chart is plain data and its `Display`. What lies along the axis are names, not numbers, at equal
//! distances: figures here are of a few settings each, which grow by factors.

use std::fmt;

/// Measures in SVG units.
const PANEL: (f64, f64) = (360.0, 240.0);
const MARGIN: (f64, f64) = (64.0, 40.0);
const LEGEND_LINE: f64 = 16.0;
/// Colours that differ for most eyes (Okabe and Ito, 2008), used again when there are more lines.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];
/// What is drawn of values that have no logarithm, or one far below all others.
const LEAST_OF_DECADES: f64 = 1e-3;

/// A chart; its `Display` is an SVG document.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What lies along the horizontal axis.
    pub along: String,
    /// Its values, from left to right.
    pub values: Vec<String>,
    /// The names of the lines, one colour each.
    pub lines: Vec<String>,
    /// The panels, from left to right and from top to bottom.
    pub panels: Vec<Panel>,
    /// Panels side by side, at least 1.
    pub columns: usize,
}

/// One figure of every line.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What the figure is, with its unit.
    pub title: String,
    /// The vertical axis.
    pub scale: Scale,
    /// For each of the chart's lines its points: the place among the chart's values, and the figure there.
    pub points: Vec<Vec<(usize, f64)>>,
}

/// What a vertical axis shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// From zero to this, above 0.
    Linear {
        /// At the top.
        most: f64,
    },
    /// Powers of ten from one exponent to another: what fails takes thousands of times as long.
    Decades {
        /// At the bottom.
        from: i32,
        /// At the top, above `from`.
        to: i32,
    },
}

impl Scale {
    /// The decades that hold all of these.
    pub fn decades(all: impl Iterator<Item = f64>) -> Self {
        let exponents: Vec<f64> = all.map(|value| value.max(LEAST_OF_DECADES).log10()).collect();
        let least = exponents.iter().copied().fold(f64::INFINITY, f64::min);
        let most = exponents.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if exponents.is_empty() {
            return Self::Decades { from: 0, to: 1 };
        }
        let from = least.floor() as i32;
        Self::Decades { from, to: (most.ceil() as i32).max(from + 1) }
    }

    /// How high a value stands, 0 to 1.
    fn height(self, value: f64) -> f64 {
        match self {
            Self::Linear { most } => value / most,
            Self::Decades { from, to } => {
                (value.max(LEAST_OF_DECADES).log10() - f64::from(from)) / f64::from(to - from)
            }
        }
    }

    fn marks(self) -> Vec<f64> {
        match self {
            Self::Linear { most } => (0..=4).map(|part| most * f64::from(part) / 4.0).collect(),
            Self::Decades { from, to } => (from..=to).map(|exponent| 10_f64.powi(exponent)).collect(),
        }
    }
}

impl fmt::Display for Chart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.columns.max(1);
        let row_height = PANEL.1 + 2.0 * MARGIN.1;
        let width = columns as f64 * (PANEL.0 + MARGIN.0) + MARGIN.1;
        let panels_height = self.panels.len().div_ceil(columns) as f64 * row_height;
        let height = panels_height + LEGEND_LINE * (self.lines.len() + 1) as f64;
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">"#
        )?;
        writeln!(f, r#"<rect width="100%" height="100%" fill="white"/>"#)?;
        for (at, panel) in self.panels.iter().enumerate() {
            let left = MARGIN.0 + (at % columns) as f64 * (PANEL.0 + MARGIN.0);
            let top = MARGIN.1 + (at / columns) as f64 * row_height;
            panel.draw(f, self, (left, top))?;
        }
        for (at, line) in self.lines.iter().enumerate() {
            let y = panels_height + LEGEND_LINE * (at as f64 + 0.5);
            let (x, colour) = (MARGIN.0, colour(at));
            writeln!(f, r#"<rect x="{x}" y="{}" width="10" height="10" fill="{colour}"/>"#, y - 9.0)?;
            writeln!(f, r#"<text x="{}" y="{y}">{}</text>"#, x + 16.0, escaped(line))?;
        }
        writeln!(f, "</svg>")
    }
}

fn colour(line: usize) -> &'static str {
    COLOURS[line % COLOURS.len()]
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

impl Panel {
    fn draw(&self, f: &mut fmt::Formatter<'_>, chart: &Chart, (left, top): (f64, f64)) -> fmt::Result {
        let bottom = top + PANEL.1;
        let x_of = |at: usize| left + PANEL.0 * (at as f64 + 0.5) / chart.values.len().max(1) as f64;
        let y_of = |value: f64| bottom - PANEL.1 * self.scale.height(value);
        let title = escaped(&self.title);
        writeln!(f, r#"<text x="{left}" y="{}" font-weight="bold">{title}</text>"#, top - 12.0)?;
        for value in self.scale.marks() {
            let y = y_of(value);
            writeln!(f, r##"<path d="M{left} {y:.1} h{}" stroke="#dddddd"/>"##, PANEL.0)?;
            writeln!(f, r#"<text x="{}" y="{:.1}" text-anchor="end">{value}</text>"#, left - 6.0, y + 4.0)?;
        }
        for (at, value) in chart.values.iter().enumerate() {
            let (x, y, value) = (x_of(at), bottom + 16.0, escaped(value));
            writeln!(f, r#"<text x="{x:.1}" y="{y}" text-anchor="middle">{value}</text>"#)?;
        }
        let (middle, below, along) = (left + PANEL.0 / 2.0, bottom + 32.0, escaped(&chart.along));
        writeln!(f, r#"<text x="{middle}" y="{below}" text-anchor="middle">{along}</text>"#)?;
        for (number, line) in self.points.iter().enumerate() {
            let colour = colour(number);
            let points: Vec<(f64, f64)> = line.iter().map(|(at, value)| (x_of(*at), y_of(*value))).collect();
            let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let path = path.join(" ");
            writeln!(f, r#"<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>"#)?;
            for (x, y) in points {
                writeln!(f, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decades_hold_all_values_and_are_never_empty() {
        for (values, expected) in [
            (vec![3.0, 250.0], (0, 3)),
            (vec![10.0], (1, 2)),
            (vec![0.0, 0.5], (-3, 0)),
            (Vec::new(), (0, 1)),
        ] {
            let scale = Scale::decades(values.iter().copied());
            assert_eq!(scale, Scale::Decades { from: expected.0, to: expected.1 }, "{values:?}");
            assert!(values.iter().all(|value| (0.0..=1.0).contains(&scale.height(*value))), "{values:?}");
        }
    }

    #[test]
    fn panels_stand_in_rows_and_have_a_point_for_each_figure() {
        let panel = |title: &str| Panel {
            title: title.to_owned(),
            scale: Scale::Linear { most: 2.0 },
            points: vec![vec![(0, 0.0), (1, 2.0)], vec![(1, 1.0)]],
        };
        let chart = Chart {
            along: "copies".to_owned(),
            values: vec!["1".to_owned(), "8".to_owned()],
            lines: vec!["a & b".to_owned(), "<c>".to_owned()],
            panels: vec![panel("one"), panel("two"), panel("three")],
            columns: 2,
        };
        let svg = chart.to_string();
        assert_eq!(svg.matches("<circle").count(), 9);
        // Zero stands at the bottom of the first row and of the second.
        for bottom in [280.0, 600.0] {
            assert!(svg.contains(&format!(r#"cy="{bottom:.1}""#)), "{bottom}: {svg}");
        }
        assert!(svg.contains("a &amp; b") && svg.contains("&lt;c>"));
    }
}
