//! Scenarios: what is broken when, and what must hold. Plain data from TOML, checked as a whole.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Deserializer};

/// Where the scenarios of this project are.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios");

/// The longest a scenario may be planned to take: a typing error beyond that.
const RUN_MAX: Duration = Duration::from_secs(600);

/// One scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    /// The file's name without its ending.
    #[serde(skip)]
    pub(crate) name: String,
    /// One line for people.
    pub(crate) about: String,
    /// Settles the texts and which process is hit.
    #[serde(default)]
    pub(crate) seed: u64,
    pub(crate) cluster: Cluster,
    pub(crate) load: Load,
    /// The faults, in the order of their times.
    #[serde(rename = "fault")]
    pub(crate) faults: Vec<Fault>,
    /// The rules that must hold.
    #[serde(rename = "hold")]
    pub(crate) rules: Vec<Rule>,
}

/// What runs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cluster {
    pub(crate) replicas: usize,
    pub(crate) engines: usize,
    /// What the engines behave like, as in `grapevine engine --profile`.
    pub(crate) profile: String,
    /// What the engines' times are divided by.
    pub(crate) speed: f64,
    /// Further flags of `grapevine serve`.
    #[serde(default)]
    pub(crate) replica_flags: Vec<String>,
}

/// What the clients do: chats, each client one at a time, each request on a connection of its own.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Load {
    pub(crate) clients: usize,
    /// How long new requests are sent, in ms.
    pub(crate) for_ms: u64,
    pub(crate) turns: u32,
    pub(crate) tenants: u64,
    pub(crate) first_bytes: usize,
    pub(crate) turn_bytes: usize,
    pub(crate) answer_tokens: u32,
    /// How often a failed request is sent again.
    pub(crate) retries: u32,
}

/// One fault.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fault {
    /// When, in ms after the first request.
    pub(crate) at_ms: u64,
    pub(crate) verb: Verb,
    pub(crate) target: Aim,
}

/// What is done to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verb {
    /// SIGKILL.
    Kill,
    /// SIGTERM.
    Terminate,
    /// SIGSTOP: frozen, its connections open.
    Stop,
    /// SIGCONT.
    Continue,
    /// Started again with the arguments that it had, after it ended.
    Start,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kill => "kill",
            Self::Terminate => "terminate",
            Self::Stop => "stop",
            Self::Continue => "continue",
            Self::Start => "start",
        })
    }
}

/// A kind of process that faults are aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Replica,
    Engine,
}

/// One process of the cluster, as scenarios, logs and reports name it: `replica-0`, `engine-3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Name {
    pub(crate) kind: Kind,
    pub(crate) number: usize,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Replica => "replica",
            Kind::Engine => "engine",
        };
        write!(f, "{kind}-{}", self.number)
    }
}

/// Which process a fault hits: `replica-0`, or `replica-any`, which the seed settles once for the whole run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    At(Name),
    Any(Kind),
}

impl FromStr for Aim {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        const ALLOWED: &str = "replica-N, replica-any, engine-N or engine-any";
        let (kind, which) = text.split_once('-').with_context(|| format!("{text:?}: allowed: {ALLOWED}"))?;
        let kind = match kind {
            "replica" => Kind::Replica,
            "engine" => Kind::Engine,
            _ => bail!("{text:?}: allowed: {ALLOWED}"),
        };
        if which == "any" {
            return Ok(Self::Any(kind));
        }
        let number = which.parse().with_context(|| format!("{text:?}: allowed: {ALLOWED}"))?;
        Ok(Self::At(Name { kind, number }))
    }
}

impl<'de> Deserialize<'de> for Aim {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|error| serde::de::Error::custom(format!("{error:#}")))
    }
}

/// What must hold. How each is judged stands in `judge.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(tag = "rule", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Rule {
    /// The load was one: this many requests were answered in whole.
    Answered { at_least: usize },
    /// No request fails.
    NothingFails,
    /// Only requests fail that were open through a killed replica when it was killed, and as broken connections.
    OnlyCutRequestsFail,
    /// Only streams fail that had begun at a killed engine when it was killed, and with an error event.
    OnlyBegunStreamsFail,
    /// Of the later turns that begin after the first fault, this share goes to the endpoint of their chat's first
    /// turn. Chats at home on an engine that was hit don't count.
    FollowUpsAtHome { ratio_min: f64 },
    /// So long after a replica was killed or stopped no other one counts its requests any more.
    LoadForgotten { within_ms: u64 },
    /// So long after a replica was continued or started again all others see it alive.
    SeenAlive { within_ms: u64 },
    /// So long after the last answer no replica counts a request anywhere.
    NothingLeftRunning { within_ms: u64 },
}

