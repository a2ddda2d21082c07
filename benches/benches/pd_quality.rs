//! Quality of experience where engines have roles: how many requests have their tokens in time, and how well their
//! users fare, under policies for pairs of endpoints, near the fleet's capacity.
//!
//! `cargo bench --bench pd_quality -- --seeds 1,2,3 --json pd_quality.json`
//!
//! Two engines prefill and two decode, as in `pd_headline`, behind three replicas of Grapevine. Two mixes of chats of
//! two turns: in one the prompts are what takes the time, in the other the answers. A mix's capacity is what clients
//! in closed loop get through under `pd-cost`; then chats begin at random at a share of it, the same ones for each
//! policy. `random` draws both endpoints by lot; whether to split is one question of cost under all of them.
//!
//! In the last table chats have three classes, which expect their tokens earlier and later.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use benches::arms;
use benches::chats::{self, Class, Mix, Pace, Sample};
use benches::fleet::Fleet;
use benches::options::Common;
use benches::roles::{Engines, Figures};
use benches::way::{Programs, Way};
use clap::{Parser, ValueEnum};
use serde::Serialize;

/// Shares of the capacity at which policies are compared.
const LOADS: [f64; 2] = [0.8, 0.95];
/// The share at which classes are mixed.
const LOAD_OF_CLASSES: f64 = 0.9;
/// How long chats begin in a run with `--short`.
const SHORT_SPAN_S: f64 = 3.0;

/// Quality of experience over engines that prefill and decode, by policy
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    /// Seeds, one run of every policy for each
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    seeds: Vec<u64>,
    /// Mixes of chats [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    mixes: Vec<MixName>,
    /// Tables to make [default: both]
    #[arg(long, value_enum, value_delimiter = ',')]
    tables: Vec<Table>,
    #[command(flatten)]
    engines: Engines,
    /// Replicas of Grapevine
    #[arg(long, default_value_t = 3)]
    replicas: usize,
    /// Clients in closed loop while the capacity is measured
    #[arg(long, default_value_t = 24)]
    clients: usize,
    /// How long chats begin in each run, in s
    #[arg(long, default_value_t = 10.0)]
    span_s: f64,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
}

/// What takes the time.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum MixName {
    PrefillHeavy,
    DecodeHeavy,
}

impl MixName {
    fn name(self) -> &'static str {
        match self {
            Self::PrefillHeavy => "prefill-heavy",
            Self::DecodeHeavy => "decode-heavy",
        }
    }

    fn mix(self, table: Table) -> Mix {
        let (long_share, output_tokens) = match self {
            Self::PrefillHeavy => (0.6, 32),
            Self::DecodeHeavy => (0.2, 96),
        };
        Mix {
            long_share,
            long_bytes: 12_000,
            short_bytes: 400,
            turns: 2,
            output_tokens,
            think: Duration::from_millis(300),
            classes: table.classes(),
        }
    }
}

/// What is compared.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Table {
    /// Policies, with chats that expect the same.
    Alike,
    /// Policies, with classes of chats.
    Classes,
}

impl Table {
    /// What chats expect: a first token as in `pd_headline`, the first class sooner and the last later; a pace that an
    /// engine keeps with 16 requests beside no prompt, and so not under every choice.
    fn classes(self) -> Vec<Class> {
        let class = |priority, ttft_ms, tpot_ms| Class { priority, ttft_ms, tpot_ms };
        match self {
            Self::Alike => vec![class(2, 350.0, 20.0)],
            Self::Classes => vec![class(1, 250.0, 20.0), class(2, 350.0, 20.0), class(3, 700.0, 40.0)],
        }
    }
}

/// How pairs are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Policy {
    PdCost,
    PdQoe,
    PdLoadAware,
    Random,
}

impl Policy {
    fn name(self) -> &'static str {
        match self {
            Self::PdCost => "pd-cost",
            Self::PdQoe => "pd-qoe",
            Self::PdLoadAware => "pd-load-aware",
            Self::Random => "random pairs",
        }
    }

    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::PdCost => &["--policy", "pd-cost"],
            Self::PdQoe => &["--policy", "pd-qoe"],
            Self::PdLoadAware => &["--policy", "pd-load-aware"],
            Self::Random => &["--prefill-policy", "random", "--decode-policy", "random"],
        }
    }
}

