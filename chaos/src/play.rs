//! Plays one scenario from the first process to the verdict.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::balancer::{self, Balancing};
use crate::evidence::{Act, Evidence};
use crate::fleet::{Fleet, Program};
use crate::judge::judge;
use crate::load::{self, Front};
use crate::report::Verdict;
use crate::scenario::{Aim, Kind, Name, Rule, Scenario, Verb};
use crate::watch;

/// How long the replicas are looked at beyond the span that the rules ask for.
const LOOK_ON: Duration = Duration::from_millis(700);

/// How to play.
pub(crate) struct Options {
    pub(crate) seed: Option<u64>,
    pub(crate) balancing: Balancing,
    pub(crate) out: PathBuf,
    pub(crate) program: Option<PathBuf>,
}

/// What became of a run.
pub(crate) enum Played {
    ToTheEnd(Box<Verdict>),
    /// By Ctrl-C or SIGTERM; everything that was started has been ended.
    Interrupted,
}

/// Plays `scenario`, prints its report and writes it beside the logs.
pub(crate) async fn play(scenario: &Scenario, options: &Options) -> anyhow::Result<Played> {
    let folder = options.out.join(&scenario.name);
    // Logs of an earlier run would be taken for this one's.
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("{} can't be emptied", folder.display()))?;
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("{} can't be made", folder.display()))?;
    let program = match &options.program {
        Some(path) => Program::Given(path.clone()),
        None => Program::Own(std::env::current_exe().context("this program's own path is unknown")?),
    };
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let played = async {
        println!(
            "{}: starting {} replicas, {} engines",
            scenario.name, scenario.cluster.replicas, scenario.cluster.engines
        );
        let mut fleet = Fleet::start(&scenario.cluster, program, &folder).await?;
        let run = run(scenario, options, &mut fleet).await;
        fleet.end().await;
        let (mut evidence, balancer) = run?;
        evidence.logged = logged(&folder, scenario.cluster.replicas)?;
        let judgements = judge(&scenario.rules, &evidence);
        let verdict = Verdict::new(scenario, seed(scenario, options), balancer, &evidence, judgements);
        print!("{verdict}");
        verdict.write(&folder.join("result.json"))?;
        anyhow::Ok(Played::ToTheEnd(Box::new(verdict)))
    };
    tokio::select! {
        played = played => played,
        // Dropping the run drops the fleet, which kills what it started.
        _ = interrupt.recv() => Ok(Played::Interrupted),
        _ = terminate.recv() => Ok(Played::Interrupted),
    }
}

fn seed(scenario: &Scenario, options: &Options) -> u64 {
    options.seed.unwrap_or(scenario.seed)
}

/// Load, faults and looks together; what they saw, and what balanced.
async fn run(
    scenario: &Scenario,
    options: &Options,
    fleet: &mut Fleet,
) -> anyhow::Result<(Evidence, &'static str)> {
    let front = front(options.balancing, fleet).await?;
    let seed = seed(scenario, options);
    let samples = Arc::new(Mutex::default());
    let begun = Instant::now();
    let mut watchers = JoinSet::new();
    for (number, replica) in fleet.replicas.iter().enumerate() {
        watchers.spawn(watch::watch(number, replica.admin, begun, Arc::clone(&samples)));
    }
    let engine_urls = fleet.engines.iter().map(|engine| format!("http://{engine}")).collect();
    let (exchanges, acts) = tokio::try_join!(
        load::run(&scenario.load, &front, seed, begun),
        break_things(scenario, seed, begun, fleet)
    )?;
    let load_ended = exchanges.iter().map(|exchange| exchange.ended).max().unwrap_or_default();
    sleep(look_on(&scenario.rules)).await;
    watchers.shutdown().await;
    let ended_on_purpose: Vec<Name> = acts
        .iter()
        .filter(|act| matches!(act.verb, Verb::Kill | Verb::Terminate))
        .map(|act| act.target)
        .collect();
    let evidence = Evidence {
        exchanges,
        samples: std::mem::take(&mut samples.lock().unwrap_or_else(PoisonError::into_inner)),
        acts,
        engine_urls,
        logged: HashMap::new(),
        lost: fleet.lost(&ended_on_purpose),
        load_ended,
    };
    let balancer = match front {
        Front::Balancer(_) => "haproxy",
        Front::Replicas(_) => "clients",
    };
    Ok((evidence, balancer))
}

async fn front(balancing: Balancing, fleet: &mut Fleet) -> anyhow::Result<Front> {
    match (balancing, balancer::installed()) {
        (Balancing::Haproxy, None) => bail!("haproxy is not in the search path"),
        (Balancing::Clients, _) | (Balancing::Auto, None) => {
            Ok(Front::Replicas(fleet.replicas.iter().map(|replica| replica.public).collect()))
        }
        (Balancing::Auto | Balancing::Haproxy, Some(program)) => {
            Ok(Front::Balancer(fleet.start_haproxy(&program).await?))
        }
    }
}

/// Does the faults at their times.
async fn break_things(
    scenario: &Scenario,
    seed: u64,
    begun: Instant,
    fleet: &mut Fleet,
) -> anyhow::Result<Vec<Act>> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let replica = rng.random_range(0..scenario.cluster.replicas);
    let engine = rng.random_range(0..scenario.cluster.engines);
    let mut acts = Vec::new();
    for fault in &scenario.faults {
        let target = match fault.target {
            Aim::At(name) => name,
            Aim::Any(Kind::Replica) => Name { kind: Kind::Replica, number: replica },
            Aim::Any(Kind::Engine) => Name { kind: Kind::Engine, number: engine },
        };
        sleep_until(begun + Duration::from_millis(fault.at_ms)).await;
        let from = begun.elapsed();
        fleet.act(fault.verb, target).await.with_context(|| format!("{} {target}", fault.verb))?;
        acts.push(Act { from, at: begun.elapsed(), verb: fault.verb, target });
    }
    Ok(acts)
}

/// How long to go on looking after the last answer.
fn look_on(rules: &[Rule]) -> Duration {
    let within_ms = rules.iter().map(|rule| match rule {
        Rule::NothingLeftRunning { within_ms }
        | Rule::LoadForgotten { within_ms }
        | Rule::SeenAlive { within_ms } => *within_ms,
        _ => 0,
    });
    Duration::from_millis(within_ms.max().unwrap_or_default()) + LOOK_ON
}

/// A line of a replica's log.
#[derive(Deserialize)]
struct Line {
    id: Option<String>,
}

/// Which replica logged the end of which request. What is no JSON (a line that a kill cut) is passed over.
fn logged(folder: &Path, replicas: usize) -> anyhow::Result<HashMap<String, Name>> {
    let mut logged = HashMap::new();
    for number in 0..replicas {
        let name = Name { kind: Kind::Replica, number };
        let path = folder.join(format!("{name}.log"));
        let file = std::fs::File::open(&path).with_context(|| format!("{} can't be read", path.display()))?;
        for line in BufReader::new(file).lines() {
            if let Ok(Line { id: Some(id) }) = serde_json::from_str(&line?) {
                logged.insert(id, name);
            }
        }
    }
    Ok(logged)
}
