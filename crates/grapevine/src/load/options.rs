//! The command line of `grapevine load`, and how it becomes a [`Plan`].

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use routing::request::{PRIORITY_HEADER, TPOT_HEADER, TTFT_HEADER};

use super::body::{Api, Envelope};
use super::client::{Target, Wire};
use super::plan::{Limits, Order, Pace, Plan, Spread, Targets};
use super::trace::{Arrivals, Reading, Trace};
use super::workload::{ChatShape, Source};

/// Clients of a closed loop unless told otherwise.
const CLIENTS: usize = 16;

/// Send a generated chat workload or a recorded trace to OpenAI endpoints and measure the answers
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Base URL that takes the requests, such as http://127.0.0.1:8000; repeat it for several
    #[arg(long = "target", value_name = "URL", required = true)]
    pub targets: Vec<String>,
    /// What stays on one of several targets
    #[arg(long, value_enum, default_value_t)]
    pub spread: Spread,
    /// `chat` for generated chats, or a trace file (Mooncake JSON lines or Azure CSV)
    #[arg(long, value_name = "chat|FILE", default_value = "chat")]
    pub workload: String,
    /// Settles every text and every drawn time
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Stop sending after this time, such as 20s [default: when the workload ends]
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration, help_heading = "End")]
    pub run_time: Option<Duration>,
    /// Stop after this many requests
    #[arg(long, value_name = "N", help_heading = "End")]
    pub requests: Option<u64>,
    /// Time for answers under way at the end, before they are abandoned
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "30s", help_heading = "End")]
    pub drain: Duration,

    /// Closed loop: clients at once, each waiting for its answer [default: 16, for chats without --rate]
    #[arg(long, value_name = "N", conflicts_with = "rate", help_heading = "Pace")]
    pub concurrency: Option<usize>,
    /// Closed loop: what a client does between two turns of a chat [default: chats]
    #[arg(long, value_enum, help_heading = "Pace")]
    pub order: Option<Order>,
    /// Open loop: Poisson arrivals of this many requests a second
    #[arg(long, value_name = "R", allow_negative_numbers = true, help_heading = "Pace")]
    pub rate: Option<f64>,
    /// Open loop: requests in flight at once; more wait and are reported [default: 1000]
    #[arg(long, value_name = "N", help_heading = "Pace")]
    pub in_flight_max: Option<usize>,

    /// How many times faster than recorded [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Trace workload")]
    pub speed: Option<f64>,
    /// Only the trace's beginning, in the trace's own time, such as 10min
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, help_heading = "Trace workload")]
    pub until_trace: Option<Duration>,
    /// Requests recorded at one moment: spread over the time to the next one (at most 3s), or as recorded
    /// [default: spread for Mooncake, recorded for Azure]
    #[arg(long, value_enum, help_heading = "Trace workload")]
    pub arrivals: Option<Arrivals>,

    /// Number of chats [default: 80, or endless with --for or --requests]
    #[arg(long, value_name = "N", help_heading = "Chat workload")]
    pub sessions: Option<u64>,
    /// Requests in each chat [default: 5]
    #[arg(long, value_name = "N", help_heading = "Chat workload")]
    pub turns: Option<u32>,
    /// Tenants that the chats belong to [default: 1]
    #[arg(long, value_name = "N", help_heading = "Chat workload")]
    pub tenants: Option<u64>,
    /// Bytes of system prompt that all chats share [default: 340]
    #[arg(long, value_name = "BYTES", help_heading = "Chat workload")]
    pub common_bytes: Option<usize>,
    /// Bytes of system prompt that the chats of a tenant share [default: 0]
    #[arg(long, value_name = "BYTES", help_heading = "Chat workload")]
    pub tenant_bytes: Option<usize>,
    /// Bytes of a chat's first user message [default: 2500]
    #[arg(long, value_name = "BYTES", help_heading = "Chat workload")]
    pub first_bytes: Option<usize>,
    /// Bytes of each later user message [default: 400]
    #[arg(long, value_name = "BYTES", help_heading = "Chat workload")]
    pub turn_bytes: Option<usize>,
    /// Time between an answer and the user's next turn, in ms [default: 0]
    #[arg(long, value_name = "MS", help_heading = "Chat workload")]
    pub think_ms: Option<u64>,
    /// Tokens of each answer [default: 64]; with a trace, the most asked for in any answer
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,

    /// Which OpenAI API to use
    #[arg(long, value_enum, default_value_t, help_heading = "Requests")]
    pub api: Api,
    /// Path behind the target's URL [default: /v1/chat/completions or /v1/completions, by --api]
    #[arg(long, value_name = "PATH", help_heading = "Requests")]
    pub endpoint_path: Option<String>,
    /// The `model` field [default: left out]
    #[arg(long, value_name = "NAME", help_heading = "Requests")]
    pub model: Option<String>,
    /// Ask for streams (the default)
    #[arg(long, overrides_with = "no_stream", help_heading = "Requests")]
    pub stream: bool,
    /// Ask for whole replies; TTFT and inter-token times are then unknown
    #[arg(long, overrides_with = "stream", help_heading = "Requests")]
    pub no_stream: bool,
    /// Send vLLM's `ignore_eos`, so that answers have their full length
    #[arg(long, help_heading = "Requests")]
    pub ignore_eos: bool,
    /// A header for every request; repeat it for several
    #[arg(long = "header", value_name = "NAME: VALUE", help_heading = "Requests")]
    pub headers: Vec<String>,
    /// Class of every request, 1 (high) to 3: sent as x-request-priority
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=3), help_heading = "Requests")]
    pub priority: Option<u8>,
    /// First token expected after this time: sent as x-slo-ttft-ms, and the answers are judged by it
    /// [default: the class's]
    #[arg(long, value_name = "MS", help_heading = "Requests")]
    pub slo_ttft_ms: Option<f64>,
    /// Time between tokens expected: sent as x-slo-tpot-ms, and the answers are judged by it
    /// [default: the class's]
    #[arg(long, value_name = "MS", help_heading = "Requests")]
    pub slo_tpot_ms: Option<f64>,
    /// Header that tells which chat a request belongs to [default: none]
    #[arg(long, value_name = "NAME", help_heading = "Requests")]
    pub session_header: Option<String>,
    /// Reply header that names the endpoint which answered
    #[arg(long, value_name = "NAME", default_value = "x-grapevine-endpoint", help_heading = "Requests")]
    pub endpoint_header: String,
    /// Time allowed for a connection
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "2s", help_heading = "Requests")]
    pub connect_timeout: Duration,
    /// Time allowed for a whole request, retries included
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "300s", help_heading = "Requests")]
    pub timeout: Duration,
    /// Send a request again, at the next target, after what OpenAI's client libraries retry: no connection,
    /// no reply, 408, 409, 429, 5xx
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Requests")]
    pub retries: u32,
    /// Open a connection for each request
    #[arg(long, help_heading = "Requests")]
    pub fresh_connections: bool,

    /// Write the report to this file as JSON
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub json: Option<PathBuf>,
    /// No progress bar
    #[arg(long, help_heading = "Result")]
    pub quiet: bool,
    /// Exit with 1 when a request failed
    #[arg(long, help_heading = "Result")]
    pub fail_on_error: bool,
}

