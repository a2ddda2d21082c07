//! A body that goes to the engine as it comes, never whole in memory.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use actix_web::dev::Payload;
use bytes::Bytes;
use tokio::sync::mpsc;

use super::intake;
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
        bytes_max: u64,
        idle: Duration,
    ) -> Self {
        let (sender, chunks) = mpsc::channel(PARTS_MAX);
        let fault = Rc::new(Cell::new(None));
        actix_web::rt::spawn(pump(first, payload, sender, Rc::clone(&fault), bytes_max, idle));
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

/// Ends when the body does, when it is at fault, or when nobody takes it any more.
async fn pump(
    first: Option<Bytes>,
    mut payload: Payload,
    sender: mpsc::Sender<Result<Bytes, ClientBrokeOff>>,
    fault: Rc<Cell<Option<BodyFault>>>,
    bytes_max: u64,
    idle: Duration,
) {
    let mut bytes = 0;
    let mut next = Ok(first);
    loop {
        let part = match next {
            Ok(None) => return,
            Ok(Some(part)) if bytes + part.len() as u64 > bytes_max => {
                Err(BodyFault::TooLarge { max: bytes_max })
            }
            other => other,
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
