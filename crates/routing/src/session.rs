//! Where conversations live: a bounded table, the truth behind pins and session actors.
//!
//! A session's home is the endpoint that holds its prefix. The pin is soft (it only settles ties), so the
//! table may forget: beyond its bound the session used least recently leaves, whatever it does.

use hashbrown::HashTable;
use parking_lot::Mutex;

use crate::{EndpointId, Moment, SessionKey};

/// The default of `session_table_max`. 100,000: some 10 MB; a day's conversations of a few thousand users.
pub const SESSION_TABLE_MAX_DEFAULT: usize = 100_000;

/// What one new measurement of QoE weighs against those before it: about the last five turns count.
const QOE_WEIGHT: f32 = 0.3;

/// What is known of a session.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SessionState {
    /// Nothing.
    New,
    /// It has a home (told by another replica, or by a reply's id), and no request came here yet.
    Homed {
        /// Where it lives.
        home: Home,
    },
    /// Requests of it are in flight here.
    Active {
        /// Where it lives; `None` when its endpoint went away meanwhile.
        home: Option<Home>,
        /// How many.
        in_flight: u32,
    },
    /// It had requests here, and none are in flight: the next one finds it at home.
    Idle {
        /// Where it lives.
        home: Home,
        /// Since when it is idle.
        since: Moment,
    },
}

impl SessionState {
    /// Where it lives.
    pub const fn home(&self) -> Option<Home> {
        match self {
            Self::New => None,
            Self::Homed { home } | Self::Idle { home, .. } => Some(*home),
            Self::Active { home, .. } => *home,
        }
    }

    /// The name in JSON and logs.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Homed { .. } => "homed",
            Self::Active { .. } => "active",
            Self::Idle { .. } => "idle",
        }
    }
}

/// A session's home.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Home {
    /// The endpoint (the decode endpoint of a pair).
    pub endpoint: EndpointId,
    /// The endpoint that computed its prompt last for that one to decode, if another did since it lives there.
    pub prefill: Option<EndpointId>,
    /// How many of its tokens are believed warm there.
    pub warm_tokens: u32,
    /// How its users fared lately, 0 to 1; `None` until a stream was measured.
    pub qoe: Option<f32>,
}

/// How a request's begin found its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Began {
    /// The session is new here.
    First,
    /// It is at its home.
    AtHome,
    /// It has moved from the endpoint named.
    Moved {
        /// Where it was.
        from: EndpointId,
    },
}

/// Sessions and their homes; the least recently used leave first.
pub struct SessionTable {
    table: Mutex<Table>,
}

/// No entry.
const NIL: u32 = u32::MAX;

struct Table {
    sessions_max: usize,
    entries: Vec<Entry>,
    by_key: HashTable<u32>,
    /// The most and the least recently used; ends of a list through the entries.
    newest: u32,
    oldest: u32,
    free: Vec<u32>,
    left: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    key: SessionKey,
    endpoint: Option<EndpointId>,
    prefill: Option<EndpointId>,
    used: Moment,
    newer: u32,
    older: u32,
    warm_tokens: u32,
    in_flight: u32,
    qoe: Option<f32>,
    served_here: bool,
}

impl SessionTable {
    /// An empty table of at most `sessions_max` sessions (at least one).
    pub fn new(sessions_max: usize) -> Self {
        let table = Table {
            sessions_max: sessions_max.clamp(1, NIL as usize),
            entries: Vec::new(),
            by_key: HashTable::new(),
            newest: NIL,
            oldest: NIL,
            free: Vec::new(),
            left: 0,
        };
        Self { table: Mutex::new(table) }
    }

    /// What is known of a session. Looking does not keep it.
    pub fn state(&self, key: SessionKey) -> SessionState {
        let table = self.table.lock();
        table.find(key).map_or(SessionState::New, |at| table.entries[at as usize].state())
    }

