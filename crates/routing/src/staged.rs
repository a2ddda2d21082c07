//! What prefill engines keep for split requests, so that it is let go of though the replica dies that would see to it.
//!
//! Each replica tells what it has staged, from the prefill leg's reply until a decode leg has taken it over or its
//! release is done: as a set of numbers, which is absolute, and with a row for each number. Its heirs keep what it
//! said last. When it dies, the first of them that lives has the engines let go; what it can not release is left to
//! the engines' own limits, and counted.
//!
//! A replica that merely fell silent may still be waiting for a decode engine to read what it has staged, and who
//! reads blocks that were freed answers wrongly. So what it staged is left alone for as long as such a leg may take;
//! where nobody listens at its port any more, or it has begun a new life, nothing is waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::facts::{StagedPush, StagedRow};
use crate::liveness::REPLICAS_MAX;
use crate::news::News;
use crate::{EndpointId, Moment, ReplicaId};

/// What a replica tells as staged at a time. 256: as many requests between their legs, most of them for less than a
/// tenth of a second; beyond it the engines' own limits are relied on.
pub const STAGED_MAX: usize = 256;
/// The longest token that is told, in bytes. 640: vLLM's parameters without their block ids take about 400, of which
/// the client's request id is at most 128; two hundred and fifty numbers and one such row fit in a datagram.
pub const STAGED_TOKEN_BYTES_MAX: usize = 640;
/// How many heirs are told. 2: the one that inherits, and the one that does if both die.
pub const HEIRS_TOLD: usize = 2;

/// What was staged by a replica that is gone, for this one to see to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Who staged it.
    pub origin: ReplicaId,
    /// Who keeps it.
    pub prefill: EndpointId,
    /// See [`StagedRow::token`].
    pub token: Option<Vec<u8>>,
}

/// This replica's own.
#[derive(Debug, Default)]
pub(crate) struct OwnStaged {
    rows: Mutex<Rows>,
}

#[derive(Debug, Default)]
struct Rows {
    last: u64,
    told: BTreeMap<u64, Arc<StagedRow>>,
    untold: u64,
}

/// Something is staged for as long as this is kept.
#[derive(Debug)]
pub struct StagedTicket {
    number: u64,
    own: Arc<OwnStaged>,
    news: News,
}

impl Drop for StagedTicket {
    fn drop(&mut self) {
        self.own.rows.lock().told.remove(&self.number);
        self.news.ring();
    }
}

impl OwnStaged {
    /// Notes what `prefill` keeps; `None` if too much is staged already to tell of this as well.
    pub(crate) fn stage(
        self: &Arc<Self>,
        prefill: EndpointId,
        token: Option<Vec<u8>>,
        news: &News,
    ) -> Option<StagedTicket> {
        let number = {
            let mut rows = self.rows.lock();
            if rows.told.len() >= STAGED_MAX {
                rows.untold += 1;
                return None;
            }
            rows.last += 1;
            let number = rows.last;
            let token = token.filter(|token| token.len() <= STAGED_TOKEN_BYTES_MAX);
            rows.told.insert(number, Arc::new(StagedRow { number, prefill, token }));
            number
        };
        news.ring();
        Some(StagedTicket { number, own: Arc::clone(self), news: news.clone() })
    }

    /// All that is staged and told, by number.
    pub(crate) fn rows(&self) -> Vec<Arc<StagedRow>> {
        self.rows.lock().told.values().cloned().collect()
    }

    /// How often something was staged that could not be told.
    pub(crate) fn untold(&self) -> u64 {
        self.rows.lock().untold
    }
}

/// What other replicas have staged.
#[derive(Debug, Default)]
pub(crate) struct Estates(BTreeMap<ReplicaId, Estate>);

#[derive(Debug, Default)]
struct Estate {
    epoch: u64,
    version: u64,
    held: BTreeSet<u64>,
    rows: BTreeMap<u64, StagedRow>,
    /// From when on it may be touched, if the replica is gone.
    opens: Option<Moment>,
    /// What earlier lives of the replica left.
    former: Vec<StagedRow>,
}

impl Estate {
    /// Another life of the replica speaks: the earlier one sees to nothing any more.
    fn begin_epoch(&mut self, epoch: u64) {
        if self.epoch == 0 {
            self.epoch = epoch;
        } else if epoch > self.epoch {
            let left = std::mem::take(&mut self.rows).into_values();
            let room = STAGED_MAX.saturating_sub(self.former.len());
            self.former.extend(left.take(room));
            *self = Self { epoch, former: std::mem::take(&mut self.former), ..Self::default() };
        }
    }

    fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.former.is_empty()
    }
}

impl Estates {
    /// How much other replicas have staged, as far as this one was told.
    pub(crate) fn rows(&self) -> usize {
        self.0.values().map(|estate| estate.rows.len() + estate.former.len()).sum()
    }

    /// The estate of `replica`. When there is no room for one more, one that holds nothing makes room; `None` if all
    /// hold something.
    fn of(&mut self, replica: &ReplicaId) -> Option<&mut Estate> {
        if !self.0.contains_key(replica) && self.0.len() >= REPLICAS_MAX {
            let idle = self.0.iter().find(|(_, estate)| estate.is_empty())?.0.clone();
            self.0.remove(&idle);
        }
        Some(self.0.entry(replica.clone()).or_default())
    }

    /// Takes in what `from` says that it has staged; how many rows were not news.
    pub(crate) fn merge(&mut self, from: &ReplicaId, push: &StagedPush) -> usize {
        let Some(estate) = self.of(from) else { return push.rows.len() };
        if push.epoch < estate.epoch {
            return push.rows.len();
        }
        estate.begin_epoch(push.epoch);
        if push.version > estate.version {
            estate.version = push.version;
            estate.held = push.held.iter().copied().take(STAGED_MAX).collect();
            estate.rows.retain(|number, _| estate.held.contains(number));
        }
        let mut ignored = 0;
        for row in &push.rows {
            let fits = row.token.as_ref().is_none_or(|token| token.len() <= STAGED_TOKEN_BYTES_MAX);
            if estate.held.contains(&row.number) && fits {
                estate.rows.insert(row.number, row.clone());
            } else {
                ignored += 1;
            }
        }
        ignored
    }

    /// A word of this life of the replica was heard in some other way.
    pub(crate) fn lives_as(&mut self, replica: &ReplicaId, epoch: u64) {
        if let Some(estate) = self.0.get_mut(replica) {
            estate.begin_epoch(epoch);
        }
    }

    /// The replica is gone; what it has staged may be touched from `opens` on.
    pub(crate) fn gone(&mut self, replica: &ReplicaId, opens: Moment) {
        if let Some(estate) = self.of(replica) {
            estate.opens = Some(opens);
        }
    }

    /// The replica that was taken for dead lives.
    pub(crate) fn back(&mut self, replica: &ReplicaId) {
        if let Some(estate) = self.0.get_mut(replica) {
            estate.opens = None;
        }
    }

    /// What is due to be released, taken out. `is_ours` says whose heir this replica is; what falls to others goes
    /// without a word.
    pub(crate) fn due(&mut self, now: Moment, is_ours: impl Fn(&ReplicaId) -> bool) -> Vec<Orphan> {
        let mut due = Vec::new();
        for (origin, estate) in &mut self.0 {
            let mut left = std::mem::take(&mut estate.former);
            if estate.opens.is_some_and(|opens| opens <= now) {
                estate.held.clear();
                left.extend(std::mem::take(&mut estate.rows).into_values());
            }
            if !left.is_empty() && is_ours(origin) {
                due.extend(left.into_iter().map(|row| Orphan {
                    origin: origin.clone(),
                    prefill: row.prefill,
                    token: row.token,
                }));
            }
        }
        due
    }
}

