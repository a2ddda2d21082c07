//! Quality of experience: how near a reply's tokens came to when its reader wanted them.
//!
//! The measure is Andes's (Liu et al., 2024, arXiv 2404.16283): a reader expects the first token by TTFT* and
//! then one every TPOT*, and takes tokens in no faster than that. A token that is taken in is a ramp of one
//! TPOT*, which begins when the token is there and the one before has been taken in. QoE is the area under
//! the curve of tokens taken in over the area under the curve of tokens expected, at most 1; both run from
//! arrival to the end of the last ramp, and no more tokens are expected than there were.
//!
//! The main choice: sums instead of arrival times. The area under all ramps needs only their number, the sum
//! of their beginnings and the last of them, so a stream of any length costs 200 bytes, and a chunk some 15 ns.
//! What comes is pieces, and how many tokens an engine has put into one is known at the end, if it reports its
//! count: so the reader is followed side by side at a few fixed numbers of tokens per piece, and the true one
//! lies between two of them.
//!
//! Two things follow from the definition and surprise: tokens that come before they are expected make up for
//! later ones that are late, and since the curves end with the last token, a single last token that is very
//! late stretches a stretch in which nearly all is there and nearly all was expected, which counts as good.

use serde::{Deserialize, Serialize};

use crate::request::{Priority, Slo};

/// What requests of each class expect unless they say otherwise.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ClassTargets {
    /// Of priority 1.
    pub high: Slo,
    /// Of priority 2.
    pub normal: Slo,
    /// Of priority 3.
    pub low: Slo,
}

impl ClassTargets {
    /// What a request of this class expects.
    pub const fn of(&self, priority: Priority) -> Slo {
        match priority {
            Priority::High => self.high,
            Priority::Normal => self.normal,
            Priority::Low => self.low,
        }
    }
}

impl Default for ClassTargets {
    fn default() -> Self {
        Self { high: Slo::of(Priority::High), normal: Slo::of(Priority::Normal), low: Slo::of(Priority::Low) }
    }
}

/// Tokens per piece at which a reader is followed. Engines send a token at a time, the few that speculation
/// guessed right, or as many as a streaming interval holds, mostly 10 or 16.
const TOKENS_PER_PIECE: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 16.0];

/// A stream as its reader takes it in. All times are in ms after the request's arrival.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Digestion {
    ttft_target_ms: f64,
    pieces: u32,
    first_ms: f64,
    last_ms: f64,
    /// The same reader if each piece were as many tokens as [`TOKENS_PER_PIECE`] says.
    readers: [Reader; TOKENS_PER_PIECE.len()],
}

/// How far a reader is who takes `ramp_ms` over each piece.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Reader {
    ramp_ms: f64,
    /// When the last piece begins to be taken in.
    last_ramp_ms: f64,
    /// The sum of when each piece begins to be taken in.
    ramps_sum_ms: f64,
}

impl Reader {
    fn arrived(&mut self, at_ms: f64, pieces: f64) {
        let first_ramp_ms = at_ms.max(self.last_ramp_ms + self.ramp_ms);
        self.ramps_sum_ms += pieces * first_ramp_ms + self.ramp_ms * pieces * (pieces - 1.0) / 2.0;
        self.last_ramp_ms = first_ramp_ms + self.ramp_ms * (pieces - 1.0);
    }

    fn qoe(&self, ttft_target_ms: f64, pieces: f64) -> f64 {
        let end_ms = self.last_ramp_ms + self.ramp_ms;
        // Each ramp is half the area short of what a piece that is there at once would give.
        let taken_in = pieces * (end_ms - self.ramp_ms / 2.0) - self.ramps_sum_ms;
        let expected = expected_area(end_ms - ttft_target_ms, pieces, self.ramp_ms);
        if expected > 0.0 { (taken_in / expected).clamp(0.0, 1.0) } else { 1.0 }
    }
}

impl Digestion {
    /// Nothing has come yet. Of a request that is answered `samples` times over in one stream, each sample is
    /// expected at the pace of `slo`, and so the stream at that many times the pace.
    pub fn new(slo: &Slo, samples: u32) -> Self {
        let token_ms = slo.tpot_ms / f64::from(samples.max(1));
        Self {
            ttft_target_ms: slo.ttft_ms,
            pieces: 0,
            first_ms: 0.0,
            last_ms: 0.0,
            readers: TOKENS_PER_PIECE.map(|tokens| Reader {
                ramp_ms: token_ms * tokens,
                last_ramp_ms: f64::NEG_INFINITY,
                ramps_sum_ms: 0.0,
            }),
        }
    }

    /// `pieces` pieces have come together, `at_ms` after arrival. An earlier time than the last call's is
    /// taken for that.
    pub fn arrived(&mut self, at_ms: f64, pieces: u32) {
        if pieces == 0 {
            return;
        }
        self.last_ms = at_ms.max(self.last_ms);
        if self.pieces == 0 {
            self.first_ms = self.last_ms;
        }
        for reader in &mut self.readers {
            reader.arrived(self.last_ms, f64::from(pieces));
        }
        self.pieces = self.pieces.saturating_add(pieces);
    }

    /// Pieces so far.
    pub const fn pieces(&self) -> u32 {
        self.pieces
    }

    /// When the first token came, if one has.
    pub fn ttft_ms(&self) -> Option<f64> {
        (self.pieces > 0).then_some(self.first_ms)
    }

    /// From the first piece to the last, in ms, if any has come.
    pub fn span_ms(&self) -> Option<f64> {
        (self.pieces > 0).then_some(self.last_ms - self.first_ms)
    }