/// One run of one policy.
#[derive(Serialize)]
struct Run {
    mix: MixName,
    load: f64,
    policy: Policy,
    seed: u64,
    all: Figures,
    /// The requests of class 1.
    first_class: Figures,
    splits: u64,
    samples: Vec<Sample>,
}

/// What clients in closed loop got through.
#[derive(Serialize)]
struct Capacity {
    mix: MixName,
    requests_per_second: f64,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if settings.common.short {
        settings.seeds.truncate(1);
        settings.span_s = SHORT_SPAN_S;
    }
    if settings.mixes.is_empty() {
        settings.mixes = MixName::value_variants().to_vec();
    }
    if settings.tables.is_empty() {
        settings.tables = Table::value_variants().to_vec();
    }
    let programs = Programs::find(&settings.common, &[])?;
    if programs.haproxy.is_none() {
        return Ok(());
    }
    let bench = Bench { programs, settings };
    let mut capacities = Vec::new();
    let mut runs = Vec::new();
    for mix in bench.settings.mixes.clone() {
        let capacity = bench.capacity(mix)?;
        eprintln!("{}: {:.1} requests/s in closed loop", mix.name(), capacity.requests_per_second);
        for table in &bench.settings.tables {
            let (loads, policies): (&[f64], _) = match table {
                Table::Alike => (&LOADS, vec![Policy::Random, Policy::PdLoadAware, Policy::PdCost]),
                Table::Classes => (&[LOAD_OF_CLASSES], vec![Policy::PdLoadAware, Policy::PdQoe]),
            };
            for load in loads {
                runs.extend(bench.compare(*table, mix, *load, &capacity, policies.clone())?);
            }
        }
        capacities.push(capacity);
    }
    print!("{}", tables(&bench.settings, &capacities, &runs)?);
    let everything =
        serde_json::json!({ "settings": bench.settings, "capacities": capacities, "runs": runs });
    bench.settings.common.write(&everything)
}

struct Bench {
    settings: Settings,
    programs: Programs,
}

impl Bench {
    /// Runs chats through new replicas and new engines; the requests, and how many were split.
    fn drive(&self, policy: Policy, mix: &Mix, pace: Pace, seed: u64) -> anyhow::Result<(Vec<Sample>, u64)> {
        let fleet = Fleet::start(self.settings.engines.configs(true))?;
        let endpoints = self.settings.engines.endpoints(&fleet.addresses());
        let serve = self.settings.common.serve_arguments(policy.arguments());
        let way = Way::replicas(&self.programs, self.settings.replicas, &endpoints, &serve)?;
        let target = *way.targets().first().context("a way has an entry")?;
        let samples = chats::run(mix, pace, seed, target)?;
        ensure!(!samples.is_empty(), "no request was sent");
        Ok((samples, fleet.stats().iter().map(|stats| stats.staged).sum()))
    }

    /// The rate at which the middle half of the requests of a closed loop ended.
    fn capacity(&self, mix: MixName) -> anyhow::Result<Capacity> {
        /// Chats that each client holds.
        const CHATS_EACH: u64 = 6;
        let clients = self.settings.clients;
        let pace = Pace::Closed { clients, chats: clients as u64 * CHATS_EACH };
        let busy = Mix { think: Duration::ZERO, ..mix.mix(Table::Alike) };
        let (samples, _) = self.drive(Policy::PdCost, &busy, pace, 0)?;
        let mut ends: Vec<f64> = samples.iter().map(|sample| sample.ended_s).collect();
        ends.sort_by(f64::total_cmp);
        let (from, until) = (ends.len() / 4, ends.len() * 3 / 4);
        let requests_per_second = (until - from) as f64 / (ends[until] - ends[from]);
        ensure!(requests_per_second.is_finite(), "all requests ended at once");
        Ok(Capacity { mix, requests_per_second })
    }

