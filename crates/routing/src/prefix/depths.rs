//! How deep a prompt is warm where.

use smallvec::SmallVec;

use super::Slot;

/// Up to this many holders a search through the list beats a table.
const LISTED_MAX: usize = 16;

/// How many leading blocks of one prompt are believed warm at each slot that holds any.
///
/// Reusable: filling it again allocates nothing once it has grown, and nothing at all for up to 16
/// holders. At most 4 bytes for each slot number up to the highest, and 8 for each holder.
#[derive(Clone, Default, Debug)]
pub struct WarmDepths {
    held: SmallVec<[(Slot, u32); LISTED_MAX]>,
    /// Depth by slot number, 0 for none; in use while there are more than [`LISTED_MAX`] holders.
    by_slot: Vec<u32>,
}

impl WarmDepths {
    /// How many leading blocks are believed warm at `slot`.
    pub fn at(&self, slot: Slot) -> u32 {
        if self.held.len() > LISTED_MAX {
            return self.by_slot.get(usize::from(slot.number())).copied().unwrap_or(0);
        }
        self.held.iter().find(|(held, _)| *held == slot).map_or(0, |(_, depth)| *depth)
    }

    /// The slots with any warm block and their depths in blocks, the deepest first.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, u32)> + '_ {
        self.held.iter().copied()
    }

    /// How many leading blocks are warm anywhere.
    pub fn deepest(&self) -> u32 {
        self.held.first().map_or(0, |(_, depth)| *depth)
    }

    pub(super) fn clear(&mut self) {
        if self.held.len() > LISTED_MAX {
            for (slot, _) in &self.held {
                if let Some(depth) = self.by_slot.get_mut(usize::from(slot.number())) {
                    *depth = 0;
                }
            }
        }
        self.held.clear();
    }

    /// Notes that `slot` holds `depth` blocks, unless a greater depth is noted: depths come in falling.
    pub(super) fn note(&mut self, slot: Slot, depth: u32) {
        if self.at(slot) != 0 {
            return;
        }
        self.held.push((slot, depth));
        match self.held.len() - 1 {
            0..LISTED_MAX => {}
            LISTED_MAX => {
                for at in 0..self.held.len() {
                    let (slot, depth) = self.held[at];
                    self.set(slot, depth);
                }
            }
            _ => self.set(slot, depth),
        }
    }

    fn set(&mut self, slot: Slot, depth: u32) {
        let at = usize::from(slot.number());
        if at >= self.by_slot.len() {
            self.by_slot.resize(at + 1, 0);
        }
        self.by_slot[at] = depth;
    }
}
