//! Looks at engines whose streams are silent: one at a time for each engine, however many streams of it there are.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actors::EngineProbe;
use hashbrown::HashMap;
use routing::EndpointId;
use routing::endpoint::Endpoint;
use routing::lifecycle::Seen;

use crate::probe::Probe;

/// How long a look may take. 750 ms: many times what an engine takes that is merely busy.
const LOOK_MAX: Duration = Duration::from_millis(750);
/// What is looked at: every engine has it, and none queues it behind its requests.
const LOOKED_AT: &str = "/health";
/// From this status on an answer says that the engine can't go on: vLLM says so when its core has died.
const SICK_STATUS: u16 = 500;

/// Who wants to know what is seen.
type Told = Box<dyn FnOnce(Seen)>;

/// The looks of one worker.
#[derive(Clone)]
pub(crate) struct Looks(Rc<Inner>);

struct Inner {
    probe: Probe,
    /// Who waits for the look at each engine that is looked at.
    waiting: RefCell<HashMap<EndpointId, Vec<Told>>>,
}

impl std::fmt::Debug for Looks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Looks").field("out", &self.0.waiting.borrow().len()).finish_non_exhaustive()
    }
}

impl Looks {
    /// Looks that give a connection this long to be made.
    pub(crate) fn new(connect: Duration) -> Self {
        Self(Rc::new(Inner { probe: Probe::new(connect), waiting: RefCell::default() }))
    }

    /// Looks at an engine, or waits with others for what is about to be seen of it.
    pub(crate) fn look(&self, endpoint: &Arc<Endpoint>, told: Told) {
        let mut waiting = self.0.waiting.borrow_mut();
        if let Some(others) = waiting.get_mut(&endpoint.id) {
            others.push(told);
            return;
        }
        waiting.insert(endpoint.id, vec![told]);
        drop(waiting);
        let (inner, endpoint) = (Rc::clone(&self.0), Arc::clone(endpoint));
        actix_web::rt::spawn(async move {
            let seen = match inner.probe.get(&endpoint.spec, LOOKED_AT, LOOK_MAX).await {
                Ok(reply) if reply.status < SICK_STATUS => Seen::Answers,
                Ok(_) | Err(_) => Seen::Nothing,
            };
            let waited = inner.waiting.borrow_mut().remove(&endpoint.id);
            waited.into_iter().flatten().for_each(|told| told(seen));
        });
    }
}
