//! More requests than the engines can serve: the urgent ones are served in time, and the others are served or told
//! when to come again.

use std::time::Duration;

use engine::{Config, Profile};
use serde_json::json;
use tests::{Cluster, Fleet, MODEL, Plan, Talker, words};
use tokio::task::JoinSet;

/// First tokens as classes 1 and 3 expect them, and how long anybody waits.
const SETTINGS: &str = "priority_1_ttft_ms = 600\npriority_3_ttft_ms = 1200\nqueue_wait_ms_max = 2500";
const WAIT_MAX: Duration = Duration::from_millis(2_500);
/// What a refusal may take beyond the queue's limit on a machine that does other things too.
const SLACK: Duration = Duration::from_millis(1_500);

/// How one request fared.
struct Fared {
    class: usize,
    in_time: bool,
    refused_after: Option<Duration>,
}

/// One class-1 and one class-3 request every `every`, over all replicas in turn.
async fn overload(cluster: &Cluster, every: Duration, pairs: usize) -> Vec<Fared> {
    let replicas = cluster.public();
    let mut clients = JoinSet::new();
    let mut due = tokio::time::interval(every);
    for number in 0..pairs {
        due.tick().await;
        for (class, ttft) in [(1, Duration::from_millis(600)), (3, Duration::from_millis(1_200))] {
            let to = replicas[number % replicas.len()];
            clients.spawn(async move {
                let session = format!("session-{}", number % 40);
                let talker = Talker::with_headers(&[
                    ("x-request-priority", if class == 1 { "1" } else { "3" }),
                    ("x-session-id", &session),
                ]);
                let prompt = words(&format!("{number} of class {class}"), 400);
                let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 16, "stream": true});
                let outcome = talker.send(to, "/v1/completions", &body).await;
                match &outcome.verdict {
                    Ok(()) => {
                        let first = outcome.ttft.expect("a stream has a first token");
                        Fared { class, in_time: first <= ttft, refused_after: None }
                    }
                    Err(failure) => {
                        assert_eq!(outcome.status, Some(429), "{}: {}", failure.kind, failure.detail);
                        assert!(outcome.headers.contains_key("retry-after"), "when to come again");
                        Fared { class, in_time: false, refused_after: Some(outcome.e2e) }
                    }
                }
            });
        }
    }
    clients.join_all().await
}

/// Two engines of two places each, whose batches fill while their prompts are short.
async fn small_engines() -> Fleet {
    let mut config = Config::profile(Profile::Llama8bH100);
    config.limits.running_max = 2;
    Fleet::of(2, config).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beyond_what_engines_can_serve_the_urgent_are_served_in_time() {
    let fleet = small_engines().await;
    let cluster = Cluster::start(Plan::new(1, &fleet.urls()).settings(SETTINGS)).await;
    // Four places of some 230 ms serve 17 a second; 26 come.
    let fared = overload(&cluster, Duration::from_millis(77), 90).await;
    let attained = |class: usize| {
        let of_class = || fared.iter().filter(|each| each.class == class);
        of_class().filter(|each| each.in_time).count() as f64 / of_class().count() as f64
    };
    let (urgent, patient) = (attained(1), attained(3));
    assert!(urgent >= 2.0 * patient && urgent > 0.5, "class 1: {urgent:.2}, class 3: {patient:.2}");
    let longest = fared.iter().filter_map(|each| each.refused_after).max().expect("some are refused");
    assert!(longest <= WAIT_MAX + SLACK, "refused after {longest:?}");
    cluster.wait_until_idle(tests::PATIENCE).await;
}
