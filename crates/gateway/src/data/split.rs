//! Drives a request that is split over two engines: the prefill leg, the handoff, and the decode leg, which goes
//! elsewhere with the same handoff while the lifecycle says so.

use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use actors::lifecycle::{Order, Staged};
use bytes::Bytes;
use routing::decision::{Footing, PrefillLeg};
use routing::endpoint::Endpoint;
use routing::lifecycle::LegOrder;
use routing::reserve::Reservation;
use routing::retry::LegFailure;
use routing::{Chosen, Decision};
use tokio::sync::oneshot;

use super::attempt::{Begun, Outbound, Unserved, attempt};
use super::drive::{Driver, Reply, unless_ordered};
use super::handoff::{Handoff, Prefilled};
use super::kept::Kept;
use crate::connector::{Connector, Meeting};

/// The two endpoints of a split request, and how KV goes from one to the other.
pub(super) struct Pair {
    pub(super) connector: &'static dyn Connector,
    pub(super) body: Bytes,
    pub(super) prefill: PrefillLeg,
    pub(super) decode: Seat,
}

/// Where a decode leg goes.
pub(super) struct Seat {
    decision: Decision,
    endpoint: Arc<Endpoint>,
    reservation: Reservation,
    footing: Footing,
}

impl From<Chosen> for Seat {
    fn from(chosen: Chosen) -> Self {
        let Chosen { decision, endpoint, reservation, footing, .. } = chosen;
        Self { decision, endpoint, reservation, footing }
    }
}

/// What is left of a seat once its charge is with the lifecycle.
struct Dispatched {
    decision: Decision,
    endpoint: Arc<Endpoint>,
}

/// Which of two legs that are out at once has come to something.
#[expect(clippy::large_enum_variant, reason = "it lives for a moment, within a future that is boxed")]
enum Came {
    /// The prefill leg, to something that ends both.
    Prefill(Prefilled),
    /// The decode leg.
    Decode(Result<Begun, Unserved>),
}

/// Which leg of a split request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegName {
    Prefill,
    Decode,
}

impl LegName {
    /// The name in labels.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl Driver {
    /// Sends the request to a pair of endpoints and makes a response of what comes.
    pub(super) async fn serve_split(mut self, pair: Pair) -> Result<Box<Reply>, (Self, Unserved)> {
        let Pair { connector, body, prefill, decode } = pair;
        let shape = self.handle.shape();
        let meeting = Meeting {
            prefill: &prefill.endpoint.spec,
            sequences: shape.prompts.saturating_mul(shape.samples),
            room: self.worker.room(),
        };
        let (handoff, prefilled) = Handoff::begin(
            &self.worker,
            (&self.envelope, shape.route),
            connector,
            connector.prepared(&body, &meeting),
            (&prefill.endpoint, &decode.endpoint),
        );
        let footing = prefill.footing;
        let Seat { decision, endpoint, reservation, footing: decode_footing } = decode;
        let staged = Rc::clone(&handoff) as Rc<dyn Staged>;
        self.handle.split(prefill, staged, connector.order(), (&endpoint, reservation, decode_footing));
        if connector.order() == LegOrder::Together {
            return self.serve_together(&handoff, prefilled, Dispatched { decision, endpoint }).await;
        }
        match unless_ordered(&self.handle, told(prefilled)).await {
            Err(order) => {
                self.count_failed(LegName::Prefill, &order);
                return Err((self, Unserved::Ordered(order)));
            }
            Ok(Prefilled::Answered(kept)) => return Err(self.prefill_answered(kept).await),
            Ok(Prefilled::Failed(failure, said)) => {
                self.kept = said;
                let order = self.prefill_failed(failure).await;
                return Err((self, Unserved::Ordered(order)));
            }
            Ok(Prefilled::Ready { usage, took_ms }) => {
                self.worker.prefilled(self.handle.shape(), footing, usage, took_ms);
                self.handle.handed_off();
            }
        }
        self.handle.decode_dispatched();
        self.decode(&handoff, Dispatched { decision, endpoint }).await
    }

