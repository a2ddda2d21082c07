//! The figures of a grid, as JSON and as a table.

use std::fmt;

use ::lab::Figures;
use serde::Serialize;

use super::options::Grid;

/// What came of all runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What was played.
    pub workload: String,
    /// The seed of it.
    pub seed: u64,
    /// The share of the trace's blocks that a cache without end, shared by all, would have had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling_hit_rate: Option<f64>,
    /// One row for each run.
    pub results: Vec<Row>,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Who decided.
    pub policy: String,
    /// Replicas that did.
    pub replicas: usize,
    /// Engines.
    pub engines: usize,
    /// Time between two pushes, in ms; `null` where replicas told each other nothing.
    pub gossip_ms: Option<f64>,
    /// What came of it.
    #[serde(flatten)]
    pub figures: Figures,
}

impl Report {
    pub(super) fn of(grid: &Grid, figures: Vec<Figures>) -> Self {
        let row = |(cell, figures): (&super::options::Cell, Figures)| Row {
            policy: cell.policy.clone(),
            replicas: cell.replicas,
            engines: cell.engines,
            gossip_ms: cell.gossip_ms,
            figures,
        };
        Self {
            workload: grid.workload.clone(),
            seed: grid.seed,
            ceiling_hit_rate: grid.ceiling,
            results: grid.cells.iter().zip(figures).map(row).collect(),
        }
    }

    /// Each run with the most replicas of its like, beside the one with a single replica.
    fn scaled_out(&self) -> impl Iterator<Item = (&Row, &Row)> {
        let alike = |one: &Row, other: &Row| {
            (&one.policy, one.engines, one.gossip_ms) == (&other.policy, other.engines, other.gossip_ms)
        };
        let singles = self.results.iter().filter(|row| row.replicas == 1);
        singles.filter_map(move |single| {
            let like = self.results.iter().filter(|row| alike(row, single));
            let most = like.max_by_key(|row| row.replicas).filter(|row| row.replicas > 1)?;
            Some((single, most))
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<18}{:>9}{:>9}{:>11}{:>10}{:>12}{:>12}{:>14}{:>11}",
            "policy",
            "replicas",
            "engines",
            "gossip ms",
            "hit rate",
            "ttft ms",
            "p99 ms",
            "busiest/mean",
            "work/mean"
        )?;
        for row in &self.results {
            let gossip = row.gossip_ms.map_or("-".to_owned(), |ms| format!("{ms}"));
            let Figures {
                hit_rate,
                ttft_mean_ms,
                ttft_p99_ms,
                busiest_over_mean,
                busiest_work_over_mean,
                ..
            } = &row.figures;
            writeln!(
                f,
                "{:<18}{:>9}{:>9}{gossip:>11}{hit_rate:>10.3}{ttft_mean_ms:>12.1}{ttft_p99_ms:>12.1}\
                 {busiest_over_mean:>14.3}{busiest_work_over_mean:>11.3}",
                row.policy, row.replicas, row.engines,
            )?;
        }
        for (single, most) in self.scaled_out() {
            let gossip = most.gossip_ms.map_or("no gossip".to_owned(), |ms| format!("gossip {ms} ms"));
            write!(
                f,
                "{}, {} engines, {gossip}: {} replicas against 1: ",
                most.policy, most.engines, most.replicas
            )?;
            // Prompts that share nothing hit nothing.
            if single.figures.hit_rate > 0.0 {
                write!(f, "hit rate {:.3} x, ", most.figures.hit_rate / single.figures.hit_rate)?;
            }
            writeln!(f, "mean ttft {:.3} x", most.figures.ttft_mean_ms / single.figures.ttft_mean_ms)?;
        }
        if let Some(ceiling) = self.ceiling_hit_rate {
            writeln!(f, "a cache without end, shared by all, would have {ceiling:.3} of the trace's blocks")?;
        }
        let refused: usize = self.results.iter().map(|row| row.figures.refused).sum();
        if refused > 0 {
            writeln!(f, "{refused} requests did not fit into an engine's KV cache and were refused")?;
        }
        Ok(())
    }
}
