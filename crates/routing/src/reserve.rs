//! Charges: what this replica's own requests in flight weigh at an endpoint, and the guard that returns them.
//!
//! Choosing and charging are one step: `Reservation::try_new` succeeds only if the packed charge is still
//! what the decision read, so that two threads can't both take the last free place (invariant I-05). The
//! guard releases once, whatever the order of first token, predicted prefill end and drop, and nothing can
//! go below zero because each amount is taken back by exactly one of them (I-06).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::Moment;
use crate::admission::Held;
use crate::endpoint::Endpoint;

/// Where the count of running requests begins in the packed charge; below it are the prefill tokens.
const RUNNING_SHIFT: u32 = 40;
const PREFILL_MASK: u64 = (1 << RUNNING_SHIFT) - 1;
/// No predicted prefill end is put further ahead than this, so that what is kept of ended requests until
/// then stays bounded; a prompt that takes longer than this is charged as decoding for the rest of it.
pub const PREFILL_PREDICTED_MAX: Duration = Duration::from_secs(60);

const PREFILLING: u8 = 0;
const DECODING: u8 = 1;
const RELEASED: u8 = 2;

/// The running requests and the prefill tokens of one endpoint in one word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedCharge(u64);

impl PackedCharge {
    /// `running` requests with `prefill_tokens` between them.
    pub const fn new(running: u32, prefill_tokens: u64) -> Self {
        Self(((running as u64) << RUNNING_SHIFT) | (prefill_tokens & PREFILL_MASK))
    }

    /// Requests whose last byte has not come.
    pub const fn running(self) -> u32 {
        (self.0 >> RUNNING_SHIFT) as u32
    }

    /// Uncached prompt tokens of those that have no first token yet.
    pub const fn prefill_tokens(self) -> u64 {
        self.0 & PREFILL_MASK
    }

    pub(crate) const fn raw(self) -> u64 {
        self.0
    }

    pub(crate) const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }
}

/// What one request weighs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChargeSize {
    /// Prompt tokens that the endpoint has to compute: its whole prompt less what is believed warm there.
    pub prefill_tokens: u32,
    /// Output tokens expected once the prompt is done.
    pub output_tokens: u32,
    /// When the prompt will be done, for a request whose first token can't be seen (it does not stream).
    pub prefill_ends: Option<Moment>,
    /// What it weighs as first.
    pub begins: Begins,
}

/// What a request weighs as when it is charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Begins {
    /// Its prompt is to be computed: the output tokens count once it is done.
    #[default]
    Prefilling,
    /// Its prompt is computed elsewhere: the output tokens count at once.
    Decoding,
}

impl ChargeSize {
    /// What is put on an endpoint's packed charge at first.
    const fn packed(self) -> PackedCharge {
        match self.begins {
            Begins::Prefilling => PackedCharge::new(1, self.prefill_tokens as u64),
            Begins::Decoding => PackedCharge::new(1, 0),
        }
    }
}

/// One request's charge. Its phase moves forward only, each step by one thread.
#[derive(Debug)]
struct Charge {
    phase: AtomicU8,
    size: ChargeSize,
}

/// All own charges at one endpoint.
#[derive(Debug)]
pub struct Charges {
    packed: AtomicU64,
    decode_tokens: AtomicU64,
    /// The earliest predicted prefill end in `predicted`, in micros; `u64::MAX` when there is none. Lets a
    /// reader see without the lock that nothing is due.
    next_due: AtomicU64,
    predicted: Mutex<BinaryHeap<Reverse<Predicted>>>,
    /// Counts prompts that were done or given up: each time the engine may have begun with another.
    done: AtomicU32,
}

#[derive(Debug)]
struct Predicted {
    due: Moment,
    charge: Arc<Charge>,
}

impl PartialEq for Predicted {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}
impl Eq for Predicted {}
impl PartialOrd for Predicted {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Predicted {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

impl Default for Charges {
    fn default() -> Self {
        Self {
            packed: AtomicU64::new(0),
            decode_tokens: AtomicU64::new(0),
            next_due: AtomicU64::new(u64::MAX),
            predicted: Mutex::default(),
            done: AtomicU32::new(0),
        }
    }
}

impl Charges {
    /// The charge as it stands, after moving what is due by `now` from prefill to decode.
    pub fn read(&self, now: Moment) -> PackedCharge {
        self.settle(now);
        PackedCharge(self.packed.load(Ordering::Acquire))
    }

    /// How many of the own prompts were done or given up so far.
    pub fn prompts_done(&self) -> u32 {
        self.done.load(Ordering::Relaxed)
    }

    /// Output tokens expected of the requests that decode.
    pub fn decode_tokens(&self) -> u64 {
        self.decode_tokens.load(Ordering::Acquire)
    }

