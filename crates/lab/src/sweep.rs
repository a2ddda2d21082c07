//! Many runs, over the machine's cores. Which core plays a run, and beside which others, changes nothing in it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use routing::request::ShapeRules;
use routing::settings::{Fault, Settings};

use crate::figures::Figures;
use crate::scenario::{Decider, Scenario};
use crate::simulation::play;
use crate::workload::trace::Trace;
use crate::workload::{Prompts, Workload};

/// Plays every scenario on `threads` threads; `ended` is called with the number of each that is over. The figures
/// come in the order of the scenarios.
///
/// # Errors
/// All faults of all scenarios; nothing is played then.
pub fn sweep(
    scenarios: &[Scenario],
    threads: usize,
    ended: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Figures>, Vec<Fault>> {
    let faults: Vec<Fault> = scenarios.iter().flat_map(Scenario::faults).collect();
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut read = Vec::new();
    let prompts: Vec<Option<Prompts>> =
        scenarios.iter().map(|scenario| prompts_of(scenario, threads, &mut read)).collect();
    let next = AtomicUsize::new(0);
    let done = Mutex::new(vec![None; scenarios.len()]);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, scenarios.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(scenario) = scenarios.get(at) else { return };
                    let figures = play(scenario, prompts[at].as_ref());
                    done.lock().expect("no run panicked")[at] = Some(figures);
                    ended(at);
                }
            });
        }
    });
    let done = done.into_inner().expect("no run panicked");
    Ok(done.into_iter().flatten().collect())
}

/// The requests of a scenario's trace under its rules, read once for all scenarios that read them alike.
type Read = Vec<(Trace, ShapeRules, u32, Prompts)>;

fn prompts_of(scenario: &Scenario, threads: usize, read: &mut Read) -> Option<Prompts> {
    let Workload::Trace(trace) = &scenario.workload else { return None };
    let rules = rules_of(scenario);
    let block_tokens = scenario.engines[0].limits.block_tokens;
    let known = read
        .iter()
        .find(|(other, by, tokens, _)| other.is_same(trace) && *by == rules && *tokens == block_tokens);
    if let Some((.., prompts)) = known {
        return Some(prompts.clone());
    }
    let prompts = Prompts::of_trace(trace, &rules, block_tokens, threads);
    read.push((trace.clone(), rules, block_tokens, prompts.clone()));
    Some(prompts)
}

/// How the scenario's replicas read requests.
pub(crate) fn rules_of(scenario: &Scenario) -> ShapeRules {
    match &scenario.decider {
        Decider::Replicas { settings, .. } => settings.rules(),
        Decider::LeastConnections | Decider::AllKnowing => Settings::default().rules(),
    }
}
