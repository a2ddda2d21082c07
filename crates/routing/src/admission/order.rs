//! The one order of what waits here and what waits elsewhere.

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
    /// Who has the first of those.
    pub first: Option<Claimant>,
}

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
pub(super) fn next(heads: &[Head<'_>], claims: &[Claim], now: Moment) -> Option<Next> {
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
            Whose::Own(ticket) => return Some(place(ticket, &waiter, &passed)),
            Whose::Other(_) => passed.push(waiter),
        }
    }
}

/// What goes before an own request, of those that were passed.
fn place(ticket: Ticket, own: &Waiter<'_>, passed: &[Waiter<'_>]) -> Next {
    let entry = own.entry;
    let rivals = || passed.iter().filter(|waiter| waiter.entry.pool == entry.pool);
    let is_of_session = |waiter: &Waiter<'_>| own.session.is_some() && waiter.session == own.session;
    let weight = |waiter: &Waiter<'_>| match waiter {
        // What it holds after that is known then, and whether it may have one more.
        waiter if is_of_session(waiter) => u32::MAX,
        waiter if waiter.entry.expects_as(entry) => 1,
        waiter => waiter.waiting,
    };
    let first = rivals().find_map(|waiter| match waiter.whose {
        Whose::Other(claimant) => Some(claimant),
        Whose::Own(_) => None,
    });
    Next { ticket, pool: entry.pool, before: rivals().map(weight).fold(0, u32::saturating_add), first }
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
