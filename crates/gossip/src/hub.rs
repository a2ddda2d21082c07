//! The task that hears the others: it keeps what is known of each, and tells the replica what is new.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use routing::facts::{LoadPush, QueuePush};
use routing::{Moment, ReplicaId};
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval};

use crate::board::{News, Read};
use crate::directory::Known;
use crate::inbox::Arrival;
use crate::names::{Names, Verdict};
use crate::peer::Peer;
use crate::repair::{Repair, Repairs};
use crate::shared::Shared;
use crate::wire::{
    HEAD_KEY, Head, META_KEY, PARTS_MAX, Position, Push, QUEUE_KEY, Queued, Run, SLOTS_MAX, Staged, key_index,
};
use crate::{GossipEvent, Rejection, codec};

/// Messages from the other tasks that wait for this one. A push that finds no room is lost and counted; what
/// it said comes again by the boards or is pulled.
pub(crate) const INPUTS_MAX: usize = 4_096;
/// How often heartbeats are looked up and gaps and silences acted on.
const TICK: Duration = Duration::from_millis(50);
/// Replicas and past incarnations of them that are kept track of.
const PEERS_MAX: usize = 1_024;
/// A replica's sign of life is told at most this often.
const HEARTBEAT_EVERY: Duration = Duration::from_millis(50);
/// A live replica's pulse is told again after this time, so that whoever missed an event catches up.
const PULSE_AGAIN: Duration = Duration::from_secs(2);
/// Silence after which a replica that is heard again may have been forgotten meanwhile.
const SILENCE: Duration = Duration::from_secs(1);
/// A replica silent for longer is neither pushed to nor pulled from.
const LIVE_SPAN: Duration = Duration::from_secs(3);
/// Silence after which it is checked whether anyone still listens at its port, and how often.
const SUSPICION: Duration = Duration::from_millis(400);
/// A replica silent for longer is forgotten; as long as the library keeps one.
const FORGET: Duration = Duration::from_secs(120);
/// How long what was handed on may take to be applied, when a snapshot says what it holds.
const SETTLE: Duration = Duration::from_secs(1);

/// What the other tasks tell the hub.
pub(crate) enum Input {
    Push(Box<Push>),
    Staged(Staged),
    Queue(Queued),
    /// Records of a replica's own log, pulled from it.
    Pulled {
        replica: ReplicaId,
        generation: u64,
        run: Run,
        head: Head,
    },
    /// A snapshot was applied that holds these replicas' ledgers up to there.
    Positions {
        positions: Vec<Position>,
        afresh: bool,
    },
    /// A repair ended.
    Repaired {
        replica: ReplicaId,
        result: Repair,
    },
    /// Nobody listens at the port of this incarnation.
    Deserted {
        replica: ReplicaId,
        generation: u64,
    },
    /// Joining is over.
    Joined,
    /// The gossip library gave up.
    LibraryEnded,
}

pub(crate) struct Hub {
    shared: Arc<Shared>,
    peers: HashMap<ReplicaId, Entry>,
    pulse_read: Read,
    ledger_read: Read,
    names: Names,
    repairs: Repairs,
    joined: bool,
}

/// One replica, and what has been told of it.
struct Entry {
    peer: Peer,
    heard: Moment,
    beat_told: Option<Moment>,
    pulse_told: Option<Moment>,
    goodbye_told: bool,
    checked: Option<Moment>,
    /// Where its ledger was at the last two looks that are [`SETTLE`] apart, older first.
    settled: [Head; 2],
    settled_at: Moment,
}

impl Hub {
    pub(crate) fn new(shared: Arc<Shared>, repairs: Repairs) -> Self {
        let (peers, names) = (HashMap::new(), Names::default());
        Self {
            shared,
            peers,
            pulse_read: Read::new(),
            ledger_read: Read::new(),
            names,
            repairs,
            joined: false,
        }
    }

    /// Runs until nobody wants to hear its events.
    pub(crate) async fn run(mut self, mut inputs: mpsc::Receiver<Input>, posted: Arc<Notify>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.shared.events.is_closed() {
            tokio::select! {
                input = inputs.recv() => match input {
                    Some(input) => self.take(input).await,
                    None => return,
                },
                () = posted.notified() => self.read_boards().await,
                _ = tick.tick() => {
                    self.read_boards().await;
                    self.look_around().await;
                }
            }
        }
    }

