//! A robust estimate from recent samples.

use std::time::Duration;

use smallvec::SmallVec;

use crate::Moment;

/// Samples that are kept. 64: the median of so many is steady, and sorting them costs a microsecond.
const SAMPLES_MAX: usize = 64;
/// The newest samples keep at least half their weight however old they are: at one request a minute a single
/// odd one must not make the estimate.
const NEWEST: usize = 5;

/// The last samples of a figure.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    samples: Vec<Sample>,
    /// Where the next one goes once the window is full.
    next: usize,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Moment,
    value: f32,
    weight: f32,
}

impl Window {
    pub(super) const fn new() -> Self {
        Self { samples: Vec::new(), next: 0 }
    }

    /// Adds a sample (positive) that weighs `weight`, 0 to 1.
    pub(super) fn add(&mut self, value: f32, weight: f32, now: Moment) {
        let sample = Sample { at: now, value, weight };
        if self.samples.len() < SAMPLES_MAX {
            self.samples.push(sample);
        } else {
            self.samples[self.next] = sample;
            self.next = (self.next + 1) % SAMPLES_MAX;
        }
    }

    /// Whether each new sample takes an old one's place.
    pub(super) const fn is_full(&self) -> bool {
        self.samples.len() >= SAMPLES_MAX
    }

    /// The weighted median, recent samples weighing more; `prior` counts as one sample while there are few.
    pub(super) fn estimate(&self, prior: f32, half_life: Duration) -> f32 {
        let Some(newest) = self.newest_first().next() else { return prior };
        let mut weighted: SmallVec<[(f32, f32); SAMPLES_MAX + 1]> = self
            .newest_first()
            .enumerate()
            .map(|(rank, sample)| {
                let fresh = decay(newest.at.since(sample.at), half_life);
                let fresh = if rank < NEWEST { fresh.max(0.5) } else { fresh };
                (sample.value, sample.weight * fresh)
            })
            .collect();
        if self.samples.len() < NEWEST {
            weighted.push((prior, 1.0));
        }
        median(&mut weighted)
    }

    /// How many fresh samples there are, in effect.
    pub(super) fn confidence(&self, half_life: Duration, now: Moment) -> f32 {
        self.samples.iter().map(|sample| sample.weight * decay(now.since(sample.at), half_life)).sum()
    }

    fn newest_first(&self) -> impl Iterator<Item = &Sample> {
        let (newer, older) = self.samples.split_at(self.next.min(self.samples.len()));
        newer.iter().rev().chain(older.iter().rev())
    }
}

fn decay(age: Duration, half_life: Duration) -> f32 {
    (-age.as_secs_f32() / half_life.as_secs_f32()).exp2()
}

/// The value at which half of the weight is reached; the geometric mean of two if it lies between them.
fn median(weighted: &mut [(f32, f32)]) -> f32 {
    weighted.sort_unstable_by(|one, other| one.0.total_cmp(&other.0));
    let half = weighted.iter().map(|(_, weight)| weight).sum::<f32>() / 2.0;
    let mut reached = 0.0;
    for (at, (value, weight)) in weighted.iter().enumerate() {
        reached += weight;
        if reached > half {
            return *value;
        }
        if reached == half {
            let after = weighted.get(at + 1).map_or(*value, |(after, _)| *after);
            return (value * after).sqrt();
        }
    }
    weighted.last().map_or(1.0, |(value, _)| *value)
}
