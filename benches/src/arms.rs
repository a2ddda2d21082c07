//! Several ways measured in one run: each arm once for each seed, one after another.

use clap::{Args, ValueEnum};
use serde::Serialize;

/// Which arms a run has, and with which seeds.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Arms<A: ValueEnum + Send + Sync + 'static> {
    /// Seeds, one run of every arm for each
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    pub seeds: Vec<u64>,
    /// Arms to run [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub arms: Vec<A>,
}

impl<A: ValueEnum + Send + Sync + Copy + 'static> Arms<A> {
    /// The arms that were asked for, or all, of those that are `there`.
    pub fn chosen(&self, there: impl Fn(A) -> bool) -> Vec<A> {
        let chosen = if self.arms.is_empty() { A::value_variants() } else { &self.arms };
        chosen.iter().copied().filter(|arm| there(*arm)).collect()
    }
}

/// Measures each of `arms` with each of `seeds`. Which comes first changes from seed to seed: what else the machine
/// does is nobody's fault.
///
/// # Errors
/// The first of `measure`.
pub fn interleaved<A: Copy, R>(
    mut arms: Vec<A>,
    seeds: &[u64],
    mut measure: impl FnMut(A, u64) -> anyhow::Result<R>,
) -> anyhow::Result<Vec<R>> {
    let mut runs = Vec::new();
    for (turn, seed) in seeds.iter().enumerate() {
        arms.rotate_left(turn.min(1));
        for arm in &arms {
            runs.push(measure(*arm, *seed)?);
        }
    }
    Ok(runs)
}