    async fn take(&mut self, input: Input) {
        match input {
            Input::Push(push) => self.take_push(*push).await,
            Input::Staged(staged) => self.take_staged(staged).await,
            Input::Queue(queued) => self.take_queue(queued).await,
            Input::Pulled { replica, generation, run, head } => {
                let now = self.shared.clock.now();
                if let Some(entry) = self.peers.get_mut(&replica).filter(|e| e.peer.generation == generation)
                {
                    entry.peer.inbox.told(head);
                    self.shared.counters.records_missed.add(run.records.len() as u64);
                    entry.heard = now;
                    self.take_run(&replica, run).await;
                }
            }
            Input::Positions { positions, afresh } => {
                for position in positions {
                    let entry = self.entry(&position.replica, position.generation, None);
                    if let Some(entry) = entry {
                        if afresh {
                            entry.peer.inbox.reset(position.head);
                        } else {
                            entry.peer.inbox.settle(position.head);
                        }
                    }
                }
            }
            Input::Repaired { replica, result } => {
                let now = self.shared.clock.now();
                let abandoned = self.repairs.ended(&replica, result, now);
                if let (Some(head), Some(entry)) = (abandoned, self.peers.get_mut(&replica)) {
                    entry.peer.inbox.settle(head);
                }
            }
            Input::Deserted { replica, generation } => {
                let now = self.shared.clock.now();
                let silent = self.peers.get(&replica).is_some_and(|entry| {
                    entry.peer.generation == generation
                        && entry.peer.silence(now).is_some_and(|silence| silence >= SUSPICION)
                });
                if silent {
                    self.emit(GossipEvent::Refused { replica }).await;
                }
            }
            Input::Joined => self.joined = true,
            Input::LibraryEnded => self.restart(self.shared.generation() + 1).await,
        }
    }

    async fn take_push(&mut self, push: Push) {
        let now = self.shared.clock.now();
        if push.replica == self.shared.config.replica {
            return self.judge_name(push.generation, None, push.version, now).await;
        }
        let Some(entry) = self.entry(&push.replica, push.generation, None) else {
            return self.shared.counters.reject(Rejection::Outlived);
        };
        entry.heard = now;
        let alive = entry.peer.advance(push.version);
        let meta = crate::wire::Meta { version: push.version, state: push.state };
        let state_changed = entry.peer.take_meta(meta);
        let rows = entry.peer.take_rows(push.version, &push.load);
        entry.peer.inbox.told(push.head);
        let told_before = entry.pulse_told.is_some();
        let replica = push.replica;
        // What was placed before the load that it made: a session must not flee from a load that is its own.
        self.take_run(&replica, push.run).await;
        if !told_before || state_changed {
            self.tell_pulse(&replica).await;
        } else if !rows.is_empty() {
            let load = LoadPush { epoch: push.generation, version: push.version, rows };
            self.emit(GossipEvent::Load { replica: replica.clone(), push: load }).await;
        }
        if alive {
            self.take_beat(&replica, now).await;
        }
        self.tell_goodbye(&replica).await;
    }

    /// Hands on what a replica has staged, if this is its newest incarnation. Whoever keeps it sees to its order.
    async fn take_staged(&mut self, staged: Staged) {
        let replica = staged.replica.clone();
        if self.entry(&replica, staged.generation, None).is_none() {
            return self.shared.counters.reject(Rejection::Outlived);
        }
        let push = staged.into_push();
        self.emit(GossipEvent::Staged { replica, push }).await;
    }

    /// Hands on who waits at a replica, if that is news.
    async fn take_queue(&mut self, queued: Queued) {
        let Queued { replica, generation, waiting } = queued;
        let Some(entry) = self.entry(&replica, generation, None) else {
            return self.shared.counters.reject(Rejection::Outlived);
        };
        let push = QueuePush { epoch: generation, version: waiting.version, queue: waiting.queue.clone() };
        if entry.peer.take_waiting(waiting) {
            self.emit(GossipEvent::Queue { replica, push }).await;
        }
    }

    /// Hands on those of these records that are new.
    async fn take_run(&mut self, replica: &ReplicaId, run: Run) {
        let Some(entry) = self.peers.get_mut(replica) else { return };
        let numbered = (run.first..).zip(run.records);
        let new = numbered.filter(|(sequence, record)| {
            entry.peer.inbox.offer(*sequence, codec::digest(record)) == Arrival::New
        });
        let records: Vec<_> = new.map(|(_, record)| record).collect();
        if !records.is_empty() {
            self.emit(GossipEvent::Ledger { replica: replica.clone(), records }).await;
        }
    }

    async fn read_boards(&mut self) {
        let shared = Arc::clone(&self.shared);
        for news in shared.pulse_board.news(&mut self.pulse_read).await {
            self.take_pulse_news(news).await;
        }
        for news in shared.ledger_board.news(&mut self.ledger_read).await {
            self.take_ledger_news(news).await;
        }
    }

