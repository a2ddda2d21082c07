//! The metrics of one replica.

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

/// From a token of an idle small model to a long generation, in s.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0,
    600.0,
];
/// Tokens per second of one request.
const TOKENS_PER_SECOND: &[f64] =
    &[1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 250.0, 500.0, 1_000.0];

/// Quality of experience: fine near 1, where the good streams are told apart.
const RATIOS: &[f64] = &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0];

/// Everything that a replica counts.
#[derive(Clone, Debug)]
pub struct Metrics {
    pub(super) registry: Registry,
    pub(super) requests: IntCounterVec,
    pub(super) phase_seconds: HistogramVec,
    pub(super) ttft_seconds: Histogram,
    pub(super) e2e_seconds: HistogramVec,
    pub(super) decode_tokens_per_second: HistogramVec,
    pub(super) qoe_ratio: HistogramVec,
    pub(super) slo_met: IntCounterVec,
    pub(super) slo_missed: IntCounterVec,
    pub(super) headers_ignored: IntCounter,
    pub(super) word_awaited: IntCounterVec,
    pub(super) decisions: IntCounterVec,
    pub(super) filter_reverted: IntCounterVec,
    pub(super) resumed: IntCounterVec,
    pub(super) stream_breaks: IntCounterVec,
    pub(super) retries: IntCounterVec,
    pub(super) queue_requests: IntGauge,
    pub(super) queue_bytes: IntGauge,
    pub(super) queue_requests_elsewhere: IntGauge,
    pub(super) queue_admitted: IntCounterVec,
    pub(super) queue_shed: IntCounterVec,
    pub(super) pd_split: IntCounterVec,
    pub(super) pd_fallbacks: IntCounterVec,
    pub(super) handoff_failures: IntCounterVec,
    pub(super) load_imbalance: IntCounterVec,
    pub(super) kv_released: IntCounter,
    pub(super) kv_stranded: IntCounter,
    pub(super) kv_orphaned: IntCounterVec,
    pub(super) kv_staged_heard: IntGauge,
    pub(super) kv_staged_untold: IntCounter,
    pub(super) endpoint_running: IntGaugeVec,
    pub(super) endpoint_up: IntGaugeVec,
    pub(super) gossip_age_seconds: GaugeVec,
    pub(super) gossip_bytes: IntCounter,
    pub(super) gossip_rejected: IntCounterVec,
    pub(super) disagreement_ratio: Gauge,
    pub(super) index_bytes: IntGauge,
    pub(super) index_evicted: IntCounter,
    pub(super) sessions: IntGauge,
    pub(super) sessions_evicted: IntCounter,
    pub(super) session_actors: IntGauge,
    pub(super) admin_facts: IntGauge,
    pub(super) admin_facts_refused: IntCounter,
    pub(super) ledger_dropped: IntCounter,
    pub(super) peer_events_delayed: IntCounter,
    pub(super) config_reloads: IntCounterVec,
    pub(super) requests_in_flight: IntGauge,
    pub(super) body_bytes: IntGauge,
    pub(super) mailbox_overload: IntCounterVec,
    pub(super) actors_recreated: IntCounterVec,
    pub(super) log_lines_dropped: IntCounter,
}

