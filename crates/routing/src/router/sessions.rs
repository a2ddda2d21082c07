//! Where sessions and responses live.

use super::Router;
use crate::facts::LedgerRecord;
use crate::session::{SessionState, SessionTable};
use crate::{EndpointId, Moment, SessionKey};

impl Router {
    /// What is known of a session.
    pub fn session(&self, key: SessionKey) -> SessionState {
        self.sessions.state(key)
    }

    /// All sessions: for their bound, their count and their memory.
    pub fn sessions(&self) -> &SessionTable {
        &self.sessions
    }

    /// A request of the session that was placed at `endpoint` is over. `warm_tokens`: what it left in the
    /// cache there, if it got that far. `qoe`: how it fared, 0 to 1, if that was measured.
    pub fn end_session(
        &self,
        key: SessionKey,
        endpoint: EndpointId,
        warm_tokens: Option<u32>,
        qoe: Option<f32>,
        now: Moment,
    ) {
        self.sessions.end(key, endpoint, warm_tokens, qoe, now);
    }

    /// The session or response `key` lives at `endpoint` from now on; the others are told.
    pub fn pin(&self, key: SessionKey, endpoint: EndpointId, now: Moment) {
        self.sessions.pin(key, endpoint, now);
        self.tell(LedgerRecord::Pin { key, endpoint });
    }
}
