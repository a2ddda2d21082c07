//! CPU per request of nginx, HAProxy and Grapevine, side by side.
//!
//! `cargo bench --bench proxy_cpu -- --json proxy_cpu.json`
//!
//! Four canned engines in a process of their own, 32 connections, chat bodies of 4 KB whose beginnings are
//! shared as those of tenants are. Three kinds of reply: a small one in one piece, a stream of 100 chunks
//! written at once, and one with a chunk every 5 ms. CPU is that of the proxy's processes (`/proc/PID/stat`)
//! between the end of a warm-up and the last reply; every repeat measures each proxy once, one after another.
//! `direct` has no proxy and is measured once: it shows what the generator and the engines cost by themselves.
//! Grapevine runs with its defaults: policy `cost`, an info line for each request (to a file), a thread for each
//! core, as the others. A whole run takes about two minutes once everything is built.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use benches::canned::{self, CHUNKS, Kind};
use benches::closed_loop;
use benches::front::{self, Front, HaproxyMode};
use benches::options::Common;
use benches::process::{self, Process};
use benches::replicas::Replicas;
use benches::spread::Spread;
use benches::wait;
use clap::Parser;
use grapevine::load::{Api, ChatShape, Envelope, Source, Workload};
use serde::Serialize;

/// What Grapevine may cost, in another proxy's cost of the same run.
const TARGETS: [Target; 3] = [
    Target { kind: Kind::Whole, over: Proxy::Nginx, at_most: 1.75 },
    Target { kind: Kind::Burst, over: Proxy::Haproxy, at_most: 2.0 },
    Target { kind: Kind::Paced, over: Proxy::Haproxy, at_most: 1.2 },
];
/// Different bodies that are sent in turn.
const BODIES: usize = 256;
/// The seed of their texts.
const SEED: u64 = 1;

/// CPU per request: nginx, HAProxy, Grapevine
#[derive(Parser, Clone, Debug, Serialize)]
struct Settings {
    /// Kinds of reply [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Vec<Kind>,
    /// Connections, each with one request at a time
    #[arg(long, default_value_t = 32)]
    connections: usize,
    /// Engines
    #[arg(long, default_value_t = 4)]
    engines: usize,
    /// Times that each proxy is measured for each kind
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Requests of one measurement with small replies; burst streams are a fifth, paced ones a fiftieth
    #[arg(long, default_value_t = 20_000)]
    requests: usize,
    #[command(flatten)]
    #[serde(flatten)]
    common: Common,
    /// Be the engines at these addresses
    #[arg(long, hide = true, value_delimiter = ',')]
    #[serde(skip)]
    canned: Vec<SocketAddr>,
}

impl Settings {
    fn requests(&self, kind: Kind) -> usize {
        let share = match kind {
            Kind::Whole => 1,
            Kind::Burst => 5,
            Kind::Paced => 50,
        };
        (self.requests / share).max(self.connections)
    }
}

/// What the requests pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Proxy {
    Direct,
    Nginx,
    Haproxy,
    Grapevine,
}

impl Proxy {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx",
            Self::Haproxy => "HAProxy",
            Self::Grapevine => "Grapevine",
        }
    }
}

/// A bound on Grapevine's cost.
struct Target {
    kind: Kind,
    over: Proxy,
    at_most: f64,
}

/// What the run ran on.
#[derive(Serialize)]
struct Machine {
    processor: String,
    cores: usize,
    kernel: String,
    /// The load averages before and after: what else ran.
    load: [String; 2],
}

impl Machine {
    fn read(load_before: String) -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            processor: model.and_then(|line| line.split_once(": ")).unwrap_or_default().1.to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: kernel.trim().to_owned(),
            load: [load_before, load()],
        }
    }
}

fn load() -> String {
    std::fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned()
}

/// One proxy, measured once.
#[derive(Serialize)]
struct Measured {
    kind: Kind,
    proxy: Proxy,
    repeat: usize,
    requests: usize,
    failed: usize,
    /// Microseconds of CPU per request; of nobody for `direct`.
    proxy_us: f64,
    engines_us: f64,
    generator_us: f64,
}

