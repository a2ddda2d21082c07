//! Chats in closed loop over engines that queue and cache: what a router is worth shows in how soon the first token
//! comes.
//!
//! Engines have FIFO prefill and an LRU cache of blocks. Clients in closed loop hold chats that belong to tenants; the
//! system prompts of all tenants share some bytes and each tenant's own part has more. Time to first token is the queue
//! plus 83 us for each token of the prompt that is not cached (`8b-h100` at three times its speed, without its fixed
//! part): with the defaults about 190 ms for a prompt that is cached nowhere and 10 ms for a warm turn. A cache holds
//! two fifths of the tenants' prompts and the chats under way: enough for a router that keeps tenants together, too
//! little for one that does not.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use engine::{Config, Profile};
use grapevine::load::{self, ChatShape, Limits, Live, Order, Pace, Plan, Source, Target, Targets};
use serde::Serialize;

use crate::fleet::Fleet;

/// Bytes of text that the simulated engines take for a token.
const BYTES_PER_TOKEN: f64 = 4.0;

/// Chats in a short run.
const SHORT_CHATS: u64 = 32;

/// After this time no more requests are sent.
const RUN_MAX: Duration = Duration::from_secs(300);

/// The engines, and the chats that are held over them.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Shape {
    /// Clients in closed loop
    #[arg(long, default_value_t = 16)]
    pub clients: usize,
    /// Chats in each run
    #[arg(long, default_value_t = 240)]
    pub chats: u64,
    /// Turns of each chat
    #[arg(long, default_value_t = 4)]
    pub turns: u32,
    /// Tenants
    #[arg(long, default_value_t = 12)]
    pub tenants: u64,
    /// Bytes of system prompt that all tenants share
    #[arg(long, default_value_t = 2_000)]
    pub common_bytes: usize,
    /// Bytes of system prompt of each tenant's own
    #[arg(long, default_value_t = 6_000)]
    pub tenant_bytes: usize,
    /// Bytes of a chat's first message
    #[arg(long, default_value_t = 1_000)]
    pub first_bytes: usize,
    /// Bytes of each later message
    #[arg(long, default_value_t = 400)]
    pub turn_bytes: usize,
    /// Tokens of each answer
    #[arg(long, default_value_t = 16)]
    pub output_tokens: u32,
    /// Time between an answer and the client's next turn, in ms
    #[arg(long, default_value_t = 30)]
    pub think_ms: u64,
    /// Fixed part of a prefill before it is divided by the engine's speed, in ms
    #[arg(long, default_value_t = 0.0)]
    pub prefill_base_ms: f64,
    /// How many times faster than `8b-h100` each engine is; one engine for each number
    #[arg(long, value_delimiter = ',', default_value = "3,3,3,3")]
    pub speeds: Vec<f64>,
    /// An engine's cache as a share of what all tenants' prompts and all chats under way fill
    #[arg(long, default_value_t = 0.4)]
    pub cache_share: f64,
}

/// How one run went.
#[derive(Serialize)]
pub struct Ran {
    /// Requests that each engine got.
    pub requests_per_engine: Vec<u64>,
    /// The busiest engine's over their mean.
    pub busiest_over_mean: f64,
    /// What the clients saw.
    pub report: load::Report,
}

impl Shape {
    /// So few chats that a run only shows that everything works.
    pub fn shorten(&mut self) {
        self.chats = self.chats.min(SHORT_CHATS);
    }

    /// The engines' configurations.
    ///
    /// # Errors
    /// When there is no engine.
    pub fn engines(&self) -> anyhow::Result<Vec<Config>> {
        ensure!(!self.speeds.is_empty(), "--speeds names no engine");
        let tokens = |bytes: f64| bytes / BYTES_PER_TOKEN;
        let prompts = self.common_bytes as f64 + self.tenants as f64 * self.tenant_bytes as f64;
        let turns = f64::from(self.turns);
        let chat = tokens(self.first_bytes as f64 + (turns - 1.0) * self.turn_bytes as f64)
            + turns * f64::from(self.output_tokens);
        let working_set_tokens = tokens(prompts) + self.clients as f64 * chat;
        let config = |speed: &f64| {
            let mut config = Config::fifo(Profile::Llama8bH100, *speed);
            config.timing.prefill_base = Duration::from_secs_f64(self.prefill_base_ms / 1_000.0 / speed);
            let block_tokens = f64::from(config.limits.block_tokens);
            config.limits.kv_blocks = (self.cache_share * working_set_tokens / block_tokens).ceil() as u32;
            config
        };
        Ok(self.speeds.iter().map(config).collect())
    }

    /// Holds the chats through `targets`, which lead to `fleet`.
    ///
    /// # Errors
    /// When the run can't be set up, or no engine got a request.
    pub fn run(&self, seed: u64, targets: &[SocketAddr], fleet: &Fleet) -> anyhow::Result<Ran> {
        let report = self.drive(seed, targets)?;
        let requests_per_engine = fleet.chats();
        let (busiest, total) =
            (requests_per_engine.iter().max().copied().unwrap_or(0), requests_per_engine.iter().sum::<u64>());
        ensure!(total > 0, "no engine got a request");
        let busiest_over_mean = busiest as f64 * requests_per_engine.len() as f64 / total as f64;
        Ok(Ran { requests_per_engine, busiest_over_mean, report })
    }

    fn drive(&self, seed: u64, targets: &[SocketAddr]) -> anyhow::Result<load::Report> {
        let shape = ChatShape {
            sessions: Some(self.chats),
            turns: self.turns,
            tenants: self.tenants,
            common_bytes: self.common_bytes,
            tenant_bytes: self.tenant_bytes,
            first_bytes: self.first_bytes,
            turn_bytes: self.turn_bytes,
            max_tokens: self.output_tokens,
            think: Duration::from_millis(self.think_ms),
        };
        let path = load::Api::Chat.default_path();
        let targets: anyhow::Result<Vec<Target>> =
            targets.iter().map(|address| Target::new(&format!("http://{address}"), path)).collect();
        let pace = Pace::Closed { clients: self.clients, order: Order::Chats };
        let mut plan = Plan::new(Targets::new(targets?)?, Source::Chat(Arc::new(shape)), pace);
        plan.envelope.model = Some("sim".to_owned());
        plan.envelope.ignore_eos = true;
        plan.seed = seed;
        plan.limits = Limits { run_max: Some(RUN_MAX), ..Limits::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(load::drive(plan, Live::new(), std::future::pending())))
    }
}

impl Ran {
    /// Requests that failed or were given up.
    pub fn failed(&self) -> u64 {
        self.report.failed() + self.report.abandoned
    }

    /// Mean time to first token, in ms; NaN without any.
    pub fn mean_ms(&self) -> f64 {
        self.report.ttft_ms.mean.unwrap_or(f64::NAN)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} engines (speed {:?}), {} clients, {} chats of {} turns, {} tenants with {} common and {} own bytes, cache {} of the working set",
            self.speeds.len(),
            self.speeds,
            self.clients,
            self.chats,
            self.turns,
            self.tenants,
            self.common_bytes,
            self.tenant_bytes,
            self.cache_share,
        )
    }
}
