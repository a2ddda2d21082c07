//! One worker's own: its connections, its lifecycles, its randomness. Nothing here is shared across threads.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::http::StatusCode;
use actors::TurnEnded;
use actors::lifecycle::{Account, Ended, LifecycleHandle, LifecyclePort, WorkerLifecycles};
use rand::{Rng as _, SeedableRng};
use routing::admission::Shed;
use routing::decision::{CandidateCost, Footing};
use routing::endpoint::{Endpoint, Role, Signal, StandingChange};
use routing::lifecycle::{GiveUp, Seen as Looked, Verdict};
use routing::qoe::{End, Fared, Seen, Target};
use routing::request::{RequestShape, Route, response_key};
use routing::router::{Admission, Applicant, Fate, Measurement};
use routing::{Chosen, Decision, EndpointId, Moment, Refusal, Rng};

use crate::data::{Admitted, LegName, Waiting, queue};
use crate::errors::EdgeError;
use crate::look::Looks;
use crate::metrics::WorkerMetrics;
use crate::state::{GatewaySettings, GatewayState};
use crate::stream::Usage;
use crate::upstream::Upstream;

/// The status that is counted for a client that left before it was sent one (nginx's convention).
const CLIENT_GONE: u16 = 499;

/// How long a chat that goes on is held back at most for the word of where it was answered. 5 ms: many times the
/// way of that word, and little beside computing its prompt anew.
const WORD_AWAITED_MAX: Duration = Duration::from_millis(5);
/// How often it is looked for meanwhile.
const WORD_LOOKED_FOR: Duration = Duration::from_millis(1);

/// The model's label where a request names none.
const MODEL_UNNAMED: &str = "default";
/// The model's label where it names one that nobody serves.
const MODEL_UNKNOWN: &str = "unknown";

/// What one worker thread of the public listener has.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) state: Arc<GatewayState>,
    pub(crate) upstream: Upstream,
    pub(crate) lifecycles: WorkerLifecycles,
    port: Rc<Port>,
    rng: RefCell<Rng>,
}

impl Worker {
    /// Must be called on the worker's own thread.
    pub(crate) fn new(state: Arc<GatewayState>) -> Rc<Self> {
        let settings = state.settings.load();
        let port = Rc::new(Port {
            metrics: WorkerMetrics::new(state.metrics.clone()),
            looks: Looks::new(settings.upstream.connect),
            state: Arc::clone(&state),
        });
        Rc::new(Self {
            upstream: Upstream::new(&settings.upstream),
            lifecycles: state.lifecycles.on_worker(Rc::clone(&port) as Rc<dyn LifecyclePort>),
            port,
            rng: RefCell::new(Rng::from_rng(&mut rand::rng())),
            state,
        })
    }

    pub(crate) fn now(&self) -> Moment {
        self.state.clock.now()
    }

    pub(crate) fn settings(&self) -> arc_swap::Guard<Arc<GatewaySettings>> {
        self.state.settings.load()
    }

    /// Holds a chat back while the word of where its last turn was answered is probably on its way.
    pub(crate) async fn await_word(&self, shape: &RequestShape) {
        let router = &self.state.router;
        if !router.awaits_word(shape) {
            return;
        }
        let deadline = Instant::now() + WORD_AWAITED_MAX;
        let mut awaits = true;
        while awaits && Instant::now() < deadline {
            tokio::time::sleep(WORD_LOOKED_FOR).await;
            awaits = router.awaits_word(shape);
        }
        self.port.metrics.word_awaited(!awaits);
    }

    /// Chooses and charges an endpoint for a request that has just come, or has it wait for one.
    pub(crate) fn admit(&self, handle: &LifecycleHandle, bytes: u64) -> Result<Admitted, Refusal> {
        let applicant = Applicant { shape: handle.shape(), arrived: handle.arrived(), bytes };
        let mut heard = None;
        let call = || {
            let (call, waiting) = queue::call();
            heard = Some(waiting);
            call
        };
        let rng = &mut self.rng.borrow_mut();
        let admission = self.state.router.admit(applicant, self.now(), rng, call)?;
        Ok(match admission {
            Admission::Chosen(chosen) => {
                self.chosen(handle.shape(), &chosen, handle.id());
                Admitted::Chosen(chosen)
            }
            Admission::Shed { reason, retry_after_ms } => {
                Admitted::Shed(self.shed(handle, reason, retry_after_ms))
            }
            Admission::Waits { ticket, shape } => match heard {
                Some(heard) => Admitted::Waits(Waiting::new(&self.state, ticket, shape, heard)),
                None => return Err(Refusal::Overloaded { retry_after_ms: 0 }),
            },
        })
    }

