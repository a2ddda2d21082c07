//! What a rank counts, and how it is shown under vLLM's names in the Prometheus text format.

use std::fmt::Write;
use std::time::Duration;

use crate::flight::Finish;
use crate::rank::{Ended, Snapshot};
use crate::timing::Moment;
use crate::transfer::{Connector, KvCounts};

/// Bucket bounds of vLLM's histograms, in seconds (or tokens).
const TTFT_S: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
const INTER_TOKEN_S: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const REQUEST_S: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
const TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];

/// A histogram with fixed bounds.
#[derive(Clone)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    buckets: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, buckets: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    pub(crate) fn observe(&mut self, value: f64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        if let Some(bucket) = self.buckets.get_mut(bucket) {
            *bucket += 1;
        }
        self.count += 1;
        self.sum += value;
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }
}

/// What one rank has counted since it started.
#[derive(Clone)]
pub(crate) struct Measures {
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) finished_length: u64,
    pub(crate) finished_stop: u64,
    pub(crate) finished_abort: u64,
    pub(crate) finished_error: u64,
    pub(crate) rejections: u64,
    pub(crate) kv: KvCounts,
    ttft: Histogram,
    inter_token: Histogram,
    e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    inference: Histogram,
    prompt: Histogram,
    generation: Histogram,
}

impl Measures {
    /// Nothing counted yet, for a model of at most so many tokens: counts of tokens have buckets up to there.
    pub(crate) fn new(model_tokens_max: u32) -> Self {
        let tokens = &TOKENS[..TOKENS.partition_point(|&bound| bound <= f64::from(model_tokens_max))];
        Self {
            prompt_tokens: 0,
            cached_tokens: 0,
            generation_tokens: 0,
            finished_length: 0,
            finished_stop: 0,
            finished_abort: 0,
            finished_error: 0,
            rejections: 0,
            kv: KvCounts::new(),
            ttft: Histogram::new(TTFT_S),
            inter_token: Histogram::new(INTER_TOKEN_S),
            e2e: Histogram::new(REQUEST_S),
            queue: Histogram::new(REQUEST_S),
            prefill: Histogram::new(REQUEST_S),
            inference: Histogram::new(REQUEST_S),
            prompt: Histogram::new(tokens),
            generation: Histogram::new(tokens),
        }
    }

    pub(crate) fn started(&mut self, prompt_tokens: u32, cached_tokens: u32, queued: Duration) {
        self.prompt_tokens += u64::from(prompt_tokens);
        self.cached_tokens += u64::from(cached_tokens);
        self.queue.observe(queued.as_secs_f64());
    }

    pub(crate) fn first_token(&mut self, since_arrival: Duration, since_start: Duration) {
        self.ttft.observe(since_arrival.as_secs_f64());
        self.prefill.observe(since_start.as_secs_f64());
    }

    pub(crate) fn inter_token(&mut self, gap: Duration) {
        self.inter_token.observe(gap.as_secs_f64());
    }

    pub(crate) fn generated(&mut self, tokens: u32) {
        self.generation_tokens += u64::from(tokens);
    }

    pub(crate) fn finished(&mut self, ended: &Ended, finish: Finish, at: Moment) {
        match finish {
            Finish::Length => self.finished_length += 1,
            Finish::Stop => self.finished_stop += 1,
        }
        self.ended(ended, at);
    }

    pub(crate) fn aborted(&mut self, ended: &Ended, at: Moment) {
        self.finished_abort += 1;
        self.ended(ended, at);
    }

    pub(crate) fn failed(&mut self, ended: &Ended, at: Moment) {
        self.finished_error += 1;
        self.ended(ended, at);
    }

    fn ended(&mut self, ended: &Ended, at: Moment) {
        self.e2e.observe(at.since(ended.arrived).as_secs_f64());
        self.inference.observe(at.since(ended.started).as_secs_f64());
        self.prompt.observe(f64::from(ended.prompt_tokens));
        self.generation.observe(f64::from(ended.generated));
    }
}

/// What the whole process shows beside its ranks.
pub(crate) struct Page<'a> {
    pub(crate) model: &'a str,
    pub(crate) block_tokens: u32,
    pub(crate) kv_blocks: u32,
    pub(crate) process_start_unix_s: f64,
    pub(crate) connector: Connector,
    /// Bootstrap rooms in use.
    pub(crate) rooms: usize,
    pub(crate) ranks: &'a [Snapshot],
}

