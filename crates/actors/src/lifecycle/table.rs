//! What `GET /requests` shows: the requests in flight, and those that ended lately.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use routing::Moment;
use routing::endpoint::Endpoint;
use routing::lifecycle::Phase;
use routing::qoe::{Fared, Target};
use routing::request::Priority;
use routing::retry::LegFailure;
use serde::Serialize;

/// How long an ended request is shown. 60 s: time to look one up after a complaint.
const ENDED_FOR: Duration = Duration::from_secs(60);
/// Ended requests kept, whatever their age.
const ENDED_MAX: usize = 1_000;

const PHASES: [Phase; 10] = [
    Phase::Admitted,
    Phase::Queued,
    Phase::Prefilling,
    Phase::HandedOff,
    Phase::Decoding,
    Phase::Retrying,
    Phase::Resuming,
    Phase::Finished,
    Phase::Failed,
    Phase::Cancelled,
];

/// One request, shared between its lifecycle and the table.
#[derive(Debug)]
pub(super) struct Row {
    id: String,
    model: Option<String>,
    route: &'static str,
    priority: Priority,
    arrived: Moment,
    phase: AtomicU8,
    places: Mutex<Places>,
    breaks: Mutex<Vec<BreakShown>>,
    fared: OnceLock<Fared>,
    /// Where it lies among the live ones; read and written under the table's lock.
    place: AtomicUsize,
}

/// Where a request is.
#[derive(Debug, Default)]
struct Places {
    endpoint: Option<Arc<Endpoint>>,
    prefill: Option<Arc<Endpoint>>,
}

impl Row {
    pub(super) fn new(
        id: String,
        model: Option<String>,
        route: &'static str,
        priority: Priority,
        arrived: Moment,
    ) -> Self {
        Self {
            id,
            model,
            route,
            priority,
            arrived,
            phase: AtomicU8::new(0),
            places: Mutex::default(),
            breaks: Mutex::default(),
            fared: OnceLock::new(),
            place: AtomicUsize::new(0),
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) const fn arrived(&self) -> Moment {
        self.arrived
    }

    pub(super) fn phase(&self) -> Phase {
        PHASES.get(usize::from(self.phase.load(Ordering::Acquire))).copied().unwrap_or(Phase::Failed)
    }

    pub(super) fn set_phase(&self, phase: Phase) {
        let number = PHASES.iter().position(|other| *other == phase).unwrap_or_default();
        self.phase.store(number as u8, Ordering::Release);
    }

    /// It is served whole here.
    pub(super) fn set_endpoint(&self, endpoint: &Arc<Endpoint>) {
        *self.places.lock() = Places { endpoint: Some(Arc::clone(endpoint)), prefill: None };
    }

    /// It is split over these two.
    pub(super) fn set_pair(&self, prefill: &Arc<Endpoint>, decode: &Arc<Endpoint>) {
        let (endpoint, prefill) = (Some(Arc::clone(decode)), Some(Arc::clone(prefill)));
        *self.places.lock() = Places { endpoint, prefill };
    }

    /// Its stream broke where it was, and is to go on elsewhere.
    pub(super) fn broke(&self, failure: &LegFailure) {
        let endpoint = self.places.lock().endpoint.as_ref().map(|each| each.spec.label());
        self.breaks.lock().push(BreakShown { endpoint, cause: failure.as_str() });
    }

    /// A request ends once; what is said of it later is not heard.
    pub(super) fn set_fared(&self, fared: Fared) {
        let _ = self.fared.set(fared);
    }

    fn show(&self, now: Moment, ended: Option<Moment>) -> RequestRow {
        let (endpoint, prefill_endpoint) = {
            let places = self.places.lock();
            let label = |place: &Option<Arc<Endpoint>>| place.as_ref().map(|each| each.spec.label());
            (label(&places.endpoint), label(&places.prefill))
        };
        RequestRow {
            id: self.id.clone(),
            phase: self.phase().as_str(),
            age_ms: now.millis_since(self.arrived),
            endpoint,
            prefill_endpoint,
            priority: self.priority.number(),
            model: self.model.clone(),
            route: self.route,
            breaks: self.breaks.lock().clone(),
            took_ms: ended.map(|ended| ended.millis_since(self.arrived)),
            qoe: self.fared.get().and_then(|fared| fared.qoe),
            slo: self.fared.get().copied().map(SloShown::from),
        }
    }
}

/// One request as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestRow {
    /// Its id.
    pub id: String,
    /// Where it stands.
    pub phase: &'static str,
    /// Since it arrived, in ms.
    pub age_ms: f64,
    /// The endpoint it is (or was last) at, as people name it.
    pub endpoint: Option<String>,
    /// The endpoint that computed its prompt, if that is another one.
    pub prefill_endpoint: Option<String>,
    /// 1 to 3.
    pub priority: u8,
    /// The model it names.
    pub model: Option<String>,
    /// The face it came by.
    pub route: &'static str,
    /// Where its stream broke to be continued elsewhere, in order.
    pub breaks: Vec<BreakShown>,
    /// From arrival to end, in ms, once it has ended.
    pub took_ms: Option<f64>,
    /// Quality of experience of a stream, 0 to 1, once it has ended.
    pub qoe: Option<f64>,
    /// Which of its targets were met, once it has ended.
    pub slo: Option<SloShown>,
}

