//! What is staged at prefill engines: this replica's own, and what falls to it when another dies.

use std::sync::Arc;
use std::time::Duration;

use super::Router;
use crate::facts::{StagedPush, StagedRow};
use crate::liveness::DeathCause;
use crate::staged::{HEIRS_TOLD, Orphan, StagedTicket, opens};
use crate::{EndpointId, Moment, ReplicaId};

impl Router {
    /// A prompt is computed at `prefill` and kept there for a decode engine: this replica's heirs are told, until the
    /// ticket goes. `token` is what it can be released with. `None` if too much is staged already.
    pub fn stage(&self, prefill: EndpointId, token: Option<Vec<u8>>) -> Option<StagedTicket> {
        self.staged.stage(prefill, token, &self.news)
    }

    /// All that this replica has staged, by number.
    pub fn staged_rows(&self) -> Vec<Arc<StagedRow>> {
        self.staged.rows()
    }

    /// Who is told what this replica has staged, the one first that inherits it.
    pub fn heirs(&self) -> Vec<ReplicaId> {
        self.replicas.load().heirs(&self.own).take(HEIRS_TOLD).cloned().collect()
    }

    /// Takes in what another replica has staged; how many rows were no news.
    pub fn merge_staged(&self, from: &ReplicaId, push: &StagedPush) -> usize {
        if *from == self.own { push.rows.len() } else { self.estates.lock().merge(from, push) }
    }

    /// The replica died: what it has staged falls to its heir, at once if the death is beyond doubt, else when `doubt`
    /// has passed.
    pub fn open_estate(&self, of: &ReplicaId, cause: DeathCause, doubt: Duration, now: Moment) {
        let certain = matches!(cause, DeathCause::Goodbye | DeathCause::Refused);
        self.estates.lock().gone(of, opens(certain, doubt, now));
    }

    /// What falls to this replica by now, to be released by it. Each is named once.
    pub fn take_orphans(&self, now: Moment) -> Vec<Orphan> {
        let ring = self.replicas.load();
        let is_ours = |origin: &ReplicaId| ring.heirs(origin).next() == Some(&self.own);
        self.estates.lock().due(now, is_ours)
    }
}
