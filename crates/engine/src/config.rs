//! What an engine is told: the command line, and the checked form the server runs on.

use std::net::SocketAddr;
use std::time::Duration;

use crate::scheduler::{Limits, SchedulerKind};
use crate::timing::{Crowding, Profile, Timing};
use crate::transfer::{BadParams, Connector, Role, Transfer};

/// The flags of `grapevine engine`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Address to serve on; port 0 picks a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Name of the served model
    #[arg(long, default_value = "sim")]
    pub model: String,
    /// Hardware and model to behave like
    #[arg(long, value_enum, default_value_t)]
    pub profile: Profile,
    /// How work is ordered
    #[arg(long, value_enum, default_value_t)]
    pub scheduler: SchedulerKind,
    /// Divide all times by this
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    pub speed: f64,
    /// Fixed part of a prompt's prefill, in ms [default: the profile's]
    #[arg(long, value_name = "MS")]
    pub prefill_base_ms: Option<f64>,
    /// Prefill of one uncached token, in microseconds [default: the profile's]
    #[arg(long, value_name = "US")]
    pub prefill_token_us: Option<f64>,
    /// Time between tokens of a request that decodes alone, in ms [default: the profile's]
    #[arg(long, value_name = "MS")]
    pub inter_token_ms: Option<f64>,
    /// Decoding requests at which the time between tokens has doubled; 1 for never
    #[arg(long, value_name = "N", conflicts_with = "each_adds")]
    pub double_at: Option<u32>,
    /// Every other decoding request adds this share of the time between tokens, instead of --double-at
    #[arg(long, value_name = "RATIO")]
    pub each_adds: Option<f64>,
    /// Time between tokens while a prompt is computed beside them, as a multiple; for --scheduler fifo
    #[arg(long, value_name = "FACTOR")]
    pub beside_prefill: Option<f64>,
    /// Tokens in a KV block
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    pub block_size: u32,
    /// KV blocks [default: the profile's]
    #[arg(long, value_name = "N")]
    pub num_gpu_blocks: Option<u32>,
    /// Tokens computed in one step
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    pub max_num_batched_tokens: u32,
    /// Requests running at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_num_seqs: u32,
    /// Refuse with 503 when this many requests wait [default: never]
    #[arg(long, value_name = "N")]
    pub max_num_queued_reqs: Option<u32>,
    /// Longest prompt and answer together
    #[arg(long, value_name = "TOKENS", default_value_t = 131_072)]
    pub max_model_len: u32,
    /// Answers end by themselves after this many tokens [default: 16, or at the request's limit]
    #[arg(long, value_name = "N")]
    pub output_tokens: Option<u32>,
    /// Data-parallel ranks behind this address, each with its own scheduler and cache
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub data_parallel_size: u32,
    /// Which legs of a request that is split over two engines to take
    #[arg(long, value_enum, default_value_t)]
    pub role: Role,
    /// How such legs come [default: nixl with a role, else none]
    #[arg(long, value_enum)]
    pub kv_connector: Option<Connector>,
    /// Port of the NIXL side channel or the bootstrap server; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub kv_port: u16,
    /// Fixed part of a KV transfer, in ms [default: the profile's]
    #[arg(long, value_name = "MS")]
    pub kv_base_ms: Option<f64>,
    /// KV transfer of one token, in microseconds [default: the profile's]
    #[arg(long, value_name = "US")]
    pub kv_token_us: Option<f64>,
    /// How long the KV of a prefill is kept for a decode engine that does not come, in s
    #[arg(long, value_name = "S", default_value_t = 480.0)]
    pub kv_pin_s: f64,
    /// How long an unreachable prefill engine is tried, in s; twice as long for a stream
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub kv_handshake_s: f64,
    /// How long one side of a bootstrap room waits for the other, in s
    #[arg(long, value_name = "S", default_value_t = 300.0)]
    pub kv_join_s: f64,
    /// Refuse incomplete `kv_transfer_params` instead of dying of them
    #[arg(long)]
    pub refuse_bad_kv_params: bool,
    /// Go on answering with errors when the engine's core has died
    #[arg(long)]
    pub keep_alive_on_core_death: bool,
    /// Ask for this bearer token under /v1
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Leave `cached_tokens` out of usage
    #[arg(long)]
    pub no_cached_tokens: bool,
    /// Serve no /metrics
    #[arg(long)]
    pub no_metrics: bool,
    /// Let POST /fault break things, and echo requests under /echo
    #[arg(long)]
    pub faults: bool,
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address to serve on; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Name of the served model.
    pub model: String,
    /// How work is ordered.
    pub scheduler: SchedulerKind,
    /// How long work takes.
    pub timing: Timing,
    /// The bounds of each rank's scheduler.
    pub limits: Limits,
    /// Most tokens of prompt and answer together.
    pub model_tokens_max: u32,
    /// Where answers end by themselves.
    pub natural_tokens: Option<u32>,
    /// Ranks, at least 1.
    pub ranks: u32,
    /// What it does for prompts that are computed and decoded in different engines.
    pub transfer: Transfer,
    /// Whether it goes on answering, with errors, when its core has died; else it ends.
    pub keep_alive_on_core_death: bool,
    /// The bearer token asked for under `/v1`.
    pub api_key: Option<String>,
    /// Whether usage names cached tokens.
    pub cached_tokens: bool,
    /// Whether `/metrics` exists.
    pub metrics: bool,
    /// Whether `/fault` and `/echo` exist.
    pub faults: bool,
    /// How many of the last requests are kept for inspection by tests; 0 keeps none.
    pub recorded_max: usize,
}

