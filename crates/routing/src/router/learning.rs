//! Learning from what requests measured: how fast endpoints are, and how large tokens.

use std::collections::BTreeMap;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::Router;
use crate::Moment;
use crate::decision::Footing;
use crate::endpoint::Served;
use crate::facts::SpeedRow;
use crate::rates::{self, BytesPerToken, SNAP_FACTOR, combine, snap_to_median};
use crate::request::{PromptUnit, RequestShape, ShapeRules};

/// Models whose token size is learned. Clients may name any model; beyond these the configured size holds.
const MODELS_LEARNED_MAX: usize = 256;

/// What one request, served to its end, showed of its endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// How it began there.
    pub footing: Footing,
    /// From dispatch to the first byte of the body, in ms; `None` if it did not stream.
    pub first_byte_ms: Option<f64>,
    /// From dispatch to the last byte, in ms.
    pub leg_ms: f64,
    /// Prompt tokens by the engine's `usage`.
    pub prompt_tokens: Option<u32>,
    /// Of those, how many came from its cache, if it says so.
    pub cached_tokens: Option<u32>,
    /// Output tokens by the engine's `usage`, else the chunks counted.
    pub output_tokens: Option<u32>,
}

/// How many bytes a token has, by model.
#[derive(Debug, Default)]
pub(super) struct TokenSizes {
    learned: Mutex<BTreeMap<u64, BytesPerToken>>,
    published: ArcSwap<BTreeMap<u64, f64>>,
}

impl TokenSizes {
    fn learn(&self, model: u64, bytes: u64, tokens: u32, now: Moment) {
        let mut learned = self.learned.lock();
        if learned.len() >= MODELS_LEARNED_MAX && !learned.contains_key(&model) {
            return;
        }
        let size = learned.entry(model).or_default();
        size.learn(bytes, tokens, now);
        let ratio = size.ratio();
        if self.published.load().get(&model) != Some(&ratio) {
            let mut next = (**self.published.load()).clone();
            next.insert(model, ratio);
            self.published.store(next.into());
        }
    }

    /// The tokens of the request's prompts: exact where they came as tokens, else by what was learned of the
    /// model, else as the request was read.
    pub(super) fn prompt_tokens(&self, model: u64, shape: &RequestShape, rules: &ShapeRules) -> u32 {
        if shape.unit != PromptUnit::Text {
            return shape.prompt_tokens;
        }
        self.published.load().get(&model).map_or(shape.prompt_tokens, |bytes_per_token| {
            let text = (shape.prompt_bytes as f64 / bytes_per_token).ceil();
            (text + f64::from(shape.media) * f64::from(rules.media_tokens)) as u32
        })
    }
}

impl Router {
    /// Takes in what a request measured. An engine that reports no `usage` teaches less and is served the
    /// same.
    pub fn learn(&self, measured: &Measurement, shape: &RequestShape, now: Moment) {
        let view = self.view();
        let Some(endpoint) = view.get(measured.footing.endpoint) else { return };
        let uncached_tokens = match (measured.prompt_tokens, measured.cached_tokens) {
            (Some(prompt), Some(cached)) => prompt.saturating_sub(cached),
            _ => measured.footing.uncached_tokens,
        };
        let served = rates::LegSample {
            first_byte_ms: measured.first_byte_ms,
            leg_ms: measured.leg_ms,
            uncached_tokens,
            ahead_tokens: measured.footing.ahead_tokens,
            output_tokens: measured.output_tokens,
        };
        endpoint.with_learned(|learned| learned.learn(&served, now));
        if let (Some(tokens), PromptUnit::Text, 0, 1) =
            (measured.prompt_tokens, shape.unit, shape.media, shape.prompts)
        {
            self.token_sizes.learn(super::choosing::model_key(shape), shape.prompt_bytes, tokens, now);
        }
    }

    /// What this replica has learned of speeds, to be told.
    pub(super) fn speed_rows(&self, now: Moment) -> Vec<SpeedRow> {
        let view = self.view();
        view.endpoints
            .iter()
            .filter_map(|endpoint| endpoint.with_learned(|learned| learned.row(endpoint.id, now)))
            .collect()
    }

    /// Puts into force what all replicas together have learned. Every replica uses the figures as they are
    /// told, its own too, and takes engines of one model that are nearly alike for equal, so that small
    /// differences of what each has seen don't make them decide differently.
    pub(super) fn apply_speeds(&self, rows: &[SpeedRow]) {
        let view = self.view();
        let prior = self.active.load().settings.speed.into();
        let mut by_model: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut speeds = Vec::with_capacity(view.endpoints.len());
        for (at, endpoint) in view.endpoints.iter().enumerate() {
            let own = rows.iter().filter(|row| row.endpoint == endpoint.id).copied();
            speeds.push(combine(own, prior));
            let model = match &*endpoint.served() {
                Served::Models(models) => models.first().cloned().unwrap_or_default(),
                Served::Any | Served::Unknown => String::new(),
            };
            by_model.entry(model).or_default().push(at);
        }
        for alike in by_model.values() {
            let mut prefill: Vec<f32> = alike.iter().map(|at| speeds[*at].prefill_us_per_token).collect();
            let mut itl: Vec<f32> = alike.iter().map(|at| speeds[*at].itl_us).collect();
            snap_to_median(&mut prefill, SNAP_FACTOR);
            snap_to_median(&mut itl, SNAP_FACTOR);
            for ((at, prefill), itl) in alike.iter().zip(prefill).zip(itl) {
                let speed = rates::Speed { prefill_us_per_token: prefill, itl_us: itl, ..speeds[*at] };
                view.endpoints[*at].set_speed(speed);
            }
        }
    }
}
