//! The command line of `grapevine lab`, and the grid of runs that it asks for.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ::lab::{ChatShape, Cut, Decider, EngineSpec, Gossip, Part, Profile, Scenario, TraceRow, Workload};
use clap::{Args, ValueEnum};
use routing::policy::PolicyName;
use routing::settings::Settings;

use crate::load::{Arrivals, Faults, Prompt, Reading, Trace};

/// Runs of one grid: hours of work for any machine; more is a slip in a list.
const RUNS_MAX: usize = 1_000;
/// How busy the fluid engines would be without any cache, unless told otherwise: as in the published comparison.
const UTILISATION: f64 = 0.91;
/// KV blocks of a fluid engine's cache: the 6,000 blocks of 512 tokens of the same comparison.
const FLUID_KV_BLOCKS: u32 = 192_000;
/// The product's own period of pulses; a slower gossip has slower ones.
const PULSE_MS_MIN: f64 = 100.0;

/// Play a trace or generated chats through simulated replicas and engines, in virtual time
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Trace to play, Mooncake JSON lines or Azure CSV [default: generated chats in a closed loop, 16 clients, 12
    /// tenants with 2 KB in common and 6 KB of their own]
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Policies: any of `grapevine serve`, `least-connections` (one balancer that counts), `all-knowing` (one
    /// router that knows every queue and cache)
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "cost")]
    pub policy: Vec<String>,
    /// How many replicas
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,2,4,8")]
    pub replicas: Vec<String>,
    /// How many engines
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "8")]
    pub engines: Vec<String>,
    /// Settles everything that is left to chance
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// What engines are like: `fluid` (one prompt after the other at a rate, no decode) or a profile of `grapevine
    /// engine`, in steps with chunked prefill [default: fluid for a trace, 8b-h100 for chats]
    #[arg(long, value_enum, help_heading = "Engines")]
    pub engine: Option<EngineKind>,
    /// Make engines so fast that the trace's prompts would keep them busy for this share of the time without any cache
    /// [default: 0.91 for fluid ones; a profile's own speed]
    #[arg(long, value_name = "RATIO", help_heading = "Engines")]
    pub utilisation: Option<f64>,
    /// KV blocks of 16 tokens [default: 192000 in fluid engines; the profile's]
    #[arg(long, value_name = "N", help_heading = "Engines")]
    pub kv_blocks: Option<u32>,

    /// Requests recorded at one moment: spread over the time to the next one (at most 3s), or as recorded
    /// [default: spread for Mooncake, recorded for Azure]
    #[arg(long, value_enum, help_heading = "Trace")]
    pub arrivals: Option<Arrivals>,
    /// Only the trace's beginning, in the trace's own time, such as 10min
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, help_heading = "Trace")]
    pub until_trace: Option<Duration>,
    /// Which requests figures are of; all before them are played, too
    #[arg(long, value_enum, default_value_t, help_heading = "Trace")]
    pub figures: FiguresOf,

    /// Time between two pushes of what changed at a replica, in ms; 0 for at once, `never` for none
    #[arg(
        long,
        value_name = "MS",
        value_delimiter = ',',
        default_value = "2",
        allow_hyphen_values = true,
        help_heading = "Gossip"
    )]
    pub gossip_ms: Vec<String>,
    /// From a push until it is heard, in ms
    #[arg(long, value_name = "MS", default_value_t = 1.0, help_heading = "Gossip")]
    pub delay_ms: f64,
    /// Share of words that never arrive
    #[arg(long, value_name = "RATIO", default_value_t = 0.0, help_heading = "Gossip")]
    pub loss: f64,
    /// Cut the replicas in two from one time to another, such as 10min..11min; repeat it for several
    #[arg(long, value_name = "FROM..UNTIL", help_heading = "Gossip")]
    pub cut: Vec<String>,

    /// Runs at once [default: one a core]
    #[arg(long, value_name = "N", help_heading = "Result")]
    pub threads: Option<usize>,
    /// Write the figures to this file as JSON
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub json: Option<PathBuf>,
    /// Write a chart to this file
    #[arg(long, value_name = "FILE", help_heading = "Result")]
    pub svg: Option<PathBuf>,
    /// No progress bar
    #[arg(long, help_heading = "Result")]
    pub quiet: bool,
}

/// What engines are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineKind {
    /// One prompt after the other at a rate, nothing else takes time.
    Fluid,
    /// An 8B model on one H100.
    #[value(name = "8b-h100")]
    Llama8bH100,
    /// A 70B model on four H100.
    #[value(name = "70b-h100")]
    Llama70bH100,
    /// An 8B model on one L40S.
    #[value(name = "l40s")]
    Llama8bL40s,
}

/// Which requests of a trace figures are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum FiguresOf {
    /// All of them.
    #[default]
    Whole,
    /// The first half of the trace's time.
    FirstHalf,
    /// The second half of the trace's time, after the first was played.
    SecondHalf,
}

