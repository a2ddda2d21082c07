//! What a run has measured so far, readable while it runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use routing::qoe::{Fared, Target};
use routing::request::Slo;

use super::client::Outcome;
use super::reply::ErrorKind;
use super::report::{Milliseconds, Ratios, Report, SloMet};

/// The longest time told apart, an hour; longer ones count as that.
const TIME_US_MAX: u64 = 3_600_000_000;

/// Significant digits of every percentile.
const DIGITS: u8 = 3;

/// Endpoints counted by name: a server that names a new one for each reply must not fill the memory.
const ENDPOINTS_MAX: usize = 4096;

/// Microseconds, counted.
#[derive(Debug, Clone)]
pub(super) struct Times(Histogram<u64>);

impl Times {
    pub(super) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, TIME_US_MAX, DIGITS).expect("constant bounds are in order"))
    }

    pub(super) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub(super) fn milliseconds(&self) -> Milliseconds {
        if self.0.is_empty() {
            return Milliseconds::default();
        }
        let at = |quantile| Some(self.0.value_at_quantile(quantile) as f64 / 1000.0);
        Milliseconds {
            mean: Some((self.0.mean().round()) / 1000.0),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: Some(self.0.max() as f64 / 1000.0),
        }
    }
}

/// Ratios from 0 to 1, counted.
#[derive(Debug, Clone)]
struct RatioCounts {
    /// In steps of 1 / [`RATIO_STEPS`].
    steps: Histogram<u64>,
    sum: f64,
}

/// How finely ratios are told apart.
const RATIO_STEPS: f64 = 10_000.0;

impl RatioCounts {
    fn new() -> Self {
        let steps = Histogram::new_with_bounds(1, RATIO_STEPS as u64, DIGITS);
        Self { steps: steps.expect("constant bounds are in order"), sum: 0.0 }
    }

    fn record(&mut self, ratio: f64) {
        self.steps.saturating_record((ratio * RATIO_STEPS).round() as u64);
        self.sum += ratio;
    }

    fn ratios(&self) -> Ratios {
        if self.steps.is_empty() {
            return Ratios::default();
        }
        // The histogram names a value by the upper end of its bucket.
        let at = |quantile| Some((self.steps.value_at_quantile(quantile) as f64 / RATIO_STEPS).min(1.0));
        Ratios { mean: Some(self.sum / self.steps.len() as f64), p50: at(0.5), p10: at(0.1) }
    }
}

/// Streams that met their targets, and all of them.
#[derive(Debug, Clone, Copy, Default)]
struct Attained {
    streams: u64,
    ttft: u64,
    tpot: u64,
    both: u64,
}

impl Attained {
    /// An answer of one token has no time between tokens to miss.
    fn record(&mut self, fared: &Fared) {
        let (ttft, tpot) = (fared.ttft == Some(Target::Met), fared.tpot != Some(Target::Missed));
        self.streams += 1;
        self.ttft += u64::from(ttft);
        self.tpot += u64::from(tpot);
        self.both += u64::from(ttft && tpot);
    }

    fn shares(self) -> SloMet {
        let share = |met: u64| (self.streams > 0).then(|| met as f64 / self.streams as f64);
        SloMet { ttft: share(self.ttft), tpot: share(self.tpot), both: share(self.both) }
    }
}

/// Everything counted in one run.
#[derive(Debug, Clone)]
struct Statistics {
    answered: u64,
    errors: BTreeMap<ErrorKind, (u64, String)>,
    ttft: Times,
    gaps: Times,
    e2e: Times,
    late: Times,
    qoe: RatioCounts,
    attained: Attained,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    per_endpoint: BTreeMap<String, u64>,
    follow_ups: u64,
    follow_ups_at_home: u64,
    chats_broken: u64,
    retries: u64,
    held_back: u64,
    last_end: Option<Instant>,
}

/// One finished request and its place in its conversation.
#[derive(Debug)]
pub(super) struct Finished<'a> {
    /// What became of it.
    pub outcome: &'a Outcome,
    /// Which turn of its conversation it was, from 0.
    pub turn: u32,
    /// The endpoint that answered its conversation's first turn, if named.
    pub home: Option<&'a str>,
    /// How often it was sent again.
    pub retries: u32,
    /// What its user expected, if it asked for a stream.
    pub slo: Option<&'a Slo>,
}

/// The counters of a run, shared by those who drive it and those who watch it.
#[derive(Debug)]
pub struct Live {
    begun: OnceLock<Instant>,
    started: AtomicU64,
    in_flight: AtomicU64,
    statistics: Mutex<Statistics>,
}

