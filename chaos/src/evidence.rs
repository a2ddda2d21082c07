//! What a run left behind, for the judge: plain data, every time counted from the first request.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use grapevine::load::ErrorKind;

use crate::scenario::{Kind, Name, Verb};

/// Everything that was seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    pub(crate) exchanges: Vec<Exchange>,
    pub(crate) samples: Vec<Sample>,
    pub(crate) acts: Vec<Act>,
    /// Where each engine serves, by its number.
    pub(crate) engine_urls: Vec<String>,
    /// Which replica logged the end of a request, by the request's id.
    pub(crate) logged: HashMap<String, Name>,
    /// Processes that ended though nobody ended them, and how.
    pub(crate) lost: Vec<(Name, String)>,
    /// When the last answer was there.
    pub(crate) load_ended: Duration,
}

/// A fault that was done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Act {
    /// Just before the signal was sent.
    pub(crate) from: Duration,
    /// When it had worked: what a kill cut may have ended a little earlier.
    pub(crate) at: Duration,
    pub(crate) verb: Verb,
    pub(crate) target: Name,
}

/// One request, as its client saw it.
#[derive(Clone, Debug)]
pub(crate) struct Exchange {
    pub(crate) id: String,
    /// Which turn of its chat, from 0.
    pub(crate) turn: u32,
    pub(crate) began: Duration,
    /// When the first content came.
    pub(crate) first_content: Option<Duration>,
    pub(crate) ended: Duration,
    /// Why it failed, if it did.
    pub(crate) failure: Option<(ErrorKind, String)>,
    /// The replica that it is known to have gone through, by its reply's head or by the client's choice.
    pub(crate) replica: Option<Name>,
    /// The endpoint that the reply's head names.
    pub(crate) endpoint: Option<String>,
    /// The endpoint of its chat's first turn.
    pub(crate) home: Option<String>,
}

impl Exchange {
    /// Whether it was under way when this was done.
    pub(crate) fn is_open_at(&self, act: &Act) -> bool {
        self.began <= act.at && act.from <= self.ended
    }
}

/// What one replica's `/cluster` said.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    /// When it was asked.
    pub(crate) at: Duration,
    /// Who.
    pub(crate) replica: Name,
    /// The replicas that it believes alive, by id.
    pub(crate) live: BTreeSet<String>,
    /// Requests in flight over all endpoints, by the replica that they go through; none are left out.
    pub(crate) running_by_replica: BTreeMap<String, u64>,
    /// Requests in flight over all endpoints.
    pub(crate) running: u64,
}

impl Evidence {
    /// The replica that a request went through, as far as anyone knows.
    pub(crate) fn replica_of(&self, exchange: &Exchange) -> Option<Name> {
        exchange.replica.or_else(|| self.logged.get(&exchange.id).copied())
    }

    /// The faults done to processes of this kind with one of these verbs.
    pub(crate) fn acts_of<'a>(&'a self, kind: Kind, verbs: &'a [Verb]) -> impl Iterator<Item = &'a Act> {
        self.acts.iter().filter(move |act| act.target.kind == kind && verbs.contains(&act.verb))
    }

    /// Whether the process runs at the end.
    pub(crate) fn runs_at_end(&self, name: Name) -> bool {
        let last = self.acts.iter().rfind(|act| act.target == name);
        last.is_none_or(|act| matches!(act.verb, Verb::Continue | Verb::Start))
    }
}