/// A break of a stream that was to go on elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BreakShown {
    /// Where it was, as people name it.
    pub endpoint: Option<String>,
    /// How it broke.
    pub cause: &'static str,
}

/// Targets of one request: met, missed, or none of the kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SloShown {
    /// The first token of a stream.
    pub ttft: Option<Target>,
    /// The time between its tokens.
    pub tpot: Option<Target>,
    /// The whole answer.
    pub e2e: Option<Target>,
}

impl From<Fared> for SloShown {
    fn from(fared: Fared) -> Self {
        let Fared { ttft, tpot, e2e, .. } = fared;
        Self { ttft, tpot, e2e }
    }
}

/// All requests of this replica, in flight and ended lately.
#[derive(Debug, Default)]
pub struct RequestTable {
    rows: Mutex<Rows>,
}

#[derive(Debug, Default)]
struct Rows {
    live: Vec<Arc<Row>>,
    ended: VecDeque<(Moment, Arc<Row>)>,
}

impl RequestTable {
    pub(super) fn insert(&self, row: Arc<Row>) {
        let live = &mut self.rows.lock().live;
        row.place.store(live.len(), Ordering::Relaxed);
        live.push(row);
    }

    pub(super) fn end(&self, row: &Arc<Row>, now: Moment) {
        let mut rows = self.rows.lock();
        let place = row.place.load(Ordering::Relaxed);
        if rows.live.get(place).is_some_and(|there| Arc::ptr_eq(there, row)) {
            rows.live.swap_remove(place);
            if let Some(moved) = rows.live.get(place) {
                moved.place.store(place, Ordering::Relaxed);
            }
        }
        rows.ended.push_back((now, Arc::clone(row)));
        rows.drop_old(now);
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.rows.lock().live.len()
    }

    /// Every request that is shown at `now`, those in flight first.
    pub fn list(&self, now: Moment) -> Vec<RequestRow> {
        let (live, ended) = {
            let mut rows = self.rows.lock();
            rows.drop_old(now);
            (rows.live.clone(), rows.ended.clone())
        };
        live.iter()
            .map(|row| row.show(now, None))
            .chain(ended.iter().rev().map(|(at, row)| row.show(now, Some(*at))))
            .collect()
    }

    /// The latest request with this id.
    pub fn find(&self, id: &str, now: Moment) -> Option<RequestRow> {
        self.list(now).into_iter().find(|row| row.id == id)
    }
}

impl Rows {
    fn drop_old(&mut self, now: Moment) {
        while self.ended.len() > ENDED_MAX
            || self.ended.front().is_some_and(|(at, _)| now.since(*at) > ENDED_FOR)
        {
            self.ended.pop_front();
        }
    }
}
