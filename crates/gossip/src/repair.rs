//! Fills what is missing of others' ledgers: the range from its owner, or a snapshot from anyone.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use routing::{Moment, ReplicaId};
use tokio::sync::mpsc;

use crate::GossipEvent;
use crate::directory::Known;
use crate::hub::Input;
use crate::peer::Peer;
use crate::pull::{self, Pull, PullError};
use crate::shared::Shared;
use crate::wire::{Head, PullReply, Wanted};

/// A gap younger than this is only datagrams that overtook each other.
const PATIENCE: Duration = Duration::from_millis(40);
/// Between tries for one replica, times the failures so far.
const BACKOFF: Duration = Duration::from_millis(250);
const BACKOFF_MAX: Duration = Duration::from_millis(1_500);
/// Replicas whose gaps are filled at a time.
const AT_ONCE_MAX: usize = 8;
/// After this many failures in a row with the owner, every next try is another replica's snapshot.
const OWNER_TRIES: u32 = 2;
/// Whole snapshots taken because of one replica, at most one in this time.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(10);
/// The same when the owner is gone: the last that is taken for it.
const LAST_SNAPSHOT_EVERY: Duration = Duration::from_secs(2);
/// Pages of one snapshot: at 400 records each, of an index of several million blocks.
const PAGES_MAX: usize = 16_384;

pub(crate) struct Repairs {
    shared: Arc<Shared>,
    inputs: mpsc::Sender<Input>,
    cases: HashMap<ReplicaId, Case>,
}

#[derive(Default)]
struct Case {
    gap_since: Option<Moment>,
    running: bool,
    failures: u32,
    not_before: Option<Moment>,
    snapshot_at: Option<Moment>,
}

/// How a repair ended.
#[derive(Clone, Copy)]
pub(crate) enum Repair {
    Done,
    Failed,
    /// Nobody has what is missing up to here.
    Abandoned(Head),
}

/// What a snapshot that came in whole contained.
pub(crate) struct Taken {
    pub(crate) records: u64,
    /// Whether its giver had itself joined.
    pub(crate) joined: bool,
}

impl Repairs {
    pub(crate) fn new(shared: Arc<Shared>, inputs: mpsc::Sender<Input>) -> Self {
        Self { shared, inputs, cases: HashMap::new() }
    }

    /// Forgets what was tried for a past incarnation.
    pub(crate) fn forget(&mut self, replica: &ReplicaId) {
        self.cases.remove(replica);
    }

    /// Begins a repair if one is needed and due.
    pub(crate) fn consider(&mut self, replica: &ReplicaId, peer: &Peer, known: &[Known], now: Moment) {
        let running = self.cases.values().filter(|case| case.running).count();
        let gap = peer.inbox.gap();
        let diverged = peer.inbox.diverged();
        if gap.is_none() && !diverged {
            if let Some(case) = self.cases.get_mut(replica) {
                (case.gap_since, case.failures) = (None, 0);
            }
            return;
        }
        let case = self.cases.entry(replica.clone()).or_default();
        let since = *case.gap_since.get_or_insert(now);
        let patient = now.since(since) < PATIENCE || case.not_before.is_some_and(|at| now < at);
        if case.running || patient || running >= AT_ONCE_MAX {
            return;
        }
        let own = known.iter().find(|k| k.replica == *replica);
        let owner = own.filter(|k| k.live).and_then(|k| k.address);
        let every = if owner.is_some() { SNAPSHOT_EVERY } else { LAST_SNAPSHOT_EVERY };
        let snapshot_due = case.snapshot_at.is_none_or(|at| now.since(at) >= every);
        let owners_turn = case.failures % (OWNER_TRIES + 1) < OWNER_TRIES || !snapshot_due;
        let task = Task {
            shared: Arc::clone(&self.shared),
            inputs: self.inputs.clone(),
            replica: replica.clone(),
            generation: peer.generation,
        };
        match (gap, owner) {
            (Some(gap), Some(address)) if owners_turn => {
                tokio::spawn(task.fill(address, *gap.start()));
            }
            (None, Some(address)) if snapshot_due => {
                self.shared.counters.ledger_diverged.up();
                case.snapshot_at = Some(now);
                tokio::spawn(task.renew(address));
            }
            (Some(_), owner) if snapshot_due => {
                let others = known.iter().filter(|k| k.live && k.replica != *replica);
                let others = others.filter_map(|k| Some((k.replica.clone(), k.generation, k.address?)));
                case.snapshot_at = Some(now);
                let told = peer.inbox.told_head();
                tokio::spawn(task.ask_others(others.collect(), owner.is_none(), told));
            }
            _ => return,
        }
        case.running = true;
    }

    /// Notes how a repair ended; where to go on if it was given up.
    pub(crate) fn ended(&mut self, replica: &ReplicaId, result: Repair, now: Moment) -> Option<Head> {
        let case = self.cases.get_mut(replica)?;
        case.running = false;
        match result {
            Repair::Done => {
                // What is still missing then is a new gap.
                (case.gap_since, case.failures, case.not_before) = (None, 0, None);
                None
            }
            Repair::Failed => {
                self.shared.counters.pulls_failed.up();
                case.failures += 1;
                case.not_before = Some(now.plus((BACKOFF * case.failures.min(20)).min(BACKOFF_MAX)));
                None
            }
            Repair::Abandoned(head) => {
                self.cases.remove(replica);
                Some(head)
            }
        }
    }