/// From when on what a replica staged may be touched that was found dead `now`. `certain`: it said so itself, or
/// nobody listens at its port. `doubt`: how long a decode leg that it sent may still take to its first byte.
pub(crate) fn opens(certain: bool, doubt: Duration, now: Moment) -> Moment {
    if certain { now } else { now.plus(doubt) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: EndpointId = EndpointId::from_raw(7);

    fn row(number: u64) -> StagedRow {
        StagedRow { number, prefill: AT, token: Some(number.to_le_bytes().to_vec()) }
    }

    fn push(version: u64, held: &[u64], rows: &[u64]) -> StagedPush {
        let rows = rows.iter().map(|&number| row(number)).collect();
        StagedPush { epoch: 1, version, held: held.to_vec(), rows }
    }

    fn numbers(orphans: &[Orphan]) -> Vec<u64> {
        let mut numbers: Vec<u64> = orphans
            .iter()
            .map(|each| u64::from_le_bytes(each.token.clone().unwrap().try_into().unwrap()))
            .collect();
        numbers.sort_unstable();
        numbers
    }

    /// What is left after these pushes when their replica is found dead.
    fn left(pushes: &[StagedPush]) -> Vec<u64> {
        let (from, mut estates) = (ReplicaId::new("a"), Estates::default());
        for push in pushes {
            estates.merge(&from, push);
        }
        let now = Moment::from_millis(1);
        assert_eq!(estates.due(now, |_| true), [], "it lives");
        estates.gone(&from, now);
        numbers(&estates.due(now, |_| true))
    }

    #[test]
    fn what_the_newest_word_names_is_left_whatever_came_when() {
        let [one, two, three] = [push(1, &[1, 2], &[1, 2]), push(2, &[2, 3], &[3]), push(3, &[3], &[])];
        assert_eq!(left(std::slice::from_ref(&one)), [1, 2]);
        assert_eq!(left(&[one.clone(), two.clone()]), [2, 3]);
        assert_eq!(left(&[two.clone(), one.clone()]), [2, 3], "a late push brings a row that is still held");
        assert_eq!(left(&[one.clone(), two.clone(), three.clone()]), [3]);
        assert_eq!(left(&[three.clone(), two, one]), [3]);
        assert!(left(&[push(9, &[], &[]), three]).is_empty(), "and none that is over");
    }

    #[test]
    fn a_silent_replica_s_estate_opens_late_and_closes_when_it_is_back() {
        let (from, mut estates) = (ReplicaId::new("a"), Estates::default());
        let at = Moment::from_millis;
        estates.merge(&from, &push(1, &[1], &[1]));
        estates.gone(&from, opens(false, Duration::from_secs(20), at(0)));
        assert_eq!(estates.due(at(19_999), |_| true), []);
        estates.back(&from);
        assert_eq!(estates.due(at(90_000), |_| true), []);
        estates.gone(&from, opens(true, Duration::from_secs(20), at(90_000)));
        assert_eq!(numbers(&estates.due(at(90_000), |_| true)), [1]);
        assert_eq!(estates.due(at(90_000), |_| true), [], "once");
    }

    #[test]
    fn an_earlier_life_s_estate_is_open_at_once() {
        let (from, mut estates) = (ReplicaId::new("a"), Estates::default());
        estates.merge(&from, &push(5, &[1, 2], &[1, 2]));
        estates.merge(&from, &StagedPush { epoch: 2, ..push(1, &[1], &[1]) });
        assert_eq!(numbers(&estates.due(Moment::default(), |_| true)), [1, 2]);
        estates.lives_as(&from, 3);
        assert_eq!(numbers(&estates.due(Moment::default(), |_| true)), [1]);
        estates.merge(&from, &push(9, &[4], &[4]));
        estates.gone(&from, Moment::default());
        assert_eq!(estates.due(Moment::default(), |_| true), [], "an earlier life's late word");
    }

    #[test]
    fn what_falls_to_another_heir_is_forgotten() {
        let (from, mut estates) = (ReplicaId::new("a"), Estates::default());
        estates.merge(&from, &push(1, &[1], &[1]));
        estates.gone(&from, Moment::default());
        assert_eq!(estates.due(Moment::default(), |_| false), []);
        assert_eq!(estates.due(Moment::default(), |_| true), []);
    }

    #[test]
    fn what_is_staged_is_told_until_its_ticket_goes_and_only_so_much() {
        let (own, news) = (Arc::new(OwnStaged::default()), News::default());
        let long = own.stage(AT, Some(vec![0; STAGED_TOKEN_BYTES_MAX + 1]), &news).unwrap();
        assert_eq!(own.rows()[0].token, None, "too long to be told");
        let mut tickets: Vec<_> =
            (1..STAGED_MAX).map(|_| own.stage(AT, Some(vec![1]), &news).unwrap()).collect();
        assert!(own.stage(AT, Some(vec![1]), &news).is_none());
        assert_eq!((own.rows().len(), own.untold()), (STAGED_MAX, 1));
        tickets.pop();
        drop(long);
        assert_eq!(own.rows().len(), STAGED_MAX - 2);
        let next = own.stage(AT, None, &news).unwrap();
        assert!(own.rows().iter().all(|row| row.number <= next.number));
    }
}