    /// Takes in what became of a request that waited.
    pub(crate) fn called(&self, handle: &LifecycleHandle, fate: Fate) -> Result<Chosen, Refusal> {
        match fate {
            Fate::Chosen(chosen) => {
                self.port.metrics.queue_admitted(handle.shape().priority);
                self.chosen(handle.shape(), &chosen, handle.id());
                Ok(*chosen)
            }
            Fate::Shed { reason, retry_after_ms } => Err(self.shed(handle, reason, retry_after_ms)),
            Fate::Refused(refusal) => Err(refusal),
        }
    }

    fn shed(&self, handle: &LifecycleHandle, reason: Shed, retry_after_ms: u64) -> Refusal {
        let priority = handle.shape().priority;
        self.port.metrics.queue_shed(reason, priority);
        let (reason, priority) = (reason.as_str(), priority.number());
        tracing::debug!(id = handle.id(), reason, priority, retry_after_ms, "refused for want of room");
        Refusal::Overloaded { retry_after_ms }
    }

    /// Chooses and charges an endpoint, whoever waits.
    pub(crate) fn choose(
        &self,
        shape: &RequestShape,
        tried: &[EndpointId],
        id: &str,
    ) -> Result<Chosen, Refusal> {
        let chosen = self.state.router.choose(shape, tried, self.now(), &mut self.rng.borrow_mut())?;
        self.chosen(shape, &chosen, id);
        Ok(chosen)
    }

    /// Chooses and charges another endpoint for the decode leg of a split request.
    pub(crate) fn choose_decode_again(
        &self,
        shape: &RequestShape,
        prefill: EndpointId,
        tried: &[EndpointId],
        id: &str,
    ) -> Result<Chosen, Refusal> {
        let rng = &mut self.rng.borrow_mut();
        let chosen = self.state.router.choose_decode_again(shape, prefill, tried, self.now(), rng)?;
        self.chosen(shape, &chosen, id);
        Ok(chosen)
    }

    fn chosen(&self, shape: &RequestShape, chosen: &Chosen, id: &str) {
        if let Some(session) = shape.session {
            self.state.sessions.began(session);
        }
        let decision = &chosen.decision;
        self.port.metrics.decision(decision, chosen.endpoint.spec.role);
        if let Some(split) = &decision.split {
            tracing::debug!(
                id,
                endpoint = chosen.prefill.as_ref().map(|prefill| prefill.endpoint.spec.url.as_str()),
                policy = split.policy,
                split = split.reason.as_str(),
                reason = split.prefill.map(|prefill| prefill.reason.as_str()),
                pair_ms = split.pair_ms,
                whole_ms = split.whole_ms,
                spread = spread(&split.candidates),
                candidates = ?split.candidates,
                reverted = ?split.reverted,
                "prefill chosen"
            );
        }
        tracing::debug!(
            id,
            endpoint = %chosen.endpoint.spec.url,
            policy = decision.policy,
            reason = decision.reason.as_str(),
            spread = spread(&decision.candidates),
            candidates = ?decision.candidates,
            reverted = ?decision.reverted,
            "chosen"
        );
    }

    /// A number that no other request has, on any replica, and room behind it for those after it: 62 bits by lot.
    pub(crate) fn room(&self) -> u64 {
        self.rng.borrow_mut().random_range(0..1 << 62)
    }

    /// Takes in what the prefill leg of a split request has shown of its endpoint.
    pub(crate) fn prefilled(
        &self,
        shape: &RequestShape,
        footing: Footing,
        usage: Option<Usage>,
        took_ms: f64,
    ) {
        let measured = Measurement {
            footing,
            first_byte_ms: None,
            leg_ms: took_ms,
            prompt_tokens: usage.map(|usage| usage.prompt_tokens),
            cached_tokens: usage.and_then(|usage| usage.cached_tokens),
            output_tokens: usage.map(|usage| usage.output_tokens),
        };
        self.state.router.learn(&measured, shape, self.now());
    }

    /// A leg of a split request failed, for this reason.
    pub(crate) fn handoff_failed(&self, leg: LegName, reason: &str) {
        self.port.metrics.handoff_failed(leg, reason);
    }

    /// A request that had been split in vain is served whole.
    pub(crate) fn fell_back(&self, decision: &Decision) {
        if let Some(split) = &decision.split {
            self.port.metrics.fell_back(split.reason);
        }
    }

    /// An engine was had to let go of KV that nobody wanted.
    pub(crate) fn kv_released(&self) {
        self.port.metrics.kv_released();
    }

    /// Nobody could be found to take over what is held at `prefill`; it stays there until its time is up.
    pub(crate) fn kv_stranded(&self, prefill: &Endpoint) {
        self.port.metrics.kv_stranded();
        tracing::warn!(endpoint = %prefill.spec.url, "KV stays at an engine: nobody could be sent to take it over");
    }

