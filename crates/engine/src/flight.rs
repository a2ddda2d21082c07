//! What a request knows of its sequences: what they are to do, and how far they have come.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Context;

use futures_util::task::AtomicWaker;

use crate::scheduler::Prompt;
use crate::transfer::courier::Source;

/// How a sequence ends when nothing goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Finish {
    /// The request's limit, or the model's.
    Length,
    /// The answer is over.
    Stop,
}

/// A sequence to compute.
pub(crate) struct Work {
    pub(crate) prompt: Prompt,
    pub(crate) output_tokens: u32,
    pub(crate) finish: Finish,
    pub(crate) leg: Leg,
}

/// What part of a request a sequence is.
#[derive(Clone, Debug)]
pub(crate) enum Leg {
    /// All of it.
    Whole,
    /// The prefill, whose blocks are kept under this name.
    Prefill { kept_as: Arc<str> },
    /// The decode of a prompt that was computed elsewhere.
    Decode { source: Arc<Source> },
}

/// Where a sequence stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Phase {
    Under,
    Complete,
    /// The engine ended it, as on SIGTERM.
    Aborted,
    /// The engine's process is gone.
    Cut,
    /// Its KV did not come.
    Failed,
    /// The engine's core has died.
    CoreDied,
}

impl Phase {
    const ALL: [Self; 6] =
        [Self::Under, Self::Complete, Self::Aborted, Self::Cut, Self::Failed, Self::CoreDied];
}

/// What is known of one sequence of a flight.
struct Progress {
    leg: Leg,
    /// The phase above, tokens that are out below; only its rank writes, under its lock.
    standing: AtomicU64,
    cached: AtomicU32,
    spoiled: AtomicBool,
    /// The blocks that are kept of it.
    kept: OnceLock<Vec<u32>>,
}

/// The sequences of one request, as the connection sees them.
pub(crate) struct Flight {
    waker: AtomicWaker,
    sequences: Box<[Progress]>,
}

impl Flight {
    /// Of sequences with these legs, none of them begun.
    pub(crate) fn new<'a>(legs: impl Iterator<Item = &'a Leg>) -> Self {
        let progress = |leg: &Leg| Progress {
            leg: leg.clone(),
            standing: AtomicU64::new(0),
            cached: AtomicU32::new(0),
            spoiled: AtomicBool::new(false),
            kept: OnceLock::new(),
        };
        Self { waker: AtomicWaker::new(), sequences: legs.map(progress).collect() }
    }

    /// How many sequences.
    pub(crate) fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// What part of the request a sequence is.
    pub(crate) fn leg(&self, sequence: usize) -> &Leg {
        &self.sequences[sequence].leg
    }

    /// Wakes the task of `cx` at the next progress of any sequence.
    pub(crate) fn watch(&self, cx: &Context<'_>) {
        self.waker.register(cx.waker());
    }

    /// Where a sequence stands, and its tokens that have come out: of one moment, so that the last token is never
    /// seen without the end.
    pub(crate) fn progress(&self, sequence: usize) -> (Phase, u32) {
        let standing = self.sequences[sequence].standing.load(Ordering::Acquire);
        let phase = Phase::ALL.get((standing >> 32) as usize).copied().unwrap_or(Phase::Under);
        (phase, standing as u32)
    }

    /// Prompt tokens of a sequence found in the cache.
    pub(crate) fn cached_tokens(&self, sequence: usize) -> u32 {
        self.sequences[sequence].cached.load(Ordering::Acquire)
    }

    /// Whether a sequence builds on KV that is not its own.
    pub(crate) fn spoiled(&self, sequence: usize) -> bool {
        self.sequences[sequence].spoiled.load(Ordering::Acquire)
    }

    /// The blocks that are kept of a complete sequence.
    pub(crate) fn kept(&self, sequence: usize) -> Option<&[u32]> {
        self.sequences[sequence].kept.get().map(Vec::as_slice)
    }

    pub(crate) fn started(&self, sequence: usize, cached_tokens: u32, spoiled: bool) {
        let progress = &self.sequences[sequence];
        progress.cached.store(cached_tokens, Ordering::Release);
        progress.spoiled.store(spoiled, Ordering::Release);
    }

    /// So many tokens of a sequence are out, and it stands there.
    pub(crate) fn said(&self, sequence: usize, tokens: u32, phase: Phase) {
        let standing = u64::from(phase as u8) << 32 | u64::from(tokens);
        self.sequences[sequence].standing.store(standing, Ordering::Release);
        self.waker.wake();
    }

    /// A sequence has ended in this phase, with the tokens it has.
    pub(crate) fn end(&self, sequence: usize, phase: Phase) {
        self.said(sequence, self.progress(sequence).1, phase);
    }

    /// These blocks are kept of a sequence that is about to end.
    pub(crate) fn keep(&self, sequence: usize, blocks: Vec<u32>) {
        // A sequence ends once.
        let _ = self.sequences[sequence].kept.set(blocks);
    }
}
