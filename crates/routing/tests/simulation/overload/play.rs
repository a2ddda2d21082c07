//! One run: requests of two classes come faster than engines with a few places can serve them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use routing::endpoint::EndpointSpec;
use routing::request::{HeaderView, RequestShape, Route};
use routing::router::{Admission, Applicant, Fate};
use routing::settings::Settings;
use routing::{Chosen, EndpointId, Moment};

use crate::replicas::{PULSE_US, Posted, Replicas};
use crate::workload::prose;

/// Those that wait are looked at this often though nothing was heard, as the gateway does.
const LOOKED_AT_US: u64 = 10_000;
/// Between two pushes of a replica, as gossip spaces them.
const PUSH_EVERY_US: u64 = 2_000;

/// What is played.
#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) replicas: usize,
    pub(crate) engines: usize,
    /// Requests that an engine runs at a time.
    pub(crate) places: usize,
    /// What a prompt takes in a place, and each token after it.
    pub(crate) prefill_us: u64,
    pub(crate) itl_us: u64,
    pub(crate) output_tokens: u64,
    /// What comes, over what the places can serve.
    pub(crate) load: f64,
    pub(crate) seconds: u64,
    /// From a push until it is heard.
    pub(crate) push_us: u64,
    /// Share of words that are lost.
    pub(crate) loss: f64,
    /// Sessions that requests belong to in turn.
    pub(crate) sessions: usize,
    /// A replica falls silent at this second, and is taken for dead 1.5 s later.
    pub(crate) dies_at_s: Option<u64>,
    pub(crate) settings: Settings,
    pub(crate) seed: u64,
}

/// How it went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures {
    /// Share of class 1 and of class 3 whose first token came in time.
    pub(crate) in_time: [f64; 2],
    /// Share that was refused.
    pub(crate) refused: [f64; 2],
    /// The median of the first token of those served, in ms.
    pub(crate) ttft_ms: [f64; 2],
    /// The longest that anybody waited here, in ms.
    pub(crate) waited_ms_max: f64,
    /// The share of its time that a place was idle while somebody waited at a replica that lives.
    pub(crate) idle: f64,
    /// Requests in an engine's own queue, mean of one engine, and most.
    pub(crate) behind: f64,
    pub(crate) behind_max: usize,
}

enum Event {
    Arrives(usize),
    First(usize),
    Ends(usize),
    Push(usize),
    Pulse,
    Heard(Posted),
    Look(usize),
    Dies,
    Missed,
}

struct Request {
    shape: RequestShape,
    class: usize,
    replica: usize,
    arrived: u64,
    sent: u64,
    engine: usize,
    chosen: Option<Chosen>,
    first: Option<u64>,
    refused: bool,
}

#[derive(Default)]
struct Engine {
    running: usize,
    waiting: VecDeque<usize>,
}

/// A replica's bells.
#[derive(Default)]
struct Bells {
    room: AtomicBool,
    news: AtomicBool,
}

pub(crate) struct Play {
    scenario: Scenario,
    now: u64,
    number: u64,
    events: BinaryHeap<Reverse<(u64, u64, usize)>>,
    kept: Vec<Option<Event>>,
    requests: Vec<Request>,
    engines: Vec<Engine>,
    endpoints: Vec<EndpointId>,
    replicas: Replicas,
    bells: Vec<Arc<Bells>>,
    fates: Arc<Mutex<Vec<(usize, Fate)>>>,
    push_due: Vec<u64>,
    push_set: Vec<bool>,
    dead: Option<usize>,
    rng: SmallRng,
    lots: SmallRng,
    figures: Figures,
    idle_us: f64,
    behind_us: f64,
}

struct Headers(Vec<(&'static str, String)>);

impl HeaderView for Headers {
    fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_bytes())
    }
}

impl Play {
    pub(crate) fn run(scenario: &Scenario) -> Figures {
        let mut play = Self::new(scenario.clone());
        let end = (scenario.seconds + 40) * 1_000_000;
        while let Some(Reverse((at, _, kept))) = play.events.pop() {
            if at > end {
                break;
            }
            play.pass(at);
            if let Some(event) = play.kept[kept].take() {
                play.step(event);
            }
            play.answer_bells();
        }
        play.figures()
    }

