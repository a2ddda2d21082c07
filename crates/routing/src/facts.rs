//! What replicas tell each other, as plain data: the schema of the gossip, without its transport.
//!
//! Facts are absolute states and never increments, so that a lost or repeated message can't skew a sum
//! (invariant I-03). Load facts belong to their origin and die with it. Ledger records describe an
//! engine's cache; any live replica keeps them and serves them on.

use serde::{Deserialize, Serialize};

use crate::endpoint::EndpointSpec;
use crate::request::Priority;
use crate::{BlockHash, EndpointId, ReplicaId, SessionKey};

/// What a replica says of itself, many times a second.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pulse {
    /// When this incarnation of the replica began, as a number that only grows with each restart.
    pub epoch: u64,
    /// Grows with every pulse of one epoch: an older pulse never replaces a newer one.
    pub version: u64,
    /// Whether the replica takes requests.
    pub ready: bool,
    /// Whether it is on its way out.
    pub draining: bool,
    /// Its own work in flight, for each endpoint where that is not all zero.
    pub load: Vec<LoadRow>,
    /// What it saw at the endpoints whose scrape it owns.
    pub observed: Vec<ObservedRow>,
    /// The speed it has learned from its own requests.
    pub speed: Vec<SpeedRow>,
    /// The endpoints that it has ejected, as hints to the others.
    pub ejected: Vec<EndpointId>,
    /// Who waits at it for room.
    pub queue: QueueRow,
}

/// One replica's own queue. All zero while nothing waits anywhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueueRow {
    /// Requests that wait, by class, the high one first.
    pub requests: [u32; 3],
    /// Requests that it has in flight at endpoints.
    pub running: u32,
    /// How many of those each session has, by a hash of the session, at most [`HELD_MAX`] that have most.
    pub held: Vec<(u16, u32)>,
    /// The first of each of its rows, at most [`HEADS_MAX`].
    pub heads: Vec<HeadRow>,
    /// The engines that it has lately seen to be full, at most [`FULL_MAX`].
    pub full: Vec<FullRow>,
}

/// An engine that let a request wait until another had ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FullRow {
    /// Which.
    pub endpoint: EndpointId,
    /// Requests that filled it.
    pub filled_by: u32,
    /// How long ago that was seen when this was told, in ms.
    pub age_ms: u32,
}

impl FullRow {
    /// Whether it says the same, however much time has passed, unless it was seen anew.
    fn says(&self, other: &Self) -> bool {
        (self.endpoint, self.filled_by) == (other.endpoint, other.filled_by) && self.age_ms >= other.age_ms
    }
}

/// The first of those that wait at a replica with the same expectations and for the same endpoints: what others need
/// to know to tell whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadRow {
    /// Tells it from the replica's others.
    pub number: u64,
    /// Stands for the endpoints that can serve it; the same at every replica.
    pub pool: u64,
    /// Its class.
    pub priority: Priority,
    /// Its session, by the hash under which [`QueueRow::held`] counts it.
    pub session: Option<u16>,
    /// Whether its session has more than its share in flight.
    pub is_sated: bool,
    /// When it expects its first token, in ms after arrival.
    pub ttft_ms: f64,
    /// When it expects each further one, in ms after the one before.
    pub tpot_ms: f64,
    /// How many it expects.
    pub output_tokens: u32,
    /// What its first token will take once it is sent, in ms.
    pub first_token_ms: f32,
    /// What each further one will, in ms.
    pub itl_ms: f32,
    /// How many wait in its row, itself included.
    pub waiting: u32,
    /// How long ago it arrived when this was told, in ms.
    pub waited_ms: u32,
}

impl HeadRow {
    /// Whether it is the same request and says the same, however much time has passed.
    fn says(&self, other: &Self) -> bool {
        Self { waited_ms: other.waited_ms, ..*self } == *other
    }
}