    /// Remembers which endpoint made a response, so that what refers to it goes there.
    pub(crate) fn pin_response(&self, id: &str, handle: &LifecycleHandle) {
        if let Some(endpoint) = handle.endpoint() {
            self.state.router.pin(response_key(id.as_bytes()), endpoint, self.now());
        }
    }

    /// Every endpoint but the one where the response with this id was made: to be left out when what
    /// concerns it is sent on.
    pub(crate) fn all_but_home_of(&self, response: &str) -> Option<Vec<EndpointId>> {
        let router = &self.state.router;
        let home = router.session(response_key(response.as_bytes())).home()?.endpoint;
        let view = router.view();
        view.get(home)?;
        Some(view.endpoints.iter().map(|endpoint| endpoint.id).filter(|id| *id != home).collect())
    }

    /// Counts and logs a request that was answered without a lifecycle.
    pub(crate) fn answered(&self, id: &str, route: Route, status: StatusCode, arrived: Moment) {
        self.port.metrics.request(MODEL_UNNAMED, route, status.as_u16());
        let total_ms = self.now().millis_since(arrived);
        tracing::info!(
            id,
            route = route.as_str(),
            status = status.as_u16(),
            total_ms,
            "answered at the edge"
        );
    }
}

/// What the lifecycles of one worker act on.
#[derive(Debug)]
struct Port {
    state: Arc<GatewayState>,
    metrics: WorkerMetrics,
    looks: Looks,
}

impl LifecyclePort for Port {
    fn now(&self) -> Moment {
        self.state.clock.now()
    }

    fn report(&self, endpoint: EndpointId, signal: Signal) {
        let change = self.state.router.report(endpoint, signal, self.state.clock.now());
        match change {
            StandingChange::Unchanged => {}
            StandingChange::Joined | StandingChange::Readmitted => {
                tracing::info!(%endpoint, change = change.as_str(), "an endpoint's standing changed");
            }
            StandingChange::Ejected { cause } | StandingChange::Spared { cause } => {
                tracing::warn!(%endpoint, change = change.as_str(), cause = cause.as_str(), "an endpoint fails");
            }
        }
    }

    fn first_byte(&self, footing: &Footing, took_ms: f64) {
        self.state.router.first_byte(footing, took_ms, self.state.clock.now());
    }

    fn look(&self, endpoint: &Arc<Endpoint>, told: Box<dyn FnOnce(Looked)>) {
        self.looks.look(endpoint, told);
    }

    fn withdraw(&self, shape: &RequestShape, footing: &Footing) {
        self.state.router.withdraw(shape, footing);
    }

    fn leg_over(&self, shape: &RequestShape, endpoint: EndpointId, account: &Account, finished: bool) {
        let Some(session) = shape.session else { return };
        let prompt_tokens = account.prompt_tokens.unwrap_or(shape.prompt_tokens);
        let warm_tokens = prompt_tokens.saturating_add(account.output_tokens.unwrap_or(account.events));
        let warm_tokens = finished.then_some(warm_tokens);
        let qoe =
            account.digestion.filter(|_| finished).and_then(|digestion| digestion.qoe(account.output_tokens));
        let qoe = qoe.map(|qoe| qoe as f32);
        self.state.sessions.ended(session, TurnEnded { endpoint, warm_tokens, qoe });
    }

    fn ended(&self, ended: &Ended<'_>) -> Fared {
        let seen = seen(ended);
        let fared = seen.judge(&ended.shape.slo);
        self.count(ended, &seen, &fared);
        // What a continuation shows of its endpoint is not what was believed of the request.
        if let Verdict::Finished { status: 200..=299 } = ended.outcome.verdict
            && ended.outcome.breaks.is_empty()
            && let Some(footing) = ended.footing
        {
            let measured = measurement(ended, *footing);
            self.state.router.learn(&measured, ended.shape, self.state.clock.now());
        }
        log(ended, &fared);
        fared
    }
}

impl Port {
    fn count(&self, ended: &Ended<'_>, seen: &Seen<'_>, fared: &Fared) {
        let Ended { shape, outcome, endpoint, account, .. } = ended;
        self.metrics.request(model_label(ended), shape.route, status_of(ended));
        let role = endpoint.map_or(Role::Both, |endpoint| endpoint.spec.role);
        let ttft_ms = account.digestion.and_then(|digestion| digestion.ttft_ms());
        self.metrics.outcome(outcome, role, shape.priority, ttft_ms);
        self.metrics.headers_ignored(shape.ignored_headers);
        self.metrics.fared(shape.priority, fared);
        if !shape.stream || seen.end != End::Answered {
            return;
        }
        if let Some(ttft_ms) = outcome.ttft_ms {
            self.metrics.first_byte(ttft_ms);
        }
        if let (Some(endpoint), Some(tpot_ms)) = (endpoint, seen.tpot_ms().filter(|tpot_ms| *tpot_ms > 0.0)) {
            self.metrics.pace(endpoint.id, || endpoint.spec.label(), 1_000.0 / tpot_ms);
        }
    }
}