    /// One run for each policy and seed, interleaved.
    fn compare(
        &self,
        table: Table,
        mix: MixName,
        load: f64,
        capacity: &Capacity,
        policies: Vec<Policy>,
    ) -> anyhow::Result<Vec<Run>> {
        let pace = Pace::Open {
            requests_per_second: capacity.requests_per_second * load,
            span: Duration::from_secs_f64(self.settings.span_s),
        };
        arms::interleaved(policies, &self.settings.seeds, |policy, seed| {
            let (samples, splits) = self
                .drive(policy, &mix.mix(table), pace, seed)
                .with_context(|| format!("{} with seed {seed}", policy.name()))?;
            let all = Figures::of(&samples);
            let first_class = Figures::of(samples.iter().filter(|sample| sample.priority == 1));
            eprintln!(
                "{} {load:.2} seed {seed}  {:<14} {:.3} in time, QoE {:.4}, {:.0} ms to the first token, {:.1} ms between tokens, {splits} of {} split, {} failed",
                mix.name(),
                policy.name(),
                all.within,
                all.qoe,
                all.ttft_mean_ms,
                all.tpot_mean_ms,
                all.requests,
                all.failed,
            );
            Ok(Run { mix, load, policy, seed, all, first_class, splits, samples })
        })
    }
}

/// Means over seeds of the runs of one policy in one cell.
struct Mean {
    policy: Policy,
    within: f64,
    qoe: f64,
    first_class: f64,
    ttft_ms: f64,
    failed: usize,
}

impl Mean {
    fn of(runs: &[&Run], policy: Policy) -> Option<Self> {
        let of_policy: Vec<&&Run> = runs.iter().filter(|run| run.policy == policy).collect();
        let mean = |value: fn(&Run) -> f64| {
            of_policy.iter().map(|run| value(run)).sum::<f64>() / of_policy.len() as f64
        };
        (!of_policy.is_empty()).then(|| Self {
            policy,
            within: mean(|run| run.all.within),
            qoe: mean(|run| run.all.qoe),
            first_class: mean(|run| run.first_class.within),
            ttft_ms: mean(|run| run.all.ttft_mean_ms),
            failed: of_policy.iter().map(|run| run.all.failed).sum(),
        })
    }
}

fn tables(settings: &Settings, capacities: &[Capacity], runs: &[Run]) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut reversed = Vec::new();
    writeln!(
        out,
        "\nRequests in time and quality of experience, {} replicas, {} engines that prefill and {} that decode; means of seeds {:?}\n",
        settings.replicas, settings.engines.prefills, settings.engines.decodes, settings.seeds
    )?;
    writeln!(
        out,
        "| mix | requests/s | of capacity | policy | in time | class 1 in time | QoE | TTFT ms | failed |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|---|")?;
    for Capacity { mix, requests_per_second } in capacities {
        for load in [LOADS[0], LOADS[1], LOAD_OF_CLASSES] {
            let cell: Vec<&Run> = runs.iter().filter(|run| run.mix == *mix && run.load == load).collect();
            let policies = [Policy::Random, Policy::PdLoadAware, Policy::PdCost, Policy::PdQoe];
            let means: Vec<Mean> =
                policies.into_iter().filter_map(|policy| Mean::of(&cell, policy)).collect();
            for mean in &means {
                writeln!(
                    out,
                    "| {} | {:.1} | {load} | {} | {:.3} | {} | {:.4} | {:.0} | {} |",
                    mix.name(),
                    requests_per_second * load,
                    mean.policy.name(),
                    mean.within,
                    if mean.first_class.is_nan() {
                        "-".to_owned()
                    } else {
                        format!("{:.3}", mean.first_class)
                    },
                    mean.qoe,
                    mean.ttft_ms,
                    mean.failed,
                )?;
            }
            for pair in means.windows(2) {
                let [plainer, better] = pair else { continue };
                let mut figures = vec![("QoE", plainer.qoe, better.qoe)];
                if load == LOAD_OF_CLASSES {
                    figures.push(("class 1 in time", plainer.first_class, better.first_class));
                } else {
                    figures.push(("in time", plainer.within, better.within));
                }
                for (what, of_plainer, of_better) in figures {
                    if of_better <= of_plainer {
                        reversed.push(format!(
                            "{} at {load}: {} {of_better:.4} under {}, {of_plainer:.4} under {}",
                            mix.name(),
                            what,
                            better.policy.name(),
                            plainer.policy.name()
                        ));
                    }
                }
            }
        }
    }
    let verdict =
        if reversed.is_empty() { "met".to_owned() } else { format!("MISSED: {}", reversed.join("; ")) };
    writeln!(out, "\nTarget (each policy better than the plainer one, in every cell): {verdict}\n")?;
    Ok(out)
}
