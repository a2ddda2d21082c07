//! One run: requests, engines' steps and replicas' words are events in one queue.

mod words;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use engine_model::scheduler::Event as EngineEvent;
use engine_model::timing::Moment;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use routing::endpoint::EndpointSpec;
use routing::request::ShapeRules;
use routing::router::Measurement;
use routing::settings::{Fault, Settings};
use routing::{Chosen, EndpointId};

use crate::engine::Engine;
use crate::figures::{Chats, Figures, Tally};
use crate::queue::Queue;
use crate::replicas::{Replicas, Word, core_time};
use crate::scenario::{Decider, Scenario};
use crate::sweep::rules_of;
use crate::workload::chats::Chat;
use crate::workload::{Asked, Prompts, Workload};
use words::SCRAPE_EVERY;

/// How long a chat that goes on is held back for the word of its last turn, and how often it is looked for: as in
/// the gateway.
const WORD_AWAITED_MAX: Duration = Duration::from_millis(5);
const WORD_LOOKED_FOR: Duration = Duration::from_millis(1);
/// Over what time the clients of a closed loop send their first requests.
const BEGIN_WITHIN: Duration = Duration::from_millis(20);

/// Plays a scenario.
///
/// # Errors
/// All that is wrong with it.
pub fn run(scenario: &Scenario) -> Result<Figures, Vec<Fault>> {
    crate::sweep(std::slice::from_ref(scenario), 1, &|_| ()).map(|mut all| all.swap_remove(0))
}

/// Plays a scenario without faults; of a trace with its requests as the scenario's replicas read them.
pub(crate) fn play(scenario: &Scenario, prompts: Option<&Prompts>) -> Figures {
    let mut simulation = Simulation::new(scenario, prompts);
    simulation.begin();
    while simulation.left > 0 {
        let Some((now, event)) = simulation.queue.pop() else { break };
        simulation.now = now;
        simulation.step(event);
    }
    simulation.figures()
}

enum Event {
    /// A row of the trace arrives.
    Row(usize),
    /// A client sends its next turn.
    Turn(usize),
    /// A request that was held back is looked at again.
    Decide {
        request: usize,
        held_until: Moment,
    },
    /// Something may be due in an engine.
    Engine(usize),
    /// A replica may push again.
    PushDue(usize),
    PulseDue(usize),
    Scrape,
    Heard {
        from: usize,
        to: usize,
        word: Word,
    },
    /// The sides of a cut take each other for dead, or hear each other again.
    Parted,
    Met,
}

/// Who asked.
#[derive(Clone, Copy)]
enum Asker {
    Row(usize),
    Client(usize),
}

struct Request {
    asker: Asker,
    replica: usize,
    engine: usize,
    sent: Moment,
    first_token: Option<Moment>,
    cached_tokens: u32,
    /// Until it is over.
    asked: Option<Arc<Asked>>,
    chosen: Option<Chosen>,
}

struct Client {
    chat: Chat,
    tenant: usize,
    home: Option<usize>,
}

/// When a replica pushed last, and whether it is to push again.
#[derive(Clone, Copy, Default)]
struct Pushing {
    last: Option<Moment>,
    due: bool,
}

struct Simulation<'a> {
    scenario: &'a Scenario,
    prompts: Option<&'a Prompts>,
    rules: ShapeRules,
    block_tokens: u32,
    replicas: Replicas,
    pushing: Vec<Pushing>,
    endpoints: Vec<EndpointId>,
    engines: Vec<Engine>,
    requests: Vec<Request>,
    clients: Vec<Client>,
    chats_begun: usize,
    queue: Queue<Event>,
    now: Moment,
    /// Requests not yet over, those to come included.
    left: usize,
    /// Draws what the core and the workload leave to chance.
    rng: SmallRng,
    /// Draws what becomes of words, so that a lossless run draws nothing here.
    lots: SmallRng,
    tally: Tally,
    at_home: (usize, usize),
    by_tenant: BTreeMap<usize, Vec<usize>>,
    engine_events: Vec<EngineEvent>,
}

