//! How long things take: profiles of hardware and model, and the formulas over them.

use std::time::Duration;

/// A moment of the engine's own time line, in nanoseconds since it started.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// The moment `after` later.
    pub fn plus(self, after: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` to this moment; zero when `earlier` is not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// A named set of speeds and sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Profile {
    /// An 8B model on one H100: 30 ms and 250 us a token of prefill, 12 ms between tokens.
    #[default]
    #[value(name = "8b-h100")]
    Llama8bH100,
    /// A 70B model on four H100 (tensor parallel). From `8b-h100`: 8.75 times the arithmetic over four
    /// devices, plus 15% for their exchange: 2.5 times per prefill token; 35 GB of weights read per device and
    /// token instead of 16 GB: 2.2 times between tokens; 147 GB left for KV at 320 KiB a token.
    #[value(name = "70b-h100")]
    Llama70bH100,
    /// An 8B model on one L40S. From `8b-h100`: 2.7 times less arithmetic (362 to 989 dense fp16 TFLOPS), 3.9
    /// times less memory bandwidth (864 to 3,350 GB/s); 26 GB left for KV at 128 KiB a token.
    #[value(name = "l40s")]
    Llama8bL40s,
    /// Answers at once: caches and counts, but nothing waits.
    #[value(name = "instant")]
    Instant,
}

/// The speeds of one engine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timing {
    /// Fixed part of a prompt's prefill.
    pub prefill_base: Duration,
    /// Time for one token of a prompt that is not cached.
    pub prefill_per_token: Duration,
    /// Time between two tokens of a request that decodes alone.
    pub inter_token: Duration,
    /// How the time between tokens grows with the requests that decode.
    pub crowding: Crowding,
    /// How many times longer the time between tokens is while a prompt is computed beside them, at least 1. Only
    /// for the simple engine: with steps, decodes wait for the prompt tokens in theirs.
    pub beside_prefill: f64,
}

/// How the time between tokens grows with the requests that decode.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Crowding {
    /// Linearly to twice its value at so many, and not beyond; at 1 or below it never does.
    DoubleAt(u32),
    /// By this share of it for every one but the first, without end; in the simple engine prompts are slowed alike.
    Each(f64),
}

impl Timing {
    /// Time to compute `tokens` prompt tokens, with the fixed part when `first` says that a prompt begins.
    pub fn prefill(&self, tokens: u32, first: bool) -> Duration {
        let base = if first { self.prefill_base } else { Duration::ZERO };
        base + self.prefill_per_token * tokens
    }

    /// Time to compute a whole prompt of `tokens` while `batch` requests decode. Only [`Crowding::Each`] makes it
    /// longer.
    pub fn prefill_beside(&self, tokens: u32, batch: u32) -> Duration {
        let growth = match self.crowding {
            Crowding::DoubleAt(_) => 0.0,
            Crowding::Each(share) => share * f64::from(batch),
        };
        self.prefill(tokens, true).mul_f64(1.0 + growth)
    }

    /// Time between tokens with `batch` requests decoding.
    pub fn decode(&self, batch: u32) -> Duration {
        let others = f64::from(batch.max(1) - 1);
        let growth = match self.crowding {
            Crowding::DoubleAt(0..=1) => 0.0,
            Crowding::DoubleAt(at) => (others / f64::from(at - 1)).min(1.0),
            Crowding::Each(share) => others * share,
        };
        self.inter_token.mul_f64(1.0 + growth)
    }

    /// The same engine, everything `speed` times faster.
    #[must_use]
    pub fn sped_up(self, speed: f64) -> Self {
        Self {
            prefill_base: self.prefill_base.div_f64(speed),
            prefill_per_token: self.prefill_per_token.div_f64(speed),
            inter_token: self.inter_token.div_f64(speed),
            ..self
        }
    }
}

impl Profile {
    /// The profile's speeds.
    pub fn timing(self) -> Timing {
        let (base_ms, per_token_us, inter_token_ms) = match self {
            Self::Llama8bH100 => (30, 250, 12),
            Self::Llama70bH100 => (45, 625, 26),
            Self::Llama8bL40s => (45, 680, 46),
            Self::Instant => (0, 0, 0),
        };
        Timing {
            prefill_base: Duration::from_millis(base_ms),
            prefill_per_token: Duration::from_micros(per_token_us),
            inter_token: Duration::from_millis(inter_token_ms),
            crowding: Crowding::DoubleAt(64),
            beside_prefill: 1.0,
        }
    }

    /// KV blocks of 16 tokens that fit beside the weights in 90% of the memory.
    pub fn kv_blocks(self) -> u32 {
        match self {
            Self::Llama8bH100 | Self::Instant => 25_700,
            Self::Llama70bH100 => 28_000,
            Self::Llama8bL40s => 12_400,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_8b_engine_takes_30_ms_and_250_us_a_token() {
        let timing = Profile::Llama8bH100.timing();
        assert_eq!(timing.prefill(1_000, true), Duration::from_millis(280));
        assert_eq!(timing.prefill(1_000, false), Duration::from_millis(250));
    }

    #[test]
    fn time_between_tokens_doubles_under_load_and_no_more() {
        let timing = Profile::Llama8bH100.timing();
        for (batch, ms) in [(0, 12), (1, 12), (64, 24), (1_000, 24)] {
            assert_eq!(timing.decode(batch), Duration::from_millis(ms), "{batch} decoding");
        }
        assert!(timing.decode(32) > timing.decode(16));
    }

    #[test]
    fn every_request_can_add_its_share_without_end() {
        let timing = Timing { crowding: Crowding::Each(0.15), ..Profile::Llama8bH100.timing() };
        for (batch, us) in [(0, 12_000), (1, 12_000), (2, 13_800), (11, 30_000), (101, 192_000)] {
            assert_eq!(timing.decode(batch), Duration::from_micros(us), "{batch} decoding");
        }
        assert_eq!(timing.prefill_beside(1_000, 0), timing.prefill(1_000, true));
        assert_eq!(timing.prefill_beside(1_000, 2), Duration::from_millis(364));
        assert_eq!(Profile::Llama8bH100.timing().prefill_beside(1_000, 2), Duration::from_millis(280));
    }

    #[test]
    fn speed_divides_every_time() {
        let fast = Profile::Llama8bH100.timing().sped_up(10.0);
        assert_eq!(fast.prefill(100, true), Duration::from_micros(5_500));
        assert_eq!(fast.decode(1), Duration::from_micros(1_200));
    }
}