/// All faults of a configuration together.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct ConfigError(pub Vec<String>);

/// More ranks than any machine has; a typing error beyond that.
const RANKS_MAX: u32 = 64;
/// Above this a time rounds to nothing and the flag no longer means what it says.
const SPEED_MAX: f64 = 10_000.0;
/// An hour per step or token is a typing error.
const TIME_MS_MAX: f64 = 3_600_000.0;
/// A thousandfold slowdown is a typing error.
const FACTOR_MAX: f64 = 1_000.0;
/// Waiting longer than a day is a typing error.
const WAIT_S_MAX: f64 = 86_400.0;
/// A block is a few hundred bytes of memory here; 16 million of them are 400 MB.
const KV_BLOCKS_MAX: u32 = 1 << 24;

impl Config {
    /// An engine of this profile on a free port of the loopback interface, everything else by default.
    pub fn profile(profile: Profile) -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            model: "sim".to_owned(),
            scheduler: SchedulerKind::Step,
            timing: profile.timing(),
            limits: Limits {
                block_tokens: 16,
                kv_blocks: profile.kv_blocks(),
                step_tokens_max: 2048,
                running_max: 256,
                waiting_max: None,
            },
            model_tokens_max: 131_072,
            natural_tokens: None,
            ranks: 1,
            transfer: Transfer::profile(profile),
            keep_alive_on_core_death: false,
            api_key: None,
            cached_tokens: true,
            metrics: true,
            faults: false,
            recorded_max: 0,
        }
    }

    /// The simple engine of the benches: [`SchedulerKind::Fifo`] at this speed-up of a profile.
    pub fn fifo(profile: Profile, speed: f64) -> Self {
        let base = Self::profile(profile);
        Self {
            scheduler: SchedulerKind::Fifo,
            timing: base.timing.sped_up(speed),
            transfer: base.transfer.sped_up(speed),
            ..base
        }
    }

    /// The same engine as one side of a connector.
    #[must_use]
    pub fn with_role(self, role: Role, connector: Connector) -> Self {
        Self { transfer: Transfer { role, connector, ..self.transfer }, ..self }
    }
}

