//! One actor for each endpoint: its probes, its scrape where this replica owns it, the end of its drain.
//!
//! The ring names one owner for each scrape, who may not have the endpoint in its list at all. So whoever hears
//! no figures for as long as they would count looks for itself, and only as often as that.
//!
//! The breaker itself is pure and lives in the core; the actor only performs: it asks the core when a probe
//! is due, sends it, and reports what came back.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix::prelude::{Actor, ActorFutureExt as _, AsyncContext as _, Context, WrapFuture as _};
use actix::{ActorContext as _, SpawnHandle};
use routing::endpoint::{
    Drained, EndpointSpec, OBSERVED_FRESH, Observed, ProbeStart, Served, Signal, Standing, StandingChange,
};
use routing::facts::ObservedRow;
use routing::{EndpointId, Moment, Router};
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::figures::{self, Figures};
use crate::probe::{EngineProbe, ProbeError, ProbeReply, health, served};
use crate::settings::ActorSettings;

/// How often a due probe or scrape is looked for, at most: a tick costs a microsecond, and wakes a thread.
const TICK_MIN: Duration = Duration::from_millis(20);
/// And at least: an endpoint that was ejected is tried again within so much more than its pause.
const TICK_MAX: Duration = Duration::from_millis(50);
/// How long a list of models is believed.
const SERVED_EVERY: Duration = Duration::from_secs(30);
/// How long an engine without a metrics page is not asked for it again.
const NO_METRICS_PAUSE: Duration = Duration::from_secs(30);
/// The bound of its mailbox: it is told of nothing but the panics of tests, and ticks by itself.
const MAILBOX_MAX: usize = 16;

/// What all endpoint actors share.
pub(crate) struct Shared {
    pub(crate) router: Arc<Router>,
    pub(crate) clock: Clock,
    pub(crate) probe: Arc<dyn EngineProbe>,
    pub(crate) settings: ActorSettings,
}

/// See the module.
pub(crate) struct EndpointActor {
    id: EndpointId,
    spec: EndpointSpec,
    shared: Arc<Shared>,
    scraping: Option<SpawnHandle>,
    scrape_next: Moment,
    /// Since when it has been waited for figures, if there were none yet.
    since: Moment,
    served_next: Moment,
    /// How often it looks at what is due: five times in the shorter of the two periods.
    tick_every: Duration,
    life: Life,
}

/// Which life of the engine the scrapes see.
#[derive(Default)]
struct Life {
    tokens_total: f64,
    /// Made up when counters fell though no process start is given; ms since 1970.
    assumed: u64,
}

impl Life {
    /// The engine's epoch as these figures show it; 0 when they don't.
    fn epoch(&mut self, figures: &Figures, wall_ms: u64) -> u64 {
        if let Some(start) = figures.process_start_s {
            return (start * 1_000.0) as u64;
        }
        if let Some(total) = figures.tokens_total {
            if total < self.tokens_total {
                self.assumed = wall_ms;
            }
            self.tokens_total = total;
        }
        self.assumed
    }
}

impl EndpointActor {
    pub(crate) fn new(spec: EndpointSpec, shared: Arc<Shared>) -> Self {
        let now = shared.clock.now();
        let probe_every = shared.router.settings().breaker.probe_every;
        let tick_every = (shared.settings.scrape_every.min(probe_every) / 5).clamp(TICK_MIN, TICK_MAX);
        Self {
            id: spec.id(),
            spec,
            shared,
            scraping: None,
            scrape_next: now,
            since: now,
            served_next: now,
            tick_every,
            life: Life::default(),
        }
    }

    fn tick(&mut self, context: &mut Context<Self>) {
        let now = self.shared.clock.now();
        let view = self.shared.router.view();
        let Some(endpoint) = view.get(self.id) else {
            return context.stop();
        };
        match endpoint.standing().drained(endpoint.running(now), now) {
            Drained::Idle | Drained::DeadlinePassed => {
                info!(endpoint = %self.spec.label(), "drained");
                self.shared.router.finish_drains(now);
                return context.stop();
            }
            Drained::Waiting { .. } | Drained::NotDraining => {}
        }
        if self.shared.router.begin_probe(self.id, now) == ProbeStart::Begun {
            self.begin_probe(now, matches!(*endpoint.served(), Served::Unknown), context);
        }
        if self.scraping.is_none() && now >= self.scrape_next {
            // A tick that comes a little early is that one's, or it would be a whole tick late.
            let pause = self.shared.settings.scrape_every.saturating_sub(self.tick_every / 2);
            self.scrape_next = now.plus(pause);
            let reachable = !matches!(endpoint.standing(), Standing::Ejected { .. });
            if reachable && (self.is_owned() || self.is_unseen(endpoint.observed(), now)) {
                self.begin_scrape(now, context);
            }
        }
    }

    /// Whether this replica is the one that looks after the endpoint's figures.
    fn is_owned(&self) -> bool {
        self.shared.router.scrape_owner(self.id).as_ref() == Some(self.shared.router.own())
    }