impl Page<'_> {
    /// The page in the text format.
    pub(crate) fn render(&self) -> String {
        let mut out = String::with_capacity(16 << 10);
        family(
            &mut out,
            "process_start_time_seconds",
            "gauge",
            "Start time of the process since unix epoch in seconds.",
        );
        line(&mut out, "process_start_time_seconds", "", self.process_start_unix_s);
        self.load(&mut out);
        self.tokens(&mut out);
        self.requests(&mut out);
        self.latencies(&mut out);
        self.transfers(&mut out, self.connector);
        self.cache_config(&mut out);
        out
    }

    fn load(&self, out: &mut String) {
        self.each(
            out,
            "num_requests_running",
            "gauge",
            "Number of requests in model execution batches.",
            |rank| f64::from(rank.gauges.running),
        );
        self.each(
            out,
            "num_requests_waiting",
            "gauge",
            "Number of requests waiting to be processed.",
            |rank| f64::from(rank.gauges.waiting),
        );
        let name = "vllm:num_requests_waiting_by_reason";
        family(out, name, "gauge", "Number of waiting requests by reason.");
        for (index, rank) in self.ranks.iter().enumerate() {
            let deferred = rank.gauges.fetching;
            let capacity = rank.gauges.waiting.saturating_sub(deferred);
            for (reason, count) in [("capacity", capacity), ("deferred", deferred)] {
                let labels = format!("engine=\"{index}\",{},reason=\"{reason}\"", self.model_label());
                line(out, name, &labels, f64::from(count));
            }
        }
        self.each(
            out,
            "kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            |rank| rank.gauges.kv_ratio,
        );
    }

    fn tokens(&self, out: &mut String) {
        self.each(
            out,
            "prefix_cache_queries_total",
            "counter",
            "Prefix cache queries, in terms of number of queried tokens.",
            |rank| rank.totals.cache_query_tokens as f64,
        );
        self.each(
            out,
            "prefix_cache_hits_total",
            "counter",
            "Prefix cache hits, in terms of number of cached tokens.",
            |rank| rank.totals.cache_hit_tokens as f64,
        );
        let external = |rank: &Snapshot| match self.connector {
            Connector::None => 0.0,
            _ => (rank.totals.cache_query_tokens - rank.totals.cache_hit_tokens) as f64,
        };
        let help = "External prefix cache queries from KV connector cross-instance cache sharing.";
        self.each(out, "external_prefix_cache_queries_total", "counter", help, external);
        let help = "External prefix cache hits from KV connector cross-instance cache sharing.";
        self.each(out, "external_prefix_cache_hits_total", "counter", help, |rank| {
            rank.totals.fetch_tokens as f64
        });
        self.each(
            out,
            "num_preemptions_total",
            "counter",
            "Cumulative number of preemption from the engine.",
            |rank| rank.totals.preemptions as f64,
        );
        self.each(out, "prompt_tokens_total", "counter", "Number of prefill tokens processed.", |rank| {
            rank.measures.prompt_tokens as f64
        });
        let sources = |rank: &Snapshot| {
            let Measures { prompt_tokens, cached_tokens, kv, .. } = &rank.measures;
            let computed = prompt_tokens.saturating_sub(cached_tokens + kv.fetched_tokens);
            [
                ("local_compute", computed),
                ("local_cache_hit", *cached_tokens),
                ("external_kv_transfer", kv.fetched_tokens),
            ]
        };
        self.by_source(out, "prompt_tokens_by_source_total", "Number of prompt tokens by source.", sources);
        let help = "Number of cached prompt tokens (local + external).";
        self.each(out, "prompt_tokens_cached_total", "counter", help, |rank| {
            (rank.measures.cached_tokens + rank.totals.fetch_tokens) as f64
        });
        let help = "Prefix-cache hit tokens by the cache tier that supplied them.";
        self.by_source(out, "prompt_tokens_cached_by_source_total", help, |rank| {
            [("device", rank.measures.cached_tokens), ("p2p", rank.totals.fetch_tokens)]
        });
        self.each(
            out,
            "generation_tokens_total",
            "counter",
            "Number of generation tokens processed.",
            |rank| rank.measures.generation_tokens as f64,
        );
    }

    fn requests(&self, out: &mut String) {
        family(out, "vllm:request_success_total", "counter", "Count of successfully processed requests.");
        for (index, rank) in self.ranks.iter().enumerate() {
            let measures = &rank.measures;
            for (reason, count) in [
                ("stop", measures.finished_stop),
                ("length", measures.finished_length),
                ("abort", measures.finished_abort),
                ("error", measures.finished_error),
            ] {
                let labels =
                    format!("engine=\"{index}\",finished_reason=\"{reason}\",{}", self.model_label());
                line(out, "vllm:request_success_total", &labels, count as f64);
            }
        }
        family(
            out,
            "vllm:admission_rejections_total",
            "counter",
            "Number of admission attempts rejected by a queue limit, by reason.",
        );
        let rejections: u64 = self.ranks.iter().map(|rank| rank.measures.rejections).sum();
        let labels = format!("{},reason=\"max_num_queued_reqs\"", self.model_label());
        line(out, "vllm:admission_rejections_total", &labels, rejections as f64);
    }

    fn latencies(&self, out: &mut String) {
        type Pick = fn(&Measures) -> &Histogram;
        let histograms: [(&str, &str, Pick); 8] = [
            ("request_prompt_tokens", "Number of prefill tokens processed.", |m| &m.prompt),
            ("request_generation_tokens", "Number of generation tokens processed.", |m| &m.generation),
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", |m| &m.ttft),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", |m| {
                &m.inter_token
            }),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", |m| &m.e2e),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", |m| {
                &m.queue
            }),
            ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", |m| {
                &m.prefill
            }),
            (
                "request_inference_time_seconds",
                "Histogram of time spent in RUNNING phase for request.",
                |m| &m.inference,
            ),
        ];
        for (name, help, pick) in histograms {
            self.histograms(out, name, help, pick);
        }
    }

    pub(crate) fn histograms(
        &self,
        out: &mut String,
        name: &str,
        help: &str,
        pick: impl Fn(&Measures) -> &Histogram,
    ) {
        let name = format!("vllm:{name}");
        family(out, &name, "histogram", help);
        for (index, rank) in self.ranks.iter().enumerate() {
            self.histogram(out, &name, index, pick(&rank.measures));
        }
    }

    fn histogram(&self, out: &mut String, name: &str, engine: usize, histogram: &Histogram) {
        let model = self.model_label();
        let mut below = 0;
        for (bound, count) in histogram.bounds.iter().zip(&histogram.buckets) {
            below += count;
            let labels = format!("engine=\"{engine}\",le=\"{bound:?}\",{model}");
            line(out, &format!("{name}_bucket"), &labels, below as f64);
        }
        let labels = format!("engine=\"{engine}\",le=\"+Inf\",{model}");
        line(out, &format!("{name}_bucket"), &labels, histogram.count as f64);
        let labels = format!("engine=\"{engine}\",{model}");
        line(out, &format!("{name}_count"), &labels, histogram.count as f64);
        line(out, &format!("{name}_sum"), &labels, histogram.sum);
    }

    fn cache_config(&self, out: &mut String) {
        family(out, "vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig");
        for index in 0..self.ranks.len() {
            let labels = format!(
                "block_size=\"{}\",enable_prefix_caching=\"True\",engine=\"{index}\",num_gpu_blocks=\"{}\"",
                self.block_tokens, self.kv_blocks
            );
            line(out, "vllm:cache_config_info", &labels, 1.0);
        }
    }

    pub(crate) fn each(
        &self,
        out: &mut String,
        name: &str,
        kind: &str,
        help: &str,
        value: impl Fn(&Snapshot) -> f64,
    ) {
        self.each_named(out, &format!("vllm:{name}"), kind, help, value);
    }

    /// A figure that vLLM does not have.
    pub(crate) fn each_own(
        &self,
        out: &mut String,
        name: &str,
        kind: &str,
        help: &str,
        value: impl Fn(&Snapshot) -> f64,
    ) {
        self.each_named(out, &format!("sim:{name}"), kind, help, value);
    }

    fn each_named(
        &self,
        out: &mut String,
        name: &str,
        kind: &str,
        help: &str,
        value: impl Fn(&Snapshot) -> f64,
    ) {
        family(out, name, kind, help);
        for (index, rank) in self.ranks.iter().enumerate() {
            line(out, name, &format!("engine=\"{index}\",{}", self.model_label()), value(rank));
        }
    }

    fn by_source<const N: usize>(
        &self,
        out: &mut String,
        name: &str,
        help: &str,
        counts: impl Fn(&Snapshot) -> [(&'static str, u64); N],
    ) {
        let name = format!("vllm:{name}");
        family(out, &name, "counter", help);
        for (index, rank) in self.ranks.iter().enumerate() {
            for (source, count) in counts(rank) {
                let labels = format!("engine=\"{index}\",{},source=\"{source}\"", self.model_label());
                line(out, &name, &labels, count as f64);
            }
        }
    }

    pub(crate) fn model_label(&self) -> String {
        let escaped = self.model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("model_name=\"{escaped}\"")
    }
}

pub(crate) fn family(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

pub(crate) fn line(out: &mut String, name: &str, labels: &str, value: f64) {
    let _ = if labels.is_empty() {
        writeln!(out, "{name} {value:?}")
    } else {
        writeln!(out, "{name}{{{labels}}} {value:?}")
    };
}
