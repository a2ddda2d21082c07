//! The order of those that wait, and its bounds.
//!
//! Of requests with the same expectations the first to come is the first to go. Between such rows the one goes next
//! whose first would lose most quality of experience by waiting another second, weighed by class. That second looks
//! ahead: a request counts as in need before it is late. One that has been late for long loses little more, so it
//! yields to those that can still be served well; one that has lost nearly all comes last of all, and is served if
//! there is room or refused when its time is up.

use std::time::Duration;

use super::order::{self, Head, Next};
use super::{AdmissionSettings, Claim, Holdings};
use crate::facts::HeadRow;
use crate::qoe;
use crate::request::{Priority, Slo};
use crate::{Moment, SessionKey};

/// How far ahead the loss is looked at, in ms: about the time in which everything about the queue is different.
const HORIZON_MS: f64 = 1_000.0;
/// The predicted quality below which nothing is left to lose.
const LOST_BELOW: f64 = 0.05;
/// The least and the most that anybody is told to wait, in ms.
const RETRY_AFTER_MS: (u64, u64) = (1_000, 60_000);

/// Which of the waiting requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// How a request will fare once it is sent, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Service {
    /// From then to its first token, in ms.
    pub first_token_ms: f64,
    /// Between its tokens, in ms.
    pub tpot_ms: f64,
}

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// When it arrived.
    pub arrived: Moment,
    /// How urgent it is.
    pub priority: Priority,
    /// When it expects its tokens.
    pub slo: Slo,
    /// How many it expects.
    pub output_tokens: u32,
    /// How it will fare.
    pub service: Service,
    /// Its session.
    pub session: Option<SessionKey>,
    /// Bytes that are kept for it.
    pub bytes: u64,
    /// Requests of one pool find room at the same endpoints.
    pub pool: u64,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shed {
    /// As many wait as may.
    QueueFull,
    /// The bodies of those that wait are as large as they may be.
    QueueBytes,
    /// A request of a higher class took its place.
    PushedOut,
    /// It has waited for as long as it may.
    WaitedTooLong,
}

impl Shed {
    /// Every reason, for metrics that want to know their labels at the start.
    pub const ALL: [Self; 4] = [Self::QueueFull, Self::QueueBytes, Self::PushedOut, Self::WaitedTooLong];

    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue-full",
            Self::QueueBytes => "queue-bytes",
            Self::PushedOut => "pushed-out",
            Self::WaitedTooLong => "waited-too-long",
        }
    }
}

/// Those that wait, in the order in which they came.
#[derive(Debug, Default)]
pub struct Queue {
    waiting: Vec<(Ticket, Moment, Entry)>,
    bytes: u64,
    next: u64,
}

impl Queue {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Bytes that are kept for those that wait.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many of each class wait, the high one first.
    pub fn by_class(&self) -> [u32; 3] {
        let mut counts = [0; 3];
        for (.., entry) in &self.waiting {
            counts[usize::from(entry.priority.number()) - 1] += 1;
        }
        counts
    }

    /// Those that wait, in the order in which they came.
    pub fn entries(&self) -> impl Iterator<Item = (Ticket, &Entry)> {
        self.waiting.iter().map(|(ticket, _, entry)| (*ticket, entry))
    }

