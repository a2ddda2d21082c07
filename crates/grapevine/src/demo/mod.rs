//! `demo`: a whole cluster on this machine. Three replicas (processes of their own, so that one can really be
//! killed) behind a small L4 balancer, four simulated engines, chats, and a line that says how it goes.

mod balancer;
mod cluster;
mod phases;

use std::io::{IsTerminal as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use engine::{Config, Connector, Engine, Profile, Role};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::load::{self, ChatShape, Live, Order, Pace, Plan, Report, Source, Target, Targets};
use cluster::Replicas;
use phases::Phases;

/// The clients of the demo's closed loop.
const CLIENTS: usize = 16;
/// The model that the demo's engines serve.
const MODEL: &str = "demo";

/// What `demo` takes.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// End by itself after this long, with a summary
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime::parse_duration)]
    run_time: Option<Duration>,
    /// Port of the balancer; 0 picks a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Replicas
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    replicas: u8,
    /// Simulated engines
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    engines: u8,
    /// Of two roles instead: engines that compute prompts for others
    #[arg(long, requires = "decode", conflicts_with = "engines", value_parser = clap::value_parser!(u8).range(1..=32))]
    prefill: Option<u8>,
    /// And engines that decode what was computed there
    #[arg(long, requires = "prefill", conflicts_with = "engines", value_parser = clap::value_parser!(u8).range(1..=32))]
    decode: Option<u8>,
    /// Hardware and model that the engines behave like
    #[arg(long, value_enum, default_value_t)]
    profile: Profile,
    /// Divide the engines' times by this
    #[arg(long, default_value_t = 4.0)]
    speed: f64,
    /// Policy of the replicas
    #[arg(long, default_value = "cost")]
    policy: String,
    /// Kill one replica (as kill -9 does) after this long
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    kill_after: Option<Duration>,
    /// Seed of the chats
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs the demo until its time is up or it is interrupted.
///
/// # Errors
/// When the cluster can't be started, or requests failed though nothing was killed.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    if !(0.01..=10_000.0).contains(&options.speed) {
        bail!("--speed {}: allowed: 0.01 to 10000", options.speed);
    }
    let engines = engines(options).await?;
    let urls: Vec<String> = engines.iter().map(|(engine, role)| endpoint(engine, *role)).collect();
    let mut replicas = Replicas::start(usize::from(options.replicas), &urls, &options.policy)?;
    replicas.wait_until_ready().await?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port)).await.with_context(|| {
        format!("--port {}: can't be listened on; --port 0 picks a free one", options.port)
    })?;
    let address = listener.local_addr()?;
    let balancer = tokio::spawn(balancer::run(listener, replicas.public()));
    introduce(address, &urls, &replicas);

    let live = Live::new();
    let (stop, stopped) = oneshot::channel();
    let driver = drive(plan(address, options)?, Arc::clone(&live), stopped);
    let killed = watch(options, &live, &mut replicas).await;
    // The driver may have ended by itself; then there is nobody to stop.
    let _ = stop.send(());
    let report = tokio::task::spawn_blocking(move || driver.join()).await?;
    let report = report.map_err(|_| anyhow::anyhow!("the load generator failed"))??;
    balancer.abort();
    summarise(&report, killed, &replicas);
    if options.has_roles() {
        println!("phases              {}", Phases::read(&replicas).await);
    }
    replicas.stop().await;
    for (engine, _) in engines {
        engine.stop().await;
    }
    if killed == Killed::Nobody && report.failed() > 0 {
        bail!("{} requests failed though nothing was killed", report.failed());
    }
    Ok(())
}

impl Options {
    fn has_roles(&self) -> bool {
        self.prefill.is_some()
    }

    /// How many engines of each role.
    fn roles(&self) -> Vec<(Role, u8)> {
        match (self.prefill, self.decode) {
            (Some(prefill), Some(decode)) => vec![(Role::Prefill, prefill), (Role::Decode, decode)],
            _ => vec![(Role::Both, self.engines)],
        }
    }
}

async fn engines(options: &Options) -> anyhow::Result<Vec<(Engine, Role)>> {
    let mut engines = Vec::new();
    for (role, count) in options.roles() {
        for _ in 0..count {
            let mut config = Config::profile(options.profile);
            config.timing = config.timing.sped_up(options.speed);
            config.transfer = config.transfer.sped_up(options.speed);
            config.model = MODEL.to_owned();
            if role != Role::Both {
                config = config.with_role(role, Connector::Nixl);
            }
            engines.push((Engine::start(config).await?, role));
        }
    }
    Ok(engines)
}

/// An engine as the replicas are told of it.
fn endpoint(engine: &Engine, role: Role) -> String {
    match role {
        Role::Both => engine.url(),
        Role::Prefill => format!("{},role=prefill", engine.url()),
        Role::Decode => format!("{},role=decode", engine.url()),
    }
}

