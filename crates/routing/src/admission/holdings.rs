//! How much each session has in flight, counted without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::SessionKey;

/// Counters that sessions are spread over by hash. 65,536, so 256 KB: of 1,000 sessions in flight some fifteen share
/// a counter, and are then held to one share between them.
const BUCKETS: usize = 1 << 16;

/// What the sessions of this replica have in flight, and what the other replicas have told of theirs.
#[derive(Debug)]
pub struct Holdings {
    buckets: Box<[AtomicU32]>,
    sessions: AtomicU32,
    without_session: AtomicU32,
    running: AtomicU32,
    elsewhere: Mutex<Elsewhere>,
}

/// What other replicas have in flight, by bucket.
#[derive(Debug, Default)]
struct Elsewhere {
    running: u32,
    /// In the order of the buckets.
    held: Vec<(u16, u32)>,
}

impl Default for Holdings {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| AtomicU32::new(0)).collect(),
            sessions: AtomicU32::new(0),
            without_session: AtomicU32::new(0),
            running: AtomicU32::new(0),
            elsewhere: Mutex::default(),
        }
    }
}

/// The bucket of a session, the same on every replica.
pub(super) const fn bucket_of(session: SessionKey) -> u16 {
    (session.raw() >> 48) as u16
}

impl Holdings {
    /// Requests in flight through this replica.
    pub fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }

    /// What each session of this replica holds, by bucket, at most `max` of them, those that hold most.
    pub fn told(&self, max: usize) -> Vec<(u16, u32)> {
        let held = |(bucket, count): (usize, &AtomicU32)| {
            let count = count.load(Ordering::Relaxed);
            (count > 0).then_some((bucket as u16, count))
        };
        let mut told: Vec<(u16, u32)> = self.buckets.iter().enumerate().filter_map(held).collect();
        told.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
        told.truncate(max);
        told
    }

    /// Takes in what the other replicas have in flight, all of them together.
    pub fn set_elsewhere(&self, running: u32, held: impl IntoIterator<Item = (u16, u32)>) {
        let mut held: Vec<(u16, u32)> = held.into_iter().collect();
        held.sort_unstable_by_key(|(bucket, _)| *bucket);
        held.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 = kept.1.saturating_add(if same { next.1 } else { 0 });
            same
        });
        *self.elsewhere.lock() = Elsewhere { running, held };
    }

    /// How the room is shared out between those that run and those that wait, whose sessions these are: here, and by
    /// bucket at other replicas as far as they have told.
    pub(super) fn sharing(
        &self,
        waiting: impl Iterator<Item = Option<SessionKey>>,
        elsewhere_waiting: impl Iterator<Item = Option<u16>>,
    ) -> Sharing<'_> {
        let mut newcomers: Vec<u16> = Vec::new();
        let mut sessions =
            self.sessions.load(Ordering::Relaxed) + self.without_session.load(Ordering::Relaxed);
        let elsewhere = self.elsewhere.lock();
        let own = |bucket: u16| self.buckets[usize::from(bucket)].load(Ordering::Relaxed);
        for session in waiting {
            match session.map(bucket_of) {
                None => sessions += 1,
                Some(bucket) if own(bucket) == 0 => newcomers.push(bucket),
                Some(_) => {}
            }
        }
        for bucket in elsewhere_waiting {
            match bucket {
                None => sessions += 1,
                Some(bucket) if own(bucket) == 0 => newcomers.push(bucket),
                Some(_) => {}
            }
        }
        newcomers.extend(elsewhere.held.iter().map(|(bucket, _)| *bucket).filter(|bucket| own(*bucket) == 0));
        newcomers.sort_unstable();
        newcomers.dedup();
        sessions += newcomers.len() as u32;
        let running = self.running().saturating_add(elsewhere.running);
        Sharing {
            holdings: self,
            elsewhere: elsewhere.held.clone(),
            share: (f64::from(running + 1) / f64::from(sessions.max(1))).max(1.0),
        }
    }
}

/// One look at how the room is shared out.
pub(super) struct Sharing<'a> {
    holdings: &'a Holdings,
    elsewhere: Vec<(u16, u32)>,
    /// What each session may have in flight, at least one.
    share: f64,
}

impl Sharing<'_> {
    /// What a session has in flight; a request without one is a session of its own.
    pub(super) fn held(&self, session: Option<SessionKey>) -> u32 {
        let Some(bucket) = session.map(bucket_of) else { return 0 };
        let others = self.elsewhere.binary_search_by_key(&bucket, |(bucket, _)| *bucket);
        let others = others.map_or(0, |at| self.elsewhere[at].1);
        self.holdings.buckets[usize::from(bucket)].load(Ordering::Relaxed).saturating_add(others)
    }

    /// Whether a session with this much in flight has more than its share already: one more would be more than one
    /// too many.
    pub(super) fn is_sated(&self, held: u32) -> bool {
        f64::from(held) > self.share
    }
}

/// One request in flight, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    holdings: Arc<Holdings>,
    session: Option<SessionKey>,
}

impl Held {
    pub(crate) fn new(holdings: &Arc<Holdings>, session: Option<SessionKey>) -> Self {
        holdings.running.fetch_add(1, Ordering::Relaxed);
        match session {
            None => {
                holdings.without_session.fetch_add(1, Ordering::Relaxed);
            }
            Some(session) => {
                let bucket = &holdings.buckets[usize::from(bucket_of(session))];
                if bucket.fetch_add(1, Ordering::Relaxed) == 0 {
                    holdings.sessions.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Self { holdings: Arc::clone(holdings), session }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let holdings = &self.holdings;
        holdings.running.fetch_sub(1, Ordering::Relaxed);
        match self.session {
            None => {
                holdings.without_session.fetch_sub(1, Ordering::Relaxed);
            }
            Some(session) => {
                let bucket = &holdings.buckets[usize::from(bucket_of(session))];
                if bucket.fetch_sub(1, Ordering::Relaxed) == 1 {
                    holdings.sessions.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }
}
