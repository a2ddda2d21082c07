//! A part of the index: (block, holder) pairs in one flat array that stays sorted, with gaps.
//!
//! A pair's home is its hash scaled to the array, and it sits there or, if that is taken, behind it, in
//! order. So a look-up reads a few neighbours from the home on, all holders of a block stand side by
//! side, and a removal closes its gap: there are no tombstones. A block held by many gives up its pairs
//! for one entry that stands for a [`Crowd`].

use std::mem;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::crowd::{Crowd, Joined, Seat};
use super::slot::{Generations, Slot, Tenant};
use crate::BlockHash;

/// Up to this many holders of a block are pairs; more are a crowd. A crowd's own entry, box and spare
/// seats pay off from about here on.
const PAIRS_MAX: usize = 6;

/// Seats that a crowd begins with.
const CROWD_SEATS: usize = PAIRS_MAX + 2;

/// Entries after the last home, for what is pushed past it. Without room there an insertion grows the
/// array or, at its greatest, replaces something.
const OVERHANG_MAX: usize = 32;

/// Entries looked at to find one to evict, four cache lines: the oldest of so many is among the oldest
/// eighth of all in 7 of 8 cases.
const SAMPLE: usize = 16;

/// Bit of [`Entry::touched`] that marks a crowd. The other 31 hold the tick: nine years.
const CROWD: u32 = 1 << 31;

/// What the parts of one index share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) generations: Generations,
    /// Which bits of a hash number the part.
    pub(super) part_bits: u32,
    /// The most entries that one part may have room for.
    pub(super) entries_max: usize,
    pub(super) crowd_bytes_max: usize,
    /// Bytes of all parts' arrays.
    pub(super) entry_bytes: AtomicUsize,
    /// Bytes of all crowds.
    pub(super) crowd_bytes: AtomicUsize,
    /// Pairs that had to make room for others.
    pub(super) evicted: AtomicU64,
}

impl Shared {
    fn count_evicted(&self) {
        self.evicted.fetch_add(1, Ordering::Relaxed);
    }

    /// Changes the bytes of crowds by what is there after against before.
    fn account_crowds(&self, before: usize, after: usize) {
        // both wrap alike, so that the sum is right whatever the order
        self.crowd_bytes.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    fn crowd_room(&self) -> usize {
        self.crowd_bytes_max.saturating_sub(self.crowd_bytes.load(Ordering::Relaxed))
    }
}

/// A pair, or a crowd's place in the order. Hash 0 is a gap.
#[derive(Debug)]
struct Entry {
    hash: u64,
    /// Slot and generation, or the number of the crowd.
    holder: u32,
    /// When it was last placed, in ticks, and whether it is a crowd.
    touched: AtomicU32,
}

/// Bytes of one entry.
pub(super) const ENTRY_BYTES: usize = size_of::<Entry>();

impl Entry {
    const fn gap() -> Self {
        Self { hash: 0, holder: 0, touched: AtomicU32::new(0) }
    }

    fn pair(hash: u64, tenant: Tenant, tick: u32) -> Self {
        let holder = u32::from(tenant.slot.number()) << 16 | u32::from(tenant.generation);
        Self { hash, holder, touched: AtomicU32::new(tick) }
    }

    fn crowd(hash: u64, number: usize, tick: u32) -> Self {
        Self { hash, holder: number as u32, touched: AtomicU32::new(tick | CROWD) }
    }

    fn holder(&self) -> Holder {
        if self.touched.load(Ordering::Relaxed) & CROWD != 0 {
            return Holder::Crowd(self.holder as usize);
        }
        Holder::One(Tenant { slot: Slot::new((self.holder >> 16) as u16), generation: self.holder as u16 })
    }

    fn touch(&self, tick: u32) {
        let touched = self.touched.load(Ordering::Relaxed);
        self.touched.store(touched & CROWD | tick, Ordering::Relaxed);
    }

    /// When it was last placed; never, if its holder began a new life since.
    fn age_rank(&self, generations: &Generations) -> u32 {
        match self.holder() {
            Holder::One(tenant) if !generations.is_live(tenant) => 0,
            _ => self.touched.load(Ordering::Relaxed) & !CROWD,
        }
    }
}

/// Why an array is too small.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// It is fuller than look-ups should find it.
    Homes,
    /// No gap is left from some place on.
    Gaps,
}

