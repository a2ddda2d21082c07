//! Puts together what the gossip library sends in one datagram of up to 64 KB and we send in several.
//!
//! IP would fragment by itself, but lost fragments then fill the kernel's reassembly queue until nothing
//! large arrives any more. Here they fill a queue of our own, which forgets after a second.

use std::collections::HashMap;
use std::time::Duration;

use routing::Moment;

use crate::Rejection;
use crate::envelope::{Header, PAYLOAD_BYTES_MAX};

/// Messages put together at a time, from all senders: each replica gossips with a few others at once.
const MESSAGES_MAX: usize = 64;
/// A message that is not whole by then has lost a part: parts are sent in one go.
const PATIENCE: Duration = Duration::from_secs(1);

/// Splits a message into the bodies of at most 255 datagrams; `None` if that is not enough.
pub(crate) fn split(message: &[u8]) -> Option<impl ExactSizeIterator<Item = &[u8]>> {
    let parts = message.len().div_ceil(PAYLOAD_BYTES_MAX).max(1);
    let part = move |i: usize| {
        let from = i * PAYLOAD_BYTES_MAX;
        &message[from..(from + PAYLOAD_BYTES_MAX).min(message.len())]
    };
    (parts <= usize::from(u8::MAX)).then(|| (0..parts).map(part))
}

#[derive(Default)]
pub(crate) struct Fragments {
    /// By sender and the counter of the first part.
    messages: HashMap<(u64, u64), Message>,
}

struct Message {
    parts: Vec<Option<Vec<u8>>>,
    since: Moment,
}

impl Fragments {
    /// The whole message, if this was the last part of it that was missing.
    pub(crate) fn offer(
        &mut self,
        header: Header,
        body: Vec<u8>,
        now: Moment,
    ) -> Result<Option<Vec<u8>>, Rejection> {
        if header.parts == 1 {
            return Ok(Some(body));
        }
        let first = header.counter.checked_sub(u64::from(header.part)).ok_or(Rejection::Malformed)?;
        let key = (header.sender, first);
        if !self.messages.contains_key(&key) {
            self.messages.retain(|_, message| now.since(message.since) < PATIENCE);
            if self.messages.len() >= MESSAGES_MAX {
                return Err(Rejection::Overload);
            }
        }
        let fresh = || Message { parts: vec![None; usize::from(header.parts)], since: now };
        let message = self.messages.entry(key).or_insert_with(fresh);
        if message.parts.len() != usize::from(header.parts) {
            return Err(Rejection::Malformed);
        }
        message.parts[usize::from(header.part)] = Some(body);
        if message.parts.iter().any(Option::is_none) {
            return Ok(None);
        }
        let whole = self.messages.remove(&key).map(|message| message.parts);
        Ok(whole.map(|parts| parts.into_iter().flatten().flatten().collect()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::FrameKind;

    fn header(sender: u64, counter: u64, part: u8, parts: u8) -> Header {
        Header { kind: FrameKind::Pulse, part, parts, sender, counter }
    }

    proptest! {
        #[test]
        fn parts_in_any_order_make_the_message(length in 0_usize..70_000, seed in any::<u64>()) {
            let message: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let parts: Vec<&[u8]> = split(&message).expect("64 KB fits").collect();
            let mut order: Vec<usize> = (0..parts.len()).collect();
            order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(seed | 1));
            let mut fragments = Fragments::default();
            let mut whole = None;
            for i in order {
                prop_assert!(whole.is_none());
                let header = header(1, 100 + i as u64, i as u8, parts.len() as u8);
                whole = fragments.offer(header, parts[i].to_vec(), Moment::default()).expect("it is well-formed");
            }
            prop_assert_eq!(whole, Some(message));
            prop_assert!(fragments.messages.is_empty());
        }
    }

    #[test]
    fn a_message_that_lost_a_part_is_forgotten() {
        let mut fragments = Fragments::default();
        for sender in 0..MESSAGES_MAX as u64 {
            assert_eq!(fragments.offer(header(sender, 1, 0, 2), vec![], Moment::default()), Ok(None));
        }
        let late = header(99, 1, 0, 2);
        assert_eq!(fragments.offer(late, vec![], Moment::from_millis(999)), Err(Rejection::Overload));
        assert_eq!(fragments.offer(late, vec![], Moment::from_millis(1_000)), Ok(None));
        assert_eq!(fragments.messages.len(), 1);
    }

    #[test]
    fn contradicting_parts_are_malformed() {
        let mut fragments = Fragments::default();
        assert_eq!(fragments.offer(header(1, 1, 0, 2), vec![], Moment::default()), Ok(None));
        assert_eq!(fragments.offer(header(1, 2, 1, 3), vec![], Moment::default()), Err(Rejection::Malformed));
        assert_eq!(fragments.offer(header(1, 1, 2, 3), vec![], Moment::default()), Err(Rejection::Malformed));
        assert!(split(&vec![0; 300 * PAYLOAD_BYTES_MAX]).is_none());
    }
}
