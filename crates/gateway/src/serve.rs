//! The two listeners, from start to drain.

use std::future::ready;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_http::HttpService;
use actix_service::{IntoServiceFactory, ServiceFactoryExt, fn_service, map_config};
use actix_web::dev::{AppConfig, Server, ServerHandle};
use actix_web::rt::net::TcpStream;
use actix_web::{App, HttpServer, web};

use crate::outspoken::Outspoken;
use crate::state::GatewayState;
use crate::worker::Worker;
use crate::{admin, data};

/// How long an idle client's connection is kept: above the 60 s of common balancers, so that they close
/// first.
const KEEP_ALIVE: Duration = Duration::from_secs(75);
/// How long a client may take for a request's head.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// How long a client that was answered early may take to notice.
const DISCONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Connections per worker; further ones wait in the kernel. Streams are cheap; descriptors are not.
const CONNECTIONS_MAX: usize = 25_000;
/// Connections of operators.
const ADMIN_CONNECTIONS_MAX: usize = 256;
/// How long error events may take to go out once the drain's time is up.
const FAREWELL: Duration = Duration::from_secs(2);
/// The server's own limit on a drain, in s; ours is always sooner.
const DRAIN_S_MAX: u64 = 7 * 86_400;

/// Where a gateway listens.
#[derive(Debug)]
pub struct Listeners {
    /// For clients of the engines.
    pub public: TcpListener,
    /// For operators.
    pub admin: TcpListener,
    /// Threads for the public listener.
    pub workers: usize,
}

/// A gateway that serves. Dropping it stops it at once.
#[derive(Debug)]
pub struct Serving {
    state: Arc<GatewayState>,
    public: ServerHandle,
    admin: ServerHandle,
    public_address: SocketAddr,
    admin_address: SocketAddr,
}

/// Starts to serve. Must be called on a tokio runtime, which then also runs the accept loops.
///
/// # Errors
/// When a listener can't be used.
pub fn start(state: Arc<GatewayState>, listeners: Listeners) -> io::Result<Serving> {
    let public_address = listeners.public.local_addr()?;
    let admin_address = listeners.admin.local_addr()?;
    let public = serve_public(&state, listeners.public, listeners.workers)?;
    let shared = Arc::clone(&state);
    let admin = HttpServer::new(move || {
        App::new().app_data(Arc::clone(&shared)).default_service(web::to(admin::answer))
    })
    .workers(1)
    .max_connections(ADMIN_CONNECTIONS_MAX)
    .client_request_timeout(HEAD_WITHIN)
    .client_disconnect_timeout(DISCONNECT_WITHIN)
    .disable_signals()
    .listen(listeners.admin)?
    .run();
    let serving =
        Serving { state, public: public.handle(), admin: admin.handle(), public_address, admin_address };
    tokio::spawn(data::queue::serve(Arc::clone(&serving.state)));
    tokio::spawn(public);
    tokio::spawn(admin);
    Ok(serving)
}

/// The public listener is put together by hand, as `HttpServer` does it, because connections are wrapped.
fn serve_public(state: &Arc<GatewayState>, listener: TcpListener, workers: usize) -> io::Result<Server> {
    let builder = Server::build()
        .workers(workers)
        .max_concurrent_connections(CONNECTIONS_MAX)
        .disable_signals()
        .shutdown_timeout(DRAIN_S_MAX);
    let address = listener.local_addr()?;
    let leaving = builder.graceful_shutdown_signal();
    let state = Arc::clone(state);
    let builder = builder.listen("public", listener, move || {
        let leaving = leaving.clone();
        let worker = Worker::new(Arc::clone(&state));
        let app = App::new().app_data(Rc::clone(&worker)).default_service(web::to(data::answer));
        let app = app.into_factory().map_err(|error: actix_web::Error| error.error_response());
        let http = HttpService::build()
            .graceful_shutdown_signal(move || {
                let leaving = leaving.clone();
                async move { leaving.notified().await }
            })
            .keep_alive(KEEP_ALIVE)
            .client_request_timeout(HEAD_WITHIN)
            .client_disconnect_timeout(DISCONNECT_WITHIN)
            // Else a client that leaves before the reply's head would go unnoticed.
            .h1_allow_half_closed(false)
            .local_addr(address)
            .h1(map_config(app, |()| AppConfig::default()));
        fn_service(move |stream: TcpStream| {
            let peer = stream.peer_addr().ok();
            // Chunks of a stream must not wait for the acknowledgement of the ones before.
            let _ = stream.set_nodelay(true);
            ready(Ok((Outspoken::new(stream, Rc::clone(&worker)), peer)))
        })
        .and_then(http)
    })?;
    Ok(builder.run())
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

    /// Where operators connect.
    pub const fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Leaves in good order: not ready from now on, still accepting for `settle` (balancers need time to
    /// notice), then what runs may finish within `deadline`; what still runs then is told so. The admin
    /// listener stays until the end.
    pub async fn drain(self, settle: Duration, deadline: Duration) {
        self.state.readiness.draining();
        tokio::time::sleep(settle).await;
        // No new connections from here on; idle ones are closed.
        let mut stopping = std::pin::pin!(self.public.stop(true));
        if tokio::time::timeout(deadline, &mut stopping).await.is_err() {
            let requests = self.state.lifecycles.table().in_flight();
            tracing::warn!(requests, "the drain's time is up; what still runs is ended");
            self.state.lifecycles.end_all();
            if tokio::time::timeout(FAREWELL, stopping).await.is_err() {
                tracing::warn!("some clients did not take their end; their connections are cut");
            }
        }
        self.admin.stop(false).await;
    }

    /// Stops at once.
    pub async fn stop(self) {
        self.public.stop(false).await;
        self.admin.stop(false).await;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // The order is given by the call itself; only its end is waited for by what it returns.
        drop(self.public.stop(false));
        drop(self.admin.stop(false));
    }
}