    /// Puts a request into the queue. Where there is no room it takes the place of those of lower classes, the
    /// lowest and latest first, which are returned.
    ///
    /// # Errors
    /// Why there is no place for it; nothing has changed then.
    pub fn join(
        &mut self,
        entry: Entry,
        settings: &AdmissionSettings,
        now: Moment,
    ) -> Result<(Ticket, Vec<Ticket>), Shed> {
        let mut leaving: Vec<(Ticket, u64)> = Vec::new();
        let mut lower: Vec<&(Ticket, Moment, Entry)> =
            self.waiting.iter().filter(|(.., other)| other.priority > entry.priority).collect();
        // They came in order, so the last of the least urgent class is the last here.
        lower.sort_by_key(|(.., other)| other.priority);
        loop {
            let freed: u64 = leaving.iter().map(|(_, bytes)| bytes).sum();
            let full = self.waiting.len() - leaving.len() >= settings.queue_requests_max as usize;
            let heavy = (self.bytes - freed).saturating_add(entry.bytes) > settings.queue_bytes_max;
            if !full && !heavy {
                break;
            }
            match lower.pop() {
                Some((ticket, _, other)) => leaving.push((*ticket, other.bytes)),
                None if full => return Err(Shed::QueueFull),
                None => return Err(Shed::QueueBytes),
            }
        }
        let leaving: Vec<Ticket> = leaving.into_iter().map(|(ticket, _)| ticket).collect();
        for ticket in &leaving {
            self.leave(*ticket);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        self.bytes += entry.bytes;
        self.waiting.push((ticket, now, entry));
        Ok((ticket, leaving))
    }

    /// Takes a request out: it is sent, or nobody waits for it any more.
    pub fn leave(&mut self, ticket: Ticket) -> Option<Entry> {
        let at = self.waiting.binary_search_by_key(&ticket, |(ticket, ..)| *ticket).ok()?;
        let (.., entry) = self.waiting.remove(at);
        self.bytes -= entry.bytes;
        Some(entry)
    }

    /// Takes out those that have waited for as long as they may.
    pub fn expire(&mut self, wait_max: Duration, now: Moment) -> Vec<Ticket> {
        let over = |(_, since, _): &&(Ticket, Moment, Entry)| now.since(*since) >= wait_max;
        // They came in order.
        let expired: Vec<Ticket> = self.waiting.iter().take_while(over).map(|(ticket, ..)| *ticket).collect();
        for ticket in &expired {
            self.leave(*ticket);
        }
        expired
    }

    /// When the first of them will have.
    pub fn next_expiry(&self, wait_max: Duration) -> Option<Moment> {
        self.waiting.first().map(|(_, since, _)| since.plus(wait_max))
    }

    /// What somebody who is refused is told to wait, in ms: as long as the longest waiting has by now.
    pub fn retry_after_ms(&self, now: Moment) -> u64 {
        let waited = self.waiting.first().map_or(Duration::ZERO, |(_, since, _)| now.since(*since));
        (waited.as_millis() as u64).clamp(RETRY_AFTER_MS.0, RETRY_AFTER_MS.1)
    }

    /// Who goes next, leaving out the pools for which there is no room, and how many of what `claims` say waits
    /// elsewhere go before it. `replica` stands for this one. A session that has more than its share in flight lets the others go before it.
    pub fn next(
        &self,
        holdings: &Holdings,
        without_room: &[u64],
        claims: &[Claim],
        replica: u64,
        now: Moment,
    ) -> Option<Next> {
        let heads = self.heads(holdings, without_room, claims, now);
        order::next(&heads, claims, replica, now)
    }

    /// What others are to know of it, at most `max` rows. `claims` are what they have told of theirs.
    pub fn told(&self, holdings: &Holdings, claims: &[Claim], max: usize, now: Moment) -> Vec<HeadRow> {
        let mut heads = self.heads(holdings, &[], claims, now);
        heads.sort_by_key(|head| (head.is_sated, head.entry.priority, head.ticket));
        heads.truncate(max);
        heads.iter().map(|head| head.told(now)).collect()
    }

    /// The first of each row, leaving out those whose session has more than its share, if not all have.
    fn heads(
        &self,
        holdings: &Holdings,
        without_room: &[u64],
        claims: &[Claim],
        now: Moment,
    ) -> Vec<Head<'_>> {
        let elsewhere = claims.iter().map(|claim| claim.session);
        let sharing = holdings.sharing(self.waiting.iter().map(|(.., entry)| entry.session), elsewhere);
        let could = || self.waiting.iter().filter(|(.., entry)| !without_room.contains(&entry.pool));
        let least = could().map(|(.., entry)| sharing.held(entry.session)).min().unwrap_or(0);
        let mut heads: Vec<Head<'_>> = Vec::new();
        for &(ticket, since, ref entry) in could() {
            let held = sharing.held(entry.session);
            let is_sated = sharing.is_sated(held);
            if is_sated && held != least {
                continue;
            }
            // In a row they are lost in the order in which they came.
            if let Some(head) = heads.iter_mut().find(|head| !head.is_lost && head.entry.is_like(entry)) {
                head.waiting += 1;
                continue;
            }
            let is_lost = entry.is_lost(now);
            let lost = heads.iter_mut().find(|head| is_lost && head.is_lost && head.entry.is_like(entry));
            match lost {
                Some(head) => head.waiting += 1,
                None => {
                    let is_another = held > 0;
                    heads.push(Head { ticket, entry, is_sated, is_lost, waiting: 1, is_another, since });
                }
            }
        }
        heads
    }
}

impl Entry {
    /// Whether it wants to be served alike: then the first to come goes first.
    pub(super) fn expects_as(&self, other: &Self) -> bool {
        let times = |slo: &Slo| (slo.ttft_ms, slo.tpot_ms);
        self.priority == other.priority && times(&self.slo) == times(&other.slo)
    }

    /// Whether it also finds room at the same endpoints.
    fn is_like(&self, other: &Self) -> bool {
        self.pool == other.pool && self.expects_as(other)
    }

    /// Whether it has nearly nothing left to lose.
    pub(super) fn is_lost(&self, now: Moment) -> bool {
        self.quality(0.0, now) < LOST_BELOW
    }

    /// The quality that it will have if it is sent `later_ms` from now.
    fn quality(&self, later_ms: f64, now: Moment) -> f64 {
        let ttft_ms = now.millis_since(self.arrived) + later_ms + self.service.first_token_ms;
        qoe::predicted(&self.slo, ttft_ms, self.service.tpot_ms, self.output_tokens)
    }

    /// What waiting costs it, weighed by its class: a class is worth four of the next.
    pub(super) fn loss(&self, now: Moment) -> f64 {
        let weight = match self.priority {
            Priority::High => 16.0,
            Priority::Normal => 4.0,
            Priority::Low => 1.0,
        };
        weight * (self.quality(0.0, now) - self.quality(HORIZON_MS, now))
    }
}
