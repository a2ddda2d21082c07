//! Opens the three sockets that belong together: UDP P, UDP P + 1 and TCP P.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, UdpSocket};

use crate::GossipError;

/// With port 0, how many ports are tried. One in a few fails on a busy host; all of these won't.
const TRIES_MAX: usize = 64;
/// Wanted socket buffers: a second of a large cluster's traffic. The kernel may grant less.
const SOCKET_BUFFER_BYTES: usize = 1 << 20;

pub(crate) struct Ports {
    pub(crate) pulse: UdpSocket,
    pub(crate) ledger: UdpSocket,
    pub(crate) pulls: TcpListener,
    /// Where `pulse` and `pulls` are.
    pub(crate) address: SocketAddr,
}

pub(crate) async fn open(listen: SocketAddr) -> Result<Ports, GossipError> {
    if listen.port() != 0 {
        return open_at(listen).await;
    }
    for _ in 0..TRIES_MAX {
        let found = udp(listen).and_then(|socket| socket.local_addr());
        let address = found.map_err(|source| GossipError::Port { what: "UDP", address: listen, source })?;
        if address.port() == u16::MAX {
            continue;
        }
        if let Ok(ports) = open_at(address).await {
            return Ok(ports);
        }
    }
    Err(GossipError::NoFreePort { address: listen, tries: TRIES_MAX })
}

async fn open_at(address: SocketAddr) -> Result<Ports, GossipError> {
    let fault = |what, address, source| GossipError::Port { what, address, source };
    let mut next = address;
    next.set_port(address.port().checked_add(1).ok_or_else(|| {
        fault(
            "UDP at the port after",
            address,
            io::Error::other("65535 is the last port; choose a lower one"),
        )
    })?);
    let pulse = udp(address).map_err(|source| fault("UDP", address, source))?;
    let ledger = udp(next).map_err(|source| fault("UDP at the next port,", next, source))?;
    let pulls = TcpListener::bind(address).await.map_err(|source| fault("TCP", address, source))?;
    Ok(Ports { pulse, ledger, pulls, address })
}

/// No address reuse: two processes on one UDP port would each get some of the datagrams.
fn udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    // Best effort: the kernel caps both at its own limits.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    socket.bind(&address.into())?;
    UdpSocket::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    #[tokio::test]
    async fn port_zero_finds_three_that_belong_together() {
        let ports = open(loopback(0)).await.expect("some port is free");
        let port = ports.address.port();
        assert_eq!(ports.pulse.local_addr().unwrap().port(), port);
        assert_eq!(ports.ledger.local_addr().unwrap().port(), port + 1);
        assert_eq!(ports.pulls.local_addr().unwrap().port(), port);
    }

    #[tokio::test]
    async fn a_port_in_use_is_named() {
        let Ports { pulse, ledger, pulls, address } = open(loopback(0)).await.expect("some port is free");
        let message = async || open(address).await.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message().await.starts_with(&format!("can't open UDP at {address} ")));
        drop(pulse);
        let next = loopback(address.port() + 1);
        assert!(message().await.starts_with(&format!("can't open UDP at the next port, at {next} ")));
        drop(ledger);
        assert!(message().await.starts_with(&format!("can't open TCP at {address} ")));
        drop(pulls);
        assert!(open(loopback(u16::MAX)).await.err().is_some_and(|e| e.to_string().contains("last port")));
    }
}
