//! The client side: HTTP/1.1 to the engines, with a pool of connections per worker, so that no lock is shared.
//!
//! A client of our own, because here is where a proxy's time goes. A general client runs each connection as a
//! task of its own and hands over every part of a body through a channel: two switches per chunk. This one is
//! polled by whoever wants the bytes, and what has arrived in many chunks goes on in one piece. Parsing heads
//! is left to `httparse`. docs/adr/0008-own-upstream-client.md says more.

mod connection;
mod framing;
mod head;
mod pool;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use actix_web::http::Method;
use bytes::BytesMut;
use hashbrown::HashMap;
use routing::EndpointId;
use routing::endpoint::EndpointSpec;
use routing::retry::LegFault;
use tokio::net::TcpStream;

use self::connection::{Exchange, ExchangeFault};
use self::pool::Pool;

pub(crate) use self::connection::{ClientBrokeOff, OutBody, ReplyBody};
pub(crate) use self::head::Head;

/// How connections to the engines are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    /// For one connection to be made. 2 s: a lost SYN is sent again after one.
    pub connect: Duration,
    /// Idle connections kept per engine and worker. 64: a burst of so many leaves no handshakes behind.
    pub idle_per_endpoint_max: usize,
    /// How long a connection is kept idle. 4 s: uvicorn, which most engines run on, closes after 5.
    pub idle_for: Duration,
}

impl Default for UpstreamSettings {
    fn default() -> Self {
        Self { connect: Duration::from_secs(2), idle_per_endpoint_max: 64, idle_for: Duration::from_secs(4) }
    }
}

/// Targets kept prepared per worker. Endpoints come and go; beyond this all are prepared anew.
const TARGETS_MAX: usize = 4_096;

/// An endpoint's address, taken apart once.
#[derive(Debug)]
pub(crate) struct Target {
    endpoint: EndpointId,
    address: Address,
    /// The path before every path, without a slash at its end; mostly empty.
    pub(crate) base: String,
    /// The value of `Host`.
    pub(crate) host: String,
    /// The value of `X-data-parallel-rank`.
    pub(crate) rank: Option<String>,
}

#[derive(Debug)]
enum Address {
    Known(SocketAddr),
    /// To be looked up for each connection, because names move.
    Named(String),
}

impl Target {
    fn of(spec: &EndpointSpec) -> Self {
        let rest = spec.url.strip_prefix("http://").unwrap_or(&spec.url);
        let (authority, base) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let address = authority.parse().map_or_else(|_| Address::Named(authority.to_owned()), Address::Known);
        Self {
            endpoint: spec.id(),
            address,
            base: base.to_owned(),
            host: authority.to_owned(),
            rank: spec.rank.map(|rank| rank.to_string()),
        }
    }
}

/// One worker's connections.
#[derive(Debug)]
pub(crate) struct Upstream {
    pool: Rc<Pool>,
    connect: Duration,
    targets: RefCell<HashMap<EndpointId, Rc<Target>>>,
}

impl Upstream {
    /// Must be called on the worker's own thread.
    pub(crate) fn new(settings: &UpstreamSettings) -> Self {
        Self {
            pool: Pool::new(settings.idle_per_endpoint_max, settings.idle_for),
            connect: settings.connect,
            targets: RefCell::default(),
        }
    }

    /// The endpoint's address, prepared.
    pub(crate) fn target(&self, id: EndpointId, spec: &EndpointSpec) -> Rc<Target> {
        if let Some(target) = self.targets.borrow().get(&id) {
            return Rc::clone(target);
        }
        let target = Rc::new(Target::of(spec));
        let mut targets = self.targets.borrow_mut();
        if targets.len() >= TARGETS_MAX {
            targets.clear();
        }
        targets.insert(id, Rc::clone(&target));
        target
    }

    /// Sends a request, of which `head` is everything up to the body, and waits for the reply's head. Dropping
    /// the future or the reply's body closes the connection, which is how an engine learns that nobody waits
    /// any more.
    ///
    /// A whole body that went out on a connection which had been idle, and was answered by nothing but its
    /// end, is sent again on a new one: the engine has closed it at the same time.
    ///
    /// `sent`, if it is wanted, turns true when the engine has been given all of the request.
    ///
    /// # Errors
    /// How the leg failed, as the retry plan wants to know it.
    pub(crate) async fn send(
        &self,
        target: &Target,
        method: Method,
        head: BytesMut,
        body: OutBody,
        sent: Option<&Cell<bool>>,
    ) -> Result<(Head, ReplyBody), LegFault> {
        if let Some(stream) = self.pool.take(target.endpoint) {
            let again = match &body {
                OutBody::Whole(bytes) => Some((head.clone(), OutBody::Whole(bytes.clone()))),
                OutBody::Streamed { .. } => None,
            };
            match (self.exchange(stream, target, method.clone(), head, body, sent).await, again) {
                (Err(ExchangeFault::Silently(_)), Some((head, body))) => {
                    let stream = self.open(target).await?;
                    let exchanged = self.exchange(stream, target, method, head, body, sent).await;
                    return exchanged.map_err(ExchangeFault::fault);
                }
                (other, _) => return other.map_err(ExchangeFault::fault),
            }
        }
        let stream = self.open(target).await?;
        self.exchange(stream, target, method, head, body, sent).await.map_err(ExchangeFault::fault)
    }

    async fn exchange(
        &self,
        stream: TcpStream,
        target: &Target,
        method: Method,
        head: BytesMut,
        body: OutBody,
        sent: Option<&Cell<bool>>,
    ) -> Result<(Head, ReplyBody), ExchangeFault> {
        let mut exchange = Exchange::new(stream, self.pool.buffer(), method, head, body);
        let (head, framing, reusable) = poll_fn(|context| {
            let head = exchange.poll_head(context);
            if let Some(sent) = sent {
                sent.set(exchange.is_sent());
            }
            head
        })
        .await?;
        let home = reusable.then(|| (Rc::downgrade(&self.pool), target.endpoint));
        Ok((head, ReplyBody::new(exchange, framing, home)))
    }

    async fn open(&self, target: &Target) -> Result<TcpStream, LegFault> {
        let connecting = async {
            match &target.address {
                Address::Known(address) => TcpStream::connect(address).await,
                Address::Named(name) => TcpStream::connect(name.as_str()).await,
            }
        };
        let stream = match tokio::time::timeout(self.connect, connecting).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(LegFault::ConnectRefused);
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionReset => return Err(LegFault::Reset),
            Ok(Err(_)) | Err(_) => return Err(LegFault::ConnectTimeout),
        };
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

impl ExchangeFault {
    const fn fault(self) -> LegFault {
        match self {
            Self::Silently(fault) | Self::Otherwise(fault) => fault,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(spec: &str, base: &str, host: &str, rank: Option<&str>) {
        let spec = EndpointSpec::parse(spec).unwrap().pop().unwrap();
        let target = Target::of(&spec);
        assert_eq!((&*target.base, &*target.host, target.rank.as_deref()), (base, host, rank));
    }

    #[test]
    fn an_endpoint_s_address_is_taken_apart() {
        check("http://h:8000", "", "h:8000", None);
        check("http://h:1/base/", "/base", "h:1", None);
        check("http://[::1]:9,dp=2", "", "[::1]:9", Some("1"));
    }
}
