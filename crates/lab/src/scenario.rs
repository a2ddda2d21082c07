//! What is played: who decides, over which engines, for which requests.

use std::time::Duration;

use engine_model::scheduler::{Limits, SchedulerKind};
use engine_model::timing::{Crowding, Profile, Timing};
use routing::settings::{Fault, Settings};

use crate::gossip::Gossip;
use crate::workload::Workload;

/// Engines and replicas that one run may have: what the core and a machine's memory are made for.
const ENGINES_MAX: usize = 10_000;
const REPLICAS_MAX: usize = 128;

/// Tokens in a KV block, as vLLM has it.
const BLOCK_TOKENS: u32 = 16;

/// Who decides.
#[derive(Clone, Debug)]
pub enum Decider {
    /// Replicas that run the product's core. Requests come to them in turn.
    Replicas {
        /// How many.
        count: usize,
        /// How they decide.
        settings: Box<Settings>,
    },
    /// One balancer that knows how many requests every engine has and nothing else; ties go in turn.
    LeastConnections,
    /// One router that knows every queue and every cache, and sends each request where its first token is soonest.
    AllKnowing,
}

/// How an engine works.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineSpec {
    /// How it orders its work.
    pub scheduler: SchedulerKind,
    /// How long work takes.
    pub timing: Timing,
    /// Its sizes.
    pub limits: Limits,
}

impl EngineSpec {
    /// Continuous batching in steps with a profile's speeds and sizes, as `grapevine engine` has it.
    pub fn step(profile: Profile) -> Self {
        Self {
            scheduler: SchedulerKind::Step,
            timing: profile.timing(),
            limits: Limits {
                block_tokens: BLOCK_TOKENS,
                kv_blocks: profile.kv_blocks(),
                step_tokens_max: 2_048,
                running_max: 256,
                waiting_max: None,
            },
        }
    }

    /// The fluid model: prompts one after the other at a rate, no time for anything else, and a cache of `kv_blocks`
    /// blocks. A request's time to first token is its queue and its own uncached tokens.
    pub fn fluid(prefill_tokens_per_second: f64, kv_blocks: u32) -> Self {
        Self {
            scheduler: SchedulerKind::Fifo,
            timing: Timing {
                prefill_base: Duration::ZERO,
                prefill_per_token: Duration::from_secs_f64(1.0 / prefill_tokens_per_second),
                inter_token: Duration::ZERO,
                crowding: Crowding::DoubleAt(1),
                beside_prefill: 1.0,
            },
            limits: Limits {
                block_tokens: BLOCK_TOKENS,
                kv_blocks,
                step_tokens_max: 1,
                running_max: 1,
                waiting_max: None,
            },
        }
    }
}

/// One run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Who decides.
    pub decider: Decider,
    /// The engines.
    pub engines: Vec<EngineSpec>,
    /// What is asked.
    pub workload: Workload,
    /// How replicas hear of each other.
    pub gossip: Gossip,
    /// Whether replies say how long the prompt was and what of it was cached.
    pub usage: bool,
    /// Settles everything that is left to chance.
    pub seed: u64,
}

impl Scenario {
    /// All that keeps it from being played; empty if nothing does.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        let mut range = |key: &str, value: f64, min: f64, max: f64| {
            if !(min..=max).contains(&value) {
                faults.push(Fault::new(key, value, format!("{min} to {max}")));
            }
        };
        range("engines", self.engines.len() as f64, 1.0, ENGINES_MAX as f64);
        range("gossip.loss", self.gossip.loss, 0.0, 0.99);
        range("gossip.pulse_every_ms", self.gossip.pulse_every.as_secs_f64() * 1e3, 1.0, 6e5);
        if let Decider::Replicas { count, .. } = &self.decider {
            range("replicas", *count as f64, 1.0, REPLICAS_MAX as f64);
        }
        match &self.workload {
            Workload::Trace(trace) => range("requests", trace.counted().len() as f64, 1.0, 1e7),
            Workload::Chats(shape) => {
                for (key, value) in [
                    ("tenants", shape.tenants),
                    ("turns", shape.turns),
                    ("output_tokens", shape.output_tokens as usize),
                    ("clients", shape.clients),
                    ("chats", shape.chats),
                ] {
                    range(&format!("chats.{key}"), value as f64, 1.0, 1e7);
                }
            }
        }
        let block_tokens = |spec: &EngineSpec| spec.limits.block_tokens;
        if let Some(odd) =
            self.engines.iter().find(|spec| block_tokens(spec) != block_tokens(&self.engines[0]))
        {
            faults.push(Fault::new("engines", block_tokens(odd), "KV blocks of one size"));
        }
        if let Some(cut) = self.gossip.cuts.iter().find(|cut| cut.from >= cut.until) {
            faults.push(Fault::new("gossip.cut", format!("{cut:?}"), "a begin before its end"));
        }
        if let Decider::Replicas { settings, .. } = &self.decider {
            faults.extend(settings.faults());
        }
        faults
    }
}
