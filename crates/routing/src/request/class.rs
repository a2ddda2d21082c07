//! What a request's headers say of it: its session, its class, what it expects.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::rules::ShapeRules;
use crate::SessionKey;
use crate::qoe::ClassTargets;

/// The longest span that can be a target, in ms: an hour. Anything longer is a mistake.
pub const TARGET_MS_MAX: f64 = 3_600_000.0;

/// The most output tokens that a header may announce; beyond it is a mistake.
const OUTPUT_TOKENS_MAX: u32 = 10_000_000;

/// The header that says how urgent a request is, 1 to 3.
pub const PRIORITY_HEADER: &str = "x-request-priority";
/// The header that says when the first token is expected, in ms after arrival.
pub const TTFT_HEADER: &str = "x-slo-ttft-ms";
/// The header that says when each further token is expected, in ms after the one before.
pub const TPOT_HEADER: &str = "x-slo-tpot-ms";

/// A request's headers, however the server keeps them.
pub trait HeaderView {
    /// The first value of the header `name` (lower case).
    fn get(&self, name: &str) -> Option<&[u8]>;
}

impl<const N: usize> HeaderView for [(&str, &str); N] {
    fn get(&self, name: &str) -> Option<&[u8]> {
        self.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_bytes())
    }
}

/// How urgent a request is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub enum Priority {
    /// 1.
    High,
    /// 2, unless said otherwise.
    #[default]
    Normal,
    /// 3.
    Low,
}

impl Priority {
    /// The class with this number, 1 to 3.
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::High),
            2 => Some(Self::Normal),
            3 => Some(Self::Low),
            _ => None,
        }
    }

    /// 1, 2 or 3.
    pub const fn number(self) -> u8 {
        match self {
            Self::High => 1,
            Self::Normal => 2,
            Self::Low => 3,
        }
    }

    /// The number as a metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::High => "1",
            Self::Normal => "2",
            Self::Low => "3",
        }
    }
}

/// When a request expects its tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slo {
    /// The first token, in ms after arrival.
    pub ttft_ms: f64,
    /// Each further token, in ms after the one before.
    pub tpot_ms: f64,
    /// The whole reply, in ms after arrival, if that is asked for; only reported as met or missed.
    pub total_ms: Option<f64>,
}

impl Slo {
    /// What a request of this class expects where nobody has said otherwise.
    pub const fn of(priority: Priority) -> Self {
        let (ttft_ms, tpot_ms) = match priority {
            Priority::High => (1_000.0, 50.0),
            Priority::Normal => (2_000.0, 50.0),
            Priority::Low => (3_000.0, 100.0),
        };
        Self { ttft_ms, tpot_ms, total_ms: None }
    }

    /// What a request with these headers expects, where its class expects what `targets` says.
    pub fn of_headers(headers: &dyn HeaderView, targets: &ClassTargets) -> Self {
        Reader { headers, ignored: 0 }.class(targets).1
    }
}

/// What the headers say.
pub(super) struct Told {
    pub(super) priority: Priority,
    pub(super) slo: Slo,
    pub(super) output_tokens: Option<NonZeroU32>,
    pub(super) session: Option<SessionKey>,
    /// Headers whose value made no sense.
    pub(super) ignored: u32,
}

/// Reads the headers; a value that makes no sense counts as not sent.
pub(super) fn read_headers(headers: &dyn HeaderView, rules: &ShapeRules) -> Told {
    let mut reader = Reader { headers, ignored: 0 };
    let (priority, slo) = reader.class(&rules.targets);
    let output_tokens = reader.value("x-expected-output-tokens", |text| {
        text.parse().ok().filter(|tokens: &NonZeroU32| tokens.get() <= OUTPUT_TOKENS_MAX)
    });
    let session = rules.session_headers.iter().find_map(|name| {
        let value = headers.get(name)?.trim_ascii();
        (!value.is_empty()).then(|| SessionKey::of(name, value))
    });
    Told { priority, slo, output_tokens, session, ignored: reader.ignored }
}

fn target_ms(text: &str) -> Option<f64> {
    text.parse().ok().filter(|&ms| ms > 0.0 && ms <= TARGET_MS_MAX)
}

struct Reader<'a> {
    headers: &'a dyn HeaderView,
    ignored: u32,
}

impl Reader<'_> {
    fn class(&mut self, targets: &ClassTargets) -> (Priority, Slo) {
        let priority =
            self.value(PRIORITY_HEADER, |text| Priority::from_number(text.parse().ok()?)).unwrap_or_default();
        let defaults = targets.of(priority);
        let slo = Slo {
            ttft_ms: self.value(TTFT_HEADER, target_ms).unwrap_or(defaults.ttft_ms),
            tpot_ms: self.value(TPOT_HEADER, target_ms).unwrap_or(defaults.tpot_ms),
            total_ms: self.value("x-sla-target-ms", target_ms),
        };
        (priority, slo)
    }

    fn value<T>(&mut self, name: &str, read: impl FnOnce(&str) -> Option<T>) -> Option<T> {
        let bytes = self.headers.get(name)?;
        let value = std::str::from_utf8(bytes).ok().and_then(|text| read(text.trim()));
        self.ignored += u32::from(value.is_none());
        value
    }
}
