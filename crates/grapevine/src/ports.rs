//! Free ports for the replicas that this process starts: they name each other before they run.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::bail;

/// Where ports are looked for: below the range from which the system gives out ephemeral ones, so that no
/// outgoing connection takes a port between the look and the use.
const FIRST: u16 = 12_000;
const LAST: u16 = 31_000;
/// A replica's ports stand together: public, admin, gossip and the one after it.
const STEP: u16 = 4;
/// How many places are looked at.
const TRIES_MAX: u32 = 2_000;

/// The addresses of one replica on the loopback interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaPorts {
    /// For clients.
    pub public: SocketAddr,
    /// For operators.
    pub admin: SocketAddr,
    /// For the other replicas (UDP, the next port's UDP, TCP).
    pub gossip: SocketAddr,
}

/// Places looked at in this process so far: one is not looked at again before all others were, so that a
/// second cluster does not get the ports of a first that does not listen yet.
static LOOKED_AT: AtomicU32 = AtomicU32::new(0);

/// Finds ports for `replicas` replicas.
///
/// # Errors
/// When there are too few free ones.
pub fn find(replicas: usize) -> anyhow::Result<Vec<ReplicaPorts>> {
    let mut found = Vec::with_capacity(replicas);
    let places = u32::from((LAST - FIRST) / STEP);
    // Processes that start at once begin their search at different places.
    let first = std::process::id().wrapping_mul(2_654_435_761) % places;
    for _ in 0..TRIES_MAX {
        if found.len() == replicas {
            break;
        }
        let place = (first + LOOKED_AT.fetch_add(1, Ordering::Relaxed) % places) % places;
        let base = FIRST + (place as u16) * STEP;
        if is_free(base) {
            let at = |offset| SocketAddr::from((Ipv4Addr::LOCALHOST, base + offset));
            found.push(ReplicaPorts { public: at(0), admin: at(1), gossip: at(2) });
        }
    }
    if found.len() < replicas {
        bail!("found free ports for {} of {replicas} replicas between {FIRST} and {LAST}", found.len());
    }
    Ok(found)
}

fn is_free(base: u16) -> bool {
    let tcp = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let udp = |port| UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    tcp(base) && tcp(base + 1) && tcp(base + 2) && udp(base + 2) && udp(base + 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_get_ports_of_their_own() {
        let (one, other) = (find(3).expect("free ports"), find(3).expect("free ports"));
        let mut ports: Vec<u16> = one
            .iter()
            .chain(&other)
            .flat_map(|each| [each.public.port(), each.admin.port(), each.gossip.port()])
            .collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 18);
    }
}
