//! Whether the rules hold, from the evidence alone.

use std::time::Duration;

use grapevine::load::ErrorKind;
use serde::Serialize;

use crate::evidence::{Act, Evidence, Exchange, Sample};
use crate::scenario::{Kind, Rule, Verb};

/// How one rule fared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Judgement {
    pub(crate) rule: &'static str,
    pub(crate) holds: bool,
    /// The numbers behind it.
    pub(crate) seen: String,
}

/// Failures told in full; more are only counted.
const EXAMPLES_MAX: usize = 5;

/// Judges all rules, and always that no process ended by itself.
pub(crate) fn judge(rules: &[Rule], evidence: &Evidence) -> Vec<Judgement> {
    let lost: Vec<String> = evidence.lost.iter().map(|(name, how)| format!("{name} ended: {how}")).collect();
    let own = Judgement {
        rule: "no-process-ends-by-itself",
        holds: lost.is_empty(),
        seen: if lost.is_empty() { "none did".to_owned() } else { lost.join("; ") },
    };
    let judged = rules.iter().map(|rule| {
        let (holds, seen) = one(rule, evidence);
        Judgement { rule: rule.name(), holds, seen }
    });
    judged.chain([own]).collect()
}

fn one(rule: &Rule, evidence: &Evidence) -> (bool, String) {
    let millis = Duration::from_millis;
    match *rule {
        Rule::Answered { at_least } => answered(evidence, at_least),
        Rule::NothingFails => only(evidence, "none may", |_| false),
        Rule::OnlyCutRequestsFail => {
            only(evidence, "all cut with their replica", |exchange| is_cut_with_replica(evidence, exchange))
        }
        Rule::OnlyBegunStreamsFail => {
            only(evidence, "all begun at the engine", |exchange| is_begun_at_dead_engine(evidence, exchange))
        }
        Rule::FollowUpsAtHome { ratio_min } => follow_ups_at_home(evidence, ratio_min),
        Rule::LoadForgotten { within_ms } => load_forgotten(evidence, millis(within_ms)),
        Rule::SeenAlive { within_ms } => seen_alive(evidence, millis(within_ms)),
        Rule::NothingLeftRunning { within_ms } => nothing_left(evidence, millis(within_ms)),
    }
}

fn answered(evidence: &Evidence, at_least: usize) -> (bool, String) {
    let count = evidence.exchanges.iter().filter(|exchange| exchange.failure.is_none()).count();
    (count >= at_least, format!("{count} answered, at least {at_least} wanted"))
}

/// Whether every failure is one that is excused.
fn only(evidence: &Evidence, which: &str, excused: impl Fn(&Exchange) -> bool) -> (bool, String) {
    let failed: Vec<&Exchange> = evidence.exchanges.iter().filter(|each| each.failure.is_some()).collect();
    let bad: Vec<&Exchange> = failed.iter().copied().filter(|exchange| !excused(exchange)).collect();
    if bad.is_empty() {
        return (true, format!("{} of {} failed ({which})", failed.len(), evidence.exchanges.len()));
    }
    let told: Vec<String> =
        bad.iter().take(EXAMPLES_MAX).map(|exchange| describe(evidence, exchange)).collect();
    (false, format!("{} of {} failures are not excused: {}", bad.len(), failed.len(), told.join("; ")))
}

fn is_cut_with_replica(evidence: &Evidence, exchange: &Exchange) -> bool {
    let cut = matches!(exchange.failure, Some((ErrorKind::Reset | ErrorKind::Truncated, _)));
    cut && evidence.acts_of(Kind::Replica, &[Verb::Kill]).any(|act| {
        exchange.is_open_at(act) && evidence.replica_of(exchange).is_none_or(|replica| replica == act.target)
    })
}

fn is_begun_at_dead_engine(evidence: &Evidence, exchange: &Exchange) -> bool {
    let told = matches!(exchange.failure, Some((ErrorKind::ErrorEvent, _)));
    told && evidence.acts_of(Kind::Engine, &[Verb::Kill]).any(|act| {
        let url = evidence.engine_urls.get(act.target.number);
        let begun = exchange.first_content.is_some_and(|at| at <= act.at);
        begun && exchange.is_open_at(act) && exchange.endpoint.as_ref() == url
    })
}