    fn new(scenario: Scenario) -> Self {
        let specs: Vec<EndpointSpec> = (0..scenario.engines)
            .map(|at| EndpointSpec::at(&format!("http://engine-{at}.seed-{}:8000", scenario.seed)).unwrap())
            .collect();
        let replicas = Replicas::new(scenario.replicas, &scenario.settings, &specs, scenario.push_us);
        let mut play = Self {
            now: 0,
            number: 0,
            events: BinaryHeap::new(),
            kept: Vec::new(),
            requests: Vec::new(),
            engines: (0..scenario.engines).map(|_| Engine::default()).collect(),
            endpoints: specs.iter().map(EndpointSpec::id).collect(),
            bells: replicas.routers.iter().map(|_| Arc::default()).collect(),
            fates: Arc::default(),
            push_due: vec![0; scenario.replicas],
            push_set: vec![false; scenario.replicas],
            dead: None,
            rng: SmallRng::seed_from_u64(scenario.seed),
            lots: SmallRng::seed_from_u64(scenario.seed ^ 0xfeed),
            figures: Figures::default(),
            idle_us: 0.0,
            behind_us: 0.0,
            replicas,
            scenario,
        };
        for (router, bells) in play.replicas.routers.iter().zip(&play.bells) {
            let heard = Arc::clone(bells);
            router.on_room(move || heard.room.store(true, Ordering::Relaxed));
            let heard = Arc::clone(bells);
            router.on_news(move || heard.news.store(true, Ordering::Relaxed));
        }
        play.come();
        play.at(PULSE_US, Event::Pulse);
        for replica in 0..play.scenario.replicas {
            play.at(1_000 * replica as u64, Event::Look(replica));
        }
        if let Some(second) = play.scenario.dies_at_s {
            play.at(second * 1_000_000, Event::Dies);
        }
        play
    }

    /// Requests come at random moments, of both classes alike.
    fn come(&mut self) {
        let scenario = self.scenario.clone();
        let service_us = scenario.prefill_us + scenario.itl_us * scenario.output_tokens;
        let per_us = (scenario.engines * scenario.places) as f64 / service_us as f64 * scenario.load;
        let mut at = 0.0;
        loop {
            at += -(1.0 - self.rng.random::<f64>()).ln() / per_us;
            if at > scenario.seconds as f64 * 1e6 {
                break;
            }
            let number = self.requests.len();
            let class = if self.rng.random_bool(0.5) { 1 } else { 3 };
            let session = number % scenario.sessions;
            let replica = self.rng.random_range(0..scenario.replicas);
            let body = serde_json::json!({
                "model": "m", "prompt": prose(scenario.seed * 100_000 + number as u64, 1_600), "stream": true,
                "max_tokens": scenario.output_tokens,
            });
            let headers = Headers(vec![
                ("x-request-priority", class.to_string()),
                ("x-session-id", format!("session {session}")),
            ]);
            let rules = self.replicas.routers[0].rules();
            let shape = RequestShape::read(Route::Completions, &headers, body.to_string().as_bytes(), &rules);
            self.requests.push(Request {
                shape: shape.unwrap(),
                class,
                replica,
                arrived: at as u64,
                sent: 0,
                engine: 0,
                chosen: None,
                first: None,
                refused: false,
            });
            self.at(at as u64, Event::Arrives(number));
        }
    }