/// The most requests in flight at any of the candidates beyond the fewest, as the decision counted them.
fn spread(candidates: &[CandidateCost]) -> u32 {
    let running = || candidates.iter().map(|candidate| candidate.running);
    running().max().unwrap_or(0) - running().min().unwrap_or(0)
}

/// The status that stands for the request in the metrics: the one sent, or why none was.
fn status_of(ended: &Ended<'_>) -> u16 {
    match ended.outcome.verdict {
        Verdict::Cancelled { .. } if ended.account.status == 0 => CLIENT_GONE,
        Verdict::GaveUp(GiveUp::Refusal) if ended.account.status != 0 => ended.account.status,
        Verdict::GaveUp(what) => EdgeError::of_give_up(&what).status.as_u16(),
        Verdict::Finished { status } => status,
        Verdict::Broken(_) | Verdict::Cancelled { .. } => ended.account.status,
    }
}

/// What was seen of a request, for its user's sake.
fn seen<'a>(ended: &'a Ended<'_>) -> Seen<'a> {
    let Ended { shape, outcome, account, .. } = ended;
    Seen {
        end: match (outcome.verdict, status_of(ended)) {
            (Verdict::Finished { .. }, 200..=299) => End::Answered,
            (Verdict::Broken(_), _) | (Verdict::Finished { .. } | Verdict::GaveUp(_), 429 | 500..) => {
                End::Failed
            }
            _ => End::Void,
        },
        stream: shape.stream,
        digestion: account.digestion.as_ref(),
        first_byte_ms: outcome.ttft_ms,
        output_tokens: account.output_tokens,
        samples: shape.samples_streamed(),
        total_ms: outcome.total_ms,
    }
}

/// A model's name becomes a label only if the endpoint lists it: else clients could make labels.
fn model_label<'a>(ended: &Ended<'a>) -> &'a str {
    match (ended.shape.model.as_deref(), ended.endpoint) {
        (None, _) => MODEL_UNNAMED,
        (Some(model), Some(endpoint)) if endpoint.lists(model) => model,
        (Some(_), _) => MODEL_UNKNOWN,
    }
}

fn measurement(ended: &Ended<'_>, footing: Footing) -> Measurement {
    let Ended { shape, outcome, account, .. } = ended;
    let streamed = shape.stream && account.events > 0;
    Measurement {
        footing,
        first_byte_ms: outcome.first_byte_of_leg_ms().filter(|_| streamed),
        leg_ms: outcome.leg_ms(),
        prompt_tokens: account.prompt_tokens,
        cached_tokens: account.cached_tokens,
        output_tokens: account.output_tokens.or((streamed).then_some(account.events)),
    }
}

fn log(ended: &Ended<'_>, fared: &Fared) {
    let Ended { id, shape, outcome, account, endpoint, .. } = ended;
    let (verdict, cause) = match outcome.verdict {
        Verdict::Finished { .. } => ("finished", ""),
        Verdict::GaveUp(_) => ("gave-up", outcome.failed.last().map_or("", |tried| tried.failure.as_str())),
        Verdict::Broken(cause) => ("broken", cause.as_str()),
        Verdict::Cancelled { during } => ("cancelled", during.as_str()),
    };
    tracing::info!(
        id,
        route = shape.route.as_str(),
        model = shape.model.as_deref().unwrap_or_default(),
        endpoint = endpoint.map_or("", |endpoint| endpoint.spec.url.as_str()),
        tries = outcome.failed.len() + 1,
        resumed = outcome.resumed(),
        status = status_of(ended),
        prefill_endpoint = ended.prefill.map(|prefill| prefill.spec.url.as_str()),
        queued_ms = outcome.queued_ms,
        prefill_ms = outcome.prefill_ms,
        handoff_ms = outcome.handoff_ms,
        decode_ms = outcome.decode_ms,
        total_ms = outcome.total_ms,
        prompt_tokens = account.prompt_tokens,
        cached_tokens = account.cached_tokens,
        output_tokens = account.output_tokens,
        qoe = fared.qoe,
        slo_ttft = fared.ttft.map(Target::as_str),
        slo_tpot = fared.tpot.map(Target::as_str),
        slo_e2e = fared.e2e.map(Target::as_str),
        outcome = verdict,
        cause,
        "request"
    );
}
