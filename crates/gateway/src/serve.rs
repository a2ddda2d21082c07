//! The two listeners, from start to drain.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::{App, HttpServer, web};

use crate::data;
use crate::state::GatewayState;
use crate::worker::Worker;

/// How long an idle client's connection is kept, in s: above the 60 s of common balancers, so that they
/// close first.
const KEEP_ALIVE: Duration = Duration::from_secs(75);
/// How long a client may take for a request's head.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// How long a client that was answered early may take to notice.
const DISCONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Connections per worker; further ones wait in the kernel. Streams are cheap; descriptors are not.
const CONNECTIONS_MAX: usize = 25_000;

/// Where a gateway listens.
#[derive(Debug)]
pub struct Listeners {
    /// For clients of the engines.
    pub public: TcpListener,
    /// Threads for the public listener.
    pub workers: usize,
}

/// A gateway that serves.
#[derive(Debug)]
pub struct Serving {
    state: Arc<GatewayState>,
    public: ServerHandle,
    public_address: SocketAddr,
}

/// Starts to serve. Must be called on a tokio runtime, which then also runs the accept loop.
///
/// # Errors
/// When a listener can't be used.
pub fn start(state: Arc<GatewayState>, listeners: Listeners) -> io::Result<Serving> {
    let public_address = listeners.public.local_addr()?;
    let shared = Arc::clone(&state);
    let public = HttpServer::new(move || {
        App::new().app_data(Worker::new(Arc::clone(&shared))).default_service(web::to(data::answer))
    })
    .workers(listeners.workers)
    .max_connections(CONNECTIONS_MAX)
    .keep_alive(KEEP_ALIVE)
    .client_request_timeout(HEAD_WITHIN)
    .client_disconnect_timeout(DISCONNECT_WITHIN)
    // Else a client that leaves before the reply's head would go unnoticed.
    .h1_allow_half_closed(false)
    .disable_signals()
    .listen(listeners.public)?
    .run();
    let handle = public.handle();
    tokio::spawn(public);
    Ok(Serving { state, public: handle, public_address })
}

impl Serving {
    /// What the gateway shares.
    pub const fn state(&self) -> &Arc<GatewayState> {
        &self.state
    }

    /// Where clients connect.
    pub const fn public_address(&self) -> SocketAddr {
        self.public_address
    }

    /// Stops at once.
    pub async fn stop(self) {
        self.public.stop(false).await;
    }
}
