//! Replicas and engines in virtual time: requests, replies and facts are events in one queue.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use routing::endpoint::EndpointSpec;
use routing::request::{RequestShape, Route, ShapeRules};
use routing::router::Measurement;
use routing::settings::Settings;
use routing::{Chosen, EndpointId, Moment};

use crate::engine::{Engine, Job, Profile};
use crate::replicas::{PULSE_US, Posted, Replicas};
use crate::workload::{Chat, Workload};

/// Who decides.
#[derive(Clone, Debug)]
pub(crate) enum Decider {
    /// Replicas that run the product's core.
    Replicas { count: usize, settings: Box<Settings> },
    /// One balancer that knows every engine's requests and nothing else, ties in turn.
    LeastConnections,
    /// One router that knows every queue and every cache.
    Oracle,
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) decider: Decider,
    pub(crate) engines: usize,
    pub(crate) profile: Profile,
    pub(crate) workload: Workload,
    pub(crate) seed: u64,
    /// From a change until other replicas know it by a push, in microseconds.
    pub(crate) push_us: u64,
    /// Whether replies carry `usage` with cached tokens.
    pub(crate) usage: bool,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// From a request's sending to its first token, on average.
    pub(crate) ttft_ms: f64,
    /// What 99 of 100 stay below.
    pub(crate) ttft_p99_ms: f64,
    /// Prompt tokens found in the engines' caches, 0 to 1.
    pub(crate) hit_ratio: f64,
    /// Requests at the busiest engine over the mean.
    pub(crate) busiest_over_mean: f64,
    /// Follow-up turns at the engine of their chat's first turn, 0 to 1.
    pub(crate) follow_ups_at_home: f64,
    /// Requests at the engine that serves most of their tenant's, 0 to 1.
    pub(crate) tenants_at_home: f64,
}

impl Figures {
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mean = |part: fn(&Self) -> f64| all.iter().map(part).sum::<f64>() / all.len() as f64;
        Self {
            ttft_ms: mean(|figures| figures.ttft_ms),
            ttft_p99_ms: mean(|figures| figures.ttft_p99_ms),
            hit_ratio: mean(|figures| figures.hit_ratio),
            busiest_over_mean: mean(|figures| figures.busiest_over_mean),
            follow_ups_at_home: mean(|figures| figures.follow_ups_at_home),
            tenants_at_home: mean(|figures| figures.tenants_at_home),
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ttft {:.1} ms, p99 {:.0} ms, hit {:.3}, busiest {:.2}, follow-ups at home {:.3}, tenants {:.3}",
            self.ttft_ms,
            self.ttft_p99_ms,
            self.hit_ratio,
            self.busiest_over_mean,
            self.follow_ups_at_home,
            self.tenants_at_home,
        )
    }
}

enum Event {
    Send { client: usize },
    Prefilled { engine: usize },
    Done { request: usize },
    Heard(Posted),
    PulseDue,
}

struct Request {
    client: usize,
    replica: usize,
    engine: usize,
    sent: u64,
    first_byte: u64,
    cached: u64,
    tokens: u64,
    shape: RequestShape,
    chosen: Option<Chosen>,
}

struct Client {
    chat: Chat,
    tenant: usize,
    home: Option<usize>,
}

pub(crate) struct Cluster {
    scenario: Scenario,
    replicas: Replicas,
    engine_ids: Vec<EndpointId>,
    engines: Vec<Engine>,
    requests: Vec<Request>,
    clients: Vec<Client>,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    sequence: u64,
    now: u64,
    rng: SmallRng,
    chats_begun: usize,
    turn: usize,
    ttft_us: Vec<u64>,
    at_home: (usize, usize),
    by_tenant: BTreeMap<usize, Vec<usize>>,
}

impl Cluster {
    pub(crate) fn run(scenario: &Scenario) -> Figures {
        Self::played(scenario).figures()
    }

    /// How many requests each engine got.
    pub(crate) fn served(scenario: &Scenario) -> Vec<usize> {
        Self::played(scenario).engines.iter().map(|engine| engine.served).collect()
    }

