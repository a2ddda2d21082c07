//! The requests whose blocks a rank keeps, by the names that decode engines know them by, and until when.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::scheduler::JobId;
use crate::timing::Moment;

/// Why blocks are no longer kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Released {
    /// They were read.
    Pulled,
    /// Nobody needs them: the decode leg ended before they were read, or the room was left.
    Abandoned,
    /// Nobody came for them in time.
    Expired,
}

impl Released {
    pub(crate) const ALL: [Self; 3] = [Self::Pulled, Self::Abandoned, Self::Expired];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Pulled => "pulled",
            Self::Abandoned => "abandoned",
            Self::Expired => "expired",
        }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Pinned {
    jobs: HashMap<Arc<str>, JobId>,
    /// In the order of their deadlines; released ones are skipped when they come up.
    deadlines: VecDeque<(Moment, Arc<str>)>,
}

impl Pinned {
    /// Keeps a request until a moment no earlier than that of any before.
    pub(crate) fn insert(&mut self, request: Arc<str>, job: JobId, until: Moment) {
        self.jobs.insert(Arc::clone(&request), job);
        self.deadlines.push_back((until, request));
    }

    /// Forgets a request; its job, unless it was forgotten before.
    pub(crate) fn remove(&mut self, request: &str) -> Option<JobId> {
        let job = self.jobs.remove(request);
        self.forget_released();
        job
    }

    /// Forgets a request whose time is up.
    pub(crate) fn expire(&mut self, now: Moment) -> Option<JobId> {
        self.deadlines.front().filter(|(until, _)| *until <= now)?;
        let (_, request) = self.deadlines.pop_front()?;
        let job = self.jobs.remove(&request);
        self.forget_released();
        job
    }

    /// When the next time is up.
    pub(crate) fn next_at(&self) -> Option<Moment> {
        self.deadlines.front().map(|(until, _)| *until)
    }

    /// Keeps the first deadline one of a request that is still kept.
    fn forget_released(&mut self) {
        while self.deadlines.front().is_some_and(|(_, request)| !self.jobs.contains_key(request)) {
            self.deadlines.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_released_in_time_expires_in_order() {
        let mut pinned = Pinned::default();
        for (name, job) in [("a", 1), ("b", 2), ("c", 3)] {
            pinned.insert(name.into(), JobId(job), Moment(job * 10));
        }
        assert_eq!(pinned.remove("b"), Some(JobId(2)));
        assert_eq!(pinned.remove("b"), None);
        assert_eq!(pinned.expire(Moment(9)), None);
        assert_eq!(pinned.expire(Moment(100)), Some(JobId(1)));
        assert_eq!(pinned.next_at(), Some(Moment(30)));
        assert_eq!(pinned.expire(Moment(100)), Some(JobId(3)));
        assert_eq!((pinned.expire(Moment(100)), pinned.next_at()), (None, None));
    }
}