impl<'a> Simulation<'a> {
    fn new(scenario: &'a Scenario, prompts: Option<&'a Prompts>) -> Self {
        let specs: Vec<EndpointSpec> = (0..scenario.engines.len())
            .map(|at| {
                // Of another seed: what hashes settle falls elsewhere.
                let url = format!("http://engine-{at}.seed-{}:8000", scenario.seed);
                EndpointSpec::at(&url).expect("a URL made here is well formed")
            })
            .collect();
        let (count, settings) = match &scenario.decider {
            Decider::Replicas { count, settings } => (*count, (**settings).clone()),
            Decider::LeastConnections | Decider::AllKnowing => (0, Settings::default()),
        };
        Self {
            scenario,
            prompts,
            rules: rules_of(scenario),
            block_tokens: scenario.engines[0].limits.block_tokens,
            replicas: Replicas::new(count, &settings, &specs).expect("settings without faults are taken"),
            pushing: vec![Pushing::default(); count],
            endpoints: specs.iter().map(EndpointSpec::id).collect(),
            engines: scenario.engines.iter().map(Engine::new).collect(),
            requests: Vec::new(),
            clients: Vec::new(),
            chats_begun: 0,
            queue: Queue::new(),
            now: Moment::default(),
            left: 0,
            rng: SmallRng::seed_from_u64(scenario.seed),
            lots: SmallRng::seed_from_u64(!scenario.seed),
            tally: Tally::default(),
            at_home: (0, 0),
            by_tenant: BTreeMap::new(),
            engine_events: Vec::new(),
        }
    }

    fn begin(&mut self) {
        match &self.scenario.workload {
            Workload::Chats(shape) => {
                self.left = shape.chats * shape.turns;
                for _ in 0..shape.clients.min(shape.chats) {
                    let client = self.next_client();
                    self.clients.push(client);
                    let within = BEGIN_WITHIN.as_nanos() as u64;
                    let at = Moment(self.rng.random_range(0..within));
                    self.queue.push(at, Event::Turn(self.clients.len() - 1));
                }
            }
            Workload::Trace(trace) => {
                self.left = trace.played();
                for (row, each) in trace.rows()[..trace.played()].iter().enumerate() {
                    self.queue.push(Moment::default().plus(each.at), Event::Row(row));
                }
            }
        }
        let gossip = &self.scenario.gossip;
        let count = self.replicas.count();
        if gossip.push_every.is_some() && count > 1 {
            for cut in &gossip.cuts {
                let parted = cut.from + gossip.dead_after;
                if parted < cut.until {
                    self.queue.push(Moment::default().plus(parted), Event::Parted);
                    self.queue.push(Moment::default().plus(cut.until + gossip.delay), Event::Met);
                }
            }
        }
        for replica in 0..count {
            // One after the other, as processes that were not started at once.
            let first = gossip.pulse_every.mul_f64((replica + 1) as f64 / count as f64);
            self.queue.push(Moment::default().plus(first), Event::PulseDue(replica));
        }
        if count > 0 {
            self.queue.push(Moment::default().plus(SCRAPE_EVERY), Event::Scrape);
        }
    }