    async fn take_pulse_news(&mut self, news: News) {
        let now = self.shared.clock.now();
        let replica = ReplicaId::new(&news.id.node_id);
        let (generation, address) = (news.id.generation_id, news.id.gossip_advertise_addr);
        if replica == self.shared.config.replica {
            return self.judge_name(generation, Some(address), news.heartbeat, now).await;
        }
        let Some(entry) = self.entry(&replica, generation, Some(address)) else { return };
        let alive = entry.peer.beat(news.heartbeat);
        let mut changed = false;
        let mut malformed = 0;
        for (key, value) in news.values {
            if key == META_KEY {
                match codec::from_text(&value) {
                    Ok(meta) => changed |= entry.peer.take_meta(meta),
                    Err(_) => malformed += 1,
                }
            } else if key == QUEUE_KEY {
                match codec::from_text(&value) {
                    Ok(waiting) => changed |= entry.peer.take_waiting(waiting),
                    Err(_) => malformed += 1,
                }
            } else if let Some(index) = key_index(&key, 'p', PARTS_MAX) {
                match codec::from_text(&value) {
                    Ok(part) => changed |= entry.peer.take_part(index, part),
                    Err(_) => malformed += 1,
                }
            }
        }
        if alive {
            entry.heard = now;
            // Of two addresses it is where the heart beats.
            entry.peer.address = Some(address);
        }
        (0..malformed).for_each(|_| self.shared.counters.reject(Rejection::Malformed));
        if changed {
            self.tell_pulse(&replica).await;
        }
        if alive {
            self.take_beat(&replica, now).await;
        }
        self.tell_goodbye(&replica).await;
    }

    async fn take_ledger_news(&mut self, news: News) {
        let replica = ReplicaId::new(&news.id.node_id);
        if replica == self.shared.config.replica {
            return;
        }
        for (key, value) in news.values {
            if key == HEAD_KEY {
                let Ok(head) = codec::from_text(&value) else {
                    self.shared.counters.reject(Rejection::Malformed);
                    continue;
                };
                if let Some(entry) = self.entry(&replica, news.id.generation_id, None) {
                    entry.peer.inbox.told(head);
                }
            } else if key_index(&key, 's', SLOTS_MAX).is_some() {
                let Ok(run) = codec::from_text(&value) else {
                    self.shared.counters.reject(Rejection::Malformed);
                    continue;
                };
                if self.entry(&replica, news.id.generation_id, None).is_some() {
                    self.take_run(&replica, run).await;
                }
            }
        }
    }

    /// The replica, if this is its newest incarnation and there is room for it.
    fn entry(
        &mut self,
        replica: &ReplicaId,
        generation: u64,
        address: Option<SocketAddr>,
    ) -> Option<&mut Entry> {
        if *replica == self.shared.config.replica {
            return None;
        }
        let now = self.shared.clock.now();
        let known = self.peers.get(replica).map(|entry| entry.peer.generation);
        if known.is_none() && self.peers.len() >= PEERS_MAX {
            self.shared.counters.reject(Rejection::Overload);
            return None;
        }
        match known {
            Some(known) if known > generation => return None,
            Some(known) if known == generation => {}
            _ => {
                self.repairs.forget(replica);
                self.peers.insert(replica.clone(), Entry::new(Peer::new(generation, address), now));
            }
        }
        let entry = self.peers.get_mut(replica)?;
        entry.peer.address = entry.peer.address.or(address);
        Some(entry)
    }

    async fn take_beat(&mut self, replica: &ReplicaId, now: Moment) {
        let Some(entry) = self.peers.get_mut(replica) else { return };
        if entry.peer.state().goodbye {
            return;
        }
        let silence = entry.peer.silence(now);
        entry.peer.lived = Some(now);
        let due = entry.beat_told.is_none_or(|told| now.since(told) >= HEARTBEAT_EVERY);
        let again = entry.pulse_told.is_some_and(|told| now.since(told) >= PULSE_AGAIN);
        if due {
            entry.beat_told = Some(now);
            self.emit(GossipEvent::Heartbeat { replica: replica.clone() }).await;
        }
        if again || silence.is_some_and(|silence| silence >= SILENCE) {
            self.tell_pulse(replica).await;
        }
        if silence.is_none_or(|silence| silence >= LIVE_SPAN) {
            self.publish_directory();
        }
    }

    async fn tell_pulse(&mut self, replica: &ReplicaId) {
        let now = self.shared.clock.now();
        let Some(entry) = self.peers.get_mut(replica).filter(|entry| entry.peer.has_told()) else { return };
        entry.pulse_told = Some(now);
        let pulse = entry.peer.pulse();
        self.emit(GossipEvent::Pulse { replica: replica.clone(), pulse }).await;
    }

    async fn tell_goodbye(&mut self, replica: &ReplicaId) {
        let Some(entry) = self.peers.get_mut(replica) else { return };
        if entry.peer.state().goodbye && !std::mem::replace(&mut entry.goodbye_told, true) {
            self.publish_directory();
            self.emit(GossipEvent::Goodbye { replica: replica.clone() }).await;
        }
    }