    /// Sends the decode leg beside the prefill leg. The first of them to fail ends the other.
    async fn serve_together(
        mut self,
        handoff: &Handoff,
        prefilled: oneshot::Receiver<Prefilled>,
        at: Dispatched,
    ) -> Result<Box<Reply>, (Self, Unserved)> {
        let mut leg = Outbound::Whole(handoff.decode_leg().unwrap_or_default());
        let (worker, envelope, handle) = (&self.worker, &self.envelope, &self.handle);
        let came = {
            let mut decode =
                pin!(attempt(worker, envelope, handle, &mut leg, &at.endpoint, Some(handoff.taken())));
            let mut prefill = Some(Box::pin(told(prefilled)));
            poll_fn(|context| {
                if let Poll::Ready(order) = handle.poll_order(context) {
                    return Poll::Ready(Came::Decode(Err(Unserved::Ordered(order))));
                }
                if let Some(Poll::Ready(came)) = prefill.as_mut().map(|leg| leg.as_mut().poll(context)) {
                    prefill = None;
                    match came {
                        Prefilled::Ready { .. } => handle.handed_off(),
                        failed => return Poll::Ready(Came::Prefill(failed)),
                    }
                }
                decode.as_mut().poll(context).map(Came::Decode)
            })
            .await
        };
        let order = match came {
            Came::Decode(Ok(begun)) => return Ok(self.reply(begun, at.endpoint, at.decision)),
            Came::Decode(Err(Unserved::Answered(kept))) => {
                if !self.continues {
                    self.handle.first_byte();
                    self.handle.ended();
                    handoff.close();
                }
                return Err((self, Unserved::Answered(kept)));
            }
            Came::Decode(Err(Unserved::Failed(failure, said))) => {
                let order = self.failed(failure, said).await;
                self.count_failed(LegName::Decode, &order);
                order
            }
            Came::Decode(Err(unserved)) => return Err((self, unserved)),
            Came::Prefill(Prefilled::Answered(kept)) => return Err(self.prefill_answered(kept).await),
            Came::Prefill(Prefilled::Failed(failure, said)) => {
                self.kept = said;
                self.prefill_failed(failure).await
            }
            Came::Prefill(Prefilled::Ready { .. }) => self.handle.order().await,
        };
        Err((self, Unserved::Ordered(order)))
    }

    /// Sends the decode leg, and again elsewhere while the lifecycle says so.
    async fn decode(mut self, handoff: &Handoff, mut at: Dispatched) -> Result<Box<Reply>, (Self, Unserved)> {
        loop {
            let mut leg = Outbound::Whole(handoff.decode_leg().unwrap_or_default());
            handoff.taken().set(false);
            let begun = unless_ordered(
                &self.handle,
                attempt(
                    &self.worker,
                    &self.envelope,
                    &self.handle,
                    &mut leg,
                    &at.endpoint,
                    Some(handoff.taken()),
                ),
            );
            let order = match begun.await.unwrap_or_else(|order| Err(Unserved::Ordered(order))) {
                Ok(begun) => return Ok(self.reply(begun, at.endpoint, at.decision)),
                Err(Unserved::Answered(kept)) => {
                    handoff.taken().set(false);
                    if !self.continues {
                        self.handle.ended();
                    }
                    return Err((self, Unserved::Answered(kept)));
                }
                Err(Unserved::Ordered(order)) => order,
                Err(Unserved::Failed(failure, said)) => {
                    handoff.taken().set(false);
                    self.failed(failure, said).await
                }
                Err(client @ Unserved::Client(_)) => return Err((self, client)),
            };
            self.count_failed(LegName::Decode, &order);
            let Order::DecodeElsewhere { .. } = order else { return Err((self, Unserved::Ordered(order))) };
            match self.decode_elsewhere() {
                Some(next) => at = next,
                None => {
                    self.handle.refused();
                    let order = self.handle.order().await;
                    return Err((self, Unserved::Ordered(order)));
                }
            }
        }
    }

    /// Another endpoint for the decode leg, with its charge with the lifecycle.
    fn decode_elsewhere(&mut self) -> Option<Dispatched> {
        let prefill = self.handle.prefill_endpoint()?;
        self.update_tried();
        let chosen =
            self.worker.choose_decode_again(self.handle.shape(), prefill.id, &self.tried, self.handle.id());
        let Seat { decision, endpoint, reservation, footing } = chosen.ok()?.into();
        self.handle.decode_moved(&endpoint, reservation, footing);
        Some(Dispatched { decision, endpoint })
    }

    /// The engine's answer to the prefill leg is the client's, if that has not had one.
    async fn prefill_answered(self, kept: Box<Kept>) -> (Self, Unserved) {
        if self.continues {
            let order = self.prefill_failed(kept.failure()).await;
            return (self, Unserved::Ordered(order));
        }
        self.handle.prefill_answered(kept.status());
        (self, Unserved::Answered(kept))
    }

    async fn prefill_failed(&self, failure: LegFailure) -> Order {
        self.handle.prefill_failed(failure);
        let order = self.handle.order().await;
        self.count_failed(LegName::Prefill, &order);
        order
    }

    /// Counts the failure that an order answers.
    fn count_failed(&self, leg: LegName, order: &Order) {
        let reason = match order {
            Order::RetryElsewhere { after } | Order::DecodeElsewhere { after } => after.as_str(),
            _ => "gave-up",
        };
        self.worker.handoff_failed(leg, reason);
    }
}

/// What the prefill leg has come to. One that was closed comes to nothing: whoever closed it gives an order.
async fn told(prefilled: oneshot::Receiver<Prefilled>) -> Prefilled {
    match prefilled.await {
        Ok(came) => came,
        Err(_) => pending().await,
    }
}
