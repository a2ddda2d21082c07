//! Prompts that are computed in one engine and decoded in another.
//!
//! Two exchanges are spoken. *NIXL*, as recorded from vLLM: the prefill engine answers with the numbers of the
//! blocks it keeps ([`params`]); the decode engine reads them ([`courier`]) from the prefill engine's side channel
//! ([`side`]) and then says so, and the prefill engine frees them. *Bootstrap*, after SGLang's source (`io_struct.py`
//! at commit 001067fffe33427bee0ed2f007fb7551a1d76b44, `disaggregation/prefill.py` at
//! 000c2b942308ea5502978be73542016c230dba02; not seen with a real engine): both legs come at once and meet in a room
//! ([`rooms`]), the prefill begins when the decode side has joined, and is answered when its KV has arrived.
//!
//! Blocks are read as memory is, by number: what comes is what is in them, right or wrong. That a transfer takes
//! time is simulated; that it goes over a socket, fails with it and frees what it held is not.

mod counts;
pub(crate) mod courier;
pub(crate) mod frames;
pub(crate) mod params;
pub(crate) mod pinned;
pub(crate) mod rooms;
pub(crate) mod side;

pub(crate) use counts::KvCounts;

use std::time::Duration;

use crate::timing::Profile;

/// What an engine is for. Requests without a connector's fields are served by all, but by the two sides of
/// [`Connector::Bootstrap`], which refuse them as SGLang does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Role {
    /// Any leg.
    #[default]
    Both,
    /// The first leg; the second is refused with 400.
    Prefill,
    /// The second leg; the first is refused with 400.
    Decode,
}

/// How legs of a request are told apart, and KV moves between them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Connector {
    /// Not at all: the fields of the others are ignored.
    #[default]
    None,
    /// `kv_transfer_params`, one leg after the other.
    Nixl,
    /// `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, both legs at once.
    Bootstrap,
}

/// What is done with `kv_transfer_params` that ask for a remote prefill and do not say where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BadParams {
    /// The engine's core dies of them, as a real one's was seen to.
    #[default]
    Fatal,
    /// They are refused with 400.
    Refused,
}

/// What an engine does for prompts that are computed elsewhere, or for elsewhere.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Transfer {
    /// What it is for.
    pub role: Role,
    /// How it talks about it.
    pub connector: Connector,
    /// Port of its side channel (NIXL) or bootstrap server, on the address it serves on; 0 picks a free one.
    pub port: u16,
    /// Fixed part of a transfer.
    pub base: Duration,
    /// Transfer of one token's KV.
    pub per_token: Duration,
    /// KV of one token, in bytes; only counted.
    pub token_bytes: u32,
    /// How long blocks are kept for a decode engine that does not come.
    pub pin_max: Duration,
    /// How long a decode engine tries to reach a prefill engine, twice as long for a stream.
    pub handshake_max: Duration,
    /// How long one side of a room waits for the other.
    pub join_max: Duration,
    /// What incomplete parameters do.
    pub bad_params: BadParams,
}

impl Transfer {
    /// No connector; the speeds of a profile. `8b-h100` moves 128 KiB a token over 25 GB/s (one 200 Gb/s port),
    /// `70b-h100` 320 KiB, `l40s` 128 KiB over half of that; 5 ms for what goes back and forth first (11 ms were
    /// recorded for 300 tokens on one CPU). `instant` takes no time. Blocks are kept for 480 s, the default of
    /// `VLLM_NIXL_ABORT_REQUEST_TIMEOUT` in vLLM before 0.32, where it is 30 s, renewed by the decode engine for as
    /// long as it has the request; the handshake fails after the 5 s that were recorded; rooms wait 300 s,
    /// the default of `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`.
    pub fn profile(profile: Profile) -> Self {
        let (base_ms, per_token_us, token_kib) = match profile {
            Profile::Llama8bH100 => (5, 5, 128),
            Profile::Llama70bH100 => (5, 13, 320),
            Profile::Llama8bL40s => (5, 10, 128),
            Profile::Instant => (0, 0, 128),
        };
        Self {
            role: Role::Both,
            connector: Connector::None,
            port: 0,
            base: Duration::from_millis(base_ms),
            per_token: Duration::from_micros(per_token_us),
            token_bytes: token_kib << 10,
            pin_max: Duration::from_secs(480),
            handshake_max: Duration::from_secs(5),
            join_max: Duration::from_secs(300),
            bad_params: BadParams::Fatal,
        }
    }

    /// The same, everything `speed` times faster.
    #[must_use]
    pub fn sped_up(self, speed: f64) -> Self {
        Self {
            base: self.base.div_f64(speed),
            per_token: self.per_token.div_f64(speed),
            pin_max: self.pin_max.div_f64(speed),
            handshake_max: self.handshake_max.div_f64(speed),
            join_max: self.join_max.div_f64(speed),
            ..self
        }
    }

    /// How long the KV of so many tokens is under way.
    pub fn time(&self, tokens: u32) -> Duration {
        self.base + self.per_token * tokens
    }
}
