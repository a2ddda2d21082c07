//! How fast each endpoint is, learned from the requests it served.
//!
//! A first byte that took `t` behind `a` queued prompt tokens, with `u` of its own, says that a token costs
//! about `(t - base) / (a + u)`; behind nothing that is exact, behind something it is the tokens completed
//! per busy millisecond as this request saw them. The figure is a weighted median of such samples, in which
//! recent ones dominate: an engine that slows down is known for it within seconds, and a few odd samples
//! change nothing. Engines of one model are mostly alike: what is known of all of them stands for some samples
//! of each, so that only an engine that many samples show to be another is taken for one. A warm token is worth at least 1/8 of the prior and nothing is slower than 8 times the
//! prior, so that an engine that answers at once does not make warmth worthless and a stuck one does not
//! look like an idle one.

mod ratio;
mod transfer;
mod window;

pub use ratio::BytesPerToken;
pub use transfer::TransferRate;
use window::Window;

use std::time::Duration;

use crate::facts::SpeedRow;
use crate::{EndpointId, Moment};

/// How many times slower than its prior an endpoint is taken for at most; and how many times faster, where
/// that says what a warm token is worth.
pub const CLAMP: f32 = 8.0;

/// How many times faster than its prior an endpoint is taken for at most where that says how long its queue
/// takes: an engine that answers at once has none.
pub const CLAMP_FAST: f32 = 256.0;

/// Engines within this factor of their model's median are taken for equal: what replicas learn differs by
/// more than what they should disagree about, and two equal engines on one busy machine by up to half. An engine
/// that is slower by less is found out by its queue.
pub const SNAP_FACTOR: f32 = 1.5;

/// The half-life of a speed sample. 1.5 s: an engine that slows down while requests queue is known for it
/// after 3 to 5 s (1 s saves one of them and follows every pause).
const SAMPLE_HALF_LIFE: Duration = Duration::from_millis(1_500);
/// The half-life of what an estimate weighs beside other replicas'. 15 s: a replica that has not seen an
/// endpoint for a minute leaves it to those that have, and when nobody has, the prior holds again.
const CONFIDENCE_HALF_LIFE: Duration = Duration::from_secs(15);
/// How often the medians are taken anew while samples come. 20 ms: they cost some microseconds, and what is
/// told of them is told every 100 ms.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// Prompt tokens (own and ahead) from which a first byte tells the time per token. 64: below, the fixed part
/// hides it.
const PREFILL_TOKENS_MIN: u32 = 64;
/// Prompt tokens from which such a sample has full weight. Below, its weight falls with their square: what the
/// fixed part strays by is divided by the tokens, and a sample weighs as the inverse of its variance.
const PREFILL_TOKENS_FULL: u32 = 512;
/// What all engines of a model together weigh in what is believed of each, in samples. 16: an engine that is
/// slower than the others is known for it after some seconds under load, and one that a few odd samples made
/// look slow, and that gets few requests for it, is soon taken for one like the others again.
const ALIKE_SAMPLES: f32 = 16.0;
/// Output tokens from which a stream tells the time between them.
const STREAM_TOKENS_MIN: u32 = 4;
/// Output tokens from which a reply in one piece does: its prefill is only estimated.
const WHOLE_TOKENS_MIN: u32 = 16;
/// What a sample weighs that rests on an estimate: of the tokens ahead, or of the prefill within a whole reply.
const INDIRECT_WEIGHT: f32 = 0.5;

/// The speed of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Microseconds per uncached prompt token.
    pub prefill_us_per_token: f32,
    /// Microseconds between two output tokens of one request.
    pub itl_us: f32,
    /// Microseconds that a first token takes beyond its prompt's.
    pub base_us: f32,
}

impl Default for Speed {
    /// An 8-billion-parameter model on one H100: 250 us, 12 ms and 30 ms.
    fn default() -> Self {
        Self { prefill_us_per_token: 250.0, itl_us: 12_000.0, base_us: 30_000.0 }
    }
}

impl Speed {
    /// What a warm token is worth, in microseconds: the time to compute it, but never less than 1/8 of
    /// `prior`, so that an engine that answers at once does not make warmth worthless.
    pub fn warm_us_per_token(&self, prior: &Self) -> f32 {
        self.prefill_us_per_token.max(prior.prefill_us_per_token / CLAMP)
    }
}