enum Holder {
    One(Tenant),
    Crowd(usize),
}

#[derive(Debug, Default)]
pub(super) struct Shard {
    entries: Box<[Entry]>,
    homes: usize,
    used: usize,
    blocks: usize,
    crowds: Vec<Crowd>,
    /// Where the next search for something old begins.
    hand: usize,
}

/// The tick at `micros` since the epoch: about an eighth of a second.
pub(super) fn tick(micros: u64) -> u32 {
    (micros >> 17) as u32 & !CROWD
}

/// The end of a tick, in micros since the epoch.
pub(super) const fn tick_end(tick: u32) -> u64 {
    (tick as u64 + 1) << 17
}

impl Shard {
    fn home(&self, hash: u64, shared: &Shared) -> usize {
        scale(hash, shared.part_bits, self.homes)
    }

    /// Where the first entry of `hash` is, or would be.
    fn find(&self, hash: u64, shared: &Shared) -> usize {
        let mut at = self.home(hash, shared);
        while self.entries.get(at).is_some_and(|entry| entry.hash != 0 && entry.hash < hash) {
            at += 1;
        }
        at
    }

    /// The entries of a block.
    fn run(&self, hash: u64, shared: &Shared) -> &[Entry] {
        let from = self.find(hash, shared);
        let rest = &self.entries[from.min(self.entries.len())..];
        let length = rest.iter().take_while(|entry| entry.hash == hash).count();
        &rest[..length]
    }

    /// How many hold a block.
    pub(super) fn holders(&self, hash: u64, shared: &Shared) -> usize {
        let of_entry = |entry: &Entry| match entry.holder() {
            Holder::One(tenant) => usize::from(shared.generations.is_live(tenant)),
            Holder::Crowd(number) => self.crowds[number].live(&shared.generations),
        };
        self.run(hash, shared).iter().map(of_entry).sum()
    }

    /// Calls `each` with every live holder of a block.
    pub(super) fn each_holder(&self, hash: u64, shared: &Shared, mut each: impl FnMut(Slot)) {
        for entry in self.run(hash, shared) {
            self.each_of(entry, shared, &mut each);
        }
    }

    /// At most `count` live holders of a block, those that follow `from` in the order in which they stand.
    pub(super) fn some_holders(&self, hash: u64, from: u64, count: usize, shared: &Shared) -> Vec<Slot> {
        let run = self.run(hash, shared);
        let live = |tenant: &Tenant| shared.generations.is_live(*tenant);
        if let [entry] = run
            && let Holder::Crowd(number) = entry.holder()
        {
            let crowd = &self.crowds[number];
            return crowd.tenants_from(from).filter(live).take(count).map(|tenant| tenant.slot).collect();
        }
        let mut slots = Vec::with_capacity(run.len());
        self.each_holder(hash, shared, |slot| slots.push(slot));
        slots.truncate(count);
        slots
    }

    fn each_of(&self, entry: &Entry, shared: &Shared, each: &mut impl FnMut(Slot)) {
        let live = |tenant: &Tenant| shared.generations.is_live(*tenant);
        match entry.holder() {
            Holder::One(tenant) if live(&tenant) => each(tenant.slot),
            Holder::One(_) => {}
            Holder::Crowd(number) => {
                self.crowds[number].tenants().filter(live).for_each(|tenant| each(tenant.slot));
            }
        }
    }

    /// Marks the tenant as placed at `tick`; false if it is not noted as a holder of the block.
    pub(super) fn touch(&self, hash: u64, tenant: Tenant, tick: u32, shared: &Shared) -> bool {
        for entry in self.run(hash, shared) {
            let found = match entry.holder() {
                Holder::One(held) => held == tenant,
                Holder::Crowd(number) => self.crowds[number].touch(tenant, tick),
            };
            if found {
                entry.touch(tick);
                return true;
            }
        }
        false
    }

    /// The tick at which the block was last placed at the tenant; `None` if it is not noted there.
    pub(super) fn touched(&self, hash: u64, tenant: Tenant, shared: &Shared) -> Option<u32> {
        self.run(hash, shared).iter().find_map(|entry| match entry.holder() {
            Holder::One(held) => (held == tenant).then(|| entry.touched.load(Ordering::Relaxed) & !CROWD),
            Holder::Crowd(number) => self.crowds[number].touched(tenant),
        })
    }