fn plan(address: SocketAddr, options: &Options) -> anyhow::Result<Plan> {
    let target = Target::new(&format!("http://{address}"), "/v1/chat/completions")?;
    let chats = ChatShape {
        sessions: None,
        tenants: 12,
        tenant_bytes: 1_500,
        max_tokens: 24,
        ..ChatShape::default()
    };
    let pace = Pace::Closed { clients: CLIENTS, order: Order::Chats };
    let mut plan = Plan::new(Targets::new(vec![target])?, Source::Chat(Arc::new(chats)), pace);
    plan.seed = options.seed;
    plan.envelope.model = Some(MODEL.to_owned());
    // Each request on a connection of its own, so that the balancer spreads them over all replicas.
    plan.wire.fresh_connections = true;
    plan.limits.run_max = options.run_time;
    plan.limits.drain_max = Duration::from_secs(10);
    Ok(plan)
}

/// The load generator has a thread and a runtime of its own, so that what it measures is not its own queue.
fn drive(
    plan: Plan,
    live: Arc<Live>,
    stopped: oneshot::Receiver<()>,
) -> std::thread::JoinHandle<anyhow::Result<Report>> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(load::drive(plan, live, async {
            // Both a word and a lost sender mean stop.
            let _ = stopped.await;
        })))
    })
}

/// Whether a replica was killed on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Nobody,
    Replica(usize),
}

/// Shows how it goes until the time is up or Ctrl-C; kills a replica when that is asked for.
async fn watch(options: &Options, live: &Live, replicas: &mut Replicas) -> Killed {
    let start = Instant::now();
    let far = start + Duration::from_secs(365 * 24 * 3_600);
    let end = options.run_time.map_or(far, |time| start + time);
    let kill_at = options.kill_after.map_or(far, |time| start + time);
    let mut killed = Killed::Nobody;
    let mut pace = tokio::time::interval(Duration::from_secs(1));
    let mut ctrl_c = std::pin::pin!(tokio::signal::ctrl_c());
    loop {
        tokio::select! {
            _ = &mut ctrl_c => break,
            () = sleep_until(end) => break,
            () = sleep_until(kill_at), if killed == Killed::Nobody => {
                let victim = replicas.kill_one().await;
                println!("\nkilled replica {victim} (kill -9); the others go on");
                killed = Killed::Replica(victim);
            }
            _ = pace.tick() => {
                let phases = if options.has_roles() { Some(Phases::read(replicas).await) } else { None };
                status(live, start.elapsed(), replicas, phases);
            }
        }
    }
    println!();
    killed
}

fn status(live: &Live, since: Duration, replicas: &Replicas, phases: Option<Phases>) {
    let report = live.report();
    let number =
        |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |value| format!("{value:.digits$}"));
    let phases = phases.map_or_else(String::new, |phases| format!("  {phases}"));
    let line = format!(
        "{:>4} s  {} replicas  {:>6} requests  {} failed  {:>3} in flight  first token p50 {} ms p99 {} ms  hit rate {}  at home {}{phases}",
        since.as_secs(),
        replicas.alive(),
        report.requests,
        report.failed(),
        live.in_flight(),
        number(report.ttft_ms.p50, 0),
        number(report.ttft_ms.p99, 0),
        number(report.hit_rate, 2),
        number(report.follow_up_at_home, 3),
    );
    if std::io::stdout().is_terminal() {
        print!("\r{line}");
        // A status line that can't be written is not worth ending for.
        let _ = std::io::stdout().flush();
    } else {
        println!("{line}");
    }
}

fn introduce(address: SocketAddr, engines: &[String], replicas: &Replicas) {
    println!("balancer   http://{address}");
    for (n, replica) in replicas.ports().iter().enumerate() {
        println!("replica {n}  http://{}  admin and dashboard http://{}/", replica.public, replica.admin);
    }
    println!("engines    {}", engines.join("  "));
    println!(
        "\ntry it:    curl -sN http://{address}/v1/chat/completions -H 'content-type: application/json' \\\n             \
         -d '{{\"model\":\"{MODEL}\",\"stream\":true,\"max_tokens\":8,\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]}}'\n"
    );
}

fn summarise(report: &Report, killed: Killed, replicas: &Replicas) {
    println!("\n{report}");
    let errors = report.failed();
    match killed {
        Killed::Nobody => println!("errors              {errors}"),
        Killed::Replica(victim) => println!(
            "errors              {errors} (requests whose connection was on replica {victim} when it was killed); {} replicas live",
            replicas.alive()
        ),
    }
    if let Some(share) = report.follow_up_at_home {
        println!("follow-up-at-home   {share:.3}");
    }
}