    fn at(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, self.kept.len())));
        self.kept.push(Some(event));
    }

    fn moment(&self) -> Moment {
        Moment::from_micros(self.now)
    }

    /// Lets time pass, and counts what stood idle in it.
    fn pass(&mut self, at: u64) {
        let us = (at - self.now) as f64;
        let waits = |number: usize| self.dead != Some(number);
        let somebody = (0..self.scenario.replicas)
            .any(|number| waits(number) && self.replicas.routers[number].queue_stats().requests > 0);
        for engine in &self.engines {
            if somebody && engine.waiting.is_empty() {
                self.idle_us += us * (self.scenario.places - engine.running) as f64;
            }
            self.behind_us += us * engine.waiting.len() as f64;
            self.figures.behind_max = self.figures.behind_max.max(engine.waiting.len());
        }
        self.now = at;
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Arrives(number) => self.arrives(number),
            Event::First(number) => {
                let request = &mut self.requests[number];
                request.first = Some(self.now);
                let now = Moment::from_micros(self.now);
                let router = &self.replicas.routers[request.replica];
                if let Some(chosen) = &request.chosen {
                    let took_ms = (self.now - request.sent) as f64 / 1_000.0;
                    chosen.reservation.first_token();
                    router.first_byte(&chosen.footing, took_ms, now);
                }
                let us = self.scenario.itl_us * self.scenario.output_tokens;
                self.at(self.now + us, Event::Ends(number));
            }
            Event::Ends(number) => {
                self.requests[number].chosen = None;
                let engine = self.requests[number].engine;
                self.engines[engine].running -= 1;
                self.begin(engine);
            }
            Event::Push(replica) => {
                self.push_set[replica] = false;
                self.push(replica);
            }
            Event::Pulse => {
                let posted = self.replicas.pulses(self.now);
                self.post(posted);
                self.at(self.now + PULSE_US, Event::Pulse);
            }
            Event::Heard(posted) => {
                if self.dead != Some(posted.to) {
                    self.replicas.hear(&posted);
                }
            }
            Event::Look(replica) => {
                self.serve(replica);
                self.at(self.now + LOOKED_AT_US, Event::Look(replica));
            }
            Event::Dies => {
                // What it had in flight goes on in the engines, though nobody reads it; what waits there is lost.
                self.dead = Some(self.scenario.replicas - 1);
                self.at(self.now + 1_500_000, Event::Missed);
            }
            Event::Missed => {
                let dead = self.scenario.replicas - 1;
                for router in &self.replicas.routers[..dead] {
                    router.replica_gone(self.replicas.id(dead));
                }
            }
        }
    }

    fn arrives(&mut self, number: usize) {
        if self.dead == Some(self.requests[number].replica) {
            self.requests[number].replica = 0;
        }
        let request = &self.requests[number];
        let router = &self.replicas.routers[request.replica];
        let applicant = Applicant { shape: &request.shape, arrived: self.moment(), bytes: 100 };
        let fates = Arc::clone(&self.fates);
        let call = || {
            let fates = Arc::clone(&fates);
            let call: routing::router::Call = Box::new(move |fate| {
                fates.lock().push((number, fate));
                Ok(())
            });
            call
        };
        match router.admit(applicant, self.moment(), &mut self.rng, call).unwrap() {
            Admission::Chosen(chosen) => self.send(number, *chosen),
            Admission::Waits { .. } => {}
            Admission::Shed { .. } => self.requests[number].refused = true,
        }
        self.hear_fates();
    }

    fn serve(&mut self, replica: usize) {
        if self.dead == Some(replica) {
            return;
        }
        self.replicas.routers[replica].serve_queue(Moment::from_micros(self.now), &mut self.rng);
        self.hear_fates();
    }

    fn hear_fates(&mut self) {
        let fates = std::mem::take(&mut *self.fates.lock());
        for (number, fate) in fates {
            let waited_ms = (self.now - self.requests[number].arrived) as f64 / 1_000.0;
            self.figures.waited_ms_max = self.figures.waited_ms_max.max(waited_ms);
            match fate {
                Fate::Chosen(chosen) => self.send(number, *chosen),
                Fate::Shed { .. } => self.requests[number].refused = true,
                Fate::Refused(refusal) => panic!("seed {}: {refusal:?}", self.scenario.seed),
            }
        }
    }

    fn send(&mut self, number: usize, chosen: Chosen) {
        let engine = self.endpoints.iter().position(|id| *id == chosen.endpoint.id).unwrap();
        let request = &mut self.requests[number];
        (request.engine, request.sent, request.chosen) = (engine, self.now, Some(chosen));
        self.engines[engine].waiting.push_back(number);
        self.begin(engine);
    }

    /// Starts what has a place.
    fn begin(&mut self, engine: usize) {
        while self.engines[engine].running < self.scenario.places {
            let Some(number) = self.engines[engine].waiting.pop_front() else { break };
            self.engines[engine].running += 1;
            self.at(self.now + self.scenario.prefill_us, Event::First(number));
        }
    }

    fn answer_bells(&mut self) {
        for replica in 0..self.scenario.replicas {
            if self.bells[replica].room.swap(false, Ordering::Relaxed) {
                self.serve(replica);
            }
            if self.bells[replica].news.swap(false, Ordering::Relaxed) && !self.push_set[replica] {
                self.push_set[replica] = true;
                self.at(self.now.max(self.push_due[replica]), Event::Push(replica));
            }
        }
    }

    fn push(&mut self, replica: usize) {
        self.push_due[replica] = self.now + PUSH_EVERY_US;
        let posted = self.replicas.push_from(replica, self.now);
        self.post(posted);
    }

    fn post(&mut self, posted: Vec<Posted>) {
        for posted in posted {
            let lost = self.scenario.loss > 0.0 && self.lots.random_bool(self.scenario.loss);
            if !lost && self.dead != Some(posted.from) {
                self.at(posted.at, Event::Heard(posted));
            }
        }
    }

    fn figures(mut self) -> Figures {
        let soonest = self.scenario.seconds * 1_000_000 / 10;
        let counted = |class: usize| {
            let of_class = move |each: &&Request| each.class == class && each.arrived >= soonest;
            self.requests.iter().filter(of_class)
        };
        for (at, class) in [1, 3].into_iter().enumerate() {
            let targets = &self.scenario.settings.rules.targets;
            let limit = if class == 1 { targets.high } else { targets.low };
            let limit_us = limit.ttft_ms as u64 * 1_000;
            let all = counted(class).count() as f64;
            let ttft = |each: &Request| each.first.map(|first| first - each.arrived);
            let in_time = counted(class).filter(|each| ttft(each).is_some_and(|us| us <= limit_us)).count();
            self.figures.in_time[at] = in_time as f64 / all;
            self.figures.refused[at] = counted(class).filter(|each| each.refused).count() as f64 / all;
            let mut firsts: Vec<u64> = counted(class).filter_map(ttft).collect();
            firsts.sort_unstable();
            self.figures.ttft_ms[at] = firsts.get(firsts.len() / 2).copied().unwrap_or(0) as f64 / 1_000.0;
        }
        let us = self.scenario.seconds as f64 * 1e6;
        self.figures.idle = self.idle_us / us / (self.scenario.engines * self.scenario.places) as f64;
        self.figures.behind = self.behind_us / us / self.scenario.engines as f64;
        self.figures
    }
}