/// Everything wrong with the options, at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<String>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for Faults {}

impl Options {
    /// The plan that the options describe, with its trace read; or all their faults.
    pub fn plan(&self) -> Result<Plan, Faults> {
        let mut faults = Vec::new();
        self.check_numbers(&mut faults);
        self.check_use(&mut faults);
        let targets = self.targets(&mut faults);
        let wire = self.wire(&mut faults);
        let source = match self.source() {
            Ok(source) => Some(source),
            Err(fault) => {
                faults.push(fault);
                None
            }
        };
        let limits = Limits {
            requests_max: self.requests,
            run_max: self.run_time,
            drain_max: self.drain,
            in_flight_max: self.in_flight_max.unwrap_or(Limits::default().in_flight_max),
            retries_max: self.retries,
        };
        let envelope = Envelope {
            api: self.api,
            model: self.model.clone(),
            stream: !self.no_stream,
            ignore_eos: self.ignore_eos,
        };
        match (targets, source) {
            (Some(targets), Some(source)) if faults.is_empty() => Ok(Plan {
                targets,
                spread: self.spread,
                source,
                pace: self.pace(),
                envelope,
                wire,
                limits,
                seed: self.seed,
            }),
            _ => Err(Faults(faults)),
        }
    }

    fn is_chat(&self) -> bool {
        self.workload == "chat"
    }

