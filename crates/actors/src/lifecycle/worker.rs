//! Lifecycles of one worker: where they begin, and the watch over them.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use hashbrown::HashMap;
use routing::decision::Footing;
use routing::endpoint::{Endpoint, Signal};
use routing::lifecycle::{Delivery, Event, Lifecycle, Limits, NoResume, OnBreak, Outcome, Seen};
use routing::qoe::Fared;
use routing::request::RequestShape;
use routing::retry::{BudgetConfig, RetryBudget, RetryPlan};
use routing::{EndpointId, Moment};
use tokio::sync::Notify;

use super::handle::{Account, LifecycleHandle};
use super::shared::Shared;
use super::table::{RequestTable, Row};

/// How often limits and actors are looked at. 50 ms: a limit is a matter of seconds, and a lost actor is to
/// be back within one.
const WATCH_EVERY: Duration = Duration::from_millis(50);

/// What a lifecycle's effects act on, given by the worker's owner. Called on the worker's thread.
pub trait LifecyclePort {
    /// The time now.
    fn now(&self) -> Moment;
    /// Tells an endpoint's breaker.
    fn report(&self, endpoint: EndpointId, signal: Signal);
    /// Hears that the first byte of a stream has come, so long after it was sent there.
    fn first_byte(&self, footing: &Footing, took_ms: f64);
    /// Looks whether `endpoint` still answers anything, and says so to `told`, now or later.
    fn look(&self, endpoint: &Arc<Endpoint>, told: Box<dyn FnOnce(Seen)>);
    /// Takes a request's placement back.
    fn withdraw(&self, shape: &RequestShape, footing: &Footing);
    /// Hears that the request is over at this endpoint; called once for each that it was sent to. `finished`
    /// says that the reply came to its end there.
    fn leg_over(&self, shape: &RequestShape, endpoint: EndpointId, account: &Account, finished: bool);
    /// Hears how a request has ended, and says how its user fared; called once for each.
    fn ended(&self, ended: &Ended<'_>) -> Fared;
}

/// How a request has ended.
#[derive(Debug)]
pub struct Ended<'a> {
    /// Its id.
    pub id: &'a str,
    /// What it was.
    pub shape: &'a RequestShape,
    /// What the lifecycle says of it.
    pub outcome: &'a Outcome,
    /// What the driver saw of its reply.
    pub account: &'a Account,
    /// The last endpoint that it was at.
    pub endpoint: Option<&'a Arc<Endpoint>>,
    /// The endpoint that computed its prompt for that one, if it is split.
    pub prefill: Option<&'a Arc<Endpoint>>,
    /// What was believed of `endpoint` when it was sent there.
    pub footing: Option<&'a Footing>,
}

/// What can be set of the lifecycles.
#[derive(Clone, Debug, PartialEq)]
pub struct LifecycleSettings {
    /// How long requests may take.
    pub limits: Limits,
    /// Tries of one request, 1 to [`routing::retry::TRIES_MAX`].
    pub tries_max: u32,
    /// Whether streams that break go on elsewhere, where that is exact.
    pub resume: bool,
}

impl Default for LifecycleSettings {
    fn default() -> Self {
        Self { limits: Limits::default(), tries_max: RetryPlan::TRIES_DEFAULT, resume: true }
    }
}

/// What has happened to the actors themselves.
#[derive(Debug, Default)]
pub struct LifecycleCounts {
    overloads: AtomicU64,
    recreated: AtomicU64,
}

impl LifecycleCounts {
    /// Messages that found a mailbox full.
    pub fn overloads(&self) -> u64 {
        self.overloads.load(Ordering::Relaxed)
    }

    /// Actors that were recreated after a panic.
    pub fn recreated(&self) -> u64 {
        self.recreated.load(Ordering::Relaxed)
    }
}

/// The lifecycles of one replica: what all its workers share.
#[derive(Clone, Debug)]
pub struct Lifecycles {
    settings: Arc<ArcSwap<LifecycleSettings>>,
    budget: Arc<RetryBudget>,
    table: Arc<RequestTable>,
    counts: Arc<LifecycleCounts>,
    ending: Arc<AtomicBool>,
    #[cfg(feature = "panic-injection")]
    panic_wanted: Arc<AtomicBool>,
}

impl Lifecycles {
    /// Lifecycles with these settings and a retry budget of their own.
    pub fn new(settings: LifecycleSettings, budget: BudgetConfig) -> Self {
        Self {
            settings: Arc::new(ArcSwap::from_pointee(settings)),
            budget: Arc::new(RetryBudget::new(budget)),
            table: Arc::default(),
            counts: Arc::default(),
            ending: Arc::default(),
            #[cfg(feature = "panic-injection")]
            panic_wanted: Arc::default(),
        }
    }