/// What one served leg tells of its endpoint's speed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LegSample {
    /// From dispatch to the first byte, in ms; `None` for a reply in one piece.
    pub first_byte_ms: Option<f64>,
    /// From dispatch to the last byte, in ms.
    pub leg_ms: f64,
    /// Its prompt tokens that were not cached: the engine's word if it gives one, else our belief.
    pub uncached_tokens: u32,
    /// Uncached prompt tokens that were queued there when it was dispatched, over all replicas.
    pub ahead_tokens: u32,
    /// Its output tokens; `None` if they could not be counted.
    pub output_tokens: Option<u32>,
}

/// What one replica has learned of one endpoint's speed.
#[derive(Clone, Debug)]
pub struct LearnedSpeed {
    prior: Speed,
    prefill: Window,
    itl: Window,
    base: Window,
    /// What the windows said when they were last asked.
    speed: Speed,
    asked: Moment,
    freshness: Freshness,
}

/// Whether [`LearnedSpeed::speed`] holds all samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freshness {
    Current,
    SamplesSince,
}

impl LearnedSpeed {
    /// Nothing yet.
    pub const fn new(prior: Speed) -> Self {
        Self {
            prior,
            prefill: Window::new(),
            itl: Window::new(),
            base: Window::new(),
            speed: prior,
            asked: Moment::from_micros(0),
            freshness: Freshness::Current,
        }
    }

    /// Takes another prior; what was learned stays.
    pub fn set_prior(&mut self, prior: Speed) {
        self.prior = prior;
        self.freshness = Freshness::SamplesSince;
    }

    /// Learns from a leg that was served to its end.
    pub fn learn(&mut self, sample: &LegSample, now: Moment) {
        let leg_us = (sample.leg_ms * 1_000.0) as f32;
        match (sample.first_byte_ms, sample.output_tokens) {
            (Some(first_byte_ms), output_tokens) => {
                let first_byte_us = (first_byte_ms * 1_000.0) as f32;
                self.learn_prefill(first_byte_us, sample, now);
                if let Some(count) = output_tokens.filter(|count| *count >= STREAM_TOKENS_MIN) {
                    self.learn_itl((leg_us - first_byte_us) / (count - 1) as f32, 1.0, now);
                }
            }
            (None, Some(0 | 1)) => self.learn_prefill(leg_us, sample, now),
            (None, Some(count)) if count >= WHOLE_TOKENS_MIN => {
                let prefill_us =
                    self.speed.base_us + sample.tokens() as f32 * self.speed.prefill_us_per_token;
                self.learn_itl((leg_us - prefill_us) / (count - 1) as f32, INDIRECT_WEIGHT, now);
            }
            (None, _) => {}
        }
        self.freshness = Freshness::SamplesSince;
        if now.since(self.asked) >= ASK_EVERY {
            self.ask(now);
        }
    }

    /// Learns from a leg that only decoded: its first byte says nothing of prompts.
    pub fn learn_decode(&mut self, sample: &LegSample, now: Moment) {
        if let (Some(first_byte_ms), Some(count)) = (sample.first_byte_ms, sample.output_tokens)
            && count >= STREAM_TOKENS_MIN
        {
            let span_us = ((sample.leg_ms - first_byte_ms) * 1_000.0) as f32;
            self.learn_itl(span_us / (count - 1) as f32, 1.0, now);
            self.freshness = Freshness::SamplesSince;
        }
    }

    /// The speed as learned, or as the prior says.
    pub fn speed(&mut self, now: Moment) -> Speed {
        if self.freshness == Freshness::SamplesSince {
            self.ask(now);
        }
        self.speed
    }

    /// What to tell the other replicas, and to use here as well; `None` when that is nothing. Quantised, so
    /// that it seldom changes.
    pub fn row(&mut self, endpoint: EndpointId, now: Moment) -> Option<SpeedRow> {
        // A figure that rests on the prior, which counts as one sample, is not worth telling.
        let weight = |window: &Window| {
            let confidence = window.confidence(CONFIDENCE_HALF_LIFE, now);
            if confidence > 1.0 { 1 << (confidence.round() as u16).ilog2() } else { 0 }
        };
        let (prefill_samples, itl_samples) = (weight(&self.prefill), weight(&self.itl));
        if prefill_samples == 0 && itl_samples == 0 {
            return None;
        }
        let speed = self.speed(now);
        Some(SpeedRow {
            endpoint,
            prefill_us_per_token: from_step(to_step(speed.prefill_us_per_token)),
            prefill_samples,
            itl_us: from_step(to_step(speed.itl_us)),
            itl_samples,
        })
    }