    fn pace(&self) -> Pace {
        match (self.rate, self.concurrency) {
            (Some(requests_per_second), _) => Pace::Poisson { requests_per_second },
            (None, None) if !self.is_chat() => Pace::Recorded { speed: self.speed.unwrap_or(1.0) },
            (None, clients) => {
                Pace::Closed { clients: clients.unwrap_or(CLIENTS), order: self.order.unwrap_or_default() }
            }
        }
    }

    fn chat_shape(&self) -> ChatShape {
        let usual = ChatShape::default();
        let endless = self.run_time.is_some() || self.requests.is_some();
        ChatShape {
            sessions: self.sessions.or(if endless { None } else { usual.sessions }),
            turns: self.turns.unwrap_or(usual.turns),
            tenants: self.tenants.unwrap_or(usual.tenants),
            common_bytes: self.common_bytes.unwrap_or(usual.common_bytes),
            tenant_bytes: self.tenant_bytes.unwrap_or(usual.tenant_bytes),
            first_bytes: self.first_bytes.unwrap_or(usual.first_bytes),
            turn_bytes: self.turn_bytes.unwrap_or(usual.turn_bytes),
            max_tokens: self.max_tokens.unwrap_or(usual.max_tokens),
            think: self.think_ms.map_or(usual.think, Duration::from_millis),
        }
    }

    fn source(&self) -> Result<Source, String> {
        if self.is_chat() {
            return Ok(Source::Chat(Arc::new(self.chat_shape())));
        }
        let reading = Reading {
            until: self.until_trace,
            arrivals: self.arrivals,
            output_tokens_max: self.max_tokens,
            seed: self.seed,
        };
        let trace = Trace::open(self.workload.as_ref(), &reading);
        trace.map(|trace| Source::Trace(Arc::new(trace))).map_err(|error| format!("--workload: {error:#}"))
    }

    fn targets(&self, faults: &mut Vec<String>) -> Option<Targets> {
        let path = self.endpoint_path.as_deref().unwrap_or(self.api.default_path());
        if !path.starts_with('/') {
            faults.push(format!("--endpoint-path {path:?}: must begin with /"));
            return None;
        }
        let mut targets = Vec::new();
        for base in &self.targets {
            match Target::new(base, path) {
                Ok(target) => targets.push(target),
                Err(error) => faults.push(format!("--target: {error:#}")),
            }
        }
        Targets::new(targets).ok()
    }

    fn wire(&self, faults: &mut Vec<String>) -> Wire {
        let mut wire = Wire {
            connect_timeout: self.connect_timeout,
            request_timeout: self.timeout,
            fresh_connections: self.fresh_connections,
            headers: HeaderMap::new(),
            session_header: None,
            ..Wire::default()
        };
        for header in &self.headers {
            match parse_header(header) {
                Some((name, value)) => drop(wire.headers.append(name, value)),
                None => faults.push(format!("--header {header:?}: must be NAME: VALUE")),
            }
        }
        for (name, value) in [
            (PRIORITY_HEADER, self.priority.map(|class| class.to_string())),
            (TTFT_HEADER, self.slo_ttft_ms.map(|ms| ms.to_string())),
            (TPOT_HEADER, self.slo_tpot_ms.map(|ms| ms.to_string())),
        ] {
            if let Some(value) = value.and_then(|text| text.parse().ok()) {
                wire.headers.insert(HeaderName::from_static(name), value);
            }
        }
        let mut name = |flag: &str, name: &str| {
            let parsed: Option<HeaderName> = name.parse().ok();
            if parsed.is_none() {
                faults.push(format!("--{flag} {name:?}: not a header name"));
            }
            parsed
        };
        wire.session_header =
            self.session_header.as_deref().and_then(|header| name("session-header", header));
        if let Some(header) = name("endpoint-header", &self.endpoint_header) {
            wire.endpoint_header = header;
        }
        wire
    }

