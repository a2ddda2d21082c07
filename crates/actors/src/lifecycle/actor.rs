//! The actor itself: message, step, effects.

use std::rc::Rc;

use actix::{Actor, ActorContext, Context, Handler, Message};
use routing::Moment;
use routing::lifecycle::Event;

use super::shared::Shared;

/// Messages that one lifecycle's mailbox holds. 32: a request of the most tries says less in its whole life.
pub(super) const MAILBOX_MAX: usize = 32;

/// Something happened, at that moment.
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Tell(pub(super) Event, pub(super) Moment);

/// The owner of one request's state machine.
pub(super) struct LifecycleActor {
    shared: Rc<Shared>,
}

impl LifecycleActor {
    pub(super) const fn new(shared: Rc<Shared>) -> Self {
        Self { shared }
    }
}

impl Actor for LifecycleActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
    }
}

impl Handler<Tell> for LifecycleActor {
    type Result = ();

    fn handle(&mut self, Tell(event, at): Tell, context: &mut Self::Context) {
        self.shared.step(event, at);
        if self.shared.is_over() {
            context.stop();
        }
    }
}

/// Makes the actor panic, to show that it is recreated.
#[cfg(any(test, feature = "panic-injection"))]
#[derive(Message)]
#[rtype(result = "()")]
pub(super) struct Panic;

#[cfg(any(test, feature = "panic-injection"))]
impl Handler<Panic> for LifecycleActor {
    type Result = ();

    fn handle(&mut self, _: Panic, _: &mut Self::Context) {
        panic!("injected into a lifecycle actor");
    }
}
