//! The task that tells the others what is new here: at once by push, and at the boards' pace for good.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use routing::facts::{LoadRow, QueueRow};
use routing::{EndpointId, Moment};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until};

use crate::directory::Known;
use crate::parts::{Planner, next_after};
use crate::push::{Budget, Pace, changed_rows, pack};
use crate::shared::Shared;
use crate::staged::{self, Teller};
use crate::wire::{
    HEAD_KEY, META_KEY, Meta, Presence, Push, QUEUE_KEY, Queued, Run, Staged, Waiting, part_key, slot_key,
};
use crate::{FrameKind, codec};

/// What of the byte budget of pushes the queue may take. Half: load rows must not wait for it.
const QUEUE_BUDGET_SHARE: f64 = 0.5;
/// Own records taken at a time.
const TAKE_MAX: usize = 4_096;
/// Goodbye is pushed this often: one lost datagram in twenty makes two of three enough.
const GOODBYES: usize = 3;
const GOODBYE_PAUSE: Duration = Duration::from_millis(20);

/// Tells the publisher that the replica ends; answered when the others have been told.
pub(crate) type Goodbye = oneshot::Sender<()>;

pub(crate) struct Publisher {
    shared: Arc<Shared>,
    /// Of what was told last: milliseconds since the start, made to grow.
    version: u64,
    state: Presence,
    posted_state: Option<Presence>,
    posted_queue: QueueRow,
    pushed_queue: QueueRow,
    /// When the queue may be pushed again, and whether it waits for that.
    queue_due: Moment,
    queue_is_due: bool,
    /// Load rows as last pushed.
    pushed: HashMap<EndpointId, LoadRow>,
    /// Records up to here were pushed or posted in slots.
    told: u64,
    posted_head: u64,
    planner: Planner,
    teller: Teller,
    budget: Budget,
    pace: Pace,
    burst_at: Option<Moment>,
    pulse_due: Moment,
}