    /// The quality so far, 0 to 1; `None` before the first token. `tokens` is the engine's count for what has
    /// come, if it has one; without it, each piece is a token.
    ///
    /// Exact for as many tokens per piece as are in the list that is followed, and interpolated between.
    pub fn qoe(&self, tokens: Option<u32>) -> Option<f64> {
        if self.pieces == 0 {
            return None;
        }
        let pieces = f64::from(self.pieces);
        // The token that ends an answer is counted and has no text.
        let texts = tokens.map_or(pieces, |tokens| f64::from(tokens) - 1.0);
        let most = TOKENS_PER_PIECE[TOKENS_PER_PIECE.len() - 1];
        let per_piece = (texts / pieces).clamp(1.0, most);
        let above = TOKENS_PER_PIECE.partition_point(|followed| *followed < per_piece);
        let below = above.saturating_sub(1);
        let [low, high] = [below, above].map(|at| self.readers[at].qoe(self.ttft_target_ms, pieces));
        let [from, to] = [below, above].map(|at| TOKENS_PER_PIECE[at]);
        let share = if to > from { (per_piece - from) / (to - from) } else { 0.0 };
        Some(low + share * (high - low))
    }
}

/// The quality that a stream of `tokens` tokens will have of which the first comes `ttft_ms` after arrival and each
/// other `tpot_ms` after the one before, 0 to 1.
pub fn predicted(slo: &Slo, ttft_ms: f64, tpot_ms: f64, tokens: u32) -> f64 {
    let tokens = f64::from(tokens.max(1));
    // A reader takes tokens in no faster than at the expected pace.
    let pace_ms = tpot_ms.max(slo.tpot_ms);
    let reader = Reader {
        ramp_ms: slo.tpot_ms,
        last_ramp_ms: ttft_ms + pace_ms * (tokens - 1.0),
        ramps_sum_ms: tokens * ttft_ms + pace_ms * tokens * (tokens - 1.0) / 2.0,
    };
    reader.qoe(slo.ttft_ms, tokens)
}

/// The area under the expected curve over the `span_ms` that begin when the first piece is expected, in
/// piece-milliseconds.
fn expected_area(span_ms: f64, pieces: f64, ramp_ms: f64) -> f64 {
    let span = span_ms.max(0.0);
    let rising = ramp_ms * pieces;
    if span <= rising { span * span / (2.0 * ramp_ms) } else { pieces * (span - rising / 2.0) }
}

/// Whether a target was met.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Target {
    /// In time.
    Met,
    /// Too late, or never.
    Missed,
}

impl Target {
    /// Whether `actual_ms`, if it was ever reached, lies within `target_ms`.
    fn judge(actual_ms: Option<f64>, target_ms: f64) -> Self {
        if actual_ms.is_some_and(|actual| actual <= target_ms) { Self::Met } else { Self::Missed }
    }

    /// The word in logs and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
        }
    }
}

/// How a request ended, as its user sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The whole answer is there.
    Answered,
    /// It was refused for want of room, failed, or broke off: what had not come by then never came.
    Failed,
    /// The user left, or asked for what nobody can give: what had not come by then is not held against anyone.
    Void,
}

/// How the user of one request fared. `None`: nothing of the kind was expected, or it can't be told.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Fared {
    /// Quality of experience, 0 to 1, of a stream. One that failed counts 0.
    pub qoe: Option<f64>,
    /// The first token of a stream.
    pub ttft: Option<Target>,
    /// The mean time between a stream's tokens.
    pub tpot: Option<Target>,
    /// The whole answer, where a target for it was set.
    pub e2e: Option<Target>,
}

/// What was seen of one request.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Seen<'a> {
    /// How it ended.
    pub end: End,
    /// Whether a stream was asked for.
    pub stream: bool,
    /// Its tokens, if they could be told from other bytes.
    pub digestion: Option<&'a Digestion>,
    /// When its first byte came, in ms after arrival: stands for the first token where that could not be told.
    pub first_byte_ms: Option<f64>,
    /// Output tokens of all samples by the engine's count, if it said so.
    pub output_tokens: Option<u32>,
    /// Samples in the answer.
    pub samples: u32,
    /// From arrival to the end, in ms.
    pub total_ms: f64,
}

impl Seen<'_> {
    /// Mean time between the tokens of one sample, in ms; `None` for fewer than two.
    pub fn tpot_ms(&self) -> Option<f64> {
        let digestion = self.digestion?;
        let span_ms = digestion.span_ms()?;
        let tokens = f64::from(self.output_tokens.unwrap_or(0).max(digestion.pieces()));
        let steps = tokens / f64::from(self.samples.max(1)) - 1.0;
        (steps > 0.0).then(|| span_ms / steps)
    }

    /// Judges it by what it expected.
    pub fn judge(&self, slo: &Slo) -> Fared {
        let ttft_ms = self.digestion.and_then(Digestion::ttft_ms).or(self.first_byte_ms);
        let tpot_ms = self.tpot_ms();
        let failed = self.end == End::Failed;
        let e2e = match (slo.total_ms, self.end) {
            (None, _) | (_, End::Void) => None,
            (Some(total_ms), End::Answered) => Some(Target::judge(Some(self.total_ms), total_ms)),
            (Some(_), End::Failed) => Some(Target::Missed),
        };
        if !self.stream {
            return Fared { e2e, ..Fared::default() };
        }
        Fared {
            qoe: if failed {
                Some(0.0)
            } else {
                self.digestion.and_then(|each| each.qoe(self.output_tokens))
            },
            ttft: (failed || ttft_ms.is_some()).then(|| Target::judge(ttft_ms, slo.ttft_ms)),
            tpot: if failed {
                Some(Target::Missed)
            } else {
                tpot_ms.map(|tpot_ms| Target::judge(Some(tpot_ms), slo.tpot_ms))
            },
            e2e,
        }
    }
}

#[cfg(test)]
mod tests;
