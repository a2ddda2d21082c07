//! Memory for the bodies of all requests together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};

use crate::errors::BodyFault;

/// How many bytes of bodies are held. A body that came in one piece, at most what one read takes (32 KiB), is not
/// counted: the number of connections bounds those.
#[derive(Debug, Default)]
pub(crate) struct BodyRoom {
    taken: AtomicU64,
}

impl BodyRoom {
    /// Bytes held now.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Room for a body that is to come.
    pub(crate) fn open(self: &Arc<Self>) -> HeldBody {
        HeldBody { whole: BytesMut::new(), room: Arc::clone(self), held: 0 }
    }
}

/// A body, and the room that it takes until nobody holds any of its bytes.
#[derive(Debug)]
pub(crate) struct HeldBody {
    whole: BytesMut,
    room: Arc<BodyRoom>,
    held: u64,
}

impl HeldBody {
    /// Makes place for `bytes` without taking room yet.
    pub(crate) fn reserve(&mut self, bytes: usize) {
        self.whole.reserve(bytes);
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.whole.len() as u64
    }

    /// Takes in a part, if all bodies together stay within `max` bytes.
    pub(crate) fn take_in(&mut self, part: &[u8], max: u64) -> Result<(), BodyFault> {
        let more = part.len() as u64;
        let before = self.room.taken.fetch_add(more, Ordering::Relaxed);
        self.held += more;
        if before + more > max {
            return Err(BodyFault::NoRoom);
        }
        self.whole.extend_from_slice(part);
        Ok(())
    }

    /// The bytes; the room is given back with the last of their holders.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for HeldBody {
    fn as_ref(&self) -> &[u8] {
        &self.whole
    }
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        self.room.taken.fetch_sub(self.held, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_held_as_long_as_any_of_the_bytes_and_what_does_not_fit_takes_none() {
        let room = Arc::new(BodyRoom::default());
        let mut first = room.open();
        assert_eq!(first.take_in(b"12345", 8), Ok(()));
        let mut second = room.open();
        assert_eq!(second.take_in(b"1234", 8), Err(BodyFault::NoRoom));
        drop(second);
        assert_eq!(room.taken(), 5);
        assert_eq!(first.take_in(b"678", 8), Ok(()));
        let bytes = first.into_bytes();
        let part = bytes.slice(2..4);
        drop(bytes);
        assert_eq!((room.taken(), &part[..]), (8, &b"34"[..]));
        drop(part);
        assert_eq!(room.taken(), 0);
    }
}
