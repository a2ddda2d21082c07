//! Replicas and engines with roles in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use routing::decision::PrefillLeg;
use routing::endpoint::EndpointSpec;
use routing::qoe::predicted;
use routing::request::{RequestShape, Route, ShapeRules};
use routing::router::Measurement;
use routing::settings::Settings;
use routing::{Chosen, EndpointId, Moment};

use super::engine::{Engine, Happened, Job, Profile};
use crate::replicas::{PULSE_US, Posted, Replicas};
use crate::workload::{Chat, Workload};

/// Who decides.
#[derive(Clone, Debug)]
pub(crate) enum Decider {
    /// Replicas that run the product's core.
    Replicas { count: usize, settings: Box<Settings> },
    /// One balancer that uses every engine whole and knows how many requests each has.
    LeastConnections,
    /// One router that knows every queue and cache, and splits when that pays.
    Oracle,
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) decider: Decider,
    pub(crate) prefills: usize,
    pub(crate) decodes: usize,
    pub(crate) profile: Profile,
    pub(crate) clients: usize,
    pub(crate) chats: usize,
    /// Chats that begin with `long_bytes`, 0 to 1; the others with `short_bytes`.
    pub(crate) long_share: f64,
    pub(crate) long_bytes: usize,
    pub(crate) short_bytes: usize,
    pub(crate) output_tokens: u64,
    /// Between a reply and the client's next turn, in microseconds.
    pub(crate) think_us: u64,
    pub(crate) seed: u64,
    /// From a change until other replicas know it by a push, in microseconds.
    pub(crate) push_us: u64,
}

/// What is asked of a first token: 0.35 s, and 1.05 s where a long chat begins.
const TTFT_MAX_MS: f64 = 350.0;
const TTFT_LONG_MAX_MS: f64 = 1_050.0;
/// And of the time between tokens, on average over a reply.
const ITL_MAX_MS: f64 = 30.0;

/// What came of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// From a request's sending to its first token, on average.
    pub(crate) ttft_ms: f64,
    /// Requests within both limits, 0 to 1.
    pub(crate) within: f64,
    /// The mean quality of experience, 0 to 1, as if the tokens after the first had come evenly.
    pub(crate) qoe: f64,
    /// Requests at the busiest engine of a role over the mean of that role, whichever role is worse; of balancers
    /// that know roles.
    pub(crate) busiest_over_mean: f64,
    /// Of the first turns of long chats, and of all others, those that were split.
    pub(crate) long_split: f64,
    pub(crate) others_split: f64,
}

impl Figures {
    pub(crate) fn mean(all: &[Self]) -> Self {
        let mean = |part: fn(&Self) -> f64| all.iter().map(part).sum::<f64>() / all.len() as f64;
        Self {
            ttft_ms: mean(|figures| figures.ttft_ms),
            within: mean(|figures| figures.within),
            qoe: mean(|figures| figures.qoe),
            busiest_over_mean: mean(|figures| figures.busiest_over_mean),
            long_split: mean(|figures| figures.long_split),
            others_split: mean(|figures| figures.others_split),
        }
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ttft_ms, within, qoe, busiest_over_mean, long_split, others_split } = self;
        write!(f, "ttft {ttft_ms:.0} ms, within limits {within:.3}, qoe {qoe:.3}, ")?;
        write!(f, "busiest {busiest_over_mean:.2}, ")?;
        write!(f, "split {long_split:.3} of long first turns, {others_split:.3} of others")
    }
}

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
enum Course {
    Whole { at: usize },
    Split { prefill: usize, decode: usize },
}

enum Event {
    Send { client: usize },
    Engine { engine: usize, version: u64 },
    Handed { request: usize },
    Heard(Posted),
    PulseDue,
}

struct Request {
    client: usize,
    replica: usize,
    course: Course,
    is_long: bool,
    job: Job,
    output_tokens: u64,
    shape: RequestShape,
    sent: u64,
    handed_off: Option<u64>,
    first_token: Option<u64>,
    ended: u64,
    cached: u64,
    chosen: Option<Chosen>,
}

impl Request {
    fn first_token(&self) -> u64 {
        self.first_token.unwrap_or(self.ended)
    }

    fn ttft_ms(&self) -> f64 {
        (self.first_token() - self.sent) as f64 / 1_000.0
    }

    fn itl_ms(&self) -> f64 {
        (self.ended - self.first_token()) as f64 / 1_000.0 / (self.output_tokens - 1) as f64
    }
}

struct Client {
    chat: Chat,
    is_long: bool,
}

