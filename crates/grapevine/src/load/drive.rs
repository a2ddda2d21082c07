//! The driver: sends a plan's requests at their time and counts what comes back.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use routing::request::Slo;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::arrivals::Poisson;
use super::body::Envelope;
use super::client::{Client, Outcome};
use super::plan::{Limits, Order, Pace, Plan, Spread, Targets};
use super::report::Report;
use super::statistics::{Finished, Live};
use super::workload::{Conversation, Workload};

/// Chats open at once in an open loop, most of them thinking: about 1 GB of histories.
const CHATS_OPEN_MAX: usize = 100_000;

/// The pause before a request is sent again, doubled each time: what the OpenAI client libraries do.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The longest such pause.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(8);

/// Runs `plan` to its end, or until `stop` resolves, and reports. `live` can be read meanwhile.
///
/// Must be called within a tokio runtime with time and IO. After `stop`, or at the run's time limit, no
/// request is sent; answers under way have `drain_max`.
pub async fn drive(plan: Plan, live: Arc<Live>, stop: impl Future<Output = ()>) -> Report {
    let begun = live.begun();
    let run_end = plan.limits.run_max.map(|run_max| tokio::time::Instant::from_std(later(begun, run_max)));
    let limits = plan.limits;
    let run = Arc::new(Run::new(&plan, live.clone()));
    let mut tasks = JoinSet::new();
    let work = async {
        match plan.pace {
            Pace::Closed { clients, order } => {
                for _ in 0..clients {
                    tasks.spawn(run.clone().client(order));
                }
            }
            Pace::Recorded { speed } => {
                run.clone().dispatch(Departures::Recorded { speed }, &mut tasks).await;
            }
            Pace::Poisson { requests_per_second } => {
                let starts = requests_per_second / f64::from(plan.source.turns());
                run.clone().dispatch(Departures::Poisson(Poisson::new(starts, plan.seed)), &mut tasks).await;
            }
        }
        join_all(&mut tasks).await;
    };
    let ended = tokio::select! {
        () = work => true,
        () = stop => false,
        () = async { match run_end {
            Some(at) => sleep_until(at).await,
            None => std::future::pending().await,
        } } => false,
    };
    run.halt.cancel();
    if !ended {
        let _ = timeout(limits.drain_max, join_all(&mut tasks)).await;
    }
    let report = live.report(); // before the rest is aborted: it is what the report calls abandoned
    tasks.shutdown().await;
    report
}

/// The moment `wait` after `from`; a year stands for anything longer, which an `Instant` may not hold.
fn later(from: Instant, wait: Duration) -> Instant {
    const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
    from + wait.min(WAIT_MAX)
}

async fn join_all(tasks: &mut JoinSet<()>) {
    while let Some(ended) = tasks.join_next().await {
        pass_on_panic(ended);
    }
}

/// A task that panicked is a fault of the driver: a report without it would be wrong.
fn pass_on_panic(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// What the tasks of one run share.
struct Run {
    client: Client,
    targets: Targets,
    spread: Spread,
    envelope: Envelope,
    limits: Limits,
    /// What users expect, where streams are asked for.
    slo: Option<Slo>,
    live: Arc<Live>,
    feed: Mutex<Feed>,
    /// Requests assigned to targets so far.
    turns_taken: AtomicU64,
    /// Requests that may still be sent.
    requests_left: AtomicU64,
    /// No request starts after this.
    halt: CancellationToken,
    in_flight: Arc<Semaphore>,
    chats_open: Arc<Semaphore>,
}

/// Conversations not in a client's hands: those not begun, then those that wait for their next turn.
struct Feed {
    workload: Workload,
    waiting: VecDeque<Talk>,
}

/// A conversation under way.
struct Talk {
    conversation: Conversation,
    /// The endpoint that answered its first turn.
    home: Option<String>,
    /// When its user has thought.
    ready_at: Instant,
}

impl Talk {
    fn new(conversation: Conversation) -> Self {
        Self { conversation, home: None, ready_at: Instant::now() }
    }
}

/// What follows a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// The conversation goes on.
    NextTurn,
    /// The conversation is over.
    Over,
    /// The run is over.
    Halted,
}

impl Run {
    fn new(plan: &Plan, live: Arc<Live>) -> Self {
        Self {
            client: Client::new(plan.wire.clone(), plan.envelope.stream, plan.seed),
            targets: plan.targets.clone(),
            spread: plan.spread,
            envelope: plan.envelope.clone(),
            limits: plan.limits,
            slo: plan.envelope.stream.then(|| plan.wire.slo()),
            live,
            feed: Mutex::new(Feed {
                workload: Workload::new(plan.source.clone(), plan.envelope.api, plan.seed),
                waiting: VecDeque::new(),
            }),
            turns_taken: AtomicU64::new(0),
            requests_left: AtomicU64::new(plan.limits.requests_max.unwrap_or(u64::MAX)),
            halt: CancellationToken::new(),
            in_flight: Arc::new(Semaphore::new(plan.limits.in_flight_max.min(Semaphore::MAX_PERMITS))),
            chats_open: Arc::new(Semaphore::new(CHATS_OPEN_MAX)),
        }
    }