    /// Notes the tenant as a holder of the block.
    pub(super) fn place(&mut self, hash: u64, tenant: Tenant, tick: u32, shared: &Shared) -> Joined {
        let from = self.find(hash, shared);
        let mut at = from;
        // whoever holds nothing any more makes room, but not before it is known that the slot has no pair
        // of its own further on
        let mut vacant = None;
        while let Some(entry) = self.entries.get_mut(at).filter(|entry| entry.hash == hash) {
            match entry.holder() {
                Holder::Crowd(number) => {
                    entry.touch(tick);
                    return self.join_crowd(number, tenant, tick, shared);
                }
                Holder::One(held) if held.slot == tenant.slot => {
                    *entry = Entry::pair(hash, tenant, tick);
                    return if held == tenant { Joined::Known } else { Joined::New };
                }
                Holder::One(held) if !shared.generations.is_live(held) => vacant = vacant.or(Some(at)),
                Holder::One(_) => {}
            }
            at += 1;
        }
        if let Some(vacant) = vacant {
            self.entries[vacant] = Entry::pair(hash, tenant, tick);
            return Joined::New;
        }
        if at - from >= PAIRS_MAX {
            return self.form_crowd(from, tenant, tick, shared);
        }
        self.insert(Entry::pair(hash, tenant, tick), shared)
    }

    /// Takes back what [`Self::place`] noted.
    pub(super) fn withdraw(&mut self, hash: u64, slot: Slot, shared: &Shared) {
        let from = self.find(hash, shared);
        for at in from..self.entries.len() {
            let entry = &self.entries[at];
            if entry.hash != hash {
                return;
            }
            match entry.holder() {
                Holder::One(held) if held.slot == slot => return self.remove(at, shared),
                Holder::One(_) => {}
                Holder::Crowd(number) => {
                    self.crowds[number].withdraw(slot);
                    if self.crowds[number].len() == 0 {
                        self.remove(at, shared);
                    }
                    return;
                }
            }
        }
    }

    /// Appends the live pairs of whole blocks to `page`, from the hash `from` on, until it has `limit` or
    /// more. Returns the hash to go on from, if anything is left.
    pub(super) fn walk(
        &self,
        from: u64,
        limit: usize,
        shared: &Shared,
        page: &mut Vec<(BlockHash, Slot)>,
    ) -> Option<u64> {
        let mut last = 0;
        for entry in self.entries.iter().skip(self.find(from, shared)).filter(|entry| entry.hash != 0) {
            if entry.hash != last && page.len() >= limit {
                return Some(entry.hash);
            }
            last = entry.hash;
            self.each_of(entry, shared, &mut |slot| page.push((BlockHash::from_raw(last), slot)));
        }
        None
    }

    /// Blocks noted.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Pairs noted, those whose holder began a new life since included until they are met.
    pub(super) fn pairs(&self) -> usize {
        self.used - self.crowds.len() + self.crowds.iter().map(Crowd::len).sum::<usize>()
    }

    /// Puts a pair behind the others of its block.
    fn insert(&mut self, entry: Entry, shared: &Shared) -> Joined {
        let mut joined = Joined::New;
        if self.used * 6 >= self.homes * 5 && !self.grow(Need::Homes, shared) {
            self.evict(shared);
            joined = Joined::Replaced;
        }
        let mut at = self.end_of_run(entry.hash, shared);
        let mut gap = self.gap_from(at);
        while gap.is_none() && self.grow(Need::Gaps, shared) {
            at = self.end_of_run(entry.hash, shared);
            gap = self.gap_from(at);
        }
        let Some(gap) = gap else { return self.replace_near(at, entry, shared) };
        self.put(entry, at, gap);
        joined
    }

    /// Puts `entry` at `at` and moves what stands there towards the gap.
    fn put(&mut self, entry: Entry, at: usize, gap: usize) {
        self.entries[at..=gap].rotate_right(1);
        self.blocks += usize::from(!self.is_of_block(at.wrapping_sub(1), entry.hash))
            & usize::from(!self.is_of_block(at + 1, entry.hash));
        self.entries[at] = entry;
        self.used += 1;
    }

    fn is_of_block(&self, at: usize, hash: u64) -> bool {
        self.entries.get(at).is_some_and(|entry| entry.hash == hash)
    }