    fn check_numbers(&self, faults: &mut Vec<String>) {
        let mut above_zero = |flag: &str, value: Option<f64>| {
            if value.is_some_and(|value| !(value.is_finite() && value > 0.0)) {
                faults.push(format!("--{flag}: must be above 0"));
            }
        };
        above_zero("speed", self.speed);
        above_zero("rate", self.rate);
        above_zero("concurrency", self.concurrency.map(|value| value as f64));
        above_zero("in-flight-max", self.in_flight_max.map(|value| value as f64));
        above_zero("turns", self.turns.map(f64::from));
        above_zero("tenants", self.tenants.map(|value| value as f64));
        above_zero("sessions", self.sessions.map(|value| value as f64));
        above_zero("requests", self.requests.map(|value| value as f64));
        above_zero("max-tokens", self.max_tokens.map(f64::from));
        above_zero("slo-ttft-ms", self.slo_ttft_ms);
        above_zero("slo-tpot-ms", self.slo_tpot_ms);
        above_zero("timeout", Some(self.timeout.as_secs_f64()));
        above_zero("connect-timeout", Some(self.connect_timeout.as_secs_f64()));
    }

    /// A flag that would change nothing is a misunderstanding, and said so.
    fn check_use(&self, faults: &mut Vec<String>) {
        let chat = self.is_chat();
        let closed = matches!(self.pace(), Pace::Closed { .. });
        let recorded = matches!(self.pace(), Pace::Recorded { .. });
        let endless = chat && self.chat_shape().sessions.is_none();
        for (given, useful, flag, needs) in [
            (self.speed.is_some(), recorded, "speed", "a trace at its recorded times"),
            (self.arrivals.is_some(), recorded, "arrivals", "a trace at its recorded times"),
            (self.until_trace.is_some(), !chat, "until-trace", "a trace"),
            (
                self.in_flight_max.is_some(),
                !closed,
                "in-flight-max",
                "an open loop; --concurrency is the bound",
            ),
            (self.order.is_some(), chat && closed, "order", "chats in a closed loop"),
            (
                self.order == Some(Order::Turns),
                !endless,
                "order turns",
                "--sessions: endless chats have no last one",
            ),
            (self.sessions.is_some(), chat, "sessions", "generated chats"),
            (self.slo_ttft_ms.is_some(), !self.no_stream, "slo-ttft-ms", "streams"),
            (self.slo_tpot_ms.is_some(), !self.no_stream, "slo-tpot-ms", "streams"),
            (self.turns.is_some(), chat, "turns", "generated chats"),
            (self.tenants.is_some(), chat, "tenants", "generated chats"),
            (self.common_bytes.is_some(), chat, "common-bytes", "generated chats"),
            (self.tenant_bytes.is_some(), chat, "tenant-bytes", "generated chats"),
            (self.first_bytes.is_some(), chat, "first-bytes", "generated chats"),
            (self.turn_bytes.is_some(), chat, "turn-bytes", "generated chats"),
            (self.think_ms.is_some(), chat, "think-ms", "generated chats"),
        ] {
            if given && !useful {
                faults.push(format!("--{flag} needs {needs}"));
            }
        }
    }
}

fn parse_header(header: &str) -> Option<(HeaderName, HeaderValue)> {
    let (name, value) = header.split_once(':')?;
    Some((name.trim().parse().ok()?, value.trim().parse().ok()?))
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
