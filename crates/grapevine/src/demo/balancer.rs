//! The demo's own L4 balancer: takes a TCP connection, gives it to the next replica that takes it.
//!
//! For the demo only; in front of a real cluster stands HAProxy, a cloud balancer or kube-proxy.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// How long a replica may take to accept.
const CONNECT_LIMIT: Duration = Duration::from_millis(500);

/// Serves until dropped.
pub(super) async fn run(listener: TcpListener, replicas: Vec<SocketAddr>) {
    let replicas = Arc::new(replicas);
    let turn = Arc::new(AtomicUsize::new(0));
    while let Ok((client, _)) = listener.accept().await {
        let (replicas, turn) = (Arc::clone(&replicas), Arc::clone(&turn));
        tokio::spawn(async move {
            if let Some(replica) = next(&replicas, &turn).await {
                relay(client, replica).await;
            }
        });
    }
}

/// The next replica in turn that accepts; none if all were asked.
async fn next(replicas: &[SocketAddr], turn: &AtomicUsize) -> Option<TcpStream> {
    let first = turn.fetch_add(1, Ordering::Relaxed);
    for offset in 0..replicas.len() {
        let replica = replicas[(first + offset) % replicas.len()];
        if let Ok(Ok(stream)) = timeout(CONNECT_LIMIT, TcpStream::connect(replica)).await {
            return Some(stream);
        }
    }
    None
}

async fn relay(mut client: TcpStream, mut replica: TcpStream) {
    // Small messages both ways: waiting to fill a packet would show up as latency.
    let _ = (client.set_nodelay(true), replica.set_nodelay(true));
    // Either side's failure ends both; there is nothing to report it to.
    let _ = tokio::io::copy_bidirectional(&mut client, &mut replica).await;
}