    fn end_of_run(&self, hash: u64, shared: &Shared) -> usize {
        let from = self.find(hash, shared);
        from + self.entries.iter().skip(from).take_while(|entry| entry.hash == hash).count()
    }

    fn gap_from(&self, at: usize) -> Option<usize> {
        self.entries.iter().skip(at).position(|entry| entry.hash == 0).map(|offset| at + offset)
    }

    /// Puts `entry` at `at` where everything from there on is taken: the oldest of the next few goes.
    fn replace_near(&mut self, at: usize, entry: Entry, shared: &Shared) -> Joined {
        shared.count_evicted();
        let near = at..self.entries.len().min(at + SAMPLE);
        let Some(oldest) = near.min_by_key(|&at| self.entries[at].age_rank(&shared.generations)) else {
            return Joined::Refused;
        };
        self.remove(oldest, shared);
        // the removal has left a gap not before `oldest`
        let Some(gap) = self.gap_from(at) else { return Joined::Refused };
        self.put(entry, at, gap);
        Joined::Replaced
    }

    /// Removes the oldest of the next few entries that the hand meets.
    fn evict(&mut self, shared: &Shared) {
        let mut oldest: Option<(u32, usize)> = None;
        let mut seen = 0;
        for _ in 0..self.entries.len() {
            self.hand = if self.hand + 1 < self.entries.len() { self.hand + 1 } else { 0 };
            let entry = &self.entries[self.hand];
            if entry.hash == 0 {
                continue;
            }
            let rank = entry.age_rank(&shared.generations);
            if oldest.is_none_or(|(oldest, _)| rank < oldest) {
                oldest = Some((rank, self.hand));
            }
            seen += 1;
            if seen == SAMPLE {
                break;
            }
        }
        if let Some((_, at)) = oldest {
            self.remove(at, shared);
            shared.count_evicted();
        }
    }

    /// Takes an entry out and closes its gap.
    fn remove(&mut self, at: usize, shared: &Shared) {
        let removed = mem::replace(&mut self.entries[at], Entry::gap());
        self.used -= 1;
        if !self.is_of_block(at.wrapping_sub(1), removed.hash) && !self.is_of_block(at + 1, removed.hash) {
            self.blocks -= 1;
        }
        let mut end = at + 1;
        while self
            .entries
            .get(end)
            .is_some_and(|entry| entry.hash != 0 && scale(entry.hash, shared.part_bits, self.homes) < end)
        {
            end += 1;
        }
        self.entries[at..end].rotate_left(1);
        if let Holder::Crowd(number) = removed.holder() {
            self.dissolve(number, shared);
        }
    }

    /// Makes the array larger by a quarter, without the pairs whose holder began a new life since; if they
    /// are many and no more is needed, it stays as large as it is. False if it is at its greatest.
    fn grow(&mut self, need: Need, shared: &Shared) -> bool {
        let homes_max = shared.entries_max.saturating_sub(OVERHANG_MAX);
        if self.homes >= homes_max {
            return false;
        }
        let before = self.entries.len();
        let generations = &shared.generations;
        let keeps = |entry: &Entry| match entry.holder() {
            _ if entry.hash == 0 => false,
            Holder::One(tenant) => generations.is_live(tenant),
            Holder::Crowd(_) => true,
        };
        let kept = self.entries.iter().filter(|entry| keeps(entry)).count();
        if need == Need::Gaps || kept * 8 >= self.homes * 5 {
            self.homes = (self.homes * 5 / 4 + 4).min(homes_max);
        }
        let entries = mem::take(&mut self.entries).into_vec();
        let overhang = (self.homes / 4).clamp(PAIRS_MAX, OVERHANG_MAX);
        let mut grown = Vec::with_capacity(self.homes + overhang);
        (self.used, self.blocks) = (kept, 0);
        let mut last = 0;
        for entry in entries.into_iter().filter(keeps) {
            let home = scale(entry.hash, shared.part_bits, self.homes);
            while grown.len() < home {
                grown.push(Entry::gap());
            }
            self.blocks += usize::from(entry.hash != last);
            last = entry.hash;
            grown.push(entry);
        }
        while grown.len() < self.homes + overhang {
            grown.push(Entry::gap());
        }
        self.entries = grown.into_boxed_slice();
        let change = self.entries.len().wrapping_sub(before).wrapping_mul(ENTRY_BYTES);
        // wraps where the array got smaller, and so does the sum
        shared.entry_bytes.fetch_add(change, Ordering::Relaxed);
        true
    }

