//! The result of a run: as JSON for programs, as a table for people.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Mean and percentiles of one kind of time, in milliseconds. All absent (`null`) if nothing was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Milliseconds {
    /// The mean.
    pub mean: Option<f64>,
    /// The median.
    pub p50: Option<f64>,
    /// The 90th percentile.
    pub p90: Option<f64>,
    /// The 99th percentile.
    pub p99: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
}

/// Quality of experience, 0 to 1. All absent (`null`) if nothing was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Ratios {
    /// The mean.
    pub mean: Option<f64>,
    /// The median.
    pub p50: Option<f64>,
    /// A tenth fared no better.
    pub p10: Option<f64>,
}

/// Shares of streams that met their targets, 0 to 1; absent (`null`) without any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SloMet {
    /// The first token.
    pub ttft: Option<f64>,
    /// The mean time between tokens.
    pub tpot: Option<f64>,
    /// Both.
    pub both: Option<f64>,
}

/// What a run measured. Times and tokens are those of whole answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Requests that ended, answered or failed.
    pub requests: u64,
    /// Failed requests by kind.
    pub errors: BTreeMap<String, u64>,
    /// To the first content; streams only.
    pub ttft_ms: Milliseconds,
    /// From one content event to the next; streams only.
    pub itl_ms: Milliseconds,
    /// To the reply's end.
    pub e2e_ms: Milliseconds,
    /// Quality of experience of streams, by what they expected; those that failed count 0.
    pub qoe: Ratios,
    /// Streams that met their targets; those that failed met none.
    pub slo_met: SloMet,
    /// Cached prompt tokens over all prompt tokens, of answers that told both; absent if none did.
    pub hit_rate: Option<f64>,
    /// Replies by the endpoint they named.
    pub per_endpoint: BTreeMap<String, u64>,
    /// Later turns of chats that named their endpoint, as their first turn did.
    pub follow_ups: u64,
    /// The share of them that the first turn's endpoint answered; absent without any.
    pub follow_up_at_home: Option<f64>,
    /// From the run's begin to its last reply's end.
    pub duration_s: f64,
    /// Requests ended per second.
    pub requests_per_second: f64,
    /// Answer tokens per second (content events, where an engine does not count tokens).
    pub tokens_per_second: f64,
    /// Prompt tokens of answers that told how many were cached.
    pub prompt_tokens: u64,
    /// How many of them were.
    pub cached_tokens: u64,
    /// Answer tokens.
    pub output_tokens: u64,
    /// Chats that ended early because a turn failed.
    pub chats_broken: u64,
    /// Requests sent again after a failure that clients retry.
    pub retries: u64,
    /// Requests unanswered when the report was made: neither answered nor failed.
    pub abandoned: u64,
    /// Open-loop requests that waited for the bound on requests in flight.
    pub held_back: u64,
    /// How far behind its time each open-loop request was sent.
    pub late_ms: Milliseconds,
    /// For each kind of failure, what the first one said.
    pub error_details: BTreeMap<String, String>,
}

impl Report {
    /// Requests that failed.
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }

    /// The busiest endpoint's replies over the mean of those that were named; absent without any.
    pub fn busiest_over_mean(&self) -> Option<f64> {
        let busiest = self.per_endpoint.values().max()?;
        let total: u64 = self.per_endpoint.values().sum();
        Some(*busiest as f64 * self.per_endpoint.len() as f64 / total as f64)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} requests in {:.1} s ({:.1}/s, {:.0} tokens/s), {} failed",
            self.requests,
            self.duration_s,
            self.requests_per_second,
            self.tokens_per_second,
            self.failed()
        )?;
        writeln!(f, "\n{:<14}{:>10}{:>10}{:>10}{:>10}{:>10}", "ms", "mean", "p50", "p90", "p99", "max")?;
        for (name, times) in
            [("first token", self.ttft_ms), ("inter-token", self.itl_ms), ("end to end", self.e2e_ms)]
        {
            write!(f, "{name:<14}")?;
            for value in [times.mean, times.p50, times.p90, times.p99, times.max] {
                match value {
                    Some(value) => write!(f, "{value:>10.1}")?,
                    None => write!(f, "{:>10}", "-")?,
                }
            }
            writeln!(f)?;
        }
        writeln!(f)?;
        if let Ratios { mean: Some(mean), p50: Some(p50), p10: Some(p10) } = self.qoe {
            writeln!(f, "quality (QoE)       {mean:.3} mean, {p50:.3} median, {p10:.3} worst tenth")?;
        }
        if let SloMet { ttft: Some(ttft), tpot: Some(tpot), both: Some(both) } = self.slo_met {
            writeln!(f, "within targets      {both:.3} ({ttft:.3} first token, {tpot:.3} pace)")?;
        }
        if let Some(hit_rate) = self.hit_rate {
            writeln!(
                f,
                "hit rate            {hit_rate:.3} ({} of {} prompt tokens)",
                self.cached_tokens, self.prompt_tokens
            )?;
        }
        if let Some(share) = self.follow_up_at_home {
            writeln!(f, "follow-up at home   {share:.3} (of {} later turns)", self.follow_ups)?;
        }
        if let Some(ratio) = self.busiest_over_mean() {
            writeln!(f, "busiest over mean   {ratio:.2}")?;
        }
        for (endpoint, count) in &self.per_endpoint {
            writeln!(f, "  {endpoint:<40} {count:>8}")?;
        }
        for (kind, count) in &self.errors {
            let detail = self.error_details.get(kind).map_or("", String::as_str);
            writeln!(f, "failed: {kind:<18} {count:>8}  first: {detail}")?;
        }
        for (count, what) in [
            (self.chats_broken, "chats ended early because a turn failed"),
            (self.retries, "requests were sent again"),
            (self.held_back, "requests waited for --in-flight-max: the load was not fully open"),
            (self.abandoned, "requests were unanswered when the run ended"),
        ] {
            if count > 0 {
                writeln!(f, "{count} {what}")?;
            }
        }
        Ok(())
    }
}