    /// A request of the session was placed at `endpoint`, which is its home from now on.
    pub fn begin(&self, key: SessionKey, endpoint: EndpointId, now: Moment) -> Began {
        let mut table = self.table.lock();
        let (at, _) = table.enter(key, now);
        let entry = &mut table.entries[at as usize];
        entry.in_flight = entry.in_flight.saturating_add(1);
        entry.served_here = true;
        let before = entry.endpoint;
        entry.settle(endpoint);
        match before {
            None => Began::First,
            Some(before) if before == endpoint => Began::AtHome,
            Some(from) => Began::Moved { from },
        }
    }

    /// The session's prompt is computed at `prefill` for its home.
    pub fn paired(&self, key: SessionKey, prefill: EndpointId) {
        let mut table = self.table.lock();
        if let Some(at) = table.find(key) {
            table.entries[at as usize].prefill = Some(prefill);
        }
    }

    /// A request that began at `endpoint` is over. `warm_tokens`: what it left in the cache there, if it got
    /// that far. `qoe`: how it fared, 0 to 1, if that was measured.
    pub fn end(
        &self,
        key: SessionKey,
        endpoint: EndpointId,
        warm_tokens: Option<u32>,
        qoe: Option<f32>,
        now: Moment,
    ) {
        let mut table = self.table.lock();
        let (at, known) = table.enter(key, now);
        let entry = &mut table.entries[at as usize];
        entry.served_here = true;
        entry.in_flight = entry.in_flight.saturating_sub(1);
        // A session that had to leave the table while this ran comes back with it.
        if known == Known::No && warm_tokens.is_some() {
            entry.settle(endpoint);
        }
        if entry.endpoint == Some(endpoint)
            && let Some(warm_tokens) = warm_tokens
        {
            entry.warm_tokens = warm_tokens;
        }
        if let Some(qoe) = qoe.filter(|qoe| qoe.is_finite()) {
            let before = entry.qoe.unwrap_or(qoe);
            entry.qoe = Some((before + QOE_WEIGHT * (qoe - before)).clamp(0.0, 1.0));
        }
        if entry.endpoint.is_none() && entry.in_flight == 0 {
            table.leave(at);
        }
    }

    /// The session lives at `endpoint`: another replica says so, or a reply's id was made there.
    pub fn pin(&self, key: SessionKey, endpoint: EndpointId, now: Moment) {
        let mut table = self.table.lock();
        let (at, _) = table.enter(key, now);
        table.entries[at as usize].settle(endpoint);
    }

    /// The session has no home any more.
    pub fn unpin(&self, key: SessionKey) {
        let mut table = self.table.lock();
        if let Some(at) = table.find(key) {
            table.unsettle(at);
        }
    }

    /// `endpoint` is gone for good, or its cache is: nobody lives there. Walks the whole table (1 ms for
    /// 100,000), so it is for changes of the endpoint list and restarts, not for requests.
    pub fn endpoint_gone(&self, endpoint: EndpointId) {
        let mut table = self.table.lock();
        for at in 0..table.entries.len() as u32 {
            if table.entries[at as usize].endpoint == Some(endpoint) {
                table.unsettle(at);
            }
        }
    }

    /// Takes another bound; those beyond it leave.
    pub fn set_max(&self, sessions_max: usize) {
        let mut table = self.table.lock();
        table.sessions_max = sessions_max.clamp(1, NIL as usize);
        while table.by_key.len() > table.sessions_max {
            table.leave_oldest();
        }
        if table.by_key.is_empty() {
            table.entries = Vec::new();
            table.free = Vec::new();
        }
    }

