//! How deep a prompt is warm where.

use smallvec::SmallVec;

use super::Slot;

/// Up to this many holders a search through a list beats a table.
const LISTED_MAX: usize = 16;

/// How many crowds of one prompt are kept, the deepest: shallower ones hold little more than those.
const CROWDS_MAX: usize = 4;

/// A depth to which more endpoints hold a prompt than were to be listed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WarmCrowd {
    /// How many leading blocks they hold.
    pub depth: u32,
    /// How many they are.
    pub holders: usize,
}

/// How many leading blocks of one prompt are believed warm at each slot that holds any.
///
/// Reusable: filling it again allocates nothing once it has grown, and nothing at all for up to 16
/// holders. Beyond that it is a table of 8 bytes for each slot number up to the highest met.
#[derive(Clone, Default, Debug)]
pub struct WarmDepths {
    listed: SmallVec<[(Slot, u32); LISTED_MAX]>,
    /// By slot number: the filling it is from, and the depth. In use while there are more holders than
    /// can be listed.
    table: Vec<(u32, u32)>,
    filling: u32,
    tabled: bool,
    deepest: u32,
    crowds: SmallVec<[WarmCrowd; CROWDS_MAX]>,
}

impl WarmDepths {
    /// How many leading blocks are believed warm at `slot`.
    pub fn at(&self, slot: Slot) -> u32 {
        if self.tabled {
            let noted = self.table.get(usize::from(slot.number()));
            return noted.filter(|(filling, _)| *filling == self.filling).map_or(0, |(_, depth)| *depth);
        }
        self.listed.iter().find(|(held, _)| *held == slot).map_or(0, |(_, depth)| *depth)
    }

    /// The slots with any warm block and their depths in blocks, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, u32)> + '_ {
        let table = if self.tabled { self.table.as_slice() } else { &[] };
        let tabled = table
            .iter()
            .enumerate()
            .filter(|(_, (filling, _))| *filling == self.filling)
            .map(|(number, (_, depth))| (Slot::new(number as u16), *depth));
        self.listed.iter().copied().chain(tabled)
    }

    /// How many leading blocks are warm anywhere.
    pub fn deepest(&self) -> u32 {
        self.deepest
    }

    /// The depths to which too many to be listed hold the prompt, deepest first. Whoever is listed may be among them.
    pub fn crowds(&self) -> &[WarmCrowd] {
        &self.crowds
    }

    pub(super) fn note_crowd(&mut self, depth: u32, holders: usize) {
        self.deepest = self.deepest.max(depth);
        if self.crowds.len() < CROWDS_MAX {
            self.crowds.push(WarmCrowd { depth, holders });
        }
    }

    pub(super) fn clear(&mut self) {
        self.listed.clear();
        self.crowds.clear();
        self.deepest = 0;
        self.tabled = false;
    }

    /// Notes that `slot` holds `depth` blocks, unless a greater depth is noted: depths come in falling.
    pub(super) fn note(&mut self, slot: Slot, depth: u32) {
        self.deepest = self.deepest.max(depth);
        if self.tabled {
            return self.note_in_table(slot, depth);
        }
        if self.listed.iter().any(|(held, _)| *held == slot) {
            return;
        }
        if self.listed.len() < LISTED_MAX {
            self.listed.push((slot, depth));
            return;
        }
        self.begin_table();
        for (slot, depth) in std::mem::take(&mut self.listed) {
            self.note_in_table(slot, depth);
        }
        self.note_in_table(slot, depth);
    }

    fn begin_table(&mut self) {
        self.tabled = true;
        self.filling = self.filling.wrapping_add(1);
        if self.filling == 0 {
            // come around: what is left from long ago must not be taken for new
            self.table.fill((0, 0));
            self.filling = 1;
        }
    }

    fn note_in_table(&mut self, slot: Slot, depth: u32) {
        let at = usize::from(slot.number());
        if at >= self.table.len() {
            self.table.resize(at + 1, (0, 0));
        }
        let noted = &mut self.table[at];
        if noted.0 != self.filling {
            *noted = (self.filling, depth);
        }
    }
}
