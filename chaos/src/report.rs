//! The result of a run, for people and for programs.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;

use crate::evidence::Evidence;
use crate::judge::{Judgement, describe};
use crate::scenario::Scenario;

/// Failed requests told one by one.
const FAILURES_TOLD_MAX: usize = 20;

/// How a scenario ended.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Verdict {
    scenario: String,
    about: String,
    seed: u64,
    balancer: &'static str,
    holds: bool,
    rules: Vec<Judgement>,
    faults: Vec<Done>,
    requests: usize,
    answered: usize,
    /// Failed requests by what the client saw.
    failed: BTreeMap<String, usize>,
    /// The first of them.
    failures: Vec<String>,
    /// Answered requests by the replica that they went through.
    per_replica: BTreeMap<String, usize>,
    /// Answered requests by endpoint.
    per_endpoint: BTreeMap<String, usize>,
}

/// A fault that was done.
#[derive(Clone, Debug, Serialize)]
struct Done {
    at_s: f64,
    verb: String,
    target: String,
}

impl Verdict {
    pub(crate) fn new(
        scenario: &Scenario,
        seed: u64,
        balancer: &'static str,
        evidence: &Evidence,
        rules: Vec<Judgement>,
    ) -> Self {
        let mut failed = BTreeMap::new();
        let mut failures = Vec::new();
        let (mut per_replica, mut per_endpoint) = (BTreeMap::new(), BTreeMap::new());
        for exchange in &evidence.exchanges {
            if let Some((kind, _)) = &exchange.failure {
                *failed.entry(kind.to_string()).or_insert(0) += 1;
                if failures.len() < FAILURES_TOLD_MAX {
                    failures.push(describe(evidence, exchange));
                }
                continue;
            }
            if let Some(replica) = evidence.replica_of(exchange) {
                *per_replica.entry(replica.to_string()).or_insert(0) += 1;
            }
            if let Some(endpoint) = &exchange.endpoint {
                *per_endpoint.entry(endpoint.clone()).or_insert(0) += 1;
            }
        }
        let done = evidence.acts.iter().map(|act| Done {
            at_s: (act.at.as_secs_f64() * 1_000.0).round() / 1_000.0,
            verb: act.verb.to_string(),
            target: act.target.to_string(),
        });
        Self {
            scenario: scenario.name.clone(),
            about: scenario.about.clone(),
            seed,
            balancer,
            holds: rules.iter().all(|judgement| judgement.holds),
            rules,
            faults: done.collect(),
            requests: evidence.exchanges.len(),
            answered: evidence.exchanges.len() - failed.values().sum::<usize>(),
            failed,
            failures,
            per_replica,
            per_endpoint,
        }
    }

    /// Whether every rule holds.
    pub(crate) const fn holds(&self) -> bool {
        self.holds
    }

    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let mut json = serde_json::to_vec_pretty(self)?;
        json.push(b'\n');
        std::fs::write(path, json).with_context(|| format!("{} can't be written", path.display()))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} (seed {}, balanced by {})", self.scenario, self.about, self.seed, self.balancer)?;
        for Done { at_s, verb, target } in &self.faults {
            writeln!(f, "  {at_s:>7.3} s  {verb} {target}")?;
        }
        let counts = |counts: &BTreeMap<String, usize>| {
            let parts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
            parts.join(", ")
        };
        let total: usize = self.failed.values().sum();
        let kinds = if total > 0 { format!(" ({})", counts(&self.failed)) } else { String::new() };
        writeln!(f, "  {} requests, {} answered, {total} failed{kinds}", self.requests, self.answered)?;
        writeln!(f, "  through {}", counts(&self.per_replica))?;
        for Judgement { rule, holds, seen } in &self.rules {
            writeln!(f, "  {:<6} {rule:<26} {seen}", if *holds { "holds" } else { "BROKEN" })?;
        }
        Ok(())
    }
}