    fn played(scenario: &Scenario) -> Self {
        let mut cluster = Self::new(scenario.clone());
        for client in 0..scenario.workload.clients {
            let at = cluster.rng.random_range(0..20_000);
            cluster.at(at, Event::Send { client });
        }
        cluster.at(PULSE_US, Event::PulseDue);
        while let Some(Reverse((at, key))) = cluster.queue.pop() {
            cluster.now = at;
            if let Some(event) = cluster.events.remove(&key) {
                cluster.step(event);
            }
        }
        cluster
    }

    fn new(scenario: Scenario) -> Self {
        let mut rng = SmallRng::seed_from_u64(scenario.seed);
        let specs: Vec<EndpointSpec> = (0..scenario.engines)
            .map(|at| EndpointSpec::at(&format!("http://10.{}.0.{at}:8000", scenario.seed)).unwrap())
            .collect();
        let engine_ids: Vec<EndpointId> = specs.iter().map(EndpointSpec::id).collect();
        let (count, settings) = match &scenario.decider {
            Decider::Replicas { count, settings } => (*count, (**settings).clone()),
            Decider::LeastConnections | Decider::Oracle => (0, Settings::default()),
        };
        let replicas = Replicas::new(count, &settings, &specs, scenario.push_us);
        let clients = (0..scenario.workload.clients)
            .map(|at| {
                let tenant = rng.random_range(0..scenario.workload.tenants);
                Client { chat: Chat::begin(scenario.workload, tenant, at as u64 + 1), tenant, home: None }
            })
            .collect();
        Self {
            engines: (0..scenario.engines).map(|_| Engine::new(scenario.profile)).collect(),
            chats_begun: scenario.workload.clients,
            scenario,
            replicas,
            engine_ids,
            requests: Vec::new(),
            clients,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            sequence: 0,
            now: 0,
            rng,
            turn: 0,
            ttft_us: Vec::new(),
            at_home: (0, 0),
            by_tenant: BTreeMap::new(),
        }
    }

    fn at(&mut self, at: u64, event: Event) {
        self.sequence += 1;
        self.queue.push(Reverse((at, self.sequence)));
        self.events.insert(self.sequence, event);
    }