/// One run of the grid.
pub(super) struct Cell {
    pub(super) policy: String,
    pub(super) replicas: usize,
    pub(super) engines: usize,
    /// `None` for never.
    pub(super) gossip_ms: Option<f64>,
    pub(super) scenario: Scenario,
}

/// All runs, and what is known of the workload.
pub(super) struct Grid {
    pub(super) cells: Vec<Cell>,
    pub(super) workload: String,
    pub(super) seed: u64,
    /// The share of the trace's blocks that a cache without end would have.
    pub(super) ceiling: Option<f64>,
}

/// Who decides, before it is known how many.
#[derive(Clone, Copy)]
enum Name {
    Policy(PolicyName),
    LeastConnections,
    AllKnowing,
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "least-connections" => Ok(Self::LeastConnections),
            "all-knowing" => Ok(Self::AllKnowing),
            _ => text
                .parse()
                .map(Self::Policy)
                .map_err(|unknown| format!("--policy: {unknown}, least-connections, all-knowing")),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(name) => write!(f, "{name}"),
            Self::LeastConnections => f.write_str("least-connections"),
            Self::AllKnowing => f.write_str("all-knowing"),
        }
    }
}

impl Options {
    /// How many runs go on at once.
    pub(super) fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// The runs that the options ask for, with the trace read; or all their faults.
    pub(super) fn grid(&self) -> Result<Grid, Faults> {
        let mut faults = Vec::new();
        let names = each(&self.policy, &mut faults, str::parse::<Name>);
        let replicas = counts("--replicas", &self.replicas, 128, &mut faults);
        let engines = counts("--engines", &self.engines, 10_000, &mut faults);
        let gossip = each(&self.gossip_ms, &mut faults, gossip_ms);
        let cuts = each(&self.cut, &mut faults, cut);
        self.check_numbers(&mut faults);
        let runs = names.len() * replicas.len() * engines.len() * gossip.len();
        if runs > RUNS_MAX {
            faults.push(format!("the lists make {runs} runs; the most is {RUNS_MAX}"));
        }
        let trace = self.trace(&mut faults);
        if !faults.is_empty() {
            return Err(Faults(faults));
        }
        let gossip_of = |ms: Option<f64>| Gossip {
            push_every: ms.map(|ms| Duration::from_secs_f64(ms / 1e3)),
            pulse_every: Duration::from_secs_f64(ms.unwrap_or_default().max(PULSE_MS_MIN) / 1e3),
            delay: Duration::from_secs_f64(self.delay_ms / 1e3),
            loss: self.loss,
            cuts: cuts.clone(),
            ..Gossip::default()
        };
        let mut cells = Vec::new();
        for name in names {
            for &engines in &engines {
                let spec = self.engine_spec(trace.as_ref(), engines);
                let mut add = |replicas, gossip_ms, decider| {
                    let scenario = Scenario {
                        decider,
                        engines: vec![spec; engines],
                        workload: trace
                            .clone()
                            .map_or(Workload::Chats(ChatShape::default()), Workload::Trace),
                        gossip: gossip_of(gossip_ms),
                        usage: true,
                        seed: self.seed,
                    };
                    cells.push(Cell { policy: name.to_string(), replicas, engines, gossip_ms, scenario });
                };
                match name {
                    Name::LeastConnections => add(1, None, Decider::LeastConnections),
                    Name::AllKnowing => add(1, None, Decider::AllKnowing),
                    Name::Policy(policy) => {
                        let settings = Settings { policy, ..Settings::default() };
                        for &ms in &gossip {
                            for &count in &replicas {
                                add(
                                    count,
                                    ms,
                                    Decider::Replicas { count, settings: Box::new(settings.clone()) },
                                );
                            }
                        }
                    }
                }
            }
        }
        Ok(Grid {
            cells,
            workload: self.trace.as_ref().map_or("chats".to_owned(), |path| path.display().to_string()),
            seed: self.seed,
            ceiling: trace.as_ref().map(::lab::Trace::ceiling).filter(|ceiling| *ceiling > 0.0),
        })
    }

    fn kind(&self) -> EngineKind {
        let usual = if self.trace.is_some() { EngineKind::Fluid } else { EngineKind::Llama8bH100 };
        self.engine.unwrap_or(usual)
    }

