//! The metrics as one worker moves them: label lookups are done once per combination, not per request.

use std::cell::RefCell;

use hashbrown::HashMap;
use prometheus::{Histogram, IntCounter};
use routing::admission::Shed;
use routing::decision::SplitReason;
use routing::endpoint::Role;
use routing::lifecycle::{Aftermath, Outcome, Verdict};
use routing::qoe::{Fared, Target};
use routing::request::{Priority, Route};
use routing::{Decision, EndpointId, Reason};

use super::Metrics;
use crate::data::LegName;

/// Combinations kept resolved per worker and metric. Far above what the configured names can form at any one
/// time; it bounds what years of changing endpoints leave behind.
const RESOLVED_MAX: usize = 10_000;

/// One worker's resolved handles.
#[derive(Debug)]
pub(crate) struct WorkerMetrics {
    metrics: Metrics,
    requests: RefCell<HashMap<(Route, u16), HashMap<String, IntCounter>>>,
    phases: Resolved<(&'static str, Role), Histogram>,
    e2e: Resolved<Priority, Histogram>,
    pace: Resolved<EndpointId, Histogram>,
    qoe: Resolved<Priority, Histogram>,
    slo: Resolved<(Priority, &'static str, Target), IntCounter>,
    decisions: Resolved<(&'static str, Reason), IntCounter>,
    splits: Resolved<SplitReason, IntCounter>,
}

impl WorkerMetrics {
    pub(crate) fn new(metrics: Metrics) -> Self {
        Self {
            metrics,
            requests: RefCell::default(),
            phases: Resolved::default(),
            e2e: Resolved::default(),
            pace: Resolved::default(),
            qoe: Resolved::default(),
            slo: Resolved::default(),
            decisions: Resolved::default(),
            splits: Resolved::default(),
        }
    }

    /// A request was answered. `model` must be one that is served, or a fixed word.
    pub(crate) fn request(&self, model: &str, route: Route, code: u16) {
        let mut requests = self.requests.borrow_mut();
        let models = requests.entry((route, code)).or_default();
        if let Some(counter) = models.get(model) {
            counter.inc();
            return;
        }
        if models.len() >= RESOLVED_MAX {
            models.clear();
        }
        let counter = self.metrics.requests.with_label_values(&[model, route.as_str(), &code.to_string()]);
        counter.inc();
        models.insert(model.to_owned(), counter);
    }

    /// An endpoint of this role was chosen, or a pair of which it decodes.
    pub(crate) fn decision(&self, decision: &Decision, role: Role) {
        self.choice((decision.policy, decision.reason), role, &decision.reverted);
        let Some(split) = &decision.split else { return };
        let splits = if split.reason.splits() { "yes" } else { "no" };
        self.splits
            .get(split.reason, || self.metrics.pd_split.with_label_values(&[splits, split.reason.as_str()]))
            .inc();
        // Another decode endpoint goes with a prefill that was chosen before.
        if let Some(prefill) = split.prefill.filter(|_| split.reason != SplitReason::Prefilled) {
            self.choice((split.policy, prefill.reason), Role::Prefill, &split.reverted);
        }
    }

    fn choice(&self, (policy, reason): (&'static str, Reason), role: Role, reverted: &[&'static str]) {
        self.decisions
            .get((policy, reason), || self.metrics.decisions.with_label_values(&[policy, reason.as_str()]))
            .inc();
        if reason == Reason::ImbalancedLeastLoad {
            self.metrics.load_imbalance.with_label_values(&[role.as_str()]).inc();
        }
        for filter in reverted {
            self.metrics.filter_reverted.with_label_values(&[filter]).inc();
        }
    }

    /// A request that had waited is sent.
    pub(crate) fn queue_admitted(&self, priority: Priority) {
        self.metrics.queue_admitted.with_label_values(&[priority.as_str()]).inc();
    }

    /// A request is refused for want of room.
    pub(crate) fn queue_shed(&self, reason: Shed, priority: Priority) {
        self.metrics.queue_shed.with_label_values(&[reason.as_str(), priority.as_str()]).inc();
    }

    /// A leg of a split request failed.
    pub(crate) fn handoff_failed(&self, leg: LegName, reason: &str) {
        self.metrics.handoff_failures.with_label_values(&[leg.as_str(), reason]).inc();
    }

    /// A request that had been split is served whole.
    pub(crate) fn fell_back(&self, reason: SplitReason) {
        self.metrics.pd_fallbacks.with_label_values(&[reason.as_str()]).inc();
    }

    /// An engine let go of KV that nobody wanted.
    pub(crate) fn kv_released(&self) {
        self.metrics.kv_released.inc();
    }

    /// An engine could not be had to.
    pub(crate) fn kv_stranded(&self) {
        self.metrics.kv_stranded.inc();
    }

    /// How a request went, phase by phase. `role` is that of the endpoint whose reply the client got; `ttft_ms` when
    /// the first token of a stream came after arrival.
    pub(crate) fn outcome(&self, outcome: &Outcome, role: Role, priority: Priority, ttft_ms: Option<f64>) {
        let prefill_role = if outcome.prefill_endpoint.is_some() { Role::Prefill } else { role };
        let phases = [
            ("queued", role, Some(outcome.queued_ms)),
            ("prefilling", prefill_role, outcome.prefill_ms),
            ("handed-off", role, outcome.handoff_ms),
            ("first-token", role, ttft_ms.map(|ttft_ms| outcome.of_leg_ms(ttft_ms))),
            ("decoding", role, outcome.decode_ms),
        ];
        for (phase, role, ms) in phases {
            if let Some(ms) = ms {
                let labels = || self.metrics.phase_seconds.with_label_values(&[phase, role.as_str()]);
                self.phases.get((phase, role), labels).observe(ms / 1_000.0);
            }
        }
        for tried in &outcome.failed {
            if tried.next.is_ok() {
                self.metrics.retries.with_label_values(&[tried.failure.as_str()]).inc();
            }
        }
        for broke in &outcome.breaks {
            let cause = broke.failure.as_str();
            self.metrics.stream_breaks.with_label_values(&[cause, broke.then.as_str()]).inc();
            if broke.then == Aftermath::Resumed {
                self.metrics.resumed.with_label_values(&[cause]).inc();
            }
        }
        if matches!(outcome.verdict, Verdict::Finished { .. }) {
            let labels = || self.metrics.e2e_seconds.with_label_values(&[priority.as_str()]);
            self.e2e.get(priority, labels).observe(outcome.total_ms / 1_000.0);
        }
    }

    /// When a stream's first byte came, in ms after arrival.
    pub(crate) fn first_byte(&self, ttft_ms: f64) {
        self.metrics.ttft_seconds.observe(ttft_ms / 1_000.0);
    }

    /// How fast a stream came, in tokens per second.
    pub(crate) fn pace(&self, endpoint: EndpointId, label: impl FnOnce() -> String, tokens_per_second: f64) {
        self.pace
            .get(endpoint, || self.metrics.decode_tokens_per_second.with_label_values(&[&label()]))
            .observe(tokens_per_second);
    }

    /// How the user of a request fared.
    pub(crate) fn fared(&self, priority: Priority, fared: &Fared) {
        if let Some(qoe) = fared.qoe {
            let labels = || self.metrics.qoe_ratio.with_label_values(&[priority.as_str()]);
            self.qoe.get(priority, labels).observe(qoe);
        }
        for (kind, target) in [("ttft", fared.ttft), ("tpot", fared.tpot), ("e2e", fared.e2e)] {
            let Some(target) = target else { continue };
            let family = match target {
                Target::Met => &self.metrics.slo_met,
                Target::Missed => &self.metrics.slo_missed,
            };
            let labels = || family.with_label_values(&[priority.as_str(), kind]);
            self.slo.get((priority, kind, target), labels).inc();
        }
    }

    /// A chat was held back until another replica's word of it came, or in vain.
    pub(crate) fn word_awaited(&self, came: bool) {
        let outcome = if came { "came" } else { "in-vain" };
        self.metrics.word_awaited.with_label_values(&[outcome]).inc();
    }

    /// A request had this many headers that made no sense.
    pub(crate) fn headers_ignored(&self, count: u32) {
        if count > 0 {
            self.metrics.headers_ignored.inc_by(u64::from(count));
        }
    }
}

#[derive(Debug)]
struct Resolved<K, M>(RefCell<HashMap<K, M>>);

impl<K, M> Default for Resolved<K, M> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Eq + std::hash::Hash, M: Clone> Resolved<K, M> {
    fn get(&self, key: K, resolve: impl FnOnce() -> M) -> M {
        let mut known = self.0.borrow_mut();
        if let Some(metric) = known.get(&key) {
            return metric.clone();
        }
        if known.len() >= RESOLVED_MAX {
            known.clear();
        }
        let metric = resolve();
        known.insert(key, metric.clone());
        metric
    }
}