    /// Whether nobody has told what the engine says of itself for longer than an owner would take.
    fn is_unseen(&self, seen: Option<Observed>, now: Moment) -> bool {
        let patience = OBSERVED_FRESH.max(self.shared.settings.scrape_every * 2);
        now.since(seen.map_or(self.since, |seen| seen.at)) > patience
    }

    fn begin_probe(&mut self, now: Moment, unknown: bool, context: &mut Context<Self>) {
        let ask_served = self.spec.models.is_empty() && (unknown || now >= self.served_next);
        let (shared, spec) = (Arc::clone(&self.shared), self.spec.clone());
        let probe = async move {
            let limit = shared.settings.probe_timeout;
            let health_reply = shared.probe.get(&spec, "/health", limit).await;
            let verdict = health(&health_reply);
            let served_reply = match verdict {
                Ok(()) if ask_served => shared.probe.get(&spec, "/v1/models", limit).await.ok(),
                _ => None,
            };
            (verdict, served_reply)
        };
        context.spawn(probe.into_actor(self).map(|(verdict, served_reply), actor, _| {
            actor.probed(verdict, served_reply.as_ref());
        }));
    }

    fn probed(&mut self, verdict: Result<(), routing::endpoint::Cause>, served_reply: Option<&ProbeReply>) {
        let now = self.shared.clock.now();
        if let Some(list) = served_reply.and_then(served) {
            self.served_next = now.plus(SERVED_EVERY);
            self.shared.router.set_served(self.id, list);
        }
        let signal = verdict.map_or_else(Signal::ProbeFailed, |()| Signal::ProbeOk);
        let change = self.shared.router.report(self.id, signal, now);
        log_change(&self.spec, change);
    }

    fn begin_scrape(&mut self, now: Moment, context: &mut Context<Self>) {
        let (shared, spec) = (Arc::clone(&self.shared), self.spec.clone());
        let scrape = async move { shared.probe.get(&spec, "/metrics", shared.settings.probe_timeout).await };
        let handle = context.spawn(scrape.into_actor(self).map(move |reply, actor, _| {
            actor.scraping = None;
            actor.scraped(reply, now);
        }));
        self.scraping = Some(handle);
    }

    fn scraped(&mut self, reply: Result<ProbeReply, ProbeError>, asked: Moment) {
        let now = self.shared.clock.now();
        let page = match reply {
            Ok(reply) if reply.status == 200 => reply.body,
            Ok(reply) if reply.status < 500 => {
                debug!(endpoint = %self.spec.label(), status = reply.status, "engine has no metrics page");
                self.scrape_next = now.plus(NO_METRICS_PAUSE);
                return;
            }
            Ok(_) | Err(_) => return,
        };
        let figures = figures::read(&String::from_utf8_lossy(&page), self.spec.rank);
        let wall_ms =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let engine_epoch = self.life.epoch(&figures, wall_ms);
        let (Some(running), Some(waiting)) = (figures.running, figures.waiting) else {
            return;
        };
        let row = ObservedRow {
            endpoint: self.id,
            age_ms: now.since(asked).as_millis() as u32,
            running: running as u32,
            waiting: waiting as u32,
            kv_ratio: figures.kv_ratio.map(|ratio| ratio as f32),
            engine_epoch,
        };
        self.shared.router.observe(&row, now);
    }
}

fn log_change(spec: &EndpointSpec, change: StandingChange) {
    match change {
        StandingChange::Unchanged => {}
        StandingChange::Joined | StandingChange::Readmitted => {
            info!(endpoint = %spec.label(), change = change.as_str(), "endpoint in use");
        }
        StandingChange::Ejected { cause } | StandingChange::Spared { cause } => {
            warn!(endpoint = %spec.label(), change = change.as_str(), cause = cause.as_str(), "endpoint fails its probes");
        }
    }
}

impl Actor for EndpointActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        self.tick(context);
        context.run_interval(self.tick_every, Self::tick);
    }
}

#[cfg(feature = "panic-injection")]
impl actix::Handler<crate::mailbox::Panic> for EndpointActor {
    type Result = ();

    fn handle(&mut self, _: crate::mailbox::Panic, _: &mut Self::Context) {
        panic!("made to panic");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(process_start_s: Option<f64>, tokens_total: Option<f64>) -> Figures {
        Figures { process_start_s, tokens_total, ..Figures::default() }
    }

    #[test]
    fn a_new_process_start_or_counters_that_fell_are_a_new_life() {
        let mut life = Life::default();
        assert_eq!(life.epoch(&figures(Some(1.5), None), 9), 1_500);
        assert_eq!(life.epoch(&figures(None, Some(10.0)), 20), 0);
        assert_eq!(life.epoch(&figures(None, Some(12.0)), 21), 0);
        assert_eq!(life.epoch(&figures(None, Some(3.0)), 22), 22);
        assert_eq!(life.epoch(&figures(None, Some(4.0)), 23), 22);
    }
}
