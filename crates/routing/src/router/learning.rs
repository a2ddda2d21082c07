//! Learning from what requests measured: how fast endpoints are, and how large tokens.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::{Active, Router};
use crate::admission::FirstByte;
use crate::decision::{Footing, Part};
use crate::endpoint::{Endpoint, Served};
use crate::facts::SpeedRow;
use crate::rates::{self, BytesPerToken, Known, Speed, TransferRate, believed, combine};
use crate::request::{PromptUnit, RequestShape, ShapeRules};
use crate::{EndpointId, Moment};

/// Models whose token size is learned. Clients may name any model; beyond these the configured size holds.
const MODELS_LEARNED_MAX: usize = 256;

/// What one request, or a leg of a split one, served to its end, showed of its endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// How it began there.
    pub footing: Footing,
    /// From dispatch to the first byte of the body, in ms; of a decode leg from the handoff; `None` if it did not
    /// stream, as prefill legs never do.
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

/// How long the KV of a token takes from engine to engine.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    learned: Mutex<TransferRate>,
    /// The bits of what is in force, in microseconds; 0 while nothing was learned.
    us_per_token: AtomicU32,
}

impl Transfers {
    fn learn(&self, tokens: u32, ms: f64, fixed_ms: f64, prior: f32, now: Moment) {
        let us_per_token = self.learned.lock().learn(tokens, ms, fixed_ms, prior, now);
        self.us_per_token.store(us_per_token.to_bits(), Ordering::Relaxed);
    }

    /// As learned, else as configured, in microseconds.
    pub(super) fn us_per_token(&self, active: &Active) -> f32 {
        let learned = f32::from_bits(self.us_per_token.load(Ordering::Relaxed));
        if learned > 0.0 { learned } else { active.settings.policy_tables.pd_cost.transfer_us_per_token }
    }
}

impl Router {
    /// Takes in what a request, or a leg of a split one, measured. An engine that reports no `usage` teaches less and is served the
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
        if measured.footing.part == Part::Decode {
            endpoint.with_learned(|learned| learned.learn_decode(&served, now));
            if let Some(ms) = measured.first_byte_ms {
                let active = self.active.load();
                let settings = &active.settings.policy_tables.pd_cost;
                let tokens = measured.footing.uncached_tokens;
                let prior = settings.transfer_us_per_token;
                self.transfers.learn(tokens, ms, settings.handoff_ms, prior, now);
            }
        } else {
            endpoint.with_learned(|learned| learned.learn(&served, now));
        }
        endpoint.retention().insert(u64::from(measured.output_tokens.unwrap_or(0)), now);
        // What was handed over counts as cached with some engines: it says nothing of what was kept.
        if let (Some(prompt), Some(cached)) = (measured.prompt_tokens, measured.cached_tokens)
            && measured.footing.part != Part::Decode
        {
            learn_retention(endpoint, &measured.footing, shape, prompt, cached);
        }
        if let (Some(tokens), PromptUnit::Text, 0, 1) =
            (measured.prompt_tokens, shape.unit, shape.media, shape.prompts)
        {
            self.token_sizes.learn(super::choosing::model_key(shape), shape.prompt_bytes, tokens, now);
        }
    }

    /// A stream's first byte has come, `took_ms` after it was sent, and its charge knows: learns how the endpoint's own
    /// queue moves. That is told at once, and not at the stream's end, because it says who has to wait.
    pub fn first_byte(&self, footing: &Footing, took_ms: f64, now: Moment) {
        if footing.part == Part::Decode {
            return;
        }
        let view = self.view.load();
        let Some(endpoint) = view.get(footing.endpoint) else { return };
        let own_us = footing.uncached_tokens as f32 * endpoint.speed().prefill_us_per_token;
        let own_ms = f64::from(own_us) / 1_000.0;
        let ahead = footing.ahead_tokens;
        let excess_ms = endpoint.queue_pace().learn(took_ms, own_ms, footing.uncached_tokens, ahead, now);
        let ahead_ms = f64::from(ahead as f32 * endpoint.speed().prefill_us_per_token) / 1_000.0;
        let load = endpoint.load(now);
        let now_running = if load.prefill_tokens == 0 { load.running } else { 0 };
        let first_byte = FirstByte { excess_ms, ahead_ms, in_flight: footing.running, now_running };
        endpoint.places().learn(first_byte, now);
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
    /// differences of what each has seen don't make them decide differently. An engine of which little is known
    /// is taken for one like the others of its model.
    pub(super) fn apply_speeds(&self, rows: &[SpeedRow]) {
        let view = self.view();
        let prior = Speed::from(self.active.load().settings.speed);
        let mut by_model: BTreeMap<String, Vec<&Endpoint>> = BTreeMap::new();
        for endpoint in &view.endpoints {
            let model = match &*endpoint.served() {
                Served::Models(models) => models.first().cloned().unwrap_or_default(),
                Served::Any | Served::Unknown => String::new(),
            };
            by_model.entry(model).or_default().push(endpoint);
        }
        let mut by_endpoint: BTreeMap<EndpointId, Vec<SpeedRow>> = BTreeMap::new();
        for row in rows {
            by_endpoint.entry(row.endpoint).or_default().push(*row);
        }
        for alike in by_model.values() {
            let figures = |figure: fn(&SpeedRow) -> (f32, u16), prior: f32| {
                let known: Vec<Option<Known>> = alike
                    .iter()
                    .map(|endpoint| {
                        let rows = by_endpoint.get(&endpoint.id).map_or(&[][..], Vec::as_slice);
                        combine(rows.iter().map(figure), prior)
                    })
                    .collect();
                believed(&known).unwrap_or_else(|| vec![prior; alike.len()])
            };
            let prefill =
                figures(|row| (row.prefill_us_per_token, row.prefill_samples), prior.prefill_us_per_token);
            let itl = figures(|row| (row.itl_us, row.itl_samples), prior.itl_us);
            for ((endpoint, prefill_us_per_token), itl_us) in alike.iter().zip(prefill).zip(itl) {
                endpoint.set_speed(Speed { prefill_us_per_token, itl_us, ..prior });
            }
        }
    }
}

/// Blocks by which a report may fall short of what was noted before that counts as evicted: engines cache
/// whole pages of their own size, and never the last token.
const SHORT_BLOCKS_MAX: f64 = 1.5;

/// Learns from what of the prompt the engine had: was the deepest block that was noted there still there?
fn learn_retention(endpoint: &Endpoint, footing: &Footing, shape: &RequestShape, prompt: u32, cached: u32) {
    if footing.known_blocks == 0 || shape.prompt_bytes == 0 || shape.prompts != 1 {
        return;
    }
    let bytes_per_token = shape.prompt_bytes as f64 / f64::from(prompt.max(1));
    let cached_blocks = f64::from(cached) * bytes_per_token / f64::from(shape.block_bytes);
    if cached_blocks + SHORT_BLOCKS_MAX >= f64::from(footing.known_blocks) {
        endpoint.retention().found(footing.inserted_since);
    } else {
        endpoint.retention().missed(footing.inserted_since, u64::from(footing.ahead_tokens));
    }
}