    fn ask(&mut self, now: Moment) {
        self.speed = Speed {
            prefill_us_per_token: self.prefill.estimate(self.prior.prefill_us_per_token, SAMPLE_HALF_LIFE),
            itl_us: self.itl.estimate(self.prior.itl_us, SAMPLE_HALF_LIFE),
            base_us: self.base.estimate(self.prior.base_us, SAMPLE_HALF_LIFE),
        };
        self.asked = now;
        self.freshness = Freshness::Current;
    }

    fn learn_prefill(&mut self, first_byte_us: f32, sample: &LegSample, now: Moment) {
        let tokens = sample.tokens() as f32;
        if sample.tokens() >= PREFILL_TOKENS_MIN {
            let us_per_token = (first_byte_us - self.speed.base_us) / tokens;
            let direct = if sample.ahead_tokens == 0 { 1.0 } else { INDIRECT_WEIGHT };
            let size = (tokens / PREFILL_TOKENS_FULL as f32).min(1.0);
            let weight = direct * size * size;
            self.prefill.add(clamp(us_per_token, self.prior.prefill_us_per_token), weight, now);
        } else {
            let base_us = first_byte_us - tokens * self.speed.prefill_us_per_token;
            self.base.add(clamp(base_us, self.prior.base_us), 1.0, now);
        }
    }

    fn learn_itl(&mut self, itl_us: f32, weight: f32, now: Moment) {
        self.itl.add(clamp(itl_us, self.prior.itl_us), weight, now);
    }
}

impl LegSample {
    /// Prompt tokens that were computed there from its dispatch to its first byte.
    const fn tokens(&self) -> u32 {
        self.uncached_tokens.saturating_add(self.ahead_tokens)
    }
}

/// What all replicas together know of one figure of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Known {
    /// The figure, in the unit of the row it comes from.
    pub figure: f32,
    /// How much it weighs, in samples.
    pub samples: f32,
}

/// One figure of an endpoint from what all replicas say of it, `(figure, samples)`, by what each weighs; `None`
/// if nobody knows. The order of the rows does not matter, so that all replicas come to the same figure.
pub fn combine(rows: impl Iterator<Item = (f32, u16)>, prior: f32) -> Option<Known> {
    let (mut weight, mut sum) = (0_i64, 0_i64);
    for (figure, samples) in rows {
        let samples = i64::from(samples.min(1_000));
        weight += samples;
        sum += samples * i64::from(to_step(clamp(figure, prior)));
    }
    (weight > 0).then(|| Known {
        figure: from_step((sum + weight / 2).div_euclid(weight) as i32),
        samples: weight as f32,
    })
}

/// What to take each of some engines of one model for, by what is known of each: one of which little is known
/// for one like the others, those that are nearly alike for equal. `None` where nothing is known of any.
pub fn believed(known: &[Option<Known>]) -> Option<Vec<f32>> {
    let figures: Vec<f32> = known.iter().flatten().map(|known| known.figure).collect();
    let usual = median(&figures)?;
    let mut believed: Vec<f32> =
        known.iter().map(|known| known.map_or(usual, |known| known.beside(usual))).collect();
    snap_to_median(&mut believed, SNAP_FACTOR);
    Some(believed)
}

impl Known {
    /// The figure, drawn towards the `usual` one as if that were [`ALIKE_SAMPLES`] more samples.
    fn beside(self, usual: f32) -> f32 {
        let (own, usual) = (self.figure.log2(), usual.log2());
        let own_share = self.samples / (self.samples + ALIKE_SAMPLES);
        (usual + (own - usual) * own_share).exp2()
    }
}

/// The median of some figures, the lower of two middle ones, so that it is always one that somebody has.
pub fn median(values: &[f32]) -> Option<f32> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

/// Takes those within `factor` (1 or more) of the [`median`] for equal to it.
pub fn snap_to_median(values: &mut [f32], factor: f32) {
    let Some(median) = median(values) else { return };
    for value in values {
        if *value <= median * factor && *value >= median / factor {
            *value = median;
        }
    }
}

fn clamp(value: f32, prior: f32) -> f32 {
    // A figure that is not a number (from elsewhere) says nothing.
    if value.is_nan() { prior } else { value.clamp(prior / CLAMP_FAST, prior * CLAMP) }
}

/// Steps of the geometric grid in a doubling: 9% each.
const STEPS_PER_DOUBLING: f32 = 8.0;

fn to_step(value: f32) -> i32 {
    (value.max(f32::MIN_POSITIVE).log2() * STEPS_PER_DOUBLING).round() as i32
}

fn from_step(step: i32) -> f32 {
    (step as f32 / STEPS_PER_DOUBLING).exp2()
}

#[cfg(test)]
mod tests;
