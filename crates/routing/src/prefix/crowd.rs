//! The holders of a block that many endpoints hold: a common system prompt, say.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::slot::{Generations, Slot, Tenant};

/// One holder of a block.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) tenant: Tenant,
    /// When it was last placed here, in ticks.
    pub(super) touched: AtomicU32,
}

/// Many holders of one block, in the order of their slots.
#[derive(Debug)]
pub(super) struct Crowd {
    /// The block.
    pub(super) hash: u64,
    seats: Vec<Seat>,
    live: AtomicU64,
}

/// Marks the count of live holders as unknown.
const UNCOUNTED: u64 = u64::MAX;

impl Crowd {
    pub(super) fn new(hash: u64, seats: Vec<Seat>) -> Self {
        Self { hash, seats, live: AtomicU64::new(UNCOUNTED) }
    }

    /// How many of the holders are live. Counted only when a holder was added or removed or some slot
    /// began a new life since the last count.
    pub(super) fn live(&self, generations: &Generations) -> usize {
        let advances = generations.advances();
        let counted = self.live.load(Ordering::Relaxed);
        if counted != UNCOUNTED && (counted >> 32) as u32 == advances {
            return counted as u32 as usize;
        }
        let live = self.tenants().filter(|tenant| generations.is_live(*tenant)).count();
        self.live.store(u64::from(advances) << 32 | live as u64, Ordering::Relaxed);
        live
    }

    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    /// Bytes of memory taken for the holders.
    pub(super) fn bytes(&self) -> usize {
        self.seats.capacity() * size_of::<Seat>()
    }

    pub(super) fn tenants(&self) -> impl Iterator<Item = Tenant> + '_ {
        self.seats.iter().map(|seat| seat.tenant)
    }

    /// All from one place on, which `from` gives by its share of the whole range of numbers, and around.
    pub(super) fn tenants_from(&self, from: u64) -> impl Iterator<Item = Tenant> + '_ {
        let first = ((u128::from(from) * self.seats.len() as u128) >> 64) as usize;
        let (before, after) = self.seats.split_at(first);
        after.iter().chain(before).map(|seat| seat.tenant)
    }

    fn find(&self, slot: Slot) -> Result<usize, usize> {
        self.seats.binary_search_by_key(&slot, |seat| seat.tenant.slot)
    }

    /// The tick at which the tenant was last placed here; `None` if it is not here.
    pub(super) fn touched(&self, tenant: Tenant) -> Option<u32> {
        let seat = &self.seats[self.find(tenant.slot).ok()?];
        (seat.tenant == tenant).then(|| seat.touched.load(Ordering::Relaxed))
    }

    /// Marks the tenant as placed at `tick`; false if it is not here.
    pub(super) fn touch(&self, tenant: Tenant, tick: u32) -> bool {
        let Ok(at) = self.find(tenant.slot) else { return false };
        let seat = &self.seats[at];
        if seat.tenant != tenant {
            return false;
        }
        seat.touched.store(tick, Ordering::Relaxed);
        true
    }

    /// Adds the tenant, or renews it. The memory grows by at most `room` bytes: where that does not do,
    /// whoever was placed longest ago makes room.
    pub(super) fn place(
        &mut self,
        tenant: Tenant,
        tick: u32,
        generations: &Generations,
        room: usize,
    ) -> Joined {
        let at = match self.find(tenant.slot) {
            Ok(at) => {
                let seat = &mut self.seats[at];
                seat.touched = AtomicU32::new(tick);
                if seat.tenant == tenant {
                    return Joined::Known;
                }
                seat.tenant = tenant;
                self.live = AtomicU64::new(UNCOUNTED);
                return Joined::New;
            }
            Err(at) => at,
        };
        self.live = AtomicU64::new(UNCOUNTED);
        let seat = Seat { tenant, touched: AtomicU32::new(tick) };
        if self.seats.len() == self.seats.capacity() {
            let before = self.seats.len();
            self.seats.retain(|seat| generations.is_live(seat.tenant));
            if self.seats.len() == before {
                let more = (before / 4).max(8);
                if more * size_of::<Seat>() > room {
                    return self.replace_oldest(seat);
                }
                self.seats.reserve_exact(more);
            } else {
                return self.place(tenant, tick, generations, room);
            }
        }
        self.seats.insert(at, seat);
        Joined::New
    }

    fn replace_oldest(&mut self, seat: Seat) -> Joined {
        let oldest = (0..self.seats.len()).min_by_key(|&at| self.seats[at].touched.load(Ordering::Relaxed));
        let Some(oldest) = oldest else { return Joined::New };
        self.seats.remove(oldest);
        let at = self.find(seat.tenant.slot).unwrap_or_else(|at| at);
        self.seats.insert(at, seat);
        Joined::Replaced
    }

    /// Removes the slot, if it is here.
    pub(super) fn withdraw(&mut self, slot: Slot) {
        if let Ok(at) = self.find(slot) {
            self.seats.remove(at);
            self.live = AtomicU64::new(UNCOUNTED);
        }
    }
}

/// How a placement went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Joined {
    /// It was there and is renewed.
    Known,
    /// It was not.
    New,
    /// It was not, and something older made room for it.
    Replaced,
    /// It was not, and is not: there was no room.
    Refused,
}