    /// Finds out whether anyone listens at a silent replica's port.
    pub(crate) fn check(&self, replica: ReplicaId, generation: u64, address: SocketAddr) {
        let (shared, inputs) = (Arc::clone(&self.shared), self.inputs.clone());
        tokio::spawn(async move {
            if pull::is_deserted(&shared, address).await {
                let _ = inputs.send(Input::Deserted { replica, generation }).await;
            }
        });
    }
}

/// A repair under way.
struct Task {
    shared: Arc<Shared>,
    inputs: mpsc::Sender<Input>,
    replica: ReplicaId,
    generation: u64,
}

impl Task {
    /// Pulls the records from `from` on from their owner.
    async fn fill(self, address: SocketAddr, from: u64) {
        let result = match self.pull_range(address, from).await {
            Ok(true) => Ok(()),
            Ok(false) => self.take(&self.replica, self.generation, address, false).await.map(drop),
            Err(error) => Err(error),
        };
        self.end(result.is_ok(), result.err()).await;
    }

    /// Takes a snapshot from the owner of a ledger that is not the one received.
    async fn renew(self, address: SocketAddr) {
        let result = self.take(&self.replica, self.generation, address, true).await;
        self.end(result.is_ok(), result.err()).await;
    }

    /// Takes a snapshot from someone else, as the owner does not answer; if it is gone for good, what
    /// nobody else has is given up.
    async fn ask_others(self, others: Vec<(ReplicaId, u64, SocketAddr)>, gone: bool, told: Head) {
        let mut error = None;
        for (replica, generation, address) in others {
            match self.take(&replica, generation, address, false).await {
                Ok(_) if gone => return self.tell(Repair::Abandoned(told)).await,
                Ok(_) => return self.tell(Repair::Done).await,
                Err(failed) => error = Some(failed),
            }
        }
        self.end(false, error).await;
    }

    /// Whether the range was still kept.
    async fn pull_range(&self, address: SocketAddr, from: u64) -> Result<bool, PullError> {
        let mut pull = Pull::connect(&self.shared, &self.replica, self.generation, address).await?;
        let mut from = from;
        loop {
            let (run, head) = match pull.ask(Wanted::Range { from }).await? {
                PullReply::Range { run, head } => (run, head),
                PullReply::Gone => return Ok(false),
                _ => return Err(PullError::Malformed),
            };
            let count = run.records.len() as u64;
            from += count;
            let pulled =
                Input::Pulled { replica: self.replica.clone(), generation: self.generation, run, head };
            let _ = self.inputs.send(pulled).await;
            if count == 0 || from > head.sequence {
                return Ok(true);
            }
        }
    }

    async fn take(
        &self,
        replica: &ReplicaId,
        generation: u64,
        address: SocketAddr,
        afresh: bool,
    ) -> Result<Taken, PullError> {
        take_snapshot(&self.shared, &self.inputs, replica, generation, address, afresh, |_| true).await
    }

    async fn end(self, done: bool, error: Option<PullError>) {
        if let Some(error) = &error {
            tracing::debug!(replica = %self.replica, %error, "missing records could not be pulled");
            if error.nobody_listens() {
                let (replica, generation) = (self.replica.clone(), self.generation);
                let _ = self.inputs.send(Input::Deserted { replica, generation }).await;
            }
        }
        self.tell(if done { Repair::Done } else { Repair::Failed }).await;
    }

    async fn tell(self, result: Repair) {
        let _ = self.inputs.send(Input::Repaired { replica: self.replica, result }).await;
    }
}

/// Hands on a replica's whole index, page by page, and then says how far it goes. `wanted` is asked, with
/// the first page, whether to go on; if not, nothing is handed on.
pub(crate) async fn take_snapshot(
    shared: &Shared,
    inputs: &mpsc::Sender<Input>,
    replica: &ReplicaId,
    generation: u64,
    address: SocketAddr,
    afresh: bool,
    wanted: impl Fn(bool) -> bool,
) -> Result<Taken, PullError> {
    let mut pull = Pull::connect(shared, replica, generation, address).await?;
    let mut cursor = None;
    let mut taken = Taken { records: 0, joined: true };
    let mut positions = Vec::new();
    for page in 0..PAGES_MAX {
        let PullReply::Snapshot { records, cursor: next, positions: at, joined } =
            pull.ask(Wanted::Snapshot { cursor }).await?
        else {
            return Err(PullError::Malformed);
        };
        if page == 0 {
            taken.joined = joined;
            positions = at;
            if !wanted(joined) {
                return Ok(taken);
            }
        }
        taken.records += records.len() as u64;
        let event = GossipEvent::Snapshot { from: replica.clone(), records, last: next.is_none() };
        let _ = shared.events.send(event).await;
        cursor = next;
        if cursor.is_none() {
            positions.retain(|position| !afresh || position.replica == *replica);
            let _ = inputs.send(Input::Positions { positions, afresh }).await;
            return Ok(taken);
        }
    }
    Err(PullError::Malformed)
}