impl Live {
    /// Counters at zero; the clock starts with the run.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            begun: OnceLock::new(),
            started: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            statistics: Mutex::new(Statistics {
                answered: 0,
                errors: BTreeMap::new(),
                ttft: Times::new(),
                gaps: Times::new(),
                e2e: Times::new(),
                late: Times::new(),
                qoe: RatioCounts::new(),
                attained: Attained::default(),
                prompt_tokens: 0,
                cached_tokens: 0,
                output_tokens: 0,
                per_endpoint: BTreeMap::new(),
                follow_ups: 0,
                follow_ups_at_home: 0,
                chats_broken: 0,
                retries: 0,
                held_back: 0,
                last_end: None,
            }),
        })
    }

    /// When the run began: the first call says now.
    pub(super) fn begun(&self) -> Instant {
        *self.begun.get_or_init(Instant::now)
    }

    /// Requests sent and not yet ended.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// Requests sent so far.
    pub fn started(&self) -> u64 {
        self.started.load(Relaxed)
    }

    /// Requests ended so far, answered or failed: cheap, for a progress bar.
    pub fn ended(&self) -> u64 {
        self.started() - self.in_flight()
    }

    /// The report of the run so far.
    pub fn report(&self) -> Report {
        let statistics = self.statistics().clone();
        let ratio = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
        let duration_s =
            statistics.last_end.map_or(0.0, |end| end.duration_since(self.begun()).as_secs_f64());
        let failed: u64 = statistics.errors.values().map(|(count, _)| count).sum();
        let requests = statistics.answered + failed;
        let per_second = |count: u64| if duration_s > 0.0 { count as f64 / duration_s } else { 0.0 };
        Report {
            requests,
            errors: statistics.errors.iter().map(|(kind, (count, _))| (kind.to_string(), *count)).collect(),
            ttft_ms: statistics.ttft.milliseconds(),
            itl_ms: statistics.gaps.milliseconds(),
            e2e_ms: statistics.e2e.milliseconds(),
            qoe: statistics.qoe.ratios(),
            slo_met: statistics.attained.shares(),
            hit_rate: ratio(statistics.cached_tokens, statistics.prompt_tokens),
            per_endpoint: statistics.per_endpoint,
            follow_ups: statistics.follow_ups,
            follow_up_at_home: ratio(statistics.follow_ups_at_home, statistics.follow_ups),
            duration_s,
            requests_per_second: per_second(requests),
            tokens_per_second: per_second(statistics.output_tokens),
            prompt_tokens: statistics.prompt_tokens,
            cached_tokens: statistics.cached_tokens,
            output_tokens: statistics.output_tokens,
            chats_broken: statistics.chats_broken,
            retries: statistics.retries,
            abandoned: self.in_flight(),
            held_back: statistics.held_back,
            late_ms: statistics.late.milliseconds(),
            error_details: statistics
                .errors
                .into_iter()
                .map(|(kind, (_, detail))| (kind.to_string(), detail))
                .collect(),
        }
    }

    /// Counts a request as sent until the guard is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> InFlight {
        self.started.fetch_add(1, Relaxed);
        self.in_flight.fetch_add(1, Relaxed);
        InFlight(self.clone())
    }

    /// Notes how far behind its time an open-loop request was sent, and whether the bound on requests in
    /// flight was why.
    pub(super) fn departed(&self, late: Duration, held_back: bool) {
        let mut statistics = self.statistics();
        statistics.late.record(late);
        statistics.held_back += u64::from(held_back);
    }

    /// Notes a chat that ends early because a turn failed.
    pub(super) fn chat_broken(&self) {
        self.statistics().chats_broken += 1;
    }

    /// Takes a finished request into account. Times are those of whole answers; a failed request counts by
    /// its kind only.
    pub(super) fn record(&self, finished: &Finished<'_>) {
        let outcome = finished.outcome;
        let mut statistics = self.statistics();
        statistics.last_end = Some(Instant::now());
        statistics.retries += u64::from(finished.retries);
        if let Some(name) = &outcome.endpoint {
            statistics.count_endpoint(name);
        }
        if let Some(slo) = finished.slo {
            let fared = outcome.fared(slo);
            if let Some(qoe) = fared.qoe {
                statistics.qoe.record(qoe);
            }
            statistics.attained.record(&fared);
        }
        if let Err(failure) = &outcome.verdict {
            let entry = statistics.errors.entry(failure.kind).or_insert_with(|| (0, failure.detail.clone()));
            entry.0 += 1;
            return;
        }
        statistics.answered += 1;
        statistics.e2e.record(outcome.e2e);
        if let Some(ttft) = outcome.ttft {
            statistics.ttft.record(ttft);
        }
        for gap in &outcome.gaps {
            statistics.gaps.record(*gap);
        }
        if let Some(usage) = outcome.usage {
            if let Some(cached) = usage.cached_tokens() {
                statistics.prompt_tokens += usage.prompt_tokens;
                statistics.cached_tokens += cached;
            }
            statistics.output_tokens += usage.completion_tokens;
        } else {
            statistics.output_tokens += outcome.content_events;
        }
        if finished.turn > 0
            && let (Some(home), Some(endpoint)) = (finished.home, &outcome.endpoint)
        {
            statistics.follow_ups += 1;
            statistics.follow_ups_at_home += u64::from(home == endpoint);
        }
    }

    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        // A panic while recording leaves counters that are at worst one request behind.
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Statistics {
    fn count_endpoint(&mut self, name: &str) {
        if let Some(count) = self.per_endpoint.get_mut(name) {
            *count += 1;
        } else if self.per_endpoint.len() < ENDPOINTS_MAX {
            self.per_endpoint.insert(name.to_owned(), 1);
        } else {
            *self.per_endpoint.entry("(others)".to_owned()).or_default() += 1;
        }
    }
}

/// A request in flight, counted until dropped.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Live>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
#[path = "statistics_tests.rs"]
mod tests;