    /// Turns the pairs of a block into a crowd that the tenant joins; without memory for that the oldest
    /// of the pairs makes room.
    fn form_crowd(&mut self, from: usize, tenant: Tenant, tick: u32, shared: &Shared) -> Joined {
        let run = from..from + PAIRS_MAX;
        let hash = self.entries[from].hash;
        let boxes =
            if self.crowds.len() == self.crowds.capacity() { (self.crowds.len() / 4).max(2) } else { 0 };
        let bytes = boxes * size_of::<Crowd>() + CROWD_SEATS * size_of::<Seat>();
        if bytes > shared.crowd_room() {
            shared.count_evicted();
            let oldest = run.min_by_key(|&at| self.entries[at].age_rank(&shared.generations));
            self.entries[oldest.unwrap_or(from)] = Entry::pair(hash, tenant, tick);
            return Joined::Replaced;
        }
        self.crowds.reserve_exact(boxes);
        let mut seats = Vec::with_capacity(CROWD_SEATS);
        for entry in &self.entries[run.clone()] {
            if let Holder::One(tenant) = entry.holder() {
                seats.push(Seat { tenant, touched: AtomicU32::new(entry.touched.load(Ordering::Relaxed)) });
            }
        }
        seats.push(Seat { tenant, touched: AtomicU32::new(tick) });
        seats.sort_unstable_by_key(|seat| seat.tenant.slot);
        shared.account_crowds(0, bytes);
        self.entries[from] = Entry::crowd(hash, self.crowds.len(), tick);
        self.crowds.push(Crowd::new(hash, seats));
        for at in run.skip(1).rev() {
            self.remove(at, shared);
        }
        Joined::New
    }

    fn join_crowd(&mut self, number: usize, tenant: Tenant, tick: u32, shared: &Shared) -> Joined {
        let crowd = &mut self.crowds[number];
        let before = crowd.bytes();
        let joined = crowd.place(tenant, tick, &shared.generations, shared.crowd_room());
        shared.account_crowds(before, crowd.bytes());
        if joined == Joined::Replaced {
            shared.count_evicted();
        }
        joined
    }

    /// Drops a crowd whose entry is gone.
    fn dissolve(&mut self, number: usize, shared: &Shared) {
        let gone = self.crowds.swap_remove(number);
        shared.account_crowds(gone.bytes(), 0);
        let Some(moved) = self.crowds.get(number) else { return };
        let at = self.find(moved.hash, shared);
        if let Some(entry) = self.entries.get_mut(at) {
            entry.holder = number as u32;
        }
    }
}

/// The home of a hash among `homes`, in the order of the hashes; `part_bits` of it are the same for all.
fn scale(hash: u64, part_bits: u32, homes: usize) -> usize {
    ((u128::from(hash << part_bits) * homes as u128) >> 64) as usize
}

#[cfg(test)]
impl Shard {
    /// Panics unless the order, the homes and the counts are as they should be.
    pub(super) fn check(&self, shared: &Shared) {
        let taken: Vec<(usize, &Entry)> =
            self.entries.iter().enumerate().filter(|(_, entry)| entry.hash != 0).collect();
        assert_eq!(taken.len(), self.used);
        assert!(taken.is_sorted_by_key(|(_, entry)| entry.hash));
        for (at, entry) in &taken {
            let home = self.home(entry.hash, shared);
            assert!(home <= *at && self.entries[home..*at].iter().all(|before| before.hash != 0));
        }
        let mut hashes: Vec<u64> = taken.iter().map(|(_, entry)| entry.hash).collect();
        hashes.dedup();
        assert_eq!(hashes.len(), self.blocks);
        let crowds = taken.iter().filter(|(_, entry)| match entry.holder() {
            Holder::Crowd(number) => {
                assert_eq!(self.crowds[number].hash, entry.hash);
                true
            }
            Holder::One(_) => false,
        });
        assert_eq!(crowds.count(), self.crowds.len());
    }

    /// Bytes of the array and of the crowds, added up anew.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let seats: usize = self.crowds.iter().map(Crowd::bytes).sum();
        (self.entries.len() * ENTRY_BYTES, self.crowds.capacity() * size_of::<Crowd>() + seats)
    }
}