fn main() -> anyhow::Result<()> {
    let mut settings = Settings::parse();
    if !settings.canned.is_empty() {
        let kind = settings.kinds.first().copied().context("--canned needs --kinds")?;
        return canned::serve(&settings.canned, kind);
    }
    if settings.common.short {
        settings.requests = settings.requests.min(2_000);
        settings.repeats = 1;
    }
    if settings.kinds.is_empty() {
        settings.kinds = vec![Kind::Whole, Kind::Burst, Kind::Paced];
    }
    settings.common.grapevine = Some(settings.common.program()?);
    let load_before = load();
    let mut measured = Vec::new();
    for kind in settings.kinds.clone() {
        measured.extend(measure_kind(&settings, kind)?);
    }
    let machine = Machine::read(load_before);
    println!(
        "{} cores of {}, Linux {}; load {} before, {} after",
        machine.cores, machine.processor, machine.kernel, machine.load[0], machine.load[1]
    );
    print!("{}", table(&settings, &measured)?);
    settings
        .common
        .write(&serde_json::json!({ "machine": machine, "settings": settings, "measured": measured }))
}

/// Everything that runs while one kind is measured.
struct Stand {
    engines: Process,
    engine_addresses: Vec<SocketAddr>,
    nginx: Option<Front>,
    haproxy: Option<Front>,
    grapevine: Replicas,
}

impl Stand {
    fn up(settings: &Settings, kind: Kind) -> anyhow::Result<Self> {
        let addresses: Vec<SocketAddr> =
            (0..settings.engines).map(|_| wait::free_address()).collect::<anyhow::Result<_>>()?;
        let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let kind = clap::ValueEnum::to_possible_value(&kind).context("a kind has a name")?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--canned", &list.join(","), "--kinds", kind.get_name()]);
        let engines = Process::start(&mut command)?;
        for address in &addresses {
            wait::until_ok(*address, "/health")?;
        }
        let installed = |program: Option<PathBuf>, name: &str| {
            if program.is_none() {
                println!("skipped: {name} is not installed");
            }
            program
        };
        let nginx = installed(front::nginx_program(), "nginx");
        let haproxy = installed(front::haproxy_program(), "HAProxy");
        let program = settings.common.program()?;
        Ok(Self {
            nginx: nginx.map(|program| front::nginx(&program, &addresses)).transpose()?,
            haproxy: haproxy
                .map(|program| front::haproxy(&program, HaproxyMode::HttpRoundRobin, &addresses))
                .transpose()?,
            grapevine: Replicas::start(&program, 1, &addresses, &settings.common.serve_arguments(&[]))?,
            engines,
            engine_addresses: addresses,
        })
    }

    /// Every way to the engines, with where it begins and its processes.
    fn ways(&self) -> Vec<(Proxy, SocketAddr, Option<&Process>)> {
        let front = |proxy, front: &'_ Option<Front>| front.as_ref().map(|front| (proxy, front.address));
        let mut ways = vec![(Proxy::Direct, self.engine_addresses[0], None)];
        for (proxy, from) in [(Proxy::Nginx, &self.nginx), (Proxy::Haproxy, &self.haproxy)] {
            if let (Some((proxy, address)), Some(from)) = (front(proxy, from), from) {
                ways.push((proxy, address, Some(&from.process)));
            }
        }
        if let (Some(address), Some(process)) =
            (self.grapevine.public().first(), self.grapevine.processes.first())
        {
            ways.push((Proxy::Grapevine, *address, Some(process)));
        }
        ways
    }
}

fn measure_kind(settings: &Settings, kind: Kind) -> anyhow::Result<Vec<Measured>> {
    let stand = Stand::up(settings, kind)?;
    let bodies = bodies(kind);
    let requests = settings.requests(kind);
    let mut measured = Vec::new();
    for repeat in 0..settings.repeats {
        for (proxy, address, process) in stand.ways() {
            if proxy == Proxy::Direct && repeat > 0 {
                continue;
            }
            let warm_up = (requests / 10).max(settings.connections);
            closed_loop::run(address, settings.connections, warm_up, &bodies);
            let cpu = || -> anyhow::Result<[Duration; 3]> {
                let proxy = process.map_or(Ok(Duration::ZERO), Process::cpu)?;
                Ok([proxy, stand.engines.cpu()?, process::own_cpu()?])
            };
            let before = cpu()?;
            let counts = closed_loop::run(address, settings.connections, requests, &bodies);
            let after = cpu()?;
            ensure!(counts.answered > 0, "{}: {:?}", proxy.name(), counts.first_failure);
            let [proxy_us, engines_us, generator_us] = [0, 1, 2]
                .map(|at| after[at].saturating_sub(before[at]).as_secs_f64() * 1e6 / requests as f64);
            eprintln!(
                "{kind:?} {repeat}: {:<10} {proxy_us:>8.1} us (engines {engines_us:.1}, generator {generator_us:.1}), {} failed {}",
                proxy.name(),
                counts.failed,
                counts.first_failure.unwrap_or_default()
            );
            measured.push(Measured {
                kind,
                proxy,
                repeat,
                requests,
                failed: counts.failed,
                proxy_us,
                engines_us,
                generator_us,
            });
        }
    }
    Ok(measured)
}