    /// The time for what runs is up: every request in flight, and every one to come, is ended so that its
    /// client can tell.
    pub fn end_all(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Takes other settings for the requests to come; those in flight keep theirs.
    pub fn reconfigure(&self, settings: LifecycleSettings) {
        self.settings.store(Arc::new(settings));
    }

    /// The requests in flight and those that ended lately.
    pub const fn table(&self) -> &Arc<RequestTable> {
        &self.table
    }

    /// Makes the actor of one request in flight panic, on whichever worker looks next.
    #[cfg(feature = "panic-injection")]
    pub fn inject_panic(&self) {
        self.panic_wanted.store(true, Ordering::Relaxed);
    }

    /// What has happened to the actors.
    pub const fn counts(&self) -> &Arc<LifecycleCounts> {
        &self.counts
    }

    /// Lifecycles on the calling worker, with a watch over them that lives as long as they do.
    pub fn on_worker(&self, port: Rc<dyn LifecyclePort>) -> WorkerLifecycles {
        let inner = Rc::new(Inner {
            all: self.clone(),
            port,
            live: RefCell::default(),
            next_key: Cell::new(0),
            wake: Rc::default(),
        });
        actix::spawn(watch(Rc::downgrade(&inner), Rc::clone(&inner.wake)));
        WorkerLifecycles { inner }
    }
}

/// Where the requests of one worker begin.
#[derive(Clone)]
pub struct WorkerLifecycles {
    inner: Rc<Inner>,
}

impl std::fmt::Debug for WorkerLifecycles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerLifecycles")
            .field("live", &self.inner.live.borrow().len())
            .finish_non_exhaustive()
    }
}

impl WorkerLifecycles {
    /// A request has arrived. Its actor starts on this thread.
    pub fn begin(&self, id: String, shape: RequestShape, arrived: Moment) -> LifecycleHandle {
        let inner = &self.inner;
        let settings = inner.all.settings.load();
        let delivery = if shape.stream { Delivery::Stream } else { Delivery::Whole };
        let plan = RetryPlan::new(settings.tries_max, Arc::clone(&inner.all.budget));
        let on_break = if settings.resume { shape.on_break() } else { OnBreak::End(NoResume::Off) };
        let machine = Lifecycle::new(settings.limits.clone(), delivery, plan, arrived).on_break(on_break);
        let row = Arc::new(Row::new(id, shape.model.clone(), shape.route.as_str(), shape.priority, arrived));
        inner.all.table.insert(Arc::clone(&row));
        let key = inner.next_key.get();
        inner.next_key.set(key.wrapping_add(1));
        let shared = Rc::new(Shared::new(Rc::clone(inner), key, row, shape, machine));
        let mut live = inner.live.borrow_mut();
        if live.is_empty() {
            inner.wake.notify_one();
        }
        live.insert(key, Rc::clone(&shared));
        shared.start();
        LifecycleHandle::new(shared)
    }
}

/// What the lifecycles of one worker share.
pub(super) struct Inner {
    all: Lifecycles,
    pub(super) port: Rc<dyn LifecyclePort>,
    live: RefCell<HashMap<usize, Rc<Shared>>>,
    next_key: Cell<usize>,
    wake: Rc<Notify>,
}

impl Inner {
    pub(super) fn forget(&self, key: usize, row: &Arc<Row>, now: Moment) {
        self.live.borrow_mut().remove(&key);
        self.all.table.end(row, now);
    }

    pub(super) fn count_overload(&self) {
        self.all.counts.overloads.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the watch look now rather than at its next turn.
    pub(super) fn hurry(&self) {
        self.wake.notify_one();
    }

    fn sweep(&self) {
        #[cfg(feature = "panic-injection")]
        self.panic_if_wanted();
        let now = self.port.now();
        let ending = self.all.ending.load(Ordering::Acquire);
        let needs_care = |shared: &&Rc<Shared>| {
            ending
                || shared.is_lost()
                || shared.driver_gone()
                || shared.has_deadline_by(now)
                || shared.endpoint_lost().is_some()
        };
        let in_need: Vec<Rc<Shared>> = self.live.borrow().values().filter(needs_care).cloned().collect();
        for shared in in_need {
            if shared.is_lost() {
                self.all.counts.recreated.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(id = shared.id(), "a lifecycle's actor was lost; it is recreated");
                shared.start();
            }
            if shared.driver_gone() {
                // It was told so already, unless its mailbox was full or the actor lost.
                shared.tell(Event::ClientGone, now);
            } else if ending {
                shared.tell(Event::Shutdown, now);
            } else if shared.has_deadline_by(now) {
                shared.tell_tick(now);
            } else if let Some((endpoint, cause)) = shared.endpoint_lost() {
                shared.tell_lost(endpoint, cause, now);
            }
        }
    }
}

#[cfg(feature = "panic-injection")]
impl Inner {
    fn panic_if_wanted(&self) {
        if let Some(shared) = self.live.borrow().values().next()
            && self.all.panic_wanted.swap(false, Ordering::Relaxed)
        {
            shared.inject_panic();
        }
    }
}

/// Sweeps while there is something to watch. Holds no lifecycle alive by itself.
async fn watch(inner: Weak<Inner>, wake: Rc<Notify>) {
    loop {
        let idle = match inner.upgrade() {
            None => return,
            Some(inner) => inner.live.borrow().is_empty(),
        };
        if idle {
            wake.notified().await;
        }
        let _ = tokio::time::timeout(WATCH_EVERY, wake.notified()).await;
        match inner.upgrade() {
            None => return,
            Some(inner) => inner.sweep(),
        }
    }
}