impl QueueRow {
    /// Requests of all classes that wait.
    pub fn len(&self) -> u32 {
        self.requests.iter().copied().fold(0, u32::saturating_add)
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `other`, which is later, says the same, but for the time that has passed.
    pub fn says(&self, other: &Self) -> bool {
        let heads = self.heads.len() == other.heads.len()
            && self.heads.iter().zip(&other.heads).all(|(head, other)| head.says(other));
        // Later it is older, if it was not seen anew.
        let full = self.full.len() == other.full.len()
            && self.full.iter().zip(&other.full).all(|(seen, other)| other.says(seen));
        heads
            && full
            && (self.requests, self.running, &self.held) == (other.requests, other.running, &other.held)
    }

    /// Adds to how long its requests have waited: so much later it is handed on.
    pub fn age(&mut self, ms: u32) {
        for head in &mut self.heads {
            head.waited_ms = head.waited_ms.saturating_add(ms);
        }
        for seen in &mut self.full {
            seen.age_ms = seen.age_ms.saturating_add(ms);
        }
    }
}

/// Engines in a [`QueueRow`]. 32, so some 400 bytes at most: what a replica sees of more engines than that it learns by
/// itself soon enough.
pub const FULL_MAX: usize = 32;

/// Rows of a queue that are told. 8: a class or two of some pools; requests that ask for times of their own by their
/// headers are rows of their own, of which the first go first.
pub const HEADS_MAX: usize = 8;

/// Sessions in a [`QueueRow`]. 128: with more than these in flight nobody's fair share is much above one.
pub const HELD_MAX: usize = 128;

/// One replica's own work at one endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadRow {
    /// Where.
    pub endpoint: EndpointId,
    /// Requests whose last byte has not come.
    pub running: u32,
    /// Uncached prompt tokens of those whose first token has not come.
    pub prefill_tokens: u32,
    /// Output tokens still expected of those that decode.
    pub decode_tokens: u32,
    /// Prompt tokens placed here lately, decayed and quantised; settles ties only.
    pub placed_tokens: u32,
}

/// Some of a replica's load rows, told as soon as they changed rather than with its next pulse.
///
/// Unlike a pulse this is partial: an endpoint without a row here is unchanged, and a row that is all zero
/// says that nothing is left there. Each row is absolute. `epoch` and `version` count as in [`Pulse`], on
/// one scale; whoever carries facts hands none on that is older than one it handed on before, so that a
/// receiver applies pulses and pushes in the order in which they come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadPush {
    /// Which incarnation of the replica speaks.
    pub epoch: u64,
    /// When in its epoch, on the scale of [`Pulse::version`].
    pub version: u64,
    /// The rows that changed.
    pub rows: Vec<LoadRow>,
}

/// One replica's queue, told as soon as it changed rather than with its next pulse. `epoch` and `version` count as in
/// [`LoadPush`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueuePush {
    /// Which incarnation of the replica speaks.
    pub epoch: u64,
    /// When in its epoch.
    pub version: u64,
    /// All of it.
    pub queue: QueueRow,
}

/// A prompt that a prefill engine has computed and keeps for a decode engine, as far as letting go of it goes: what
/// a survivor needs when the replica is gone that would have seen to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedRow {
    /// Tells it from its replica's others; grows with each, and none is used twice in one epoch.
    pub number: u64,
    /// Who keeps it.
    pub prefill: EndpointId,
    /// What it can be had to let go with, in its connector's words; `None` if that was too long to be told.
    pub token: Option<Vec<u8>>,
}

/// All that a replica has staged at prefill engines, of which the rows are told a few at a time. `epoch` and
/// `version` count as in [`Pulse`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedPush {
    /// Which incarnation of the replica speaks.
    pub epoch: u64,
    /// When in its epoch: an older push never brings back what a newer one no longer names.
    pub version: u64,
    /// The numbers of all that is staged, ascending; what is not among them is cared for.
    pub held: Vec<u64>,
    /// Some of their rows, those not told yet first.
    pub rows: Vec<StagedRow>,
}