    /// Charges `size` in the same step that finds the charge to be `seen` still; false if it is not.
    fn try_charge(&self, seen: PackedCharge, size: ChargeSize) -> bool {
        let charged = seen.0 + size.packed().0;
        self.packed.compare_exchange(seen.0, charged, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn keep(&self, size: ChargeSize) -> Arc<Charge> {
        if size.begins == Begins::Decoding {
            self.decode_tokens.fetch_add(u64::from(size.output_tokens), Ordering::AcqRel);
            return Arc::new(Charge { phase: AtomicU8::new(DECODING), size });
        }
        let charge = Arc::new(Charge { phase: AtomicU8::new(PREFILLING), size });
        if let Some(due) = size.prefill_ends {
            let mut predicted = self.predicted.lock();
            predicted.push(Reverse(Predicted { due, charge: Arc::clone(&charge) }));
            self.next_due.fetch_min(due.micros(), Ordering::Release);
        }
        charge
    }

    fn settle(&self, now: Moment) {
        if self.next_due.load(Ordering::Acquire) > now.micros() {
            return;
        }
        let mut predicted = self.predicted.lock();
        while predicted.peek().is_some_and(|Reverse(first)| first.due <= now) {
            let Some(Reverse(first)) = predicted.pop() else { break };
            self.first_token(&first.charge);
        }
        let next = predicted.peek().map_or(u64::MAX, |Reverse(first)| first.due.micros());
        self.next_due.store(next, Ordering::Release);
    }

    fn first_token(&self, charge: &Charge) {
        let output = u64::from(charge.size.output_tokens);
        // The decode charge goes on before the phase says so: a release that sees the new phase takes back
        // no more than is there.
        self.decode_tokens.fetch_add(output, Ordering::AcqRel);
        match charge.phase.compare_exchange(PREFILLING, DECODING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                self.packed.fetch_sub(u64::from(charge.size.prefill_tokens), Ordering::AcqRel);
                self.done.fetch_add(1, Ordering::Relaxed);
            }
            Err(_) => {
                self.decode_tokens.fetch_sub(output, Ordering::AcqRel);
            }
        }
    }

    fn release(&self, charge: &Charge) {
        let size = charge.size;
        match charge.phase.swap(RELEASED, Ordering::AcqRel) {
            PREFILLING => {
                let whole = PackedCharge::new(1, u64::from(size.prefill_tokens)).0;
                self.packed.fetch_sub(whole, Ordering::AcqRel);
                self.done.fetch_add(1, Ordering::Relaxed);
            }
            DECODING => {
                self.packed.fetch_sub(PackedCharge::new(1, 0).0, Ordering::AcqRel);
                self.decode_tokens.fetch_sub(u64::from(size.output_tokens), Ordering::AcqRel);
            }
            _ => {}
        }
    }
}

/// One request's charge at its endpoint, held from the choice to the last byte (or the failure, or the
/// cancel). Dropping it gives everything back, once.
#[derive(Debug)]
#[must_use = "dropping the reservation releases the charge"]
pub struct Reservation {
    endpoint: Arc<Endpoint>,
    charge: Arc<Charge>,
    /// What the request's session holds by it.
    held: Option<Held>,
}

impl Reservation {
    /// Charges `size` to `endpoint` if its own charge still is `seen`; `None` if another request came
    /// between, and then the decision that read `seen` is void.
    pub fn try_new(endpoint: &Arc<Endpoint>, seen: PackedCharge, size: ChargeSize) -> Option<Self> {
        endpoint.charges().try_charge(seen, size).then(|| Self::charged(endpoint, size))
    }

    /// Charges `size` to `endpoint` whatever else happens there: for a choice that does not read the load.
    pub fn new(endpoint: &Arc<Endpoint>, size: ChargeSize) -> Self {
        let whole = size.packed().0;
        endpoint.charges().packed.fetch_add(whole, Ordering::AcqRel);
        Self::charged(endpoint, size)
    }

    fn charged(endpoint: &Arc<Endpoint>, size: ChargeSize) -> Self {
        Self { endpoint: Arc::clone(endpoint), charge: endpoint.charges().keep(size), held: None }
    }

    /// The endpoint that is charged.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Counts it as one of its session's requests in flight for as long as it is kept.
    pub(crate) fn hold(&mut self, held: Held) {
        self.held = Some(held);
    }

    /// The prompt is computed: what it weighed as prefill it now weighs as decode. Later calls do nothing.
    pub fn first_token(&self) {
        self.endpoint.charges().first_token(&self.charge);
        self.endpoint.news().ring();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.endpoint.charges().release(&self.charge);
        self.held = None;
        self.endpoint.news().ring();
    }
}
