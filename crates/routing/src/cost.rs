//! What a request is expected to cost at each endpoint, in milliseconds.
//!
//! `cost(e) = wait(e) + uncached(e) x prefill + decode(e) + kv_pressure(e)`, each term with a configured
//! weight. No term switches another off: a warm endpoint with a queue loses to an idle one exactly when
//! waiting there takes longer than computing the prompt anew.

use smallvec::SmallVec;

use crate::candidates::Candidates;
use crate::endpoint::Load;
use crate::policy::CostSettings;
use crate::rates::Speed;
use crate::request::RequestShape;

/// Requests that decode together before each of them takes twice as long per token as one alone.
pub(crate) const DECODE_BATCH_DOUBLES: f64 = 32.0;

/// The KV usage, 0 to 1, from which on it costs: below it engines have room to batch. What is cached and not in
/// use does not count as usage, and a busy engine is well used: only near the end must it preempt.
const KV_PRESSURE_FROM: f64 = 0.9;

/// What a request is expected to cost at one candidate, in ms but for the tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Until the prompts before it are done.
    pub wait_ms: f64,
    /// To compute what is not warm.
    pub prefill_ms: f64,
    /// The part of `prefill_ms` that is not held against the candidate: blocks common to so many prompts
    /// that every endpoint should have them, and does once one prompt was served there.
    pub forgiven_ms: f64,
    /// How much longer its output takes than at the fastest idle candidate, and what its presence costs
    /// those that decode there.
    pub decode_ms: f64,
    /// For a KV cache that is nearly full.
    pub kv_ms: f64,
    /// Tokens of the prompt believed warm.
    pub warm_tokens: u32,
    /// Tokens of the prompt to be computed; at least one of any prompt.
    pub uncached_tokens: u32,
    /// Leading blocks that count as warm: those believed so, and the common ones.
    pub depth: u32,
    /// All of it, weighed: what choices compare.
    pub total_ms: f64,
}

/// The costs of one request at all its candidates, in their order.
pub type Costs = SmallVec<[Cost; 8]>;

/// Weighs every candidate for a prompt of `prompt_tokens`. `common_blocks` leading blocks are held against nobody.
pub fn weigh(
    candidates: &Candidates<'_>,
    request: &RequestShape,
    prompt_tokens: u32,
    common_blocks: u32,
    prior: &Speed,
    settings: &CostSettings,
) -> Costs {
    let itl_best_us =
        candidates.kept().map(|each| f64::from(each.load.speed.itl_us)).fold(f64::INFINITY, f64::min);
    let common_tokens = tokens_of(request, prompt_tokens, common_blocks);
    // Many hold as much as others.
    let mut alike = (0, 0);
    candidates
        .all()
        .iter()
        .map(|candidate| {
            let load = &candidate.load;
            let wait_ms = wait_ms(load, settings);
            if alike.0 != candidate.warm_blocks {
                alike = (candidate.warm_blocks, tokens_of(request, prompt_tokens, candidate.warm_blocks));
            }
            let warm_tokens = alike.1;
            let depth = candidate.warm_blocks.max(common_blocks);
            let forgiven_tokens = common_tokens.saturating_sub(warm_tokens);
            let uncached_tokens = prompt_tokens - warm_tokens;
            let warm_ms_per_token = f64::from(load.speed.warm_us_per_token(prior)) / 1_000.0;
            let prefill_ms = f64::from(uncached_tokens) * warm_ms_per_token;
            let forgiven_ms = f64::from(forgiven_tokens) * warm_ms_per_token;
            let decode_ms =
                decode_ms(request, load.running, load.decode_tokens, load.speed.itl_us, itl_best_us);
            let kv_ms = kv_ms(load, settings);
            let total_ms = settings.wait_weight * wait_ms
                + settings.prefill_weight * (prefill_ms - forgiven_ms)
                + settings.decode_weight * decode_ms
                + kv_ms;
            Cost {
                wait_ms,
                prefill_ms,
                forgiven_ms,
                decode_ms,
                kv_ms,
                warm_tokens,
                uncached_tokens,
                depth,
                total_ms,
            }
        })
        .collect()
}

/// What `weigh` comes to for one that holds nothing, but for what is the same at all.
pub(crate) fn cold_ms(
    load: &Load,
    request: &RequestShape,
    prompt_tokens: u32,
    prior: &Speed,
    settings: &CostSettings,
) -> f64 {
    let prefill_ms = f64::from(prompt_tokens) * f64::from(load.speed.warm_us_per_token(prior)) / 1_000.0;
    let decode_ms = decode_ms(request, load.running, load.decode_tokens, load.speed.itl_us, 0.0);
    settings.wait_weight * wait_ms(load, settings)
        + settings.prefill_weight * prefill_ms
        + settings.decode_weight * decode_ms
        + kv_ms(load, settings)
}

/// Until the prompts before it are done.
fn wait_ms(load: &Load, settings: &CostSettings) -> f64 {
    let queued_ms_per_token = f64::from(load.speed.prefill_us_per_token) / 1_000.0;
    let unexplained = load.glance.waiting_unexplained * settings.waiting_request_tokens;
    let charged_ms = load.prefill_tokens as f64 * queued_ms_per_token;
    // The engine is at the first of the charged prompts for a while; how large that one is, is not
    // known, so at most half of them count as done.
    let done_ms = load.head_ms.min(charged_ms / 2.0);
    charged_ms - done_ms + unexplained * queued_ms_per_token
}

/// For a KV cache that is nearly full.
fn kv_ms(load: &Load, settings: &CostSettings) -> f64 {
    load.glance.kv_ratio.map_or(0.0, |ratio| {
        let over = ((f64::from(ratio) - KV_PRESSURE_FROM) / (1.0 - KV_PRESSURE_FROM)).max(0.0);
        over * over * settings.kv_pressure_ms * load.glance.weight
    })
}

/// Tokens in the first `blocks` blocks of the prompt. At least one token of a prompt is always computed: no
/// engine answers without.
fn tokens_of(request: &RequestShape, prompt_tokens: u32, blocks: u32) -> u32 {
    if request.prompt_bytes == 0 {
        return 0;
    }
    let bytes = f64::from(blocks) * f64::from(request.block_bytes);
    let share = (bytes / request.prompt_bytes as f64).min(1.0);
    ((f64::from(prompt_tokens) * share) as u32).min(prompt_tokens.saturating_sub(1))
}

/// The output's own delay against the fastest candidate alone, plus the delay of those that decode already:
/// each further request makes a step of the batch longer by a fixed share.
fn decode_ms(request: &RequestShape, running: u32, decode_tokens: u64, itl_us: f32, itl_best_us: f64) -> f64 {
    let output = f64::from(request.output_tokens) * f64::from(request.samples.max(1));
    let itl_us = f64::from(itl_us);
    let step_us = itl_us / DECODE_BATCH_DOUBLES;
    let own_us = output * (itl_us - itl_best_us + step_us * f64::from(running));
    let others_us = decode_tokens as f64 * step_us;
    (own_us + others_us) / 1_000.0
}
