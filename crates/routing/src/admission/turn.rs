//! Whose turn it is, where several replicas have queues for the same endpoints.
//!
//! Each tells the others the first of each of its rows ([`HeadRow`](crate::facts::HeadRow)), so that all of them put
//! what waits anywhere into one order, by one rule. A replica takes room when fewer of the others' requests go before
//! its own than there are endpoints with room; it then leaves the cheapest to those. Of several that see one free
//! place one takes it.
//!
//! A request that should have taken room and did not for a while is not waited for any more: its replica may have gone,
//! see less room than is there, or not have heard of it.

use std::time::Duration;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::{Entry, Service};
use crate::facts::{HEADS_MAX, HeadRow, QueueRow};
use crate::request::Slo;
use crate::{Moment, ReplicaId};

/// How long the replica whose turn it is may take. 30 ms: some pushes and a wake-up on a busy machine.
const PATIENCE: Duration = Duration::from_millis(30);

/// Who claims: which request of which replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimant {
    replica: u64,
    number: u64,
}

impl Claimant {
    /// Whether its replica goes before that one where nothing else says who does.
    pub(super) const fn is_before(self, replica: u64) -> bool {
        self.replica < replica
    }
}

/// What stands for a replica in the order of all.
pub(crate) fn number_of(replica: &ReplicaId) -> u64 {
    xxh3_64(replica.as_str().as_bytes())
}

/// The first of a row that waits at another replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// Whose it is.
    pub(super) claimant: Claimant,
    /// What waits, as far as its turn goes.
    pub(super) entry: Entry,
    /// Its session, as all replicas count it.
    pub(super) session: Option<u16>,
    /// Whether its session has more than its share.
    pub(super) is_sated: bool,
    /// How many wait in its row, itself included.
    pub(super) waiting: u32,
}

impl Claim {
    /// What a replica claims by its queue, which was heard then.
    pub fn of<'a>(
        replica: &ReplicaId,
        queue: &'a QueueRow,
        heard: Moment,
    ) -> impl Iterator<Item = Self> + use<'a> {
        let replica = number_of(replica);
        queue.heads.iter().take(HEADS_MAX).map(move |head| Self::new(replica, head, heard))
    }

    fn new(replica: u64, head: &HeadRow, heard: Moment) -> Self {
        let slo = Slo { ttft_ms: head.ttft_ms, tpot_ms: head.tpot_ms, total_ms: None };
        Self {
            claimant: Claimant { replica, number: head.number },
            entry: Entry {
                arrived: heard.minus(Duration::from_millis(u64::from(head.waited_ms))),
                priority: head.priority,
                slo,
                output_tokens: head.output_tokens,
                service: Service { first_token_ms: head.first_token_ms.into(), tpot_ms: head.itl_ms.into() },
                session: None,
                bytes: 0,
                pool: head.pool,
            },
            session: head.session,
            is_sated: head.is_sated,
            waiting: head.waiting,
        }
    }
}

/// Which requests elsewhere leave room that is theirs, and for how long.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// By pool, whom room was left to and since when. A pool is in it while somebody waits for it.
    since: SmallVec<[(u64, Claimant, Moment); 2]>,
    /// Which are not waited for any more. They are among the claims, and so no more than those.
    passed_over: SmallVec<[Claimant; 4]>,
}

impl Patience {
    /// Whether the claim counts.
    pub(crate) fn counts(&self, claim: &Claim) -> bool {
        !self.passed_over.contains(&claim.claimant)
    }

    /// Room for this pool is left to a claimant now; whether that has gone on for too long, so that it counts no
    /// more.
    pub(crate) fn is_over(&mut self, pool: u64, claimant: Claimant, now: Moment) -> bool {
        match self.since.iter_mut().find(|each| each.0 == pool) {
            // The one that was waited for before has gone.
            Some(left) if left.1 != claimant => (left.1, left.2) = (claimant, now),
            Some((.., since)) => {
                if now.since(*since) > PATIENCE {
                    self.reset(pool);
                    self.passed_over.push(claimant);
                    return true;
                }
            }
            None => self.since.push((pool, claimant, now)),
        }
        false
    }

    /// Something was taken for this pool, or nothing is there to take.
    pub(crate) fn reset(&mut self, pool: u64) {
        self.since.retain(|each| each.0 != pool);
    }

    /// Forgets those that have gone since.
    pub(crate) fn hear(&mut self, claims: &[Claim]) {
        let stands = |claimant: &Claimant| claims.iter().any(|claim| claim.claimant == *claimant);
        self.passed_over.retain(|claimant| stands(claimant));
    }
}
