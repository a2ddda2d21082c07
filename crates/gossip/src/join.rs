//! The first moments of a replica: it finds the others and takes over what one of them knows.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use routing::ReplicaId;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};

use crate::hub::Input;
use crate::repair::take_snapshot;
use crate::shared::Shared;
use crate::{GossipEvent, Outcome};

/// How long a replica without seeds waits for a call: others that have it as a seed call several times a
/// second.
const LOOK: Duration = Duration::from_millis(500);
/// How long a replica that finds only others as new as itself waits for an older one.
const TOGETHER: Duration = Duration::from_secs(1);
/// How soon one that was new is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// Between two looks at who is there.
const PAUSE: Duration = Duration::from_millis(20);

pub(crate) async fn run(shared: Arc<Shared>, inputs: mpsc::Sender<Input>) {
    let start = Instant::now();
    let outcome = find(&shared, &inputs, start).await;
    tracing::info!(outcome = outcome.as_str(), millis = start.elapsed().as_millis(), "joined the gossip");
    shared.joined.store(true, Ordering::Relaxed);
    let _ = inputs.send(Input::Joined).await;
    let _ = shared.events.send(GossipEvent::SnapshotDone(outcome)).await;
}

async fn find(shared: &Shared, inputs: &mpsc::Sender<Input>, start: Instant) -> Outcome {
    let deadline = start + shared.config.snapshot_wait;
    let mut failed: HashSet<(ReplicaId, u64)> = HashSet::new();
    let mut new: HashMap<(ReplicaId, u64), Instant> = HashMap::new();
    let mut new_since = None;
    let mut asked = None;
    loop {
        let known = shared.directory.known();
        let live = known.iter().filter(|known| known.live);
        let live: Vec<_> = live.filter_map(|k| Some((k.replica.clone(), k.generation, k.address?))).collect();
        for (replica, generation, address) in &live {
            let one = (replica.clone(), *generation);
            if failed.contains(&one) || new.get(&one).is_some_and(|at| at.elapsed() < ASK_AGAIN) {
                continue;
            }
            match attempt(shared, inputs, replica, *generation, *address, deadline).await {
                Attempt::Taken(records) => return Outcome::Joined { from: replica.clone(), records },
                Attempt::New => drop(new.insert(one, Instant::now())),
                Attempt::Failed => {
                    shared.counters.pulls_failed.up();
                    asked = Some(replica.clone());
                    failed.insert(one);
                }
            }
        }
        let untried =
            live.iter().any(|(replica, generation, _)| !failed.contains(&(replica.clone(), *generation)));
        let since = if untried { *new_since.get_or_insert_with(Instant::now) } else { Instant::now() };
        if since.elapsed() >= TOGETHER {
            return Outcome::AllNew;
        }
        let seeded = shared.seeded.load(Ordering::Relaxed);
        if live.is_empty() && !seeded && start.elapsed() >= LOOK.min(shared.config.snapshot_wait) {
            return Outcome::Alone;
        }
        if Instant::now() >= deadline {
            return match asked {
                Some(from) => Outcome::Interrupted { from },
                None if live.is_empty() => Outcome::Unreachable,
                None => Outcome::AllNew,
            };
        }
        sleep(PAUSE).await;
    }
}

enum Attempt {
    Taken(u64),
    /// It has not joined itself.
    New,
    Failed,
}

async fn attempt(
    shared: &Shared,
    inputs: &mpsc::Sender<Input>,
    replica: &ReplicaId,
    generation: u64,
    address: SocketAddr,
    deadline: Instant,
) -> Attempt {
    let taking = take_snapshot(shared, inputs, replica, generation, address, false, |joined| joined);
    match timeout_at(deadline, taking).await {
        Ok(Ok(taken)) if taken.joined => Attempt::Taken(taken.records),
        Ok(Ok(_)) => Attempt::New,
        Ok(Err(error)) => {
            tracing::debug!(%replica, %error, "no snapshot");
            Attempt::Failed
        }
        Err(_) => Attempt::Failed,
    }
}
