//! A bell: rung whenever there is something that other replicas would want to know at once, or those that wait
//! for room.

use std::fmt;
use std::sync::{Arc, OnceLock};

/// Copies ring the same bell. Until somebody listens it is silent.
#[derive(Clone, Default)]
pub(crate) struct News {
    listener: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
    waiter: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
}

impl News {
    /// Calls `listener` at every ring from now on; it must return at once. The first listener stays.
    pub(crate) fn listen(&self, listener: impl Fn() + Send + Sync + 'static) {
        // A second listener would be a second gossip: there is one per core.
        let _ = self.listener.set(Box::new(listener));
    }

    /// Calls `waiter` at every ring, and whenever others' loads change; likewise.
    pub(crate) fn wait(&self, waiter: impl Fn() + Send + Sync + 'static) {
        let _ = self.waiter.set(Box::new(waiter));
    }

    pub(crate) fn ring(&self) {
        if let Some(listener) = self.listener.get() {
            listener();
        }
        self.ring_here();
    }

    /// There is nothing to tell others, but there may be room.
    pub(crate) fn ring_here(&self) {
        if let Some(waiter) = self.waiter.get() {
            waiter();
        }
    }
}

impl fmt::Debug for News {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("News").field("heard", &self.listener.get().is_some()).finish()
    }
}
