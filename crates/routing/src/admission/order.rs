//! The one order of what waits here and what waits elsewhere.

use std::time::Duration;

use super::holdings::bucket_of;
use super::{Claim, Claimant, Entry, Ticket};
use crate::Moment;
use crate::facts::HeadRow;

/// The first of a row that waits here.
pub(super) struct Head<'a> {
    pub(super) ticket: Ticket,
    pub(super) entry: &'a Entry,
    /// Whether its session has more than its share.
    pub(super) is_sated: bool,
    /// Whether it has nearly nothing left to lose.
    pub(super) is_lost: bool,
    /// How many wait in its row.
    pub(super) waiting: u32,
    /// Whether its session has something in flight.
    pub(super) is_another: bool,
    /// When it began to wait.
    pub(super) since: Moment,
}

impl Head<'_> {
    /// What others are to know of it.
    pub(super) fn told(&self, now: Moment) -> HeadRow {
        let entry = self.entry;
        HeadRow {
            number: self.ticket.0,
            pool: entry.pool,
            priority: entry.priority,
            session: entry.session.map(bucket_of),
            is_sated: self.is_sated,
            ttft_ms: entry.slo.ttft_ms,
            tpot_ms: entry.slo.tpot_ms,
            output_tokens: entry.output_tokens,
            first_token_ms: entry.service.first_token_ms as f32,
            itl_ms: entry.service.tpot_ms as f32,
            waiting: self.waiting,
            waited_ms: now.millis_since(entry.arrived) as u32,
        }
    }
}

/// Who goes next of those that wait here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Which.
    pub ticket: Ticket,
    /// The pool that it is of.
    pub pool: u64,
    /// How many go before it that wait elsewhere for the same endpoints. Of its own row only the first at each
    /// replica counts: those rows move side by side. `u32::MAX` if one of its own session does: one at a time, so
    /// that a session is not given its last place twice.
    pub before: u32,
    /// Whether its session has something in flight, so that one too many might be given to it.
    pub is_another: bool,
    /// When it began to wait.
    pub since: Moment,
    /// Who has the first of those.
    pub first: Option<Claimant>,
}

/// Requests of one session that came within this time to two replicas came at once: each takes its own for the
/// earlier, as the other's age is told with a delay. 20 ms: some pushes.
const AT_ONCE: Duration = Duration::from_millis(20);

/// One that waits somewhere.
struct Waiter<'a> {
    entry: &'a Entry,
    session: Option<u16>,
    is_sated: bool,
    is_lost: bool,
    waiting: u32,
    whose: Whose,
}

enum Whose {
    Own(Ticket),
    Other(Claimant),
}

/// Those with the same expectations and standing, the first to come last, so that it can be popped.
struct Row<'a>(Vec<Waiter<'a>>);