/// One look at an engine's own figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObservedRow {
    /// Which endpoint.
    pub endpoint: EndpointId,
    /// How old the look was when it was told, in ms.
    pub age_ms: u32,
    /// Requests that the engine runs.
    pub running: u32,
    /// Requests that wait in the engine.
    pub waiting: u32,
    /// Share of its KV blocks in use, 0 to 1; `None` if it does not say.
    pub kv_ratio: Option<f32>,
    /// Which life of the engine this is (its process start, in s); 0 if unknown.
    pub engine_epoch: u64,
}

/// What one replica has learned of one endpoint's speed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpeedRow {
    /// Which endpoint.
    pub endpoint: EndpointId,
    /// Microseconds per uncached prompt token.
    pub prefill_us_per_token: f32,
    /// How much that weighs: whole prompts behind it, at most 1,000; 0 if it has not been learned.
    pub prefill_samples: u16,
    /// Microseconds between output tokens of one request, at the batch it usually has.
    pub itl_us: f32,
    /// How much that weighs, likewise.
    pub itl_samples: u16,
}

/// A fact about an engine's cache, a session's home or the endpoint list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum LedgerRecord {
    /// These leading blocks of a prompt are believed warm at the endpoint.
    Place {
        /// Where.
        endpoint: EndpointId,
        /// The chained hashes, shallowest first; each names all before it, so a part of a path is enough.
        blocks: Vec<BlockHash>,
    },
    /// They are not, after all.
    Withdraw {
        /// Where.
        endpoint: EndpointId,
        /// Which blocks.
        blocks: Vec<BlockHash>,
    },
    /// The engine began a new life: nothing placed before is warm.
    Clear {
        /// Where.
        endpoint: EndpointId,
        /// The life that began.
        engine_epoch: u64,
    },
    /// A session (or a response id) lives at the endpoint.
    Pin {
        /// Whose home.
        key: SessionKey,
        /// Where.
        endpoint: EndpointId,
    },
    /// A change to the endpoint list made by an operator at some replica.
    Admin(AdminFact),
    /// One choice of many, for others to say what they would have chosen.
    Sample(Box<DecisionSample>),
}

/// A request as far as choosing depends on it, and where it was sent. It carries hashes and sizes, no text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecisionSample {
    /// Where it was sent.
    pub chosen: EndpointId,
    /// Prompt tokens that it was charged with there.
    pub uncached_tokens: u32,
    /// The model it names.
    pub model: Option<String>,
    /// Its prompt's full blocks.
    pub blocks: Vec<BlockHash>,
    /// Bytes per block.
    pub block_bytes: u32,
    /// Bytes of its prompt.
    pub prompt_bytes: u64,
    /// Its prompt in tokens.
    pub prompt_tokens: u32,
    /// Output tokens expected.
    pub output_tokens: u32,
    /// What settles ties of a prompt that is warm nowhere.
    pub rendezvous: u64,
    /// The hash of the whole prompt.
    pub tail: u64,
    /// The hash of its conversation.
    pub conversation: Option<u64>,
    /// The hash of its beginning, if a ring wants it.
    pub beginning: Option<u64>,
    /// Its explicit session.
    pub session: Option<SessionKey>,
}

/// An operator's change, kept by all replicas and surviving its origin. Of two for one endpoint the one
/// with the higher `(counter, replica)` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdminFact {
    /// Which endpoint.
    pub endpoint: EndpointId,
    /// What was done.
    pub operation: AdminOperation,
    /// Lamport counter.
    pub counter: u64,
    /// Where it was done.
    pub replica: ReplicaId,
}

/// What an operator can do to the endpoint list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AdminOperation {
    /// Add it (or take back its removal or drain).
    Add(EndpointSpec),
    /// Remove it.
    Remove,
    /// Give it nothing new; remove it once it is idle or the time is up.
    Drain {
        /// How long its requests may still run, in ms from when the fact is first heard.
        deadline_ms: u64,
    },
}