impl Options {
    /// The checked configuration.
    ///
    /// # Errors
    /// Every flag whose value is out of range, with what is allowed.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let mut faults = Vec::new();
        let mut check = |fine: bool, flag: &str, value: &dyn std::fmt::Display, allowed: &str| {
            if !fine {
                faults.push(format!("--{flag} {value}: allowed is {allowed}"));
            }
        };
        let speed_fine = self.speed > 0.0 && self.speed <= SPEED_MAX;
        check(speed_fine, "speed", &self.speed, "above 0 and at most 10000");
        for (flag, time_ms) in [
            ("prefill-base-ms", self.prefill_base_ms),
            ("prefill-token-us", self.prefill_token_us.map(|us| us / 1e3)),
            ("inter-token-ms", self.inter_token_ms),
            ("kv-base-ms", self.kv_base_ms),
            ("kv-token-us", self.kv_token_us.map(|us| us / 1e3)),
        ] {
            let time_ms = time_ms.unwrap_or(0.0);
            check((0.0..=TIME_MS_MAX).contains(&time_ms), flag, &time_ms, "0 to one hour");
        }
        let blocks = self.num_gpu_blocks.unwrap_or_else(|| self.profile.kv_blocks());
        for (flag, value, max) in [
            ("block-size", self.block_size, 1024),
            ("num-gpu-blocks", blocks, KV_BLOCKS_MAX),
            ("max-num-batched-tokens", self.max_num_batched_tokens, 1 << 20),
            ("max-num-seqs", self.max_num_seqs, 1 << 16),
            ("max-model-len", self.max_model_len, 1 << 24),
            ("data-parallel-size", self.data_parallel_size, RANKS_MAX),
            ("double-at", self.double_at.unwrap_or(1), 1 << 16),
            ("output-tokens", self.output_tokens.unwrap_or(1), 1 << 20),
        ] {
            check((1..=max).contains(&value), flag, &value, &format!("1 to {max}"));
        }
        let each_adds = self.each_adds.unwrap_or(0.0);
        check((0.0..=FACTOR_MAX).contains(&each_adds), "each-adds", &each_adds, "0 to 1000");
        let beside = self.beside_prefill.unwrap_or(1.0);
        check((1.0..=FACTOR_MAX).contains(&beside), "beside-prefill", &beside, "1 to 1000");
        let slows = self.beside_prefill.is_none() || self.scheduler == SchedulerKind::Fifo;
        check(slows, "beside-prefill", &beside, "only with --scheduler fifo");
        for (flag, time_s) in [
            ("kv-pin-s", self.kv_pin_s),
            ("kv-handshake-s", self.kv_handshake_s),
            ("kv-join-s", self.kv_join_s),
        ] {
            let fine = time_s > 0.0 && time_s <= WAIT_S_MAX;
            check(fine, flag, &time_s, "above 0 and at most one day");
        }
        let paired = match self.connector() {
            Connector::None => self.role == Role::Both,
            Connector::Nixl => true,
            Connector::Bootstrap => self.role != Role::Both,
        };
        let allowed = "none with --role both, nixl with any, bootstrap with --role prefill or decode";
        let connector = clap::ValueEnum::to_possible_value(&self.connector());
        check(paired, "kv-connector", &connector.as_ref().map_or("", |value| value.get_name()), allowed);
        check(!self.model.is_empty(), "model", &"(empty)", "any name of at least one character");
        if !faults.is_empty() {
            return Err(ConfigError(faults));
        }
        Ok(Config {
            listen: self.listen,
            model: self.model.clone(),
            scheduler: self.scheduler,
            timing: self.timing(),
            limits: Limits {
                block_tokens: self.block_size,
                kv_blocks: blocks,
                step_tokens_max: self.max_num_batched_tokens,
                running_max: self.max_num_seqs,
                waiting_max: self.max_num_queued_reqs,
            },
            model_tokens_max: self.max_model_len,
            natural_tokens: self.output_tokens,
            ranks: self.data_parallel_size,
            transfer: self.transfer(),
            keep_alive_on_core_death: self.keep_alive_on_core_death,
            api_key: self.api_key.clone(),
            cached_tokens: !self.no_cached_tokens,
            metrics: !self.no_metrics,
            faults: self.faults,
            recorded_max: 0,
        })
    }

    fn connector(&self) -> Connector {
        let usual = if self.role == Role::Both { Connector::None } else { Connector::Nixl };
        self.kv_connector.unwrap_or(usual)
    }

    fn transfer(&self) -> Transfer {
        let profile = Transfer::profile(self.profile);
        let time = |ms: Option<f64>, default| ms.map_or(default, |ms| Duration::from_secs_f64(ms / 1e3));
        Transfer {
            role: self.role,
            connector: self.connector(),
            port: self.kv_port,
            base: time(self.kv_base_ms, profile.base),
            per_token: time(self.kv_token_us.map(|us| us / 1e3), profile.per_token),
            pin_max: Duration::from_secs_f64(self.kv_pin_s),
            handshake_max: Duration::from_secs_f64(self.kv_handshake_s),
            join_max: Duration::from_secs_f64(self.kv_join_s),
            bad_params: if self.refuse_bad_kv_params { BadParams::Refused } else { BadParams::Fatal },
            ..profile
        }
        .sped_up(self.speed)
    }

    fn timing(&self) -> Timing {
        let profile = self.profile.timing();
        let time = |ms: Option<f64>, default| ms.map_or(default, |ms| Duration::from_secs_f64(ms / 1e3));
        Timing {
            prefill_base: time(self.prefill_base_ms, profile.prefill_base),
            prefill_per_token: time(self.prefill_token_us.map(|us| us / 1e3), profile.prefill_per_token),
            inter_token: time(self.inter_token_ms, profile.inter_token),
            crowding: match (self.double_at, self.each_adds) {
                (Some(at), _) => Crowding::DoubleAt(at),
                (None, Some(share)) => Crowding::Each(share),
                (None, None) => profile.crowding,
            },
            beside_prefill: self.beside_prefill.unwrap_or(profile.beside_prefill),
        }
        .sped_up(self.speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn options(line: &str) -> Options {
        Line::try_parse_from(std::iter::once("engine").chain(line.split_whitespace()))
            .expect("parses")
            .options
    }

    #[test]
    fn flags_override_the_profile_and_speed_divides_the_result() {
        let config = options("--profile l40s --prefill-base-ms 10 --speed 2").config().expect("valid");
        assert_eq!(config.timing.prefill_base, Duration::from_millis(5));
        assert_eq!(config.timing.prefill_per_token, Duration::from_micros(340));
        assert_eq!(config.limits.kv_blocks, Profile::Llama8bL40s.kv_blocks());
    }

    #[test]
    fn every_fault_is_named_with_what_is_allowed() {
        let fault = options("--speed 0 --block-size 0 --max-num-seqs 0").config().expect_err("three faults");
        let message = fault.to_string();
        for part in ["--speed 0", "--block-size 0: allowed is 1 to 1024", "--max-num-seqs 0"] {
            assert!(message.contains(part), "{part:?} in {message:?}");
        }
    }

    #[test]
    fn a_role_means_nixl_unless_said_otherwise() {
        for (line, role, connector) in [
            ("", Role::Both, Connector::None),
            ("--role prefill", Role::Prefill, Connector::Nixl),
            ("--role decode --kv-connector bootstrap", Role::Decode, Connector::Bootstrap),
            ("--kv-connector nixl", Role::Both, Connector::Nixl),
        ] {
            let transfer = options(line).config().expect("valid").transfer;
            assert_eq!((transfer.role, transfer.connector), (role, connector), "{line}");
        }
        for line in ["--role prefill --kv-connector none", "--kv-connector bootstrap"] {
            let fault = options(line).config().expect_err("no such pair").to_string();
            assert!(fault.contains("--kv-connector"), "{fault}");
        }
    }

    #[test]
    fn speed_divides_the_times_of_transfers_and_pins() {
        let transfer = options("--role prefill --kv-base-ms 8 --kv-token-us 4 --kv-pin-s 30 --speed 2")
            .config()
            .expect("valid")
            .transfer;
        assert_eq!(transfer.time(1_000), Duration::from_millis(6));
        assert_eq!(transfer.pin_max, Duration::from_secs(15));
    }

    #[test]
    fn engines_that_slow_themselves_down_are_described_by_two_flags() {
        let timing =
            options("--scheduler fifo --each-adds 0.15 --beside-prefill 4").config().expect("valid").timing;
        assert_eq!((timing.crowding, timing.beside_prefill), (Crowding::Each(0.15), 4.0));
        for line in ["--beside-prefill 4", "--scheduler fifo --beside-prefill 0.5", "--each-adds=-1"] {
            assert!(options(line).config().is_err(), "{line}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_profile() {
        let (from_flags, direct) =
            (options("--profile l40s").config().expect("valid"), Config::profile(Profile::Llama8bL40s));
        assert_eq!((from_flags.timing, from_flags.limits), (direct.timing, direct.limits));
        assert_eq!(from_flags.transfer, direct.transfer);
    }
}