pub(crate) struct Cluster {
    scenario: Scenario,
    replicas: Replicas,
    ids: Vec<EndpointId>,
    engines: Vec<Engine>,
    requests: Vec<Request>,
    clients: Vec<Client>,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    sequence: u64,
    now: u64,
    rng: SmallRng,
    chats_begun: usize,
    at_work: usize,
}

impl Cluster {
    pub(crate) fn run(scenario: Scenario) -> Figures {
        let mut cluster = Self::new(scenario);
        for client in 0..cluster.clients.len() {
            let at = cluster.rng.random_range(0..20_000);
            cluster.at_work += 1;
            cluster.at(at, Event::Send { client });
        }
        cluster.at(PULSE_US, Event::PulseDue);
        while let Some(Reverse((at, key))) = cluster.queue.pop() {
            cluster.now = at;
            if let Some(event) = cluster.events.remove(&key) {
                cluster.step(event);
            }
        }
        cluster.check_nothing_is_left();
        cluster.figures()
    }

    /// Once all is answered no replica holds a charge anywhere, nor believes that another does.
    fn check_nothing_is_left(&self) {
        for router in &self.replicas.routers {
            for endpoint in &router.view().endpoints {
                let load = endpoint.load(self.moment());
                let left = (load.running, load.prefill_tokens, load.decode_tokens);
                assert_eq!(left, (0, 0, 0), "{} as {} sees it", endpoint.spec.label(), router.own());
            }
        }
    }

    fn new(scenario: Scenario) -> Self {
        let role = |at| if at < scenario.prefills { "prefill" } else { "decode" };
        let specs: Vec<EndpointSpec> = (0..scenario.prefills + scenario.decodes)
            .map(|at| format!("http://10.{}.0.{at}:8000,role={}", scenario.seed, role(at)))
            .map(|text| EndpointSpec::parse(&text).unwrap().remove(0))
            .collect();
        let (count, settings) = match &scenario.decider {
            Decider::Replicas { count, settings } => (*count, (**settings).clone()),
            Decider::LeastConnections | Decider::Oracle => (0, Settings::default()),
        };
        let mut cluster = Self {
            replicas: Replicas::new(count, &settings, &specs, scenario.push_us),
            ids: specs.iter().map(EndpointSpec::id).collect(),
            engines: specs.iter().map(|_| Engine::new(scenario.profile)).collect(),
            requests: Vec::new(),
            clients: Vec::new(),
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            sequence: 0,
            now: 0,
            rng: SmallRng::seed_from_u64(scenario.seed),
            chats_begun: 0,
            at_work: 0,
            scenario,
        };
        for _ in 0..cluster.scenario.clients {
            let client = cluster.begin_chat();
            cluster.clients.push(client);
        }
        cluster
    }