    /// A client with the next chat.
    fn next_client(&mut self) -> Client {
        let Workload::Chats(shape) = &self.scenario.workload else { unreachable!("traces have no clients") };
        self.chats_begun += 1;
        let tenant = self.rng.random_range(0..shape.tenants);
        let chat = Chat::begin(*shape, tenant, self.chats_begun as u64, self.scenario.seed);
        Client { chat, tenant, home: None }
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Row(row) => {
                let asked = self.prompts.map(|prompts| Arc::clone(prompts.row(row)));
                self.arrive(Asker::Row(row), asked.expect("a trace's prompts are read"));
            }
            Event::Turn(client) => {
                let asked = self.clients[client].chat.next_turn(&self.rules, self.block_tokens);
                self.arrive(Asker::Client(client), Arc::new(asked));
            }
            Event::Decide { request, held_until } => self.decide(request, held_until),
            Event::Engine(engine) => {
                self.engines[engine].wake(self.now, &mut self.engine_events);
                self.follow(engine);
            }
            Event::PushDue(replica) => {
                self.pushing[replica].due = false;
                self.push(replica);
            }
            Event::PulseDue(replica) => self.pulse(replica),
            Event::Scrape => self.scrape(),
            Event::Heard { from, to, word } => self.replicas.hear(from, to, &word, self.now),
            Event::Parted => self.replicas.part(),
            Event::Met => self.replicas.meet(self.now),
        }
    }

    fn arrive(&mut self, asker: Asker, asked: Arc<Asked>) {
        let number = self.requests.len();
        self.requests.push(Request {
            asker,
            replica: number % self.replicas.count().max(1),
            engine: 0,
            sent: self.now,
            first_token: None,
            cached_tokens: 0,
            asked: Some(asked),
            chosen: None,
        });
        self.decide(number, self.now.plus(WORD_AWAITED_MAX));
    }

    fn decide(&mut self, number: usize, held_until: Moment) {
        let Some(asked) = self.requests[number].asked.clone() else { return };
        let engine = match &self.scenario.decider {
            Decider::Replicas { .. } => {
                let router = &self.replicas.routers[self.requests[number].replica];
                if self.now < held_until && router.awaits_word(&asked.shape) {
                    let again = Event::Decide { request: number, held_until };
                    self.queue.push(self.now.plus(WORD_LOOKED_FOR), again);
                    return;
                }
                let chosen = router.choose(&asked.shape, &[], core_time(self.now), &mut self.rng);
                let chosen = chosen.expect("all endpoints are ready");
                let engine = self.endpoints.iter().position(|id| *id == chosen.endpoint.id);
                self.requests[number].chosen = Some(chosen);
                engine.expect("what is chosen is one of the endpoints")
            }
            Decider::LeastConnections => {
                let count = self.engines.len();
                let in_turn = (0..count).map(|at| (at + number) % count);
                in_turn.min_by_key(|at| self.engines[*at].in_flight).expect("there are engines")
            }
            Decider::AllKnowing => {
                let soonest = |at: &usize| {
                    let engine = &self.engines[*at];
                    (
                        engine.first_token_at(number, &asked, self.now).unwrap_or(Moment(u64::MAX)),
                        engine.in_flight,
                    )
                };
                (0..self.engines.len()).min_by_key(soonest).expect("there are engines")
            }
        };
        self.send(number, engine, &asked);
    }

    fn send(&mut self, number: usize, engine: usize, asked: &Arc<Asked>) {
        self.requests[number].engine = engine;
        if let Asker::Client(client) = self.requests[number].asker {
            let client = &mut self.clients[client];
            let counts = self.by_tenant.entry(client.tenant).or_default();
            counts.resize(self.engines.len(), 0);
            counts[engine] += 1;
            if let Some(home) = client.home {
                self.at_home.0 += usize::from(home == engine);
                self.at_home.1 += 1;
            } else {
                client.home = Some(engine);
            }
        }
        if self.is_counted(number) {
            self.engines[engine].served += 1;
        }
        let taken = self.engines[engine].submit(number, asked, self.now, &mut self.engine_events);
        if taken.is_err() {
            self.refused(number);
        }
        self.follow(engine);
        self.news_of(self.requests[number].replica);
    }

    /// Whether figures are of this request.
    fn is_counted(&self, number: usize) -> bool {
        match (self.requests[number].asker, &self.scenario.workload) {
            (Asker::Row(row), Workload::Trace(trace)) => trace.counted().contains(&row),
            _ => true,
        }
    }

    /// An engine can't take a request: it never fits.
    fn refused(&mut self, number: usize) {
        self.tally.refused += usize::from(self.is_counted(number));
        let request = &mut self.requests[number];
        if let (Some(chosen), Some(asked)) = (request.chosen.take(), &request.asked) {
            self.replicas.routers[request.replica].withdraw(&asked.shape, &chosen.footing);
        }
        self.over(number);
    }

    /// Does what an engine's events ask for, and sees to it that the engine is looked at when it is due.
    fn follow(&mut self, engine: usize) {
        let mut events = std::mem::take(&mut self.engine_events);
        for event in events.drain(..) {
            match event {
                EngineEvent::Started { job, cached_tokens, .. } => {
                    self.started(job.0 as usize, cached_tokens);
                }
                EngineEvent::Tokens { job, at, last, .. } => self.tokens(job.0 as usize, at, last),
                EngineEvent::Fetch { .. } => unreachable!("no KV comes from elsewhere"),
            }
        }
        self.engine_events = events;
        if let Some(at) = self.engines[engine].next_wake() {
            self.queue.push(at, Event::Engine(engine));
        }
    }

    fn started(&mut self, number: usize, cached_tokens: u32) {
        let counted = self.is_counted(number);
        let request = &mut self.requests[number];
        request.cached_tokens = cached_tokens;
        if let (true, Some(asked)) = (counted, &request.asked) {
            self.tally.prompt_tokens += u64::from(asked.prompt.tokens);
            self.tally.cached_tokens += u64::from(cached_tokens);
            self.engines[request.engine].computed_tokens += u64::from(asked.prompt.tokens - cached_tokens);
        }
    }

    fn tokens(&mut self, number: usize, at: Moment, last: bool) {
        let counted = self.is_counted(number);
        let request = &mut self.requests[number];
        let replica = request.replica;
        if request.first_token.is_none() {
            request.first_token = Some(at);
            if counted {
                self.tally.ttft_ns.push(at.since(request.sent).as_nanos() as u64);
            }
            if let Some(chosen) = &request.chosen {
                chosen.reservation.first_token();
            }
            self.news_of(replica);
        }
        if last {
            self.ended(number, at, counted);
        }
    }

    fn ended(&mut self, number: usize, at: Moment, counted: bool) {
        let request = &mut self.requests[number];
        self.engines[request.engine].in_flight -= 1;
        if counted {
            self.tally.e2e_ns += at.since(request.sent).as_nanos() as u64;
        }
        let (replica, sent, first_token) = (request.replica, request.sent, request.first_token);
        if let (Some(chosen), Some(asked)) = (request.chosen.take(), &request.asked) {
            let usage = self.scenario.usage;
            let ms = |until: Moment| until.since(sent).as_secs_f64() * 1e3;
            let measured = Measurement {
                footing: chosen.footing,
                first_byte_ms: first_token.map(ms),
                leg_ms: ms(at),
                prompt_tokens: usage.then_some(asked.prompt.tokens),
                cached_tokens: usage.then_some(request.cached_tokens),
                output_tokens: Some(asked.output_tokens),
            };
            drop(chosen);
            self.replicas.routers[replica].learn(&measured, &asked.shape, core_time(self.now));
        }
        self.news_of(replica);
        self.over(number);
    }

    /// A request is over: its client goes on.
    fn over(&mut self, number: usize) {
        self.left -= 1;
        let asked = self.requests[number].asked.take();
        let (Asker::Client(client), Workload::Chats(shape)) =
            (self.requests[number].asker, &self.scenario.workload)
        else {
            return;
        };
        if self.clients[client].chat.is_over() {
            if self.chats_begun >= shape.chats {
                return;
            }
            self.clients[client] = self.next_client();
        } else if let Some(asked) = asked {
            self.clients[client].chat.answered(&asked);
        }
        self.queue.push(self.now.plus(shape.think), Event::Turn(client));
    }

    fn figures(self) -> Figures {
        let served: Vec<usize> = self.engines.iter().map(|engine| engine.served).collect();
        let computed: Vec<u64> = self.engines.iter().map(|engine| engine.computed_tokens).collect();
        let chats = matches!(self.scenario.workload, Workload::Chats(_)).then(|| {
            let at_their_own: usize = self.by_tenant.values().filter_map(|counts| counts.iter().max()).sum();
            let all: usize = self.by_tenant.values().flatten().sum();
            Chats {
                follow_ups_at_home: self.at_home.0 as f64 / self.at_home.1.max(1) as f64,
                tenants_at_home: at_their_own as f64 / all.max(1) as f64,
            }
        });
        self.tally.figures(served, &computed, chats)
    }
}