impl Publisher {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let now = shared.clock.now();
        let budget = Budget::new(shared.config.push_bytes_per_second_max, now);
        let pace = Pace::new(shared.config.push_every, now);
        Self {
            shared,
            version: 0,
            state: Presence::default(),
            posted_state: None,
            posted_queue: QueueRow::default(),
            pushed_queue: QueueRow::default(),
            queue_due: now,
            queue_is_due: false,
            pushed: HashMap::new(),
            told: 0,
            posted_head: 0,
            planner: Planner::default(),
            teller: Teller::default(),
            budget,
            pace,
            burst_at: None,
            pulse_due: now,
        }
    }

    pub(crate) async fn run(mut self, nudged: Arc<Notify>, mut goodbyes: mpsc::Receiver<Goodbye>) {
        let mut pulse = interval(self.shared.config.pulse_every);
        let mut ledger = interval(self.shared.config.ledger_every);
        pulse.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ledger.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = nudged.notified() => {
                    // The timer is coarse: it is not asked when there is nothing to wait for.
                    let due = self.pace.due();
                    if due > self.shared.clock.now() {
                        // Nudges that come in the meantime are answered by the same push.
                        sleep_until(self.shared.clock.instant(due)).await;
                    }
                    self.push().await;
                    self.tell_queue().await;
                    self.tell_staged(false).await;
                }
                () = sleep_until(self.shared.clock.instant(self.queue_due)), if self.queue_is_due => {
                    self.tell_queue().await;
                }
                _ = pulse.tick() => {
                    self.push().await;
                    self.tell_staged(true).await;
                    self.post_pulse().await;
                }
                _ = ledger.tick() => self.post_ledger().await,
                goodbye = goodbyes.recv() => {
                    let Some(done) = goodbye else { return };
                    self.say_goodbye().await;
                    let _ = done.send(());
                }
            }
        }
    }

    /// Pushes what changed since the last push; with nothing to say, says so if it is time.
    async fn push(&mut self) {
        let now = self.shared.clock.now();
        // Before the records: a load must not be told without the placement that made it.
        let load = self.shared.facts.load();
        self.take_records();
        if self.shared.directory.targets().is_empty() {
            // Whoever comes first finds all of it: the ledger by its snapshot, the load by the first push.
            self.told = self.shared.log.lock().head().sequence;
            self.pushed.clear();
            self.pace.spend(now);
            return;
        }
        let version = self.next_version(now);
        let rows = changed_rows(&self.pushed, &load);
        let bare = self.bare(version);
        let head = bare.head;
        let idle = rows.is_empty() && head.sequence == self.told;
        let silent = self.burst_at.is_none_or(|at| now.since(at) >= self.shared.config.keepalive_every);
        if idle && !silent {
            return;
        }
        let pushes = pack(&bare, &rows, self.shared.log.lock().since(self.told + 1));
        self.burst_at = Some(now);
        self.pace.spend(now);
        if self.send(&pushes).await {
            // Records too large for a push are left to be pulled: the head tells of them.
            self.told = head.sequence;
        }
    }

    /// Sends as many of these as the budget allows, and notes them as told; whether that was all.
    async fn send(&mut self, pushes: &[Push]) -> bool {
        let targets = self.shared.directory.targets();
        let now = self.shared.clock.now();
        for push in pushes {
            let Some(body) = codec::encode(push) else { continue };
            if !targets.is_empty() && !self.budget.take(body.len() * targets.len(), now) {
                self.shared.counters.pushes_deferred.up();
                return false;
            }
            self.shared.pulse_link.send_all(FrameKind::Push, &targets, &body).await;
            for row in &push.load {
                self.pushed.insert(row.endpoint, *row);
                self.planner.pushed(row.endpoint);
            }
            if !push.run.records.is_empty() {
                self.told = push.run.first + push.run.records.len() as u64 - 1;
            }
        }
        let is_nothing = |row: &LoadRow| {
            row.running == 0 && row.prefill_tokens == 0 && row.decode_tokens == 0 && row.placed_tokens == 0
        };
        self.pushed.retain(|_, row| !is_nothing(row));
        self.shared.counters.pushes.up();
        true
    }

    /// Tells the heirs what is staged, as far as they were not told; with `again` some of what they were.
    async fn tell_staged(&mut self, again: bool) {
        let (staged, heirs) = self.shared.facts.staged();
        let Some(rows) = self.teller.due(&staged, &heirs, again) else { return };
        let known = self.shared.directory.known();
        let is_heir = |known: &&Known| known.live && heirs.contains(&known.replica);
        let to: Vec<SocketAddr> = known.iter().filter(is_heir).filter_map(|known| known.address).collect();
        let now = self.shared.clock.now();
        let held: Vec<u64> = staged.iter().map(|row| row.number).collect();
        let version = self.next_version(now);
        let bare = Staged::new(self.shared.config.replica.clone(), self.shared.generation(), version, &held);
        self.pace.spend(now);
        for message in staged::pack(&bare, rows) {
            let Some(body) = codec::encode(&message) else { continue };
            if !to.is_empty() && !self.budget.take(body.len() * to.len(), now) {
                // What was not told is told again with the next tick.
                return self.shared.counters.pushes_deferred.up();
            }
            self.shared.pulse_link.send_all(FrameKind::Staged, &to, &body).await;
        }
    }

    /// Pushes who waits, if that has changed. It may take its share of the byte budget and no more.
    async fn tell_queue(&mut self) {
        let queue = self.shared.facts.queue();
        let now = self.shared.clock.now();
        let is_news = !self.pushed_queue.says(&queue);
        self.queue_is_due = is_news && now < self.queue_due;
        if !is_news || self.queue_is_due {
            return;
        }
        let config = &self.shared.config;
        let (replica, bytes_per_second) = (config.replica.clone(), config.push_bytes_per_second_max);
        let waiting = Waiting { version: self.next_version(now), queue };
        let queued = Queued { replica, generation: self.shared.generation(), waiting };
        let Some(body) = codec::encode(&queued) else { return };
        let targets = self.shared.directory.targets();
        let bytes = body.len() * targets.len();
        if bytes > 0 && !self.budget.take(bytes, now) {
            // The pulse carries it.
            return self.shared.counters.pushes_deferred.up();
        }
        self.shared.pulse_link.send_all(FrameKind::Queue, &targets, &body).await;
        let share = bytes_per_second as f64 * QUEUE_BUDGET_SHARE;
        self.queue_due = now.plus(Duration::from_secs_f64(bytes as f64 / share.max(1.0)));
        self.pushed_queue = queued.waiting.queue;
    }

    async fn post_pulse(&mut self) {
        let now = self.shared.clock.now();
        let pulse = self.shared.facts.pulse();
        self.state = Presence { ready: pulse.ready, draining: pulse.draining, ..self.state };
        let mut values = self.meta();
        if now >= self.pulse_due {
            let version = self.next_version(now);
            for (index, part) in self.planner.plan(&pulse, version, now) {
                values.extend(codec::to_text(&part).map(|text| (part_key(index), text)));
            }
            values.extend(self.queue(&pulse.queue, version));
            let bytes: usize = values.iter().map(|(key, value)| key.len() + value.len()).sum();
            let copies = self.shared.directory.targets().len();
            let config = &self.shared.config;
            let after =
                next_after((bytes * copies) as u64, config.pulse_bytes_per_second_max, config.pulse_every);
            // The tick that is due just then may come a little early.
            self.pulse_due = now.plus(after.saturating_sub(config.pulse_every / 2));
        }
        if !values.is_empty() {
            self.shared.pulse_board.post(values).await;
        }
    }

    /// Who waits, if that is not as posted.
    fn queue(&mut self, queue: &QueueRow, version: u64) -> Option<(String, String)> {
        if self.posted_queue.says(queue) {
            return None;
        }
        self.posted_queue.clone_from(queue);
        let text = codec::to_text(&Waiting { version, queue: queue.clone() })?;
        Some((QUEUE_KEY.to_owned(), text))
    }

    /// How the replica stands, if that is not as posted.
    fn meta(&mut self) -> Vec<(String, String)> {
        if self.posted_state == Some(self.state) {
            return Vec::new();
        }
        self.posted_state = Some(self.state);
        let version = self.next_version(self.shared.clock.now());
        let text = codec::to_text(&Meta { version, state: self.state });
        text.map(|text| (META_KEY.to_owned(), text)).into_iter().collect()
    }

    /// Posts how far the ledger goes, and the records that no push has carried.
    async fn post_ledger(&mut self) {
        // What a push can carry is not worth a slot.
        self.push().await;
        let mut values = Vec::new();
        {
            let mut log = self.shared.log.lock();
            let head = log.head();
            if head.sequence > self.posted_head {
                values.extend(codec::to_text(&head).map(|text| (HEAD_KEY.to_owned(), text)));
                self.posted_head = head.sequence;
            }
            for (slot, run) in log.fill_slots(self.told + 1) {
                values.extend(codec::to_text(&run).map(|text| (slot_key(slot), text)));
            }
            self.told = head.sequence;
        }
        if !values.is_empty() {
            self.shared.ledger_board.post(values).await;
        }
    }

    async fn say_goodbye(&mut self) {
        self.state.goodbye = true;
        let values = self.meta();
        self.shared.pulse_board.post(values).await;
        for _ in 0..GOODBYES {
            let version = self.next_version(self.shared.clock.now());
            let push = self.bare(version);
            self.send(&[push]).await;
            sleep(GOODBYE_PAUSE).await;
        }
        if !self.shared.directory.targets().is_empty() {
            // Whoever got no push hears it from the board.
            sleep(self.shared.config.pulse_every * 2).await;
        }
    }

    /// Grows with every call, and tells the replica's own time.
    fn next_version(&mut self, now: Moment) -> u64 {
        self.version = (self.version + 1).max(now.micros() / 1_000);
        self.version
    }

    fn take_records(&self) {
        let records = self.shared.facts.take_ledger(TAKE_MAX);
        if !records.is_empty() {
            self.shared.log.lock().append(records);
        }
    }

    fn bare(&self, version: u64) -> Push {
        Push {
            replica: self.shared.config.replica.clone(),
            generation: self.shared.generation(),
            version,
            state: self.state,
            head: self.shared.log.lock().head(),
            run: Run::default(),
            load: Vec::new(),
        }
    }
}
