//! The budget that all retries of a replica share.

use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::MayRetry;
use crate::{EndpointId, Moment};

/// The numbers of a [`RetryBudget`].
#[derive(Clone, Debug, PartialEq)]
pub struct BudgetConfig {
    /// Retries for each request of the last 10 s, 0 to 1; in an outage of all, for each since it began.
    /// 0.2: an outage adds a fifth to the engines' load, no more.
    pub ratio: f64,
    /// What one failing endpoint may have moved within 10 s, though it had fewer in flight, while others
    /// are well. 20: what arrives between its death and its ejection.
    pub burst_min: u32,
    /// Retries that may be made before anything is known of anybody; refilled by any success. 2: a first
    /// request may meet two bad endpoints.
    pub unknown_max: u32,
}

impl Default for BudgetConfig {
    fn default() -> Self {
        Self { ratio: 0.2, burst_min: 20, unknown_max: 2 }
    }
}

/// What paid for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// The failed endpoint's burst: others are known to be well, or it is gone.
    Burst,
    /// A share of the recent requests.
    Ratio,
    /// The few that are free as long as nothing is known.
    Unknown,
}

/// The answer to a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Draw {
    /// Try elsewhere.
    Granted(Source),
    /// Nothing is left.
    Refused,
}

/// Seconds over which requests and retries are counted.
const WINDOW_SECONDS: u64 = 10;
const WINDOW: Duration = Duration::from_secs(WINDOW_SECONDS);
/// Endpoints below which none is forgotten. 64: some 20 KB.
const TIDY_MIN: usize = 64;

/// The budget that all retries of a replica share. It remembers the endpoints that were used within the
/// window, and at most twice as many besides.
#[derive(Debug, Default)]
pub struct RetryBudget {
    ledger: Mutex<Ledger>,
}

#[derive(Debug, Default)]
struct Ledger {
    config: BudgetConfig,
    requests: Count,
    retries: Count,
    unknown_used: u32,
    weather: Weather,
    endpoints: HashMap<EndpointId, Record>,
    /// How many of them it takes for those that are out of use to be forgotten.
    tidy_at: usize,
}

/// Whether anybody is known to serve.
#[derive(Debug, Default, PartialEq, Eq)]
enum Weather {
    #[default]
    Fair,
    Outage,
}

#[derive(Debug, Default)]
struct Record {
    last_success: Option<Moment>,
    last_failure: Option<Moment>,
    moved: Count,
    in_flight: Peak,
}

impl Record {
    /// Whether it served a request within the window and has not failed since.
    fn is_well(&self, now: Moment) -> bool {
        self.last_success.is_some_and(|success| {
            now.since(success) <= WINDOW && self.last_failure.is_none_or(|failure| failure < success)
        })
    }

    /// Whether it still counts for anything.
    fn is_in_use(&self, now: Moment) -> bool {
        self.last_success.max(self.last_failure).is_some_and(|used| now.since(used) <= WINDOW)
    }
}

impl RetryBudget {
    /// A budget with these numbers.
    pub fn new(config: BudgetConfig) -> Self {
        Self { ledger: Mutex::new(Ledger { config, ..Ledger::default() }) }
    }

    /// Takes other numbers; what has been counted stays.
    pub fn reconfigure(&self, config: BudgetConfig) {
        self.ledger.lock().config = config;
    }

    /// Counts a client's request, once.
    pub fn request(&self, now: Moment) {
        self.ledger.lock().requests.add(1, now);
    }

    /// Notes that `endpoint` served a request.
    pub fn succeeded(&self, endpoint: EndpointId, now: Moment) {
        let mut ledger = self.ledger.lock();
        ledger.unknown_used = 0;
        ledger.weather = Weather::Fair;
        ledger.record(endpoint, now).last_success = Some(now);
    }

    /// Notes that a request failed at `endpoint`, where `in_flight` requests of this replica ran at that
    /// moment, this one included.
    pub fn failed(&self, endpoint: EndpointId, in_flight: u32, now: Moment) {
        let ledger = &mut *self.ledger.lock();
        let record = ledger.record(endpoint, now);
        record.last_failure = Some(now);
        record.in_flight.raise(in_flight, now);
        if ledger.weather == Weather::Fair && !ledger.endpoints.values().any(|each| each.is_well(now)) {
            // What was earned while all was well is not spent on engines that are all overloaded.
            ledger.weather = Weather::Outage;
            ledger.requests = Count::default();
        }
    }

