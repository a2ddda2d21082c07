//! Waiting for room, without holding anything: a request that waits is a ticket and an ear.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use routing::admission::Ticket;
use routing::request::RequestShape;
use routing::router::{Call, Fate};
use routing::{Chosen, Refusal, Rng};
use tokio::sync::{Notify, oneshot};

use crate::state::GatewayState;

/// How often those that wait are looked at though nothing was heard. 10 ms: expected waits fall with time alone, and
/// room that was left to another replica may still be there.
const LOOKED_AT_EVERY: Duration = Duration::from_millis(10);

/// What became of a request that has just come.
pub(crate) enum Admitted {
    /// It is to be sent.
    Chosen(Box<Chosen>),
    /// It waits.
    Waits(Waiting),
    /// It is refused.
    Shed(Refusal),
}

/// One request's place in the queue. Dropping it leaves the queue, and gives back what was chosen in the meantime.
pub(crate) struct Waiting {
    state: Arc<GatewayState>,
    ticket: Ticket,
    shape: Arc<RequestShape>,
    heard: oneshot::Receiver<Fate>,
}

/// A call, and the ear that it reaches.
pub(crate) fn call() -> (Call, oneshot::Receiver<Fate>) {
    let (call, heard) = oneshot::channel();
    (Box::new(move |fate| call.send(fate)), heard)
}

impl Waiting {
    pub(crate) fn new(
        state: &Arc<GatewayState>,
        ticket: Ticket,
        shape: Arc<RequestShape>,
        heard: oneshot::Receiver<Fate>,
    ) -> Self {
        Self { state: Arc::clone(state), ticket, shape, heard }
    }

    /// What becomes of it.
    pub(crate) async fn fate(&mut self) -> Fate {
        // Whoever takes a request out of the queue makes its call.
        (&mut self.heard).await.unwrap_or(Fate::Refused(Refusal::AllTried))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.state.router.leave(self.ticket);
        self.heard.close();
        if let Ok(Fate::Chosen(chosen)) = self.heard.try_recv() {
            self.state.router.give_back(&self.shape, *chosen);
        }
    }
}

/// Serves the queue for as long as the gateway lives: at once when there may be room, and when a time is up.
pub(crate) async fn serve(state: Arc<GatewayState>) {
    let rung = Arc::new(Notify::new());
    let bell = Arc::downgrade(&rung);
    state.router.on_room(move || {
        if let Some(bell) = bell.upgrade() {
            bell.notify_one();
        }
    });
    let state = {
        let weak = Arc::downgrade(&state);
        drop(state);
        weak
    };
    let mut rng = Rng::from_rng(&mut rand::rng());
    loop {
        let next = match state.upgrade() {
            None => return,
            Some(state) => {
                let now = state.clock.now();
                state.router.serve_queue(now, &mut rng).map(|at| at.since(now))
            }
        };
        match next {
            None => rung.notified().await,
            Some(within) => {
                let at = Instant::now() + within.min(LOOKED_AT_EVERY);
                let _ = tokio::time::timeout_at(at.into(), rung.notified()).await;
            }
        }
    }
}