impl Metrics {
    /// Metrics that start at zero.
    ///
    /// # Errors
    /// Never in practice: the names below are valid and differ.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let made = Builder { registry: &registry };
        Ok(Self {
            requests: made.counters("requests_total", "Requests answered.", &["model", "route", "code"])?,
            phase_seconds: made.histograms(
                "request_phase_seconds",
                "Time that requests spent in each phase, by the role of their endpoint: queued, prefilling (to the first byte, of a split one to the handoff), handed-off (to the first byte), first-token (from the handoff, of a whole one from its sending, to a stream's first token), decoding (from the first byte).",
                SECONDS,
                &["phase", "role"],
            )?,
            ttft_seconds: made.histogram(
                "ttft_seconds",
                "From arrival to the first byte of a stream.",
                SECONDS,
            )?,
            e2e_seconds: made.histograms(
                "e2e_seconds",
                "From arrival to the last byte.",
                SECONDS,
                &["priority"],
            )?,
            decode_tokens_per_second: made.histograms(
                "decode_tokens_per_second",
                "Pace of streams after their first token.",
                TOKENS_PER_SECOND,
                &["endpoint"],
            )?,
            qoe_ratio: made.histograms(
                "qoe_ratio",
                "Quality of experience of streams, 0 to 1; those that failed count 0.",
                RATIOS,
                &["priority"],
            )?,
            slo_met: made.counters(
                "slo_met_total",
                "Requests that met their target.",
                &["priority", "kind"],
            )?,
            slo_missed: made.counters(
                "slo_missed_total",
                "Requests that missed their target, those that failed among them.",
                &["priority", "kind"],
            )?,
            headers_ignored: made.counter(
                "headers_ignored_total",
                "Priority and target headers whose value made no sense; the defaults were taken.",
            )?,
            word_awaited: made.counters(
                "word_awaited_total",
                "Chats held back a few milliseconds because another replica's word of them was not here yet, by whether it came.",
                &["outcome"],
            )?,
            decisions: made.counters(
                "decisions_total",
                "Endpoints chosen, by why.",
                &["policy", "reason"],
            )?,
            filter_reverted: made.counters(
                "filter_reverted_total",
                "Filters undone because they would have dropped every candidate.",
                &["filter"],
            )?,
            resumed: made.counters(
                "resumed_total",
                "Streams that broke and went on at another endpoint, by how they broke.",
                &["cause"],
            )?,
            stream_breaks: made.counters(
                "stream_breaks_total",
                "Streams that broke after their first byte, by how, and by what became of them: resumed, or why not.",
                &["cause", "outcome"],
            )?,
            retries: made.counters("retries_total", "Legs tried elsewhere, by what failed.", &["reason"])?,
            queue_requests: made.gauge("queue_requests", "Requests that wait for room at an endpoint.")?,
            queue_bytes: made.gauge("queue_bytes", "Bytes of their bodies.")?,
            queue_requests_elsewhere: made.gauge(
                "queue_requests_elsewhere",
                "Requests that wait at other replicas, as they last said.",
            )?,
            queue_admitted: made.counters(
                "queue_admitted_total",
                "Requests that waited and were sent.",
                &["priority"],
            )?,
            queue_shed: made.counters(
                "queue_shed_total",
                "Requests refused with 429 because every endpoint was busy, by why they did not wait (longer).",
                &["reason", "priority"],
            )?,
            pd_split: made.counters(
                "pd_split_total",
                "Decisions whether a prefill and a decode endpoint share a request, by why.",
                &["split", "reason"],
            )?,
            pd_fallbacks: made.counters(
                "pd_fallbacks_total",
                "Requests served whole after a split of them had failed, by why they were not split again.",
                &["reason"],
            )?,
            handoff_failures: made.counters(
                "handoff_failures_total",
                "Legs of split requests that failed before the first byte, by what failed.",
                &["leg", "reason"],
            )?,
            load_imbalance: made.counters(
                "load_imbalance_total",
                "Decisions by load alone because endpoints were too unevenly loaded, by role.",
                &["role"],
            )?,
            kv_released: made.counter(
                "kv_released_total",
                "Prompts computed for a decode that nobody wanted any more, let go of by their engine.",
            )?,
            kv_stranded: made.counter(
                "kv_stranded",
                "Of these, prompts that nobody could be sent to take over: they stay until the engine's own limit.",
            )?,
            kv_orphaned: made.counters(
                "kv_orphaned_total",
                "Prompts that a replica which died had left at their engines, by whether this one could have them let go of (released) or they stay until the engine's own limit (left).",
                &["end"],
            )?,
            kv_staged_heard: made.gauge(
                "kv_staged_heard",
                "Prompts that engines keep for a decode through another replica, which this one would see to if that died.",
            )?,
            kv_staged_untold: made.counter(
                "kv_staged_untold_total",
                "Prompts that engines kept for a decode of which no heir was told because too many were at once.",
            )?,
            endpoint_running: made.gauges(
                "endpoint_running",
                "Requests in flight through all replicas.",
                &["endpoint", "role"],
            )?,
            endpoint_up: made.gauges("endpoint_up", "1 if new requests may go there.", &["endpoint"])?,
            gossip_age_seconds: made.float_gauges(
                "gossip_age_seconds",
                "Since the replica's last heartbeat.",
                &["replica"],
            )?,
            gossip_bytes: made.counter("gossip_bytes_total", "Bytes sent to other replicas.")?,
            gossip_rejected: made.counters(
                "gossip_rejected_total",
                "Datagrams and pulls at the gossip ports that were thrown away.",
                &["cause"],
            )?,
            disagreement_ratio: made.float_gauge(
                "disagreement_ratio",
                "Share of requests for which another replica would have chosen otherwise, 0 to 1.",
            )?,
            index_bytes: made.gauge("index_bytes", "Memory of the prefix index.")?,
            index_evicted: made.counter(
                "index_evicted_total",
                "Pairs of a block and a holder that left the index to make room.",
            )?,
            sessions: made.gauge("sessions", "Sessions remembered.")?,
            sessions_evicted: made.counter("sessions_evicted_total", "Sessions forgotten to make room.")?,
            session_actors: made.gauge("session_actors", "Sessions with an actor of their own.")?,
            admin_facts: made.gauge("admin_facts", "Operators' changes to endpoints that are kept.")?,
            admin_facts_refused: made.counter(
                "admin_facts_refused_total",
                "Operators' changes, made here or heard, for which there was no room.",
            )?,
            ledger_dropped: made.counter(
                "ledger_dropped_total",
                "Placements, pins and changes never told to others because too many waited.",
            )?,
            peer_events_delayed: made.counter(
                "peer_events_delayed_total",
                "Times that what a replica said had to wait because too much waited before it.",
            )?,
            config_reloads: made.counters("config_reloads_total", "Reloads asked for.", &["result"])?,
            body_bytes: made.gauge("body_bytes", "Memory taken by bodies of requests that came in parts.")?,
            requests_in_flight: made.gauge("requests_in_flight", "Requests that have not ended.")?,
            mailbox_overload: made.counters(
                "mailbox_overload_total",
                "Messages that found an actor's mailbox full.",
                &["actor"],
            )?,
            log_lines_dropped: made.counter(
                "log_lines_dropped_total",
                "Log lines lost because the log was not taken fast enough.",
            )?,
            actors_recreated: made.counters(
                "actors_recreated_total",
                "Actors recreated after a panic.",
                &["actor"],
            )?,
            registry,
        })
    }
}