    fn begin_chat(&mut self) -> Client {
        self.chats_begun += 1;
        let is_long = self.rng.random_bool(self.scenario.long_share);
        let workload = Workload {
            common_bytes: 0,
            tenant_bytes: 0,
            first_bytes: if is_long { self.scenario.long_bytes } else { self.scenario.short_bytes },
            turn_bytes: self.scenario.short_bytes,
            turns: 2,
            output_tokens: self.scenario.output_tokens,
            chat: true,
        };
        Client { chat: Chat::begin(workload, 0, self.chats_begun as u64), is_long }
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
            Event::Engine { engine, version } => {
                if self.engines[engine].version == version {
                    self.touch(engine, |_| ());
                }
            }
            Event::Handed { request } => {
                let Course::Split { decode, .. } = self.requests[request].course else { return };
                let (blocks, tokens) =
                    (self.requests[request].job.blocks.clone(), self.requests[request].output_tokens);
                self.touch(decode, |engine| engine.join(request, &blocks, tokens));
            }
            Event::Heard(posted) => self.replicas.hear(&posted),
            Event::PulseDue => {
                let pulses = self.replicas.pulses(self.now);
                self.post(pulses);
                if self.at_work > 0 {
                    self.at(self.now + PULSE_US, Event::PulseDue);
                }
            }
        }
    }

    fn post(&mut self, posted: Vec<Posted>) {
        for each in posted {
            self.at(each.at, Event::Heard(each));
        }
    }

    /// Brings an engine to this time, changes it, and sees what happened.
    fn touch(&mut self, engine: usize, change: impl FnOnce(&mut Engine)) {
        let happened = self.engines[engine].advance(self.now);
        change(&mut self.engines[engine]);
        for each in happened {
            match each {
                Happened::Prefilled { request, cached } => self.prefilled(request, cached),
                Happened::FirstToken { request } => self.first_token(request),
                Happened::Ended { request } => self.ended(request),
            }
        }
        let version = self.engines[engine].version;
        if let Some(at) = self.engines[engine].next() {
            self.at(at, Event::Engine { engine, version });
        }
    }

    fn send(&mut self, client: usize) {
        let body = self.clients[client].chat.next_body();
        let is_long = self.clients[client].is_long && self.clients[client].chat.turn == 1;
        let ttft_max_ms = if is_long { TTFT_LONG_MAX_MS } else { TTFT_MAX_MS };
        let (ttft, itl) = (ttft_max_ms.to_string(), ITL_MAX_MS.to_string());
        let headers = [("x-slo-ttft-ms", ttft.as_str()), ("x-slo-tpot-ms", itl.as_str())];
        let read = |rules: &ShapeRules| {
            RequestShape::read(Route::ChatCompletions, &headers, body.as_bytes(), rules).unwrap()
        };
        let fine = read(&ShapeRules { block_bytes: 64, ..ShapeRules::default() });
        let request = self.requests.len();
        let output_tokens = self.scenario.output_tokens;
        let mut job = Job {
            request,
            tokens: u64::from(fine.prompt_tokens),
            blocks: fine.blocks,
            output_tokens: Some(output_tokens),
        };
        let replica = request % self.replicas.routers.len().max(1);
        let (course, shape, chosen) = match &self.scenario.decider {
            Decider::LeastConnections => {
                (self.least_connections(request), read(&ShapeRules::default()), None)
            }
            Decider::Oracle => (self.best_course(&job), read(&ShapeRules::default()), None),
            Decider::Replicas { .. } => {
                let router = &self.replicas.routers[replica];
                let shape = read(&router.rules());
                let chosen = router.choose(&shape, &[], self.moment(), &mut self.rng).unwrap();
                (self.course_of(&chosen), shape, Some(chosen))
            }
        };
        if matches!(course, Course::Split { .. }) {
            job.output_tokens = None;
        }
        self.requests.push(Request {
            client,
            replica,
            course,
            is_long,
            job: job.clone(),
            output_tokens,
            shape,
            sent: self.now,
            handed_off: None,
            first_token: None,
            ended: 0,
            cached: 0,
            chosen,
        });
        let (Course::Whole { at: first } | Course::Split { prefill: first, .. }) = course;
        self.touch(first, |engine| engine.submit(job));
        self.push_from(replica);
    }

    fn push_from(&mut self, replica: usize) {
        let posted = self.replicas.push_from(replica, self.now);
        self.post(posted);
    }

    fn course_of(&self, chosen: &Chosen) -> Course {
        let number = |id: EndpointId| self.ids.iter().position(|each| *each == id).unwrap();
        let at = number(chosen.endpoint.id);
        match &chosen.prefill {
            None => Course::Whole { at },
            Some(PrefillLeg { endpoint, .. }) => Course::Split { prefill: number(endpoint.id), decode: at },
        }
    }

    fn least_connections(&self, turn: usize) -> Course {
        let count = self.engines.len();
        let at = (0..count).map(|at| (at + turn) % count).min_by_key(|at| self.engines[*at].in_flight());
        Course::Whole { at: at.unwrap() }
    }

    /// What costs the fewest milliseconds, the request's own and those that it takes from who decodes there.
    fn best_course(&self, job: &Job) -> Course {
        let Profile { slowdown, transfer_base_us, transfer_us_per_token, itl_us, .. } = self.scenario.profile;
        let uncached = |at: usize| (job.tokens - self.engines[at].cached_tokens(job)) as f64;
        let decodes = self.scenario.prefills..self.engines.len();
        let whole = decodes.clone().map(|at| {
            let engine = &self.engines[at];
            let busy_us = uncached(at) * self.scenario.profile.prefill_us_per_token;
            let taken_us = busy_us * (1.0 - 1.0 / slowdown) * (engine.decoding() as f64 + 1.0);
            (engine.prefilled_in_us(job) + taken_us, Course::Whole { at })
        });
        let split = (0..self.scenario.prefills).flat_map(|prefill| {
            decodes.clone().map(move |decode| {
                let transfer_us = transfer_base_us + transfer_us_per_token * uncached(decode);
                let crowd = self.engines[decode].in_flight() as f64;
                let decode_us = itl_us * (1.0 + self.scenario.profile.each_running * crowd);
                let us = self.engines[prefill].prefilled_in_us(job) + transfer_us + decode_us;
                (us, Course::Split { prefill, decode })
            })
        });
        whole.chain(split).min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
    }

    fn prefilled(&mut self, request: usize, cached: u64) {
        let now = self.now;
        let ended = &mut self.requests[request];
        ended.cached = cached;
        let Course::Split { decode, .. } = ended.course else { return self.first_token(request) };
        ended.handed_off = Some(now);
        let replica = ended.replica;
        if let Some(PrefillLeg { reservation, footing, .. }) =
            ended.chosen.as_mut().and_then(|chosen| chosen.prefill.take())
        {
            drop(reservation);
            let measured = Measurement {
                footing,
                first_byte_ms: None,
                leg_ms: (now - ended.sent) as f64 / 1_000.0,
                prompt_tokens: Some(ended.job.tokens as u32),
                cached_tokens: Some(cached as u32),
                output_tokens: Some(1),
            };
            self.replicas.routers[replica].learn(&measured, &ended.shape, Moment::from_micros(now));
        }
        let job = &self.requests[request].job;
        let uncached = (job.tokens - self.engines[decode].cached_tokens(job)) as f64;
        let Profile { transfer_base_us, transfer_us_per_token, .. } = self.scenario.profile;
        let transfer_us = transfer_base_us + transfer_us_per_token * uncached;
        self.at(now + transfer_us as u64, Event::Handed { request });
        self.push_from(replica);
    }

    fn first_token(&mut self, request: usize) {
        let begun = &mut self.requests[request];
        begun.first_token = Some(self.now);
        if let Some(chosen) = &begun.chosen {
            chosen.reservation.first_token();
        }
        let replica = begun.replica;
        self.push_from(replica);
    }

    fn ended(&mut self, request: usize) {
        let now = self.moment();
        let ended = &mut self.requests[request];
        ended.ended = self.now;
        let (client, replica) = (ended.client, ended.replica);
        if let Some(Chosen { reservation, footing, .. }) = ended.chosen.take() {
            drop(reservation);
            let from = ended.handed_off.unwrap_or(ended.sent);
            let measured = Measurement {
                footing,
                first_byte_ms: ended.first_token.map(|at| (at - from) as f64 / 1_000.0),
                leg_ms: (self.now - from) as f64 / 1_000.0,
                prompt_tokens: Some(ended.job.tokens as u32),
                cached_tokens: Some(ended.cached as u32),
                output_tokens: Some(ended.output_tokens as u32),
            };
            self.replicas.routers[replica].learn(&measured, &ended.shape, now);
        }
        self.push_from(replica);
        if !self.clients[client].chat.is_over() {
            self.clients[client].chat.reply();
        } else if self.chats_begun < self.scenario.chats {
            self.clients[client] = self.begin_chat();
        } else {
            self.at_work -= 1;
            return;
        }
        self.at(self.now + self.scenario.think_us, Event::Send { client });
    }

    fn busiest_over_mean(&self) -> f64 {
        let mut served = vec![0_u32; self.engines.len()];
        for request in &self.requests {
            match request.course {
                Course::Whole { at } => served[at] += 1,
                Course::Split { prefill, decode } => {
                    served[prefill] += 1;
                    served[decode] += 1;
                }
            }
        }
        let worst = |role: &[u32]| {
            let mean = f64::from(role.iter().sum::<u32>()) / role.len() as f64;
            f64::from(role.iter().copied().max().unwrap_or(0)) / mean.max(1.0)
        };
        let (prefills, decodes) = served.split_at(self.scenario.prefills);
        worst(prefills).max(worst(decodes))
    }

    fn figures(self) -> Figures {
        let within = |each: &&Request| {
            each.ttft_ms() <= each.shape.slo.ttft_ms && each.itl_ms() <= each.shape.slo.tpot_ms
        };
        let qoe = |each: &Request| {
            predicted(&each.shape.slo, each.ttft_ms(), each.itl_ms(), each.output_tokens as u32)
        };
        let split = |is_long: bool| {
            let all: Vec<&Request> = self.requests.iter().filter(|each| each.is_long == is_long).collect();
            let split = all.iter().filter(|each| matches!(each.course, Course::Split { .. })).count();
            split as f64 / all.len().max(1) as f64
        };
        let count = self.requests.len() as f64;
        Figures {
            ttft_ms: self.requests.iter().map(Request::ttft_ms).sum::<f64>() / count,
            within: self.requests.iter().filter(within).count() as f64 / count,
            qoe: self.requests.iter().map(qoe).sum::<f64>() / count,
            busiest_over_mean: self.busiest_over_mean(),
            long_split: split(true),
            others_split: split(false),
        }
    }
}
