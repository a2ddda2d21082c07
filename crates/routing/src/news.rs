//! A bell: rung whenever there is something that other replicas would want to know at once.

use std::fmt;
use std::sync::{Arc, OnceLock};

/// Copies ring the same bell. Until somebody listens it is silent.
#[derive(Clone, Default)]
pub(crate) struct News {
    listener: Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>,
}

impl News {
    /// Calls `listener` at every ring from now on; it must return at once. The first listener stays.
    pub(crate) fn listen(&self, listener: impl Fn() + Send + Sync + 'static) {
        // A second listener would be a second gossip: there is one per core.
        let _ = self.listener.set(Box::new(listener));
    }

    pub(crate) fn ring(&self) {
        if let Some(listener) = self.listener.get() {
            listener();
        }
    }
}

impl fmt::Debug for News {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("News").field("heard", &self.listener.get().is_some()).finish()
    }
}
