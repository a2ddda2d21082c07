//! More requests than the engines can serve: the urgent ones are served in time, and the others are served or told
//! when to come again.

use std::time::{Duration, Instant};

use engine::{Config, Profile};
use serde_json::json;
use tests::{Cluster, Fleet, MODEL, Plan, Talker, words};
use tokio::task::JoinSet;

/// First tokens as classes 1 and 3 expect them, and how long anybody waits.
const SETTINGS: &str = "priority_1_ttft_ms = 600\npriority_3_ttft_ms = 1200\nqueue_wait_ms_max = 2500";
const WAIT_MAX: Duration = Duration::from_millis(2_500);
/// What a refusal may take beyond the queue's limit on a machine that does other things too.
const SLACK: Duration = Duration::from_millis(1_500);

/// The session that asks for a third of everything.
const GREEDY: &str = "greedy";
/// How long it takes until the engines are full and what comes has to wait.
const FULL_AFTER: Duration = Duration::from_millis(1_500);

/// How one request fared.
struct Fared {
    class: usize,
    session: String,
    in_time: bool,
    refused_after: Option<Duration>,
    /// From its first token to its last.
    held: Option<(Instant, Instant)>,
}

/// One class-1 and one class-3 request every `every`, over all replicas in turn.
async fn overload(cluster: &Cluster, every: Duration, pairs: usize) -> Vec<Fared> {
    let replicas = cluster.public();
    let mut clients = JoinSet::new();
    let mut due = tokio::time::interval(every);
    for number in 0..pairs {
        due.tick().await;
        for (class, ttft) in [(1, Duration::from_millis(600)), (3, Duration::from_millis(1_200))] {
            let to = replicas[(number + class) % replicas.len()];
            clients.spawn(async move {
                let other = format!("session-{}", number % 40);
                let session = if number % 3 == 0 { GREEDY.to_owned() } else { other };
                let talker = Talker::with_headers(&[
                    ("x-request-priority", if class == 1 { "1" } else { "3" }),
                    ("x-session-id", &session),
                ]);
                let prompt = words(&format!("{number} of class {class}"), 400);
                let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 16, "stream": true});
                let began = Instant::now();
                let outcome = talker.send(to, "/v1/completions", &body).await;
                match &outcome.verdict {
                    Ok(()) => {
                        let first = outcome.ttft.expect("a stream has a first token");
                        let held = Some((began + first, began + outcome.e2e));
                        Fared { class, session, in_time: first <= ttft, refused_after: None, held }
                    }
                    Err(failure) => {
                        assert_eq!(outcome.status, Some(429), "{}: {}", failure.kind, failure.detail);
                        assert!(outcome.headers.contains_key("retry-after"), "when to come again");
                        let refused_after = Some(outcome.e2e);
                        Fared { class, session, in_time: false, refused_after, held: None }
                    }
                }
            });
        }
    }
    clients.join_all().await
}

/// How many streams of the greedy session ran at once, at the most, of those that began when others waited.
fn greedy_at_once(fared: &[Fared], full: Instant) -> usize {
    let held: Vec<_> = fared
        .iter()
        .filter(|each| each.session == GREEDY)
        .filter_map(|each| each.held.filter(|(first, _)| *first >= full))
        .collect();
    let at = |moment: Instant| held.iter().filter(|(first, last)| (*first..*last).contains(&moment)).count();
    held.iter().map(|(first, _)| at(*first)).max().unwrap_or(0)
}

/// Two engines of two places each, whose batches fill while their prompts are short.
async fn small_engines() -> Fleet {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.limits.running_max = 2;
    Fleet::of(2, config).await
}

/// Four places, of which each is taken for some 315 ms, serve 12.7 a second; 1.3 times as many come.
async fn the_urgent_are_served(replicas: usize) {
    let fleet = small_engines().await;
    let cluster = Cluster::start(Plan::new(replicas, &fleet.urls()).settings(SETTINGS)).await;
    let began = Instant::now();
    let fared = overload(&cluster, Duration::from_millis(121), 90).await;
    let attained = |class: usize| {
        let of_class = || fared.iter().filter(|each| each.class == class);
        of_class().filter(|each| each.in_time).count() as f64 / of_class().count() as f64
    };
    let (urgent, patient) = (attained(1), attained(3));
    let greedy = greedy_at_once(&fared, began + FULL_AFTER);
    assert!(urgent >= 2.0 * patient && urgent > 0.25, "class 1: {urgent:.2}, class 3: {patient:.2}");
    let longest = fared.iter().filter_map(|each| each.refused_after).max().expect("some are refused");
    assert!(longest <= WAIT_MAX + SLACK, "refused after {longest:?}");
    // Four places and more than four sessions: a share is one. Of several replicas one may pass over another that is
    // slow to take its turn.
    let at_most = if replicas == 1 { 2 } else { 3 };
    assert!(greedy <= at_most, "{greedy} of one session at once");
    cluster.wait_until_idle(tests::PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_what_engines_can_serve_the_urgent_are_served_in_time() {
    the_urgent_are_served(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_what_engines_can_serve_the_urgent_are_served_in_time_through_three_replicas() {
    the_urgent_are_served(3).await;
}