/// First turns of the chats of twelve tenants, 4 KB each.
fn bodies(kind: Kind) -> Vec<Vec<u8>> {
    let shape = ChatShape {
        sessions: None,
        tenants: 12,
        common_bytes: 1_000,
        tenant_bytes: 2_000,
        first_bytes: 900,
        ..ChatShape::default()
    };
    let envelope = Envelope { model: Some("sim".to_owned()), stream: kind.streams(), ..Envelope::default() };
    Workload::new(Source::Chat(Arc::new(shape)), Api::Chat, SEED)
        .filter_map(|mut chat| chat.next_request(&envelope))
        .map(|request| request.body.to_vec())
        .take(BODIES)
        .collect()
}

fn table(settings: &Settings, measured: &[Measured]) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut verdict = String::new();
    for kind in &settings.kinds {
        let unit = if *kind == Kind::Paced { "chunk" } else { "request" };
        let per = if *kind == Kind::Paced { CHUNKS as f64 } else { 1.0 };
        writeln!(
            out,
            "\n{kind:?} replies, {} connections, {} requests, {} repeats; us of CPU per {unit}, median (least-most)\n",
            settings.connections,
            settings.requests(*kind),
            settings.repeats
        )?;
        writeln!(out, "| through | us | x nginx | x HAProxy | engines | generator | failed |")?;
        writeln!(out, "|---|---|---|---|---|---|---|")?;
        let mut of: BTreeMap<Proxy, Vec<&Measured>> = BTreeMap::new();
        for each in measured.iter().filter(|each| each.kind == *kind) {
            of.entry(each.proxy).or_default().push(each);
        }
        for (proxy, runs) in &of {
            let figure = |value: &dyn Fn(&Measured) -> Option<f64>| {
                Spread::of(&runs.iter().filter_map(|run| value(run)).collect::<Vec<f64>>())
            };
            // Over another proxy's figure of the same repeat.
            let over = |reference: Proxy| {
                figure(&|run| {
                    let others = of.get(&reference)?;
                    let other = others.iter().find(|other| other.repeat == run.repeat)?;
                    (run.proxy_us > 0.0 && other.proxy_us > 0.0).then(|| run.proxy_us / other.proxy_us)
                })
            };
            let (over_nginx, over_haproxy) = (over(Proxy::Nginx), over(Proxy::Haproxy));
            let own = figure(&|run| (*proxy != Proxy::Direct).then_some(run.proxy_us / per));
            let failed: usize = runs.iter().map(|run| run.failed).sum();
            writeln!(
                out,
                "| {} | {} | {} | {} | {} | {} | {failed} |",
                proxy.name(),
                Spread::show(own.as_ref(), 1),
                Spread::show(over_nginx.as_ref(), 2),
                Spread::show(over_haproxy.as_ref(), 2),
                Spread::show_middle(figure(&|run| Some(run.engines_us / per)).as_ref(), 1),
                Spread::show_middle(figure(&|run| Some(run.generator_us / per)).as_ref(), 1),
            )?;
            let target = TARGETS.iter().find(|target| target.kind == *kind);
            if let (Proxy::Grapevine, Some(target)) = (proxy, target)
                && let Some(ratio) = if target.over == Proxy::Nginx { over_nginx } else { over_haproxy }
            {
                let met = if ratio.median <= target.at_most { "met" } else { "MISSED" };
                writeln!(
                    verdict,
                    "{kind:?}: {:.2} x {}; target {}: {met}",
                    ratio.median,
                    target.over.name(),
                    target.at_most
                )?;
            }
        }
    }
    Ok(format!("{out}\n{verdict}"))
}