    /// Notes that a request which waited at `endpoint` must move because probes found that dead. Whether it is
    /// well again its probes say too, so that this is not held against it once it is.
    pub fn lost(&self, endpoint: EndpointId, in_flight: u32, now: Moment) {
        self.ledger.lock().record(endpoint, now).in_flight.raise(in_flight, now);
    }

    /// Asks for a retry of what just [`failed`](Self::failed) at `endpoint`.
    pub fn draw(&self, why: MayRetry, endpoint: EndpointId, now: Moment) -> Draw {
        let ledger = &mut *self.ledger.lock();
        let others_well =
            ledger.endpoints.iter().any(|(other, record)| *other != endpoint && record.is_well(now));
        let bursts = match why {
            MayRetry::Never => return Draw::Refused,
            MayRetry::EndpointGone => true,
            MayRetry::EndpointUnable | MayRetry::EndpointFailed => others_well,
        };
        let config = &ledger.config;
        let retries = ledger.retries.sum(now);
        let by_ratio = (config.ratio * ledger.requests.sum(now) as f64).floor() as u64;
        let record = ledger.endpoints.entry(endpoint).or_default();
        let burst = record.in_flight.max(now).max(config.burst_min);
        let unknown_max = config.unknown_max;
        let source = if bursts && record.moved.sum(now) < u64::from(burst) {
            record.moved.add(1, now);
            Source::Burst
        } else if retries < by_ratio {
            Source::Ratio
        } else if ledger.unknown_used < unknown_max && retries < u64::from(unknown_max) {
            ledger.unknown_used += 1;
            Source::Unknown
        } else {
            return Draw::Refused;
        };
        ledger.retries.add(1, now);
        Draw::Granted(source)
    }
}

impl Ledger {
    fn record(&mut self, endpoint: EndpointId, now: Moment) -> &mut Record {
        if self.endpoints.len() >= self.tidy_at.max(TIDY_MIN) && !self.endpoints.contains_key(&endpoint) {
            self.endpoints.retain(|_, record| record.is_in_use(now));
            self.tidy_at = 2 * self.endpoints.len();
        }
        self.endpoints.entry(endpoint).or_default()
    }
}

/// A count over the last [`WINDOW_SECONDS`], by whole seconds.
#[derive(Debug, Default)]
struct Count {
    seconds: [(u64, u64); WINDOW_SECONDS as usize],
}

impl Count {
    fn add(&mut self, count: u64, now: Moment) {
        let second = now.micros() / 1_000_000;
        let slot = &mut self.seconds[(second % WINDOW_SECONDS) as usize];
        if slot.0 != second {
            *slot = (second, 0);
        }
        slot.1 += count;
    }

    fn sum(&self, now: Moment) -> u64 {
        let second = now.micros() / 1_000_000;
        self.seconds.iter().filter(|slot| slot.0 + WINDOW_SECONDS > second).map(|slot| slot.1).sum()
    }
}

/// The highest figure of the last [`WINDOW_SECONDS`].
#[derive(Debug, Default)]
struct Peak {
    seconds: [(u64, u32); WINDOW_SECONDS as usize],
}

impl Peak {
    fn raise(&mut self, figure: u32, now: Moment) {
        let second = now.micros() / 1_000_000;
        let slot = &mut self.seconds[(second % WINDOW_SECONDS) as usize];
        *slot = if slot.0 == second { (second, slot.1.max(figure)) } else { (second, figure) };
    }

    fn max(&self, now: Moment) -> u32 {
        let second = now.micros() / 1_000_000;
        self.seconds
            .iter()
            .filter(|slot| slot.0 + WINDOW_SECONDS > second)
            .map(|slot| slot.1)
            .max()
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_that_come_and_go_leave_no_trace() {
        let budget = RetryBudget::default();
        for n in 0..10_000 {
            let now = Moment::from_millis(n * 1_000);
            budget.succeeded(EndpointId::from_raw(n), now);
            budget.failed(EndpointId::from_raw(n + 1), 1, now);
            assert!(budget.ledger.lock().endpoints.len() <= TIDY_MIN + 1);
        }
        for n in 0..1_000 {
            budget.succeeded(EndpointId::from_raw(n), Moment::from_millis(20_000_000));
        }
        assert_eq!(budget.ledger.lock().endpoints.len(), 1_000, "those in use are kept however many");
    }
}