    /// How many sessions it holds.
    pub fn len(&self) -> usize {
        self.table.lock().by_key.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many had to leave for want of room so far.
    pub fn left(&self) -> u64 {
        self.table.lock().left
    }

    /// The memory it holds, in bytes.
    pub fn bytes(&self) -> usize {
        let table = self.table.lock();
        table.entries.capacity() * size_of::<Entry>()
            + table.free.capacity() * size_of::<u32>()
            + table.by_key.allocation_size()
    }

    /// All sessions with a home, most recently used first, at most `limit`: what a joining replica is told.
    pub fn homes(&self, limit: usize) -> Vec<(SessionKey, EndpointId)> {
        let table = self.table.lock();
        let mut homes = Vec::new();
        let mut at = table.newest;
        while at != NIL && homes.len() < limit {
            let entry = &table.entries[at as usize];
            homes.extend(entry.endpoint.map(|endpoint| (entry.key, endpoint)));
            at = entry.older;
        }
        homes
    }
}

#[derive(PartialEq, Eq)]
enum Known {
    Yes,
    No,
}

impl Entry {
    fn state(&self) -> SessionState {
        let home = self.endpoint.map(|endpoint| Home {
            endpoint,
            prefill: self.prefill,
            warm_tokens: self.warm_tokens,
            qoe: self.qoe,
        });
        match (home, self.in_flight) {
            (home, 1..) => SessionState::Active { home, in_flight: self.in_flight },
            (Some(home), 0) if self.served_here => SessionState::Idle { home, since: self.used },
            (Some(home), 0) => SessionState::Homed { home },
            (None, 0) => SessionState::New,
        }
    }

    fn settle(&mut self, endpoint: EndpointId) {
        if self.endpoint != Some(endpoint) {
            self.endpoint = Some(endpoint);
            self.prefill = None;
            self.warm_tokens = 0;
        }
    }
}

impl Table {
    fn find(&self, key: SessionKey) -> Option<u32> {
        // The key is a hash already.
        self.by_key.find(key.raw(), |at| self.entries[*at as usize].key == key).copied()
    }

    /// The entry of `key`, made if need be, as the most recently used one.
    fn enter(&mut self, key: SessionKey, now: Moment) -> (u32, Known) {
        if let Some(at) = self.find(key) {
            self.unlink(at);
            self.link(at);
            self.entries[at as usize].used = now;
            return (at, Known::Yes);
        }
        if self.by_key.len() >= self.sessions_max {
            self.leave_oldest();
        }
        let entry = Entry {
            key,
            endpoint: None,
            prefill: None,
            used: now,
            newer: NIL,
            older: NIL,
            warm_tokens: 0,
            in_flight: 0,
            qoe: None,
            served_here: false,
        };
        let at = if let Some(at) = self.free.pop() {
            self.entries[at as usize] = entry;
            at
        } else {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        };
        let entries = &self.entries;
        self.by_key.insert_unique(key.raw(), at, |at| entries[*at as usize].key.raw());
        self.link(at);
        (at, Known::No)
    }

    fn unsettle(&mut self, at: u32) {
        let entry = &mut self.entries[at as usize];
        entry.endpoint = None;
        entry.prefill = None;
        entry.warm_tokens = 0;
        if entry.in_flight == 0 {
            self.leave(at);
        }
    }

    fn leave_oldest(&mut self) {
        if self.oldest != NIL {
            self.left += 1;
            self.leave(self.oldest);
        }
    }

    /// Takes an entry out; harmless for one that is out.
    fn leave(&mut self, at: u32) {
        let key = self.entries[at as usize].key;
        if let Ok(found) = self.by_key.find_entry(key.raw(), |other| *other == at) {
            found.remove();
            self.unlink(at);
            self.entries[at as usize].endpoint = None;
            self.free.push(at);
        }
    }

    fn link(&mut self, at: u32) {
        let older = self.newest;
        let entry = &mut self.entries[at as usize];
        entry.newer = NIL;
        entry.older = older;
        match older {
            NIL => self.oldest = at,
            older => self.entries[older as usize].newer = at,
        }
        self.newest = at;
    }

    fn unlink(&mut self, at: u32) {
        let Entry { newer, older, .. } = self.entries[at as usize];
        match newer {
            NIL => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NIL => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
    }
}

#[cfg(test)]
mod tests;