/// What became of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadResult {
    /// The new configuration is in force.
    Taken,
    /// It has faults; the old one is in force.
    Refused,
}

impl ReloadResult {
    /// The result as a metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Refused => "refused",
        }
    }
}

impl Metrics {
    /// What a dead replica had staged was seen to.
    pub(crate) fn orphaned(&self, end: &'static str) {
        self.kv_orphaned.with_label_values(&[end]).inc();
    }

    /// A reload was asked for.
    pub fn reloaded(&self, result: ReloadResult) {
        self.config_reloads.with_label_values(&[result.as_str()]).inc();
    }
}

struct Builder<'a> {
    registry: &'a Registry,
}

type Made<T> = Result<T, prometheus::Error>;

impl Builder<'_> {
    fn keep<T: prometheus::core::Collector + Clone + 'static>(&self, metric: T) -> Made<T> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn options(name: &str, help: &str) -> Opts {
        Opts::new(name, help).namespace("grapevine")
    }

    fn counter(&self, name: &str, help: &str) -> Made<IntCounter> {
        self.keep(IntCounter::with_opts(Self::options(name, help))?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Made<IntCounterVec> {
        self.keep(IntCounterVec::new(Self::options(name, help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Made<IntGauge> {
        self.keep(IntGauge::with_opts(Self::options(name, help))?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Made<IntGaugeVec> {
        self.keep(IntGaugeVec::new(Self::options(name, help), labels)?)
    }

    fn float_gauge(&self, name: &str, help: &str) -> Made<Gauge> {
        self.keep(Gauge::with_opts(Self::options(name, help))?)
    }

    fn float_gauges(&self, name: &str, help: &str, labels: &[&str]) -> Made<GaugeVec> {
        self.keep(GaugeVec::new(Self::options(name, help), labels)?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Made<Histogram> {
        let options = HistogramOpts::from(Self::options(name, help)).buckets(buckets.to_vec());
        self.keep(Histogram::with_opts(options)?)
    }

    fn histograms(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> Made<HistogramVec> {
        let options = HistogramOpts::from(Self::options(name, help)).buckets(buckets.to_vec());
        self.keep(HistogramVec::new(options, labels)?)
    }
}