fn follow_ups_at_home(evidence: &Evidence, ratio_min: f64) -> (bool, String) {
    let from = evidence.acts.first().map_or(Duration::ZERO, |act| act.at);
    let hit: Vec<&String> = evidence
        .acts_of(Kind::Engine, &[Verb::Kill, Verb::Terminate, Verb::Stop])
        .filter_map(|act| evidence.engine_urls.get(act.target.number))
        .collect();
    let counted = |exchange: &&Exchange| {
        exchange.failure.is_none()
            && exchange.turn > 0
            && exchange.began >= from
            && exchange.endpoint.is_some()
            && exchange.home.as_ref().is_some_and(|home| !hit.contains(&home))
    };
    let all = evidence.exchanges.iter().filter(counted).count();
    let at_home = evidence
        .exchanges
        .iter()
        .filter(counted)
        .filter(|exchange| exchange.endpoint == exchange.home)
        .count();
    let ratio = if all == 0 { 0.0 } else { at_home as f64 / all as f64 };
    (ratio >= ratio_min, format!("{at_home} of {all} after the first fault: {ratio:.3}, {ratio_min} wanted"))
}

/// The samples of the other replicas from `from` to the next fault done to the process of `act`.
fn others_after<'a>(
    evidence: &'a Evidence,
    act: &'a Act,
    from: Duration,
) -> impl Iterator<Item = &'a Sample> {
    let next = evidence.acts.iter().find(|later| later.target == act.target && later.at > act.at);
    let until = next.map_or(Duration::MAX, |next| next.at);
    evidence
        .samples
        .iter()
        .filter(move |sample| sample.replica != act.target && sample.at >= from && sample.at < until)
}

fn load_forgotten(evidence: &Evidence, within: Duration) -> (bool, String) {
    let mut seen = Vec::new();
    let mut holds = true;
    for act in evidence.acts_of(Kind::Replica, &[Verb::Kill, Verb::Stop]) {
        let id = act.target.to_string();
        let counted = |sample: &&Sample| sample.running_by_replica.get(&id).is_some_and(|count| *count > 0);
        let before = evidence.samples.iter().filter(|each| each.replica != act.target && each.at < act.at);
        let before = before.filter(counted).count();
        let after = others_after(evidence, act, act.at + within).count();
        let last = others_after(evidence, act, act.at).filter(counted).map(|sample| sample.at).max();
        let gone_ms = last.map_or(0, |last| last.saturating_sub(act.at).as_millis());
        // Without a look before and after the fault nothing is shown.
        holds &= before > 0
            && after > 0
            && others_after(evidence, act, act.at + within).filter(counted).count() == 0;
        seen.push(format!(
            "others last counted {id}'s load {gone_ms} ms after ({before} looks before that saw it, {after} looks past {} ms)",
            within.as_millis()
        ));
    }
    (holds && !seen.is_empty(), seen.join("; "))
}

fn seen_alive(evidence: &Evidence, within: Duration) -> (bool, String) {
    let mut seen = Vec::new();
    let mut holds = true;
    for act in evidence.acts_of(Kind::Replica, &[Verb::Continue, Verb::Start]) {
        let id = act.target.to_string();
        let after = others_after(evidence, act, act.at + within).count();
        let dead =
            others_after(evidence, act, act.at + within).filter(|sample| !sample.live.contains(&id)).count();
        holds &= after > 0 && dead == 0;
        seen.push(format!("{id}: {dead} of {after} looks past {} ms took it for dead", within.as_millis()));
    }
    (holds && !seen.is_empty(), seen.join("; "))
}

fn nothing_left(evidence: &Evidence, within: Duration) -> (bool, String) {
    let late = || {
        evidence.samples.iter().filter(|sample| {
            sample.at >= evidence.load_ended + within && evidence.runs_at_end(sample.replica)
        })
    };
    let busy = late().filter(|sample| sample.running > 0).count();
    let looks = late().count();
    let seen = format!("{busy} of {looks} looks later than {} ms saw any", within.as_millis());
    (looks > 0 && busy == 0, seen)
}

/// One failed request in a few words.
pub(crate) fn describe(evidence: &Evidence, exchange: &Exchange) -> String {
    let (kind, detail) = match &exchange.failure {
        Some((kind, detail)) => (kind.to_string(), detail.as_str()),
        None => ("answered".to_owned(), ""),
    };
    let through = evidence.replica_of(exchange).map_or("unknown".to_owned(), |replica| replica.to_string());
    format!(
        "{} through {through}, {:.2} to {:.2} s, {}: {kind} ({detail})",
        exchange.id,
        exchange.began.as_secs_f64(),
        exchange.ended.as_secs_f64(),
        if exchange.first_content.is_some() { "begun" } else { "no content" },
    )
}

#[cfg(test)]
mod tests;
