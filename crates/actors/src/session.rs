//! One actor for each session in use: it takes the turns' ends into the session table, and leaves when the
//! session has been idle for a while.
//!
//! The bounded table in the core is the truth. The actors are bounded too; beyond their bound, or when a
//! mailbox is full, the end of a turn goes straight into the table, so nothing is lost but the actor.

use std::collections::HashMap;
use std::sync::Arc;

use actix::prelude::{Actor, Addr, Arbiter, AsyncContext as _, Context, Handler, Message};
use actix::{ActorContext as _, ArbiterHandle};
use parking_lot::Mutex;
use routing::{EndpointId, Moment, Router, SessionKey};

use crate::clock::Clock;
use crate::mailbox::{ActorCounts, ActorKind, Told, tell};
use crate::settings::ActorSettings;

/// The bound of a mailbox. 64: more turns of one session at once than any client sends.
const MAILBOX_MAX: usize = 64;
/// Shards of the registry: workers on as many cores don't wait for each other.
const SHARDS: usize = 16;

/// How a turn of a session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Message)]
#[rtype(result = "()")]
pub struct TurnEnded {
    /// Where it ran.
    pub endpoint: EndpointId,
    /// What it left warm there, in tokens, if it got that far.
    pub warm_tokens: Option<u32>,
    /// How its user fared, 0 to 1, if that was measured.
    pub qoe: Option<f32>,
}

#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
struct TurnBegan;

struct Shared {
    router: Arc<Router>,
    clock: Clock,
    settings: ActorSettings,
    counts: Arc<ActorCounts>,
    arbiter: ArbiterHandle,
    live: [Mutex<HashMap<SessionKey, Addr<SessionActor>>>; SHARDS],
}

/// The sessions of a replica.
#[derive(Clone)]
pub struct Sessions {
    shared: Arc<Shared>,
}

impl Sessions {
    pub(crate) fn new(
        router: Arc<Router>,
        clock: Clock,
        settings: ActorSettings,
        counts: Arc<ActorCounts>,
        arbiter: &Arbiter,
    ) -> Self {
        let live = std::array::from_fn(|_| Mutex::default());
        Self { shared: Arc::new(Shared { router, clock, settings, counts, arbiter: arbiter.handle(), live }) }
    }

    /// A turn of the session was sent to an engine.
    pub fn began(&self, key: SessionKey) {
        let shared = &self.shared;
        let mut live = shared.shard(key).lock();
        if let Some(actor) = live.get(&key)
            && tell(actor, TurnBegan, ActorKind::Session, &shared.counts) != Told::Gone
        {
            return;
        }
        if live.len() >= shared.settings.session_actors_max.div_ceil(SHARDS) {
            return;
        }
        let held = Arc::clone(shared);
        let actor = SessionActor::start_in_arbiter(&shared.arbiter, move |context| {
            context.set_mailbox_capacity(MAILBOX_MAX);
            SessionActor { key, shared: held, in_flight: 1, idle_since: None }
        });
        if live.insert(key, actor).is_some() {
            shared.counts.count_recreated(ActorKind::Session);
        }
    }

    /// A turn that had begun is over.
    pub fn ended(&self, key: SessionKey, turn: TurnEnded) {
        let actor = self.shared.shard(key).lock().get(&key).cloned();
        let told =
            actor.map_or(Told::Gone, |actor| tell(&actor, turn, ActorKind::Session, &self.shared.counts));
        if told != Told::Taken {
            self.shared.take_end(key, turn);
        }
    }

    /// Sessions with an actor.
    pub fn actors(&self) -> usize {
        self.shared.live.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Makes the actor of the session panic, if it has one.
    #[cfg(feature = "panic-injection")]
    pub fn inject_panic(&self, key: SessionKey) -> bool {
        let actor = self.shared.shard(key).lock().get(&key).cloned();
        actor.is_some_and(|actor| actor.try_send(crate::mailbox::Panic).is_ok())
    }

    /// Puts a new actor in the place of each that has panicked. The turns that it knew of are over for it;
    /// their ends still reach the table.
    pub(crate) fn revive(&self) {
        for shard in &self.shared.live {
            let lost: Vec<SessionKey> =
                shard.lock().iter().filter(|(_, actor)| !actor.connected()).map(|(key, _)| *key).collect();
            for key in lost {
                self.began(key);
                self.ended_unknown(key);
            }
        }
    }

    fn ended_unknown(&self, key: SessionKey) {
        if let Some(actor) = self.shared.shard(key).lock().get(&key) {
            tell(actor, Forgotten, ActorKind::Session, &self.shared.counts);
        }
    }
}

#[derive(Clone, Copy, Debug, Message)]
#[rtype(result = "()")]
struct Forgotten;

impl Shared {
    fn shard(&self, key: SessionKey) -> &Mutex<HashMap<SessionKey, Addr<SessionActor>>> {
        &self.live[key.raw() as usize % SHARDS]
    }

    fn take_end(&self, key: SessionKey, turn: TurnEnded) {
        let now = self.clock.now();
        self.router.end_session(key, turn.endpoint, turn.warm_tokens, turn.qoe, now);
    }
}

/// See the module.
struct SessionActor {
    key: SessionKey,
    shared: Arc<Shared>,
    in_flight: u32,
    idle_since: Option<Moment>,
}

impl SessionActor {
    fn turn_over(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 {
            self.idle_since = Some(self.shared.clock.now());
        }
    }

    fn leave_if_idle(&mut self, context: &mut Context<Self>) {
        let now = self.shared.clock.now();
        let idle = self.idle_since.is_some_and(|since| now.since(since) >= self.shared.settings.session_idle);
        if idle {
            // Taken out under the shard's lock: whoever begins a turn from here on makes a new actor.
            self.shared.shard(self.key).lock().remove(&self.key);
            context.stop();
        }
    }
}

impl Actor for SessionActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        let look = self.shared.settings.session_idle / 4;
        context.run_interval(look.max(std::time::Duration::from_millis(10)), Self::leave_if_idle);
    }
}

impl Handler<TurnBegan> for SessionActor {
    type Result = ();

    fn handle(&mut self, _: TurnBegan, _: &mut Self::Context) {
        self.in_flight = self.in_flight.saturating_add(1);
        self.idle_since = None;
    }
}

impl Handler<TurnEnded> for SessionActor {
    type Result = ();

    fn handle(&mut self, turn: TurnEnded, _: &mut Self::Context) {
        self.shared.take_end(self.key, turn);
        self.turn_over();
    }
}

impl Handler<Forgotten> for SessionActor {
    type Result = ();

    fn handle(&mut self, _: Forgotten, _: &mut Self::Context) {
        self.turn_over();
    }
}

#[cfg(feature = "panic-injection")]
impl Handler<crate::mailbox::Panic> for SessionActor {
    type Result = ();

    fn handle(&mut self, _: crate::mailbox::Panic, _: &mut Self::Context) {
        panic!("made to panic");
    }
}
