//! Which of the staged rows the heirs are to be told, and how often: a row when it is new and twice more, so that a
//! lost datagram rarely costs one, and likewise that something is no longer staged.

use std::collections::BTreeMap;
use std::sync::Arc;

use routing::ReplicaId;
use routing::facts::StagedRow;

use crate::codec;
use crate::envelope::PAYLOAD_BYTES_MAX;
use crate::wire::Staged;

/// How often everything is told. 3: one datagram in twenty lost loses one row in eight thousand.
const TELLINGS: u8 = 3;
/// The lengths of the list of rows and of the whole, when they grow.
const GROWTH_BYTES: usize = 10;

/// What the heirs were told.
#[derive(Debug, Default)]
pub(crate) struct Teller {
    heirs: Vec<ReplicaId>,
    /// How often, of each row that is staged.
    told: BTreeMap<u64, u8>,
    /// How often, of which rows are staged.
    set_told: u8,
}

impl Teller {
    /// The rows to tell now; `None` if nothing is to be said. `again`: whether it is time to repeat what was said.
    /// What is returned counts as told.
    pub(crate) fn due(
        &mut self,
        staged: &[Arc<StagedRow>],
        heirs: &[ReplicaId],
        again: bool,
    ) -> Option<Vec<StagedRow>> {
        if self.heirs != heirs {
            // Nobody was told yet who is to be told now.
            *self = Self { heirs: heirs.to_vec(), ..Self::default() };
            self.set_told = if staged.is_empty() { TELLINGS } else { 0 };
        }
        let known = self.told.len();
        self.told.retain(|number, _| staged.binary_search_by_key(number, |row| row.number).is_ok());
        let mut changed = self.told.len() < known;
        for row in staged {
            self.told.entry(row.number).or_insert_with(|| {
                changed = true;
                0
            });
        }
        if changed {
            self.set_told = 0;
        }
        let wanted = |times: u8| times == 0 || (again && times < TELLINGS);
        if heirs.is_empty() || !wanted(self.set_told) {
            return None;
        }
        self.set_told += 1;
        let mut rows = Vec::new();
        for row in staged {
            if let Some(times) = self.told.get_mut(&row.number).filter(|times| wanted(**times)) {
                *times += 1;
                rows.push(StagedRow::clone(row));
            }
        }
        Some(rows)
    }
}

/// The messages that carry these rows, each in one datagram where it fits. `bare` is one without any.
pub(crate) fn pack(bare: &Staged, rows: Vec<StagedRow>) -> Vec<Staged> {
    let room_max = PAYLOAD_BYTES_MAX.saturating_sub(1 + codec::size(bare) + GROWTH_BYTES);
    let mut messages = vec![bare.clone()];
    let mut room = room_max;
    for row in rows {
        let size = codec::size(&row);
        if size > room && messages.last().is_some_and(|last| !last.rows.is_empty()) {
            messages.push(bare.clone());
            room = room_max;
        }
        room = room.saturating_sub(size);
        if let Some(last) = messages.last_mut() {
            last.rows.push(row);
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use routing::EndpointId;
    use routing::staged::{STAGED_MAX, STAGED_TOKEN_BYTES_MAX};

    use super::*;

    fn row(number: u64, bytes: usize) -> Arc<StagedRow> {
        let prefill = EndpointId::from_raw(u64::MAX);
        Arc::new(StagedRow { number, prefill, token: Some(vec![7; bytes]) })
    }

    fn numbers(due: Option<Vec<StagedRow>>) -> Option<Vec<u64>> {
        due.map(|rows| rows.iter().map(|row| row.number).collect())
    }

    #[test]
    fn everything_is_said_at_once_and_twice_more_and_then_no_longer() {
        let heirs = [ReplicaId::new("b"), ReplicaId::new("c")];
        let mut teller = Teller::default();
        let mut due = |staged: &[u64], again| {
            let staged: Vec<_> = staged.iter().map(|&number| row(number, 1)).collect();
            numbers(teller.due(&staged, &heirs, again))
        };
        assert_eq!(due(&[], true), None, "nothing was ever staged");
        assert_eq!(due(&[1], false), Some(vec![1]));
        assert_eq!(due(&[1], false), None);
        assert_eq!(due(&[1, 2], false), Some(vec![2]));
        assert_eq!(due(&[1, 2], true), Some(vec![1, 2]));
        assert_eq!(due(&[1, 2], true), Some(vec![1, 2]));
        assert_eq!(due(&[1, 2], true), None);
        assert_eq!(due(&[2], false), Some(vec![]), "one is over");
        assert_eq!(due(&[2], true), Some(vec![]));
        assert_eq!(due(&[], false), Some(vec![]));
        assert_eq!((due(&[], true), due(&[], true), due(&[], true)), (Some(vec![]), Some(vec![]), None));
    }

    #[test]
    fn other_heirs_are_told_all_and_nobody_is_told_nothing() {
        let [b, c] = ["b", "c"].map(ReplicaId::new);
        let (mut teller, staged) = (Teller::default(), [row(1, 1)]);
        assert_eq!(teller.due(&staged, &[], true), None);
        assert_eq!(numbers(teller.due(&staged, std::slice::from_ref(&b), false)), Some(vec![1]));
        assert_eq!(numbers(teller.due(&staged, std::slice::from_ref(&b), false)), None);
        assert_eq!(numbers(teller.due(&staged, &[c, b], false)), Some(vec![1]));
    }

    #[test]
    fn all_that_may_be_staged_fits_into_datagrams() {
        let held: Vec<u64> = (0..STAGED_MAX as u64).map(|number| u64::MAX - 400 + number).collect();
        let replica = ReplicaId::new(&"r".repeat(64));
        let bare = Staged::new(replica, u64::MAX, u64::MAX, &held);
        let rows: Vec<_> =
            held.iter().map(|&number| StagedRow::clone(&row(number, STAGED_TOKEN_BYTES_MAX))).collect();
        let messages = pack(&bare, rows.clone());
        for message in &messages {
            assert!(codec::encode(message).expect("it is small").len() <= PAYLOAD_BYTES_MAX);
        }
        let told: Vec<_> = messages.into_iter().flat_map(|message| message.rows).collect();
        assert_eq!(told, rows);
        assert_eq!(pack(&bare, Vec::new()), [bare]);
    }
}
