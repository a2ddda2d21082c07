//! Engines that prefill and decode for one another, and what the requests through them came to.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use engine::{Config, Connector, Crowding, Profile, Role};
use serde::Serialize;

use crate::chats::Sample;

/// Two engines of each role that queue, cache and slow each other down.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Engines {
    /// Engines that prefill
    #[arg(long, default_value_t = 2)]
    pub prefills: usize,
    /// Engines that decode
    #[arg(long, default_value_t = 2)]
    pub decodes: usize,
    /// Prefill of a token that is not cached, in us
    #[arg(long, default_value_t = 150.0)]
    pub prefill_us: f64,
    /// Between two tokens of a request that decodes alone, in ms
    #[arg(long, default_value_t = 6.0)]
    pub token_ms: f64,
    /// What every other decoding request adds to both, as a share
    #[arg(long, default_value_t = 0.15)]
    pub each_adds: f64,
    /// How many times longer it is while a prompt is computed beside it
    #[arg(long, default_value_t = 4.0)]
    pub beside_prefill: f64,
    /// Blocks of 16 tokens in each cache
    #[arg(long, default_value_t = 6_000)]
    pub cache_blocks: u32,
}

impl Engines {
    /// How each is started, in the order of their roles; `with_roles` or used whole.
    pub fn configs(&self, with_roles: bool) -> Vec<Config> {
        let mut config = Config::fifo(Profile::Llama8bH100, 1.0);
        config.timing.prefill_base = Duration::ZERO;
        config.timing.prefill_per_token = Duration::from_secs_f64(self.prefill_us / 1e6);
        config.timing.inter_token = Duration::from_secs_f64(self.token_ms / 1e3);
        config.timing.crowding = Crowding::Each(self.each_adds);
        config.timing.beside_prefill = self.beside_prefill;
        config.limits.kv_blocks = self.cache_blocks;
        let of = |at| match (with_roles, at < self.prefills) {
            (false, _) => config.clone(),
            (true, true) => config.clone().with_role(Role::Prefill, Connector::Nixl),
            (true, false) => config.clone().with_role(Role::Decode, Connector::Nixl),
        };
        (0..self.prefills + self.decodes).map(of).collect()
    }

    /// How they are named to Grapevine.
    pub fn endpoints(&self, addresses: &[SocketAddr]) -> Vec<String> {
        let role = |at| if at < self.prefills { "prefill" } else { "decode" };
        addresses.iter().enumerate().map(|(at, address)| format!("{address},role={}", role(at))).collect()
    }
}

/// What the requests of one run came to.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Figures {
    /// Requests, those that failed included.
    pub requests: usize,
    /// To the first token, in ms.
    pub ttft_mean_ms: f64,
    /// Half took at most as long.
    pub ttft_p50_ms: f64,
    /// 99 in 100 took at most as long.
    pub ttft_p99_ms: f64,
    /// Between tokens, in ms, the mean over requests.
    pub tpot_mean_ms: f64,
    /// Quality of experience, 0 to 1.
    pub qoe: f64,
    /// Requests within both of their limits, 0 to 1.
    pub within: f64,
    /// Requests that failed.
    pub failed: usize,
}

impl Figures {
    /// Of these requests.
    pub fn of<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> Self {
        let samples: Vec<&Sample> = samples.into_iter().collect();
        let mut ttft: Vec<f64> = samples.iter().filter_map(|sample| sample.ttft_ms).collect();
        ttft.sort_by(f64::total_cmp);
        let at = |share: f64| ttft.get((ttft.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
        let tpot: Vec<f64> = samples.iter().filter_map(|sample| sample.tpot_ms).collect();
        let count = samples.len() as f64;
        Self {
            requests: samples.len(),
            ttft_mean_ms: mean(&ttft),
            ttft_p50_ms: at(0.5),
            ttft_p99_ms: at(0.99),
            tpot_mean_ms: mean(&tpot),
            qoe: samples.iter().map(|sample| sample.qoe).sum::<f64>() / count,
            within: samples.iter().filter(|sample| sample.within).count() as f64 / count,
            failed: samples.iter().filter(|sample| sample.failure.is_some()).count(),
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