    fn check_numbers(&self, faults: &mut Vec<String>) {
        let mut range = |flag: &str, value: f64, min: f64, max: f64| {
            if !(min..=max).contains(&value) {
                faults.push(format!("--{flag} {value}: allowed: {min} to {max}"));
            }
        };
        range("utilisation", self.utilisation.unwrap_or(UTILISATION), 0.001, 100.0);
        range("kv-blocks", self.kv_blocks.unwrap_or(FLUID_KV_BLOCKS).into(), 1.0, f64::from(1 << 22));
        range("delay-ms", self.delay_ms, 0.0, 60_000.0);
        range("loss", self.loss, 0.0, 0.99);
        range("threads", self.threads() as f64, 1.0, 1_024.0);
        if self.trace.is_none() {
            if self.kind() == EngineKind::Fluid || self.utilisation.is_some() {
                faults.push("--engine fluid and --utilisation take their speed from a --trace".to_owned());
            }
            let for_traces = self.arrivals.is_some() || self.until_trace.is_some();
            if for_traces || self.figures != FiguresOf::Whole {
                faults.push("--arrivals, --until-trace and --figures are for a --trace".to_owned());
            }
        }
    }

    fn engine_spec(&self, trace: Option<&::lab::Trace>, engines: usize) -> EngineSpec {
        let profile = match self.kind() {
            EngineKind::Fluid => {
                let per_second = trace.map_or(1.0, ::lab::Trace::input_tokens_per_second);
                let rate = per_second / engines as f64 / self.utilisation.unwrap_or(UTILISATION);
                return EngineSpec::fluid(rate, self.kv_blocks.unwrap_or(FLUID_KV_BLOCKS));
            }
            EngineKind::Llama8bH100 => Profile::Llama8bH100,
            EngineKind::Llama70bH100 => Profile::Llama70bH100,
            EngineKind::Llama8bL40s => Profile::Llama8bL40s,
        };
        let mut spec = EngineSpec::step(profile);
        spec.limits.kv_blocks = self.kv_blocks.unwrap_or(spec.limits.kv_blocks);
        if let (Some(utilisation), Some(trace)) = (self.utilisation, trace) {
            let per_token = spec.timing.prefill_per_token.as_secs_f64();
            let busy = trace.input_tokens_per_second() / engines as f64 * per_token;
            spec.timing = spec.timing.sped_up(busy / utilisation);
        }
        spec
    }

    fn trace(&self, faults: &mut Vec<String>) -> Option<::lab::Trace> {
        let path = self.trace.as_ref()?;
        let reading = Reading {
            arrivals: self.arrivals,
            until: self.until_trace,
            seed: self.seed,
            ..Reading::default()
        };
        match Trace::open(path, &reading) {
            Ok(trace) => Some(self.taken(&trace)),
            Err(error) => {
                faults.push(format!("--trace: {error:#}"));
                None
            }
        }
    }

    /// A trace as the lab takes it. Where nothing decodes, a request asks for one token.
    fn taken(&self, trace: &Trace) -> ::lab::Trace {
        let decodes = self.kind() != EngineKind::Fluid;
        let row = |row: &crate::load::Row| TraceRow {
            at: row.at,
            input_tokens: row.input_tokens,
            output_tokens: if decodes { row.output_tokens } else { 1 },
            blocks: match &row.prompt {
                Prompt::Blocks(ids) => Some(ids.clone()),
                Prompt::Unique => None,
            },
        };
        let part = match self.figures {
            FiguresOf::Whole => Part::Whole,
            FiguresOf::FirstHalf => Part::FirstHalf,
            FiguresOf::SecondHalf => Part::SecondHalf,
        };
        ::lab::Trace::new(trace.rows.iter().map(row).collect(), part)
    }
}

/// Every item of a list as it is meant, the faulty ones left out and named.
fn each<T>(list: &[String], faults: &mut Vec<String>, read: impl Fn(&str) -> Result<T, String>) -> Vec<T> {
    let mut all = Vec::new();
    for text in list {
        match read(text.trim()) {
            Ok(value) => all.push(value),
            Err(fault) => faults.push(fault),
        }
    }
    all
}

fn counts(flag: &str, list: &[String], max: usize, faults: &mut Vec<String>) -> Vec<usize> {
    each(list, faults, |text| {
        let count = text.parse::<usize>().ok().filter(|count| (1..=max).contains(count));
        count.ok_or_else(|| format!("{flag} {text}: allowed: 1 to {max}, with commas between several"))
    })
}

fn gossip_ms(text: &str) -> Result<Option<f64>, String> {
    if text == "never" {
        return Ok(None);
    }
    let ms = text.parse::<f64>().ok().filter(|ms| (0.0..=600_000.0).contains(ms));
    ms.map(Some).ok_or_else(|| format!("--gossip-ms {text}: allowed: 0 to 600000, or never"))
}

fn cut(text: &str) -> Result<Cut, String> {
    let sides = text.split_once("..").and_then(|(from, until)| {
        let time = |text: &str| humantime::parse_duration(text).ok();
        Some(Cut { from: time(from)?, until: time(until)? })
    });
    let in_order = sides.filter(|cut| cut.from < cut.until);
    in_order.ok_or_else(|| format!("--cut {text}: allowed: FROM..UNTIL, such as 10min..11min"))
}
