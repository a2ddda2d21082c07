//! A body that goes to the engine as it comes, never whole in memory.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use actix_web::dev::Payload;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::intake::{self, Intake};
use crate::errors::BodyFault;
use crate::upstream::{ClientBrokeOff, OutBody};

/// Parts that wait for the engine to take them; the client is then read no further. 4 parts of at most
/// 32 KiB keep a connection busy.
const PARTS_MAX: usize = 4;

/// A body on its way.
#[derive(Debug)]
pub(crate) struct Upload {
    body: OutBody,
    fault: Rc<Cell<Option<BodyFault>>>,
}

impl Upload {
    /// Starts reading `payload`, of which `first` has been read already, on this worker.
    pub(crate) fn start(
        first: Option<Bytes>,
        payload: Payload,
        announced: Option<u64>,
        intake: &Intake<'_>,
    ) -> Self {
        let (sender, chunks) = mpsc::channel(PARTS_MAX);
        let fault = Rc::new(Cell::new(None));
        let longest = Longest { bytes_max: intake.bytes_max, announced };
        actix_web::rt::spawn(pump(first, payload, sender, Rc::clone(&fault), longest, intake.idle));
        Self { body: OutBody::Streamed { chunks, length: announced }, fault }
    }

    /// Where the client's own fault will be found, if there is one.
    pub(crate) fn fault(&self) -> Rc<Cell<Option<BodyFault>>> {
        Rc::clone(&self.fault)
    }

    /// How long the client has said that it is.
    pub(crate) const fn announced(&self) -> Option<u64> {
        match &self.body {
            OutBody::Streamed { length, .. } => *length,
            OutBody::Whole(_) => None,
        }
    }

    /// The body as the engine gets it.
    pub(crate) fn into_body(self) -> OutBody {
        self.body
    }
}

/// How much a body may be.
#[derive(Clone, Copy, Debug)]
struct Longest {
    bytes_max: u64,
    /// The length that the engine is told. What went beyond it would be the next request there.
    announced: Option<u64>,
}

impl Longest {
    fn admits(self, bytes: u64) -> Result<(), BodyFault> {
        if bytes > self.bytes_max {
            return Err(BodyFault::TooLarge { max: self.bytes_max });
        }
        if self.announced.is_some_and(|announced| bytes > announced) {
            return Err(BodyFault::BrokenOff);
        }
        Ok(())
    }
}

/// Ends when the body does, when it is at fault, or when nobody takes it any more.
async fn pump(
    first: Option<Bytes>,
    mut payload: Payload,
    sender: mpsc::Sender<Result<Bytes, ClientBrokeOff>>,
    fault: Rc<Cell<Option<BodyFault>>>,
    longest: Longest,
    idle: Duration,
) {
    let mut bytes = 0;
    let mut next = Ok(first);
    loop {
        let part = match next {
            Ok(None) => return,
            Ok(Some(part)) => longest.admits(bytes + part.len() as u64).map(|()| Some(part)),
            Err(broken) => Err(broken),
        };
        match part {
            Ok(Some(part)) => {
                bytes += part.len() as u64;
                if sender.send(Ok(part)).await.is_err() {
                    return;
                }
            }
            Ok(None) => return,
            Err(broken) => {
                fault.set(Some(broken));
                let _ = sender.send(Err(ClientBrokeOff)).await;
                return;
            }
        }
        next = intake::next(&mut payload, idle).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_as_long_as_announced_and_no_longer_than_allowed() {
        let longest = |announced| Longest { bytes_max: 10, announced };
        assert_eq!(longest(None).admits(10), Ok(()));
        assert_eq!(longest(None).admits(11), Err(BodyFault::TooLarge { max: 10 }));
        assert_eq!(longest(Some(5)).admits(5), Ok(()));
        assert_eq!(longest(Some(5)).admits(6), Err(BodyFault::BrokenOff));
    }
}
