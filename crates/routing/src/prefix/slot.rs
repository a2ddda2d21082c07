//! Endpoints as the index numbers them.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

/// An endpoint's number in this replica's index. The numbers of removed endpoints may be used again after
/// [`PrefixIndex::clear`](super::PrefixIndex::clear).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Slot(u16);

impl Slot {
    /// The most endpoints that one replica can number.
    pub const COUNT_MAX: usize = u16::MAX as usize;

    /// The slot with this number.
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn number(self) -> u16 {
        self.0
    }
}

/// Which life of its endpoint each slot is in. What was placed in an earlier life is forgotten at once,
/// and its memory taken back as it is met.
///
/// A generation comes around after 65,536 clears of one slot; whatever was placed that long ago is gone.
#[derive(Debug)]
pub(super) struct Generations {
    by_slot: Box<[AtomicU16]>,
    advances: AtomicU32,
}

impl Generations {
    const COUNT: usize = 1 << 16;
    pub(super) const BYTES: usize = Self::COUNT * size_of::<AtomicU16>();

    pub(super) fn new() -> Self {
        let by_slot = (0..Self::COUNT).map(|_| AtomicU16::new(0)).collect();
        Self { by_slot, advances: AtomicU32::new(0) }
    }

    /// The slot in its present life.
    pub(super) fn tenant(&self, slot: Slot) -> Tenant {
        Tenant { slot, generation: self.by_slot[usize::from(slot.0)].load(Ordering::Relaxed) }
    }

    pub(super) fn is_live(&self, tenant: Tenant) -> bool {
        self.tenant(tenant.slot) == tenant
    }

    pub(super) fn advance(&self, slot: Slot) {
        self.by_slot[usize::from(slot.0)].fetch_add(1, Ordering::Relaxed);
        self.advances.fetch_add(1, Ordering::Release);
    }

    /// Changes whenever any slot begins a new life; who reads it before sees all lives up to then.
    pub(super) fn advances(&self) -> u32 {
        self.advances.load(Ordering::Acquire)
    }
}

/// A slot in one life of its endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tenant {
    pub(super) slot: Slot,
    pub(super) generation: u16,
}