    fn moment(&self) -> Moment {
        Moment::from_micros(self.now)
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Send { client } => self.send(client),
            Event::Prefilled { engine } => self.prefilled(engine),
            Event::Done { request } => self.done(request),
            Event::Heard(posted) => self.replicas.hear(&posted),
            Event::PulseDue => {
                let pulses = self.replicas.pulses(self.now);
                self.post(pulses);
                let at_work = |event: &Event| {
                    matches!(event, Event::Send { .. } | Event::Prefilled { .. } | Event::Done { .. })
                };
                if self.events.values().any(at_work) {
                    self.at(self.now + PULSE_US, Event::PulseDue);
                }
            }
        }
    }

    fn push_from(&mut self, from: usize) {
        let posted = self.replicas.push_from(from, self.now);
        self.post(posted);
    }

    fn post(&mut self, posted: Vec<Posted>) {
        for each in posted {
            self.at(each.at, Event::Heard(each));
        }
    }

    fn send(&mut self, client: usize) {
        let body = self.clients[client].chat.next_body();
        let route = if self.scenario.workload.chat { Route::ChatCompletions } else { Route::Completions };
        let fine = ShapeRules { block_bytes: 64, ..ShapeRules::default() };
        let headers: [(&str, &str); 0] = [];
        let read = |rules: &ShapeRules| RequestShape::read(route, &headers, body.as_bytes(), rules).unwrap();
        let job_shape = read(&fine);
        let job = Job {
            request: self.requests.len(),
            tokens: u64::from(job_shape.prompt_tokens),
            output_tokens: self.scenario.workload.output_tokens,
            blocks: job_shape.blocks,
        };
        self.turn += 1;
        let replica = self.turn % self.replicas.routers.len().max(1);
        let (engine, chosen, shape) = match &self.scenario.decider {
            Decider::Oracle => {
                let best = (0..self.engines.len())
                    .min_by_key(|at| {
                        (self.engines[*at].first_token_us(&job, self.now), self.engines[*at].in_flight())
                    })
                    .unwrap();
                (best, None, read(&ShapeRules::default()))
            }
            Decider::LeastConnections => {
                let count = self.engines.len();
                let best = (0..count)
                    .map(|at| (at + self.turn) % count)
                    .min_by_key(|at| self.engines[*at].in_flight())
                    .unwrap();
                (best, None, read(&ShapeRules::default()))
            }
            Decider::Replicas { .. } => {
                let router = &self.replicas.routers[replica];
                let shape = read(&router.rules());
                let now = self.moment();
                let chosen = router.choose(&shape, &[], now, &mut self.rng).unwrap();
                let engine = self.engine_ids.iter().position(|id| *id == chosen.endpoint.id).unwrap();
                (engine, Some(chosen), shape)
            }
        };
        self.requests.push(Request {
            client,
            replica,
            engine,
            sent: self.now,
            first_byte: 0,
            cached: 0,
            tokens: job.tokens,
            shape,
            chosen,
        });
        let counts = self.by_tenant.entry(self.clients[client].tenant).or_default();
        counts.resize(self.engines.len(), 0);
        counts[engine] += 1;
        let state = &mut self.clients[client];
        if let Some(home) = state.home {
            self.at_home.0 += usize::from(home == engine);
            self.at_home.1 += 1;
        } else {
            state.home = Some(engine);
        }
        if let Some(end) = self.engines[engine].submit(job, self.now) {
            self.at(end, Event::Prefilled { engine });
        }
        self.push_from(replica);
    }

    fn prefilled(&mut self, engine: usize) {
        let (job, cached, done, next) = self.engines[engine].prefilled(self.now);
        if let Some(next) = next {
            self.at(next, Event::Prefilled { engine });
        }
        let request = &mut self.requests[job.request];
        request.first_byte = self.now;
        request.cached = cached;
        self.ttft_us.push(self.now - request.sent);
        if let Some(chosen) = &request.chosen {
            chosen.reservation.first_token();
        }
        let replica = request.replica;
        self.push_from(replica);
        self.at(done, Event::Done { request: job.request });
    }

    fn done(&mut self, request: usize) {
        let now = self.moment();
        let ended = &mut self.requests[request];
        self.engines[ended.engine].decoding -= 1;
        let (client, replica) = (ended.client, ended.replica);
        if let Some(chosen) = ended.chosen.take() {
            let measured = Measurement {
                footing: chosen.footing,
                first_byte_ms: Some((ended.first_byte - ended.sent) as f64 / 1_000.0),
                leg_ms: (self.now - ended.sent) as f64 / 1_000.0,
                prompt_tokens: self.scenario.usage.then_some(ended.tokens as u32),
                cached_tokens: self.scenario.usage.then_some(ended.cached as u32),
                output_tokens: Some(self.scenario.workload.output_tokens as u32),
            };
            drop(chosen);
            self.replicas.routers[replica].learn(&measured, &self.requests[request].shape, now);
            self.push_from(replica);
        }
        let workload = self.scenario.workload;
        if self.clients[client].chat.is_over() {
            if self.chats_begun >= workload.chats {
                return;
            }
            self.chats_begun += 1;
            let tenant = self.rng.random_range(0..workload.tenants);
            let chat = Chat::begin(workload, tenant, self.chats_begun as u64 + 1);
            self.clients[client] = Client { chat, tenant, home: None };
        } else {
            self.clients[client].chat.reply();
        }
        self.at(self.now + workload.think_us, Event::Send { client });
    }

    fn figures(mut self) -> Figures {
        self.ttft_us.sort_unstable();
        let count = self.ttft_us.len();
        let busiest = self.engines.iter().map(|engine| engine.served).max().unwrap_or(0) as f64;
        let hit: u64 = self.engines.iter().map(|engine| engine.hit_tokens).sum();
        let prompt: u64 = self.engines.iter().map(|engine| engine.prompt_tokens).sum();
        let at_their_own: usize = self.by_tenant.values().filter_map(|counts| counts.iter().max()).sum();
        Figures {
            ttft_ms: self.ttft_us.iter().sum::<u64>() as f64 / count as f64 / 1_000.0,
            ttft_p99_ms: self.ttft_us[count * 99 / 100] as f64 / 1_000.0,
            hit_ratio: hit as f64 / prompt as f64,
            busiest_over_mean: busiest / (count as f64 / self.engines.len() as f64),
            follow_ups_at_home: self.at_home.0 as f64 / self.at_home.1.max(1) as f64,
            tenants_at_home: at_their_own as f64 / count as f64,
        }
    }
}