    /// Looks for gaps to repair and silences to check, and forgets who is long gone.
    async fn look_around(&mut self) {
        let now = self.shared.clock.now();
        self.peers.retain(|_, entry| now.since(entry.heard) < FORGET);
        for entry in self.peers.values_mut() {
            if now.since(entry.settled_at) >= SETTLE {
                entry.settled = [entry.settled[1], entry.peer.inbox.upto()];
                entry.settled_at = now;
            }
        }
        self.publish_directory();
        for (replica, entry) in &mut self.peers {
            let silence = entry.peer.silence(now);
            let unchecked = entry.checked.is_none_or(|at| now.since(at) >= SUSPICION);
            let suspect = silence.is_some_and(|silence| (SUSPICION..LIVE_SPAN).contains(&silence));
            if let Some(address) = entry.peer.address.filter(|_| suspect && unchecked && !entry.goodbye_told)
            {
                entry.checked = Some(now);
                self.repairs.check(replica.clone(), entry.peer.generation, address);
            }
        }
        if self.joined {
            let known = self.shared.directory.known();
            for (replica, entry) in &self.peers {
                self.repairs.consider(replica, &entry.peer, &known, now);
            }
        }
        if let Some(verdict) = self.names.settle(now) {
            self.act_on(verdict).await;
        }
    }

    fn publish_directory(&self) {
        let now = self.shared.clock.now();
        let known = |(replica, entry): (&ReplicaId, &Entry)| Known {
            replica: replica.clone(),
            generation: entry.peer.generation,
            address: entry.peer.address,
            lived: entry.peer.lived,
            goodbye: entry.peer.state().goodbye,
            live: !entry.peer.state().goodbye && entry.peer.silence(now).is_some_and(|s| s < LIVE_SPAN),
            upto: entry.peer.inbox.upto(),
            settled: entry.settled[0],
        };
        self.shared.directory.publish(self.peers.iter().map(known).collect());
    }

    /// Someone else speaks under this replica's name: an earlier life of it, or another replica.
    async fn judge_name(&mut self, generation: u64, address: Option<SocketAddr>, beat: u64, now: Moment) {
        let verdict = self.names.hear(generation, address, beat, self.shared.generation(), now);
        if let Some(verdict) = verdict {
            self.act_on(verdict).await;
        }
    }

    async fn act_on(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Clash { address } => {
                tracing::error!(
                    replica = %self.shared.config.replica,
                    ?address,
                    "another live replica uses this one's name; give each its own replica id"
                );
                self.shared.counters.name_clashes.up();
                self.emit(GossipEvent::NameClash { address }).await;
            }
            Verdict::Outlive { generation } => {
                tracing::warn!(
                    generation,
                    "a later incarnation of this replica was known; beginning anew above it"
                );
                self.restart(generation.saturating_add(1)).await;
            }
        }
    }

    async fn restart(&mut self, generation: u64) {
        self.shared.generation.store(generation, Ordering::Relaxed);
        self.shared.counters.restarts.up();
        for board in [&self.shared.pulse_board, &self.shared.ledger_board] {
            if let Err(error) = board.restart(generation).await {
                tracing::error!(%error, "gossip could not begin anew");
            }
        }
        self.pulse_read.clear();
        self.ledger_read.clear();
    }

    async fn emit(&self, event: GossipEvent) {
        // Fails only when nobody listens any more, which ends the hub.
        let _ = self.shared.events.send(event).await;
    }
}

impl Entry {
    fn new(peer: Peer, now: Moment) -> Self {
        Self {
            peer,
            heard: now,
            beat_told: None,
            pulse_told: None,
            goodbye_told: false,
            checked: None,
            settled: [Head::default(); 2],
            settled_at: now,
        }
    }
}

/// Hands a push to the hub, or counts why not.
pub(crate) fn offer_push(inputs: &mpsc::Sender<Input>, body: &[u8]) -> Result<(), Rejection> {
    let push = codec::decode(body).map_err(|_| Rejection::Malformed)?;
    inputs.try_send(Input::Push(Box::new(push))).map_err(|_| Rejection::Overload)
}

/// The same for what a replica has staged.
pub(crate) fn offer_staged(inputs: &mpsc::Sender<Input>, body: &[u8]) -> Result<(), Rejection> {
    let staged = codec::decode(body).map_err(|_| Rejection::Malformed)?;
    inputs.try_send(Input::Staged(staged)).map_err(|_| Rejection::Overload)
}

/// The same for who waits at a replica.
pub(crate) fn offer_queue(inputs: &mpsc::Sender<Input>, body: &[u8]) -> Result<(), Rejection> {
    let queued = codec::decode(body).map_err(|_| Rejection::Malformed)?;
    inputs.try_send(Input::Queue(queued)).map_err(|_| Rejection::Overload)
}