impl Rule {
    /// The name, as scenarios write it.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Answered { .. } => "answered",
            Self::NothingFails => "nothing-fails",
            Self::OnlyCutRequestsFail => "only-cut-requests-fail",
            Self::OnlyBegunStreamsFail => "only-begun-streams-fail",
            Self::FollowUpsAtHome { .. } => "follow-ups-at-home",
            Self::LoadForgotten { .. } => "load-forgotten",
            Self::SeenAlive { .. } => "seen-alive",
            Self::NothingLeftRunning { .. } => "nothing-left-running",
        }
    }
}

impl Scenario {
    /// The scenario of this name, or in this file.
    ///
    /// # Errors
    /// When there is none, or it makes no sense; the message says why.
    pub(crate) fn find(name: &str) -> anyhow::Result<Self> {
        let named = PathBuf::from(FOLDER).join(name).with_extension("toml");
        let path = if name.ends_with(".toml") { PathBuf::from(name) } else { named };
        if !path.is_file() {
            bail!("there is no scenario {name:?}; there are: {}", names()?.join(", "));
        }
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("{} can't be read", path.display()))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Self::parse(&stem, &text).with_context(|| format!("scenario {name}"))
    }

    fn parse(name: &str, text: &str) -> anyhow::Result<Self> {
        let scenario = Self { name: name.to_owned(), ..toml::from_str(text)? };
        scenario.check()?;
        Ok(scenario)
    }

    fn check(&self) -> anyhow::Result<()> {
        let Cluster { replicas, engines, .. } = self.cluster;
        ensure!((1..=16).contains(&replicas), "cluster.replicas = {replicas}: allowed: 1 to 16");
        ensure!((1..=64).contains(&engines), "cluster.engines = {engines}: allowed: 1 to 64");
        ensure!((1..=256).contains(&self.load.clients), "load.clients: allowed: 1 to 256");
        ensure!(self.load.turns >= 1 && self.load.tenants >= 1, "load.turns and load.tenants: at least 1");
        ensure!(self.load_span() <= RUN_MAX, "load.for_ms: at most {}", RUN_MAX.as_millis());
        ensure!(!self.rules.is_empty(), "a scenario without rules proves nothing");
        ensure!(
            self.faults.is_sorted_by_key(|fault| fault.at_ms),
            "the faults must be in the order of their times"
        );
        for fault in &self.faults {
            ensure!(fault.at_ms < self.load.for_ms, "a fault at {} ms is after the load", fault.at_ms);
            if let Aim::At(name) = fault.target {
                let there = if name.kind == Kind::Replica { replicas } else { engines };
                ensure!(name.number < there, "there is no {name}: they are counted from 0");
            }
        }
        Ok(())
    }

    /// How long new requests are sent.
    pub(crate) const fn load_span(&self) -> Duration {
        Duration::from_millis(self.load.for_ms)
    }
}

/// The names of all scenarios of this project, sorted.
pub(crate) fn names() -> anyhow::Result<Vec<String>> {
    let folder = Path::new(FOLDER);
    let entries = std::fs::read_dir(folder).with_context(|| format!("{FOLDER} can't be read"))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "toml") {
            names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scenario_there_is_can_be_read() {
        let names = names().unwrap();
        assert!(names.contains(&"kill-one-replica".to_owned()));
        for name in names {
            Scenario::find(&name).unwrap();
        }
    }

    #[test]
    fn a_scenario_that_makes_no_sense_is_refused_with_its_reason() {
        let good = std::fs::read_to_string(Path::new(FOLDER).join("kill-one-replica.toml")).unwrap();
        let check = |from: &str, to: &str, why: &str| {
            let text = good.replace(from, to);
            assert_ne!(text, good, "{from}");
            let error = format!("{:#}", Scenario::parse("odd", &text).unwrap_err());
            assert!(error.contains(why), "{error}");
        };
        check("replica-any", "balancer-0", "engine-any");
        check("replica-any", "replica-3", "no replica-3");
        check("verb = \"kill\"", "verb = \"tickle\"", "tickle");
        check("replicas = 3", "replicas = 0", "1 to 16");
        check("rule = \"load-forgotten\"", "rule = \"load-forgiven\"", "load-forgiven");
        check("within_ms = 2000", "within_ms = 2000\ncolour = 1", "colour");
    }
}
