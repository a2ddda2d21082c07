//! Rooms in which the two legs of a request meet: the host computes the prompt, the guest fetches its KV.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::kv::BlockHash;

/// What the host has computed.
pub(crate) type Kv = Arc<[Option<BlockHash>]>;

/// Whether a side has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Side {
    #[default]
    Expected,
    There,
    Gone,
}

#[derive(Clone, Default)]
struct State {
    host: Side,
    guest: Side,
    kv: Option<Kv>,
    received: bool,
}

/// The other side has left, or was there already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum RoomError {
    /// The room is in use.
    #[error("bootstrap room {0} is in use")]
    Taken(i64),
    /// The other side is gone.
    #[error("the other side left bootstrap room {0}")]
    Left(i64),
}

/// All rooms of one prefill engine.
#[derive(Clone, Default)]
pub(crate) struct Rooms {
    open: Arc<Mutex<HashMap<i64, watch::Sender<State>>>>,
}

/// One side's stay in a room; leaving is dropping it.
pub(crate) struct Stay {
    rooms: Rooms,
    room: i64,
    host: bool,
    state: watch::Receiver<State>,
}

impl Rooms {
    /// Rooms in which someone is.
    pub(crate) fn count(&self) -> usize {
        self.open.lock().len()
    }

    /// Opens a room for a prefill leg.
    pub(crate) fn host(&self, room: i64) -> Result<Stay, RoomError> {
        self.enter(room, true)
    }

    /// Joins a room for a decode leg; it may come before the host.
    pub(crate) fn join(&self, room: i64) -> Result<Stay, RoomError> {
        self.enter(room, false)
    }

    fn enter(&self, room: i64, host: bool) -> Result<Stay, RoomError> {
        let mut open = self.open.lock();
        let sender = match open.entry(room) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(watch::Sender::new(State::default())),
        };
        let entered = sender.send_if_modified(|state| {
            let side = if host { &mut state.host } else { &mut state.guest };
            let free = *side == Side::Expected;
            if free {
                *side = Side::There;
            }
            free
        });
        if !entered {
            return Err(RoomError::Taken(room));
        }
        Ok(Stay { rooms: self.clone(), room, host, state: sender.subscribe() })
    }
}

impl Stay {
    /// The host waits for its guest.
    pub(crate) async fn joined(&mut self) -> Result<(), RoomError> {
        self.when(|state| (state.guest == Side::There).then_some(()), |state| state.guest).await
    }

    /// The host waits until its guest leaves.
    pub(crate) async fn left(&mut self) -> RoomError {
        let never = |_: &State| None::<()>;
        self.when(never, |state| state.guest).await.err().unwrap_or(RoomError::Left(self.room))
    }

    /// The host shows what it has computed.
    pub(crate) fn stage(&self, kv: Kv) {
        self.change(|state| state.kv = Some(kv));
    }

    /// The host waits until its guest has it.
    pub(crate) async fn taken(&mut self) -> Result<(), RoomError> {
        self.when(|state| state.received.then_some(()), |state| state.guest).await
    }

    /// The guest waits for what the host computes.
    pub(crate) async fn staged(&mut self) -> Result<Kv, RoomError> {
        self.when(|state| state.kv.clone(), |state| state.host).await
    }

    /// The guest says that it has it.
    pub(crate) fn receive(&self) {
        self.change(|state| state.received = true);
    }

    async fn when<T>(
        &mut self,
        ready: impl Fn(&State) -> Option<T>,
        other: impl Fn(&State) -> Side,
    ) -> Result<T, RoomError> {
        let left = RoomError::Left(self.room);
        let settled = |state: &State| ready(state).is_some() || other(state) == Side::Gone;
        let state = self.state.wait_for(settled).await.map_err(|_| left)?;
        ready(&state).ok_or(left)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        if let Some(sender) = self.rooms.open.lock().get(&self.room) {
            sender.send_modify(change);
        }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut open = self.rooms.open.lock();
        let Some(sender) = open.get(&self.room) else { return };
        sender.send_modify(|state| {
            *(if self.host { &mut state.host } else { &mut state.guest }) = Side::Gone;
        });
        let State { host, guest, .. } = *sender.borrow();
        if host != Side::There && guest != Side::There {
            open.remove(&self.room);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_sides_meet_in_either_order_and_leave_nothing() {
        for host_first in [true, false] {
            let rooms = Rooms::default();
            let (mut host, mut guest) = if host_first {
                let host = rooms.host(7).expect("free");
                (host, rooms.join(7).expect("free"))
            } else {
                let guest = rooms.join(7).expect("free");
                (rooms.host(7).expect("free"), guest)
            };
            host.joined().await.expect("joined");
            host.stage(Arc::new([Some(BlockHash(1))]));
            assert_eq!(*guest.staged().await.expect("staged"), [Some(BlockHash(1))]);
            guest.receive();
            drop(guest);
            host.taken().await.expect("taken, although the guest has left since");
            drop(host);
            assert_eq!(rooms.count(), 0);
        }
    }

    #[tokio::test]
    async fn a_room_has_one_host_and_one_guest() {
        let rooms = Rooms::default();
        let (_host, _guest) = (rooms.host(7).expect("free"), rooms.join(7).expect("free"));
        assert_eq!(rooms.host(7).err(), Some(RoomError::Taken(7)));
        assert_eq!(rooms.join(7).err(), Some(RoomError::Taken(7)));
        assert!(rooms.host(8).is_ok());
    }

    #[tokio::test]
    async fn each_side_sees_the_other_leave() {
        let rooms = Rooms::default();
        let (mut host, guest) = (rooms.host(7).expect("free"), rooms.join(7).expect("free"));
        drop(guest);
        assert_eq!(host.taken().await, Err(RoomError::Left(7)));
        drop(host);
        let (host, mut guest) = (rooms.host(7).expect("free again"), rooms.join(7).expect("free again"));
        drop(host);
        assert_eq!(guest.staged().await.err(), Some(RoomError::Left(7)));
        drop(guest);
        assert_eq!(rooms.count(), 0);
    }
}