/// Goes through all that waits in its order until one comes that waits here.
///
/// Those whose session has its share go first, and those that have nothing to lose last. Of rows the one goes next
/// whose first has most to lose; where nobody has anything to lose yet, the higher class.
pub(super) fn next(heads: &[Head<'_>], claims: &[Claim], replica: u64, now: Moment) -> Option<Next> {
    let own = heads.iter().map(|head| Waiter {
        entry: head.entry,
        session: head.entry.session.map(bucket_of),
        is_sated: head.is_sated,
        is_lost: head.is_lost,
        waiting: head.waiting,
        whose: Whose::Own(head.ticket),
    });
    let others = claims.iter().map(|claim| Waiter {
        entry: &claim.entry,
        session: claim.session,
        is_sated: claim.is_sated,
        is_lost: claim.entry.is_lost(now),
        waiting: claim.waiting,
        whose: Whose::Other(claim.claimant),
    });
    let mut rows: Vec<Row<'_>> = Vec::new();
    for waiter in own.chain(others) {
        match rows.iter_mut().find(|row| row.is_of(&waiter)) {
            Some(row) => row.0.push(waiter),
            None => rows.push(Row(vec![waiter])),
        }
    }
    for row in &mut rows {
        row.0.sort_by_key(|waiter| std::cmp::Reverse(waiter.entry.arrived));
    }
    let mut passed: Vec<Waiter<'_>> = Vec::new();
    loop {
        let row = rows
            .iter_mut()
            .filter(|row| !row.0.is_empty())
            .reduce(|best, row| if row.goes_before(best, now) { row } else { best })?;
        let waiter = row.0.pop()?;
        match waiter.whose {
            Whose::Own(ticket) => {
                let head = heads.iter().find(|head| head.ticket == ticket)?;
                let next = place(head, &waiter, &passed, replica);
                return Some(match at_once(&waiter, claims, replica) {
                    Some(rival) => Next { before: u32::MAX, first: next.first.or(Some(rival)), ..next },
                    None => next,
                });
            }
            Whose::Other(_) => passed.push(waiter),
        }
    }
}

/// Who goes before an own request of those of its session that came at once with it: the replicas take turns in the
/// order of their hashes.
fn at_once(own: &Waiter<'_>, claims: &[Claim], replica: u64) -> Option<Claimant> {
    let session = own.session?;
    let rival = |claim: &&Claim| {
        claim.session == Some(session)
            && claim.entry.pool == own.entry.pool
            && claim.claimant.is_before(replica)
            && came_at_once(&claim.entry, own.entry)
    };
    claims.iter().find(rival).map(|claim| claim.claimant)
}

fn came_at_once(one: &Entry, other: &Entry) -> bool {
    one.arrived.since(other.arrived).max(other.arrived.since(one.arrived)) < AT_ONCE
}

/// What goes before an own request, of those that were passed.
fn place(head: &Head<'_>, own: &Waiter<'_>, passed: &[Waiter<'_>], replica: u64) -> Next {
    let entry = own.entry;
    let rivals = || passed.iter().filter(|waiter| waiter.entry.pool == entry.pool);
    let is_of_session = |waiter: &Waiter<'_>| own.session.is_some() && waiter.session == own.session;
    let yields = |waiter: &Waiter<'_>| match waiter.whose {
        Whose::Other(claimant) => came_at_once(waiter.entry, entry) && !claimant.is_before(replica),
        Whose::Own(_) => false,
    };
    let weight = |waiter: &Waiter<'_>| match waiter {
        waiter if is_of_session(waiter) && yields(waiter) => 0,
        // What it holds after that is known then, and whether it may have one more.
        waiter if is_of_session(waiter) => u32::MAX,
        waiter if waiter.entry.expects_as(entry) => 1,
        waiter => waiter.waiting,
    };
    let first = rivals().find_map(|waiter| match waiter.whose {
        Whose::Other(claimant) => Some(claimant),
        Whose::Own(_) => None,
    });
    let before = rivals().map(weight).fold(0, u32::saturating_add);
    let Head { ticket, is_another, since, .. } = *head;
    Next { ticket, pool: entry.pool, before, first, is_another, since }
}

impl Row<'_> {
    fn is_of(&self, waiter: &Waiter<'_>) -> bool {
        self.0.last().is_some_and(|first| {
            (first.is_sated, first.is_lost) == (waiter.is_sated, waiter.is_lost)
                && (first.is_lost || first.entry.expects_as(waiter.entry))
        })
    }

    fn goes_before(&self, other: &Self, now: Moment) -> bool {
        let (Some(own), Some(other)) = (self.0.last(), other.0.last()) else { return false };
        let standing = |waiter: &Waiter<'_>| (waiter.is_sated, waiter.is_lost);
        if standing(own) != standing(other) {
            return standing(own) < standing(other);
        }
        let (loss, others) = (own.entry.loss(now), other.entry.loss(now));
        loss > others || (loss == others && own.entry.priority < other.entry.priority)
    }
}