    /// One client of a closed loop. There is work for it as long as it holds a chat or finds one.
    async fn client(self: Arc<Self>, order: Order) {
        while let Some(mut talk) = self.take() {
            loop {
                if !self.wait_until(talk.ready_at).await {
                    return;
                }
                match self.turn(&mut talk).await {
                    After::Halted => return,
                    After::Over => break,
                    After::NextTurn if order == Order::Turns => {
                        self.put_back(talk);
                        break;
                    }
                    After::NextTurn => {}
                }
            }
        }
    }

    /// Starts each conversation of an open loop at its time.
    async fn dispatch(self: Arc<Self>, mut departures: Departures, tasks: &mut JoinSet<()>) {
        let begun = Instant::now();
        while let Some(talk) = self.take() {
            let due = later(begun, departures.next(&talk.conversation));
            if !self.wait_until(due).await {
                return;
            }
            let Some(chat) = self.permit(&self.chats_open).await else { return };
            let held_back = self.in_flight.available_permits() == 0;
            let Some(permit) = self.permit(&self.in_flight).await else { return };
            self.live.departed(due.elapsed(), held_back);
            let run = self.clone();
            tasks.spawn(async move {
                run.talk_to_end(talk, permit).await;
                drop(chat);
            });
            while let Some(ended) = tasks.try_join_next() {
                pass_on_panic(ended);
            }
        }
    }

    async fn talk_to_end(self: Arc<Self>, mut talk: Talk, permit: OwnedSemaphorePermit) {
        let mut permit = Some(permit);
        loop {
            if self.turn(&mut talk).await != After::NextTurn {
                return;
            }
            permit.take();
            if !self.wait_until(talk.ready_at).await {
                return;
            }
            let held_back = self.in_flight.available_permits() == 0;
            permit = self.permit(&self.in_flight).await;
            if permit.is_none() {
                return;
            }
            self.live.departed(talk.ready_at.elapsed(), held_back);
        }
    }

    /// Sends the conversation's next request and takes its answer.
    async fn turn(&self, talk: &mut Talk) -> After {
        if !self.may_send() {
            self.halt.cancel();
            return After::Halted;
        }
        let Some(request) = talk.conversation.next_request(&self.envelope) else { return After::Over };
        let in_flight = self.live.begin();
        let (outcome, retries) = self.ask(talk.conversation.id(), &request.body).await;
        self.live.record(&Finished {
            outcome: &outcome,
            turn: request.turn,
            home: talk.home.as_deref(),
            retries,
            slo: self.slo.as_ref(),
        });
        drop(in_flight);
        if outcome.verdict.is_err() {
            if !talk.conversation.is_over() {
                self.live.chat_broken();
            }
            return After::Over;
        }
        if request.turn == 0 {
            talk.home = outcome.endpoint;
        }
        if talk.conversation.is_over() {
            return After::Over;
        }
        talk.conversation.answered(&outcome.text);
        talk.ready_at = later(Instant::now(), talk.conversation.think());
        After::NextTurn
    }

    /// Asks the next target, and after a failure that clients retry the one after it.
    async fn ask(&self, conversation: u64, body: &bytes::Bytes) -> (Outcome, u32) {
        let start = Instant::now();
        let mut retries = 0;
        loop {
            let turn = match self.spread {
                Spread::Request => self.turns_taken.fetch_add(1, Relaxed),
                Spread::Session => conversation + u64::from(retries),
            };
            let outcome = self.client.ask(self.targets.at(turn), body.clone(), conversation, start).await;
            if retries >= self.limits.retries_max || !outcome.retried_by_clients() {
                return (outcome, retries);
            }
            sleep((RETRY_PAUSE * 2u32.saturating_pow(retries)).min(RETRY_PAUSE_MAX)).await;
            retries += 1;
        }
    }

    fn may_send(&self) -> bool {
        !self.halt.is_cancelled()
            && self.requests_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// Waits for `at`; false when the run ends first.
    async fn wait_until(&self, at: Instant) -> bool {
        if at <= Instant::now() {
            return !self.halt.is_cancelled();
        }
        tokio::select! {
            () = sleep_until(at.into()) => true,
            () = self.halt.cancelled() => false,
        }
    }

    async fn permit(&self, semaphore: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            permit = semaphore.clone().acquire_owned() => permit.ok(),
            () = self.halt.cancelled() => None,
        }
    }

    fn take(&self) -> Option<Talk> {
        let mut feed = self.feed.lock().unwrap_or_else(PoisonError::into_inner);
        feed.workload.next().map(Talk::new).or_else(|| feed.waiting.pop_front())
    }

    fn put_back(&self, talk: Talk) {
        self.feed.lock().unwrap_or_else(PoisonError::into_inner).waiting.push_back(talk);
    }
}

/// When the conversations of an open loop start.
enum Departures {
    Recorded { speed: f64 },
    Poisson(Poisson),
}

impl Departures {
    /// The time of the next one, from the start of the run.
    fn next(&mut self, conversation: &Conversation) -> Duration {
        match self {
            Self::Poisson(poisson) => poisson.next_arrival(),
            Self::Recorded { speed } => {
                let due_s = conversation.due().unwrap_or_default().as_secs_f64() / *speed;
                Duration::try_from_secs_f64(due_s).unwrap_or(Duration::MAX)
            }
        }
    }
}
