//! Strangers on the ports, replicas with the wrong key or the wrong name: nothing they do is believed.

mod support;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use chitchat::transport::UdpTransport;
use chitchat::{ChitchatConfig, ChitchatId, FailureDetectorConfig, ProtocolVersion, spawn_chitchat};
use gossip::{ClusterKey, GossipEvent, Outcome, Rejection};
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};
use support::{Replica, acquaint, load, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

const LOOPBACK: ([u8; 4], u16) = ([127, 0, 0, 1], 0);

fn key(byte: u8) -> ClusterKey {
    ClusterKey::from_bytes([byte; 32])
}

fn next_port(mut address: SocketAddr) -> SocketAddr {
    address.set_port(address.port() + 1);
    address
}

/// What a replica knows of the others, apart from their ages.
fn known(replica: &Replica) -> Vec<(String, u64, Option<SocketAddr>)> {
    let peers = replica.gossip().peers();
    peers.into_iter().map(|peer| (peer.replica.to_string(), peer.generation, peer.address)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_changes_nothing_and_is_counted_by_cause() {
    let cluster = support::cluster(2).await;
    let (a, b) = (&cluster[0], &cluster[1]);
    b.facts.set_load(vec![load(1, 5)]);
    until("the load arrives", || a.heard.load_of("b") == vec![load(1, 5)]).await;
    let before = known(a);
    let stranger = UdpSocket::bind(SocketAddr::from(LOOPBACK)).await.expect("a port is free");
    let mut rng = SmallRng::seed_from_u64(7);
    let ports = [a.gossip().address(), next_port(a.gossip().address())];
    for round in 0..100 {
        for to in ports {
            let mut noise = vec![0; rng.random_range(0..1_200)];
            rng.fill_bytes(&mut noise);
            // Not by chance one of ours.
            if let Some(first) = noise.first_mut() {
                *first = 0;
            }
            stranger.send_to(&noise, to).await.expect("loopback takes it");
            stranger.send_to(&vec![7; 1_201 + 400 * round], to).await.expect("loopback takes it");
            stranger.send_to(b"GV\x01\x00\x00", to).await.expect("loopback takes it");
            stranger
                .send_to(&[b"GV\x09".as_slice(), &[0; 40]].concat(), to)
                .await
                .expect("loopback takes it");
            stranger
                .send_to(&[b"GV\x01\x00".as_slice(), &[0; 40]].concat(), to)
                .await
                .expect("loopback takes it");
        }
        // At the pace of the reader, so that the kernel drops none.
        let counted = || a.gossip().stats().rejected.iter().map(|(_, count)| count).sum::<u64>();
        until("all were counted", || counted() >= 10 * (round as u64 + 1)).await;
    }
    let stats = a.gossip().stats();
    assert_eq!(stats.rejected(Rejection::Foreign), 200);
    assert_eq!(stats.rejected(Rejection::Oversized), 200);
    assert_eq!(stats.rejected(Rejection::Truncated), 200);
    assert_eq!(stats.rejected(Rejection::Version), 200);
    assert_eq!(stats.rejected(Rejection::Malformed), 200, "part 0 of 0");
    assert_eq!(known(a), before);
    let beats = a.heard.beats_of("b");
    until("the other still beats", || a.heard.beats_of("b") > beats + 3).await;
    assert_eq!(a.heard.load_of("b"), vec![load(1, 5)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_library_process_can_not_take_a_replicas_name() {
    let cluster = support::cluster(2).await;
    let (a, b) = (&cluster[0], &cluster[1]);
    let before = known(a);
    let (own, generation) = (b.gossip().address(), before[0].1);
    let mut thieves = Vec::new();
    for (target, name) in [(a.gossip().address(), "pulse"), (next_port(a.gossip().address()), "ledger")] {
        let config = ChitchatConfig {
            chitchat_id: ChitchatId::new("b", generation + 1, own),
            cluster_id: format!("grapevine/{name}"),
            gossip_interval: Duration::from_millis(20),
            listen_addr: LOOPBACK.into(),
            seed_nodes: vec![target.to_string()],
            failure_detector_config: FailureDetectorConfig::default(),
            marked_for_deletion_grace_period: Duration::from_secs(60),
            catchup_callback: None,
            extra_liveness_predicate: None,
            protocol_version: ProtocolVersion::V1,
        };
        thieves.push(spawn_chitchat(config, Vec::new(), &UdpTransport).await.expect("it starts"));
    }
    until("it was turned away often", || a.gossip().stats().rejected(Rejection::Foreign) >= 50).await;
    assert_eq!(known(a), before);
    let beats = a.heard.beats_of("b");
    until("the true one still beats", || a.heard.beats_of("b") > beats + 3).await;
    assert_eq!(a.heard.generation_of("b"), generation);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_key_nobody_joins_and_with_either_of_two_anyone_does() {
    let a = Replica::start("a", &[], |config| config.keys = vec![key(1), key(2)]).await;
    let b = Replica::start("b", &[&a], |config| config.keys = vec![key(2), key(1)]).await;
    let c = Replica::start("c", &[&a], |config| config.keys = vec![key(1)]).await;
    acquaint(&[&a, &b]).await;
    acquaint(&[&a, &c]).await;
    b.facts.set_load(vec![load(1, 5)]);
    b.facts.add_records(vec![support::place(1, 3)]);
    b.gossip().nudge();
    until("sealed facts arrive", || a.heard.load_of("b") == vec![load(1, 5)]).await;
    until("sealed records arrive", || a.heard.ledger_of("b").len() == 1).await;
    let before = known(&a);
    let short = Duration::from_millis(800);
    let keyless = Replica::start("x", &[&a], |config| config.snapshot_wait = short).await;
    let stranger = Replica::start("y", &[&a], |config| {
        config.keys = vec![key(9)];
        config.snapshot_wait = short;
    })
    .await;
    until("they gave up", || {
        keyless.heard.outcome() == Some(Outcome::Unreachable)
            && stranger.heard.outcome() == Some(Outcome::Unreachable)
    })
    .await;
    let stats = a.gossip().stats();
    assert!(stats.rejected(Rejection::Unsealed) > 0);
    assert!(stats.rejected(Rejection::Seal) > 0);
    let names = |peers: Vec<(String, u64, Option<SocketAddr>)>| -> HashSet<String> {
        peers.into_iter().map(|(name, ..)| name).collect()
    };
    assert_eq!(names(known(&a)), names(before));
    assert!(keyless.gossip().peers().is_empty());
    assert!(stranger.gossip().peers().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn datagrams_played_again_are_not_believed() {
    let keyed = |config: &mut gossip::GossipConfig| config.keys = vec![key(1)];
    let a = Replica::start("a", &[], keyed).await;
    let address = a.gossip().address();
    let tap = Tap::open(address).await;
    let seeds = vec![tap.address.to_string()];
    let b = Replica::try_start("b", seeds, LOOPBACK.into(), &keyed).await.expect("gossip starts");
    acquaint(&[&a, &b]).await;
    until("enough was overheard", || tap.overheard.lock().len() >= 5).await;
    b.kill().await;
    until("it is silent", || {
        a.gossip().peers().iter().all(|p| p.age.is_some_and(|age| age.as_millis() > 600))
    })
    .await;
    let beats = a.heard.beats_of("b");
    let overheard = tap.overheard.lock().clone();
    let thief = UdpSocket::bind(SocketAddr::from(LOOPBACK)).await.expect("a port is free");
    let again = async |to: &Replica| {
        for (port, datagram) in &overheard {
            let to = if *port == 0 { to.gossip().address() } else { next_port(to.gossip().address()) };
            thief.send_to(datagram, to).await.expect("loopback takes it");
        }
    };
    again(&a).await;
    until("they were recognised", || {
        a.gossip().stats().rejected(Rejection::Replayed) as usize >= overheard.len() / 2
    })
    .await;
    assert_eq!(a.heard.beats_of("b"), beats);

    // One that has never heard of b can't recognise them, but asks who sends them.
    a.kill().await;
    let later = Replica::start_again("a", &[], address, keyed).await;
    again(&later).await;
    until("it asked", || later.gossip().stats().rejected(Rejection::Unproven) > 0).await;
    again(&later).await;
    until("it joined alone", || later.heard.outcome() == Some(Outcome::Alone)).await;
    assert!(later.gossip().peers().is_empty());
    assert_eq!(later.heard.events(), vec![GossipEvent::SnapshotDone(Outcome::Alone)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_live_replicas_with_one_name_are_reported_and_the_later_one_counts() {
    let a = Replica::start("a", &[], |_| ()).await;
    let first = Replica::start("b", &[&a], |config| config.generation = Some(100)).await;
    acquaint(&[&a, &first]).await;
    let second = Replica::start("b", &[&a], |config| config.generation = Some(200)).await;
    second.facts.set_load(vec![load(1, 2)]);
    first.facts.set_load(vec![load(1, 1)]);
    until("the first notices", || first.heard.clashes() > 0).await;
    until("the second notices", || second.heard.clashes() > 0).await;
    assert_eq!(
        first.gossip().stats().restarts + second.gossip().stats().restarts,
        0,
        "they do not outdo each other"
    );
    until("the later one counts", || a.heard.load_of("b") == vec![load(1, 2)]).await;
    assert_eq!(a.heard.clashes(), 0);
    until("the earlier one is turned away", || a.gossip().stats().rejected(Rejection::Outlived) > 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_whose_clock_went_back_begins_anew_above_its_past() {
    let a = Replica::start("a", &[], |_| ()).await;
    let past = Replica::start("b", &[&a], |config| config.generation = Some(500)).await;
    acquaint(&[&a, &past]).await;
    past.kill().await;
    let b = Replica::start("b", &[&a], |config| config.generation = Some(100)).await;
    b.facts.set_load(vec![load(1, 3)]);
    until("it is believed", || a.heard.load_of("b") == vec![load(1, 3)]).await;
    assert_eq!(a.heard.generation_of("b"), 501);
    assert_eq!(b.gossip().stats().restarts, 1);
    b.facts.add_records(vec![support::place(1, 1)]);
    b.gossip().nudge();
    until("its ledger, too", || a.heard.ledger_of("b").len() == 1).await;
    assert_eq!(b.heard.clashes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nonsense_at_the_pull_port_is_refused() {
    let a = Replica::start("a", &[], |config| config.keys = vec![key(1)]).await;
    let table = [
        ("GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(), "HTTP/1.1 404"),
        ("POST /pull HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nabc".to_owned(), "HTTP/1.1 403"),
        (
            format!("POST /pull HTTP/1.1\r\nhost: a\r\ncontent-length: 2000\r\n\r\n{}", "a".repeat(2_000)),
            "HTTP/1.1 413",
        ),
        ("\0\0\0 not http\r\n\r\n".to_owned(), "HTTP/1.1 400"),
    ];
    for (request, reply) in table {
        let mut stream = TcpStream::connect(a.gossip().address()).await.expect("it listens");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        let mut start = [0; 12];
        stream.read_exact(&mut start).await.expect("it answers");
        assert_eq!(String::from_utf8_lossy(&start), reply, "{request:.60}");
    }
    let stats = a.gossip().stats();
    assert_eq!(stats.pulls_served, 0);
    let causes = [Rejection::Foreign, Rejection::Truncated, Rejection::Oversized];
    assert_eq!(causes.map(|cause| stats.rejected(cause)), [1, 1, 1]);
}

/// There is room for a cluster's worth of pulls: who connects and asks for nothing must not take it for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_without_a_request_do_not_keep_others_from_pulling() {
    let a = Replica::start("a", &[], |config| config.keys = vec![key(1)]).await;
    let mut idle = Vec::new();
    for _ in 0..64 {
        idle.push(TcpStream::connect(a.gossip().address()).await.expect("it listens"));
    }
    let mut stream = TcpStream::connect(a.gossip().address()).await.expect("it listens");
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("it reads");
    let mut start = [0; 12];
    let answered = tokio::time::timeout(Duration::from_secs(20), stream.read_exact(&mut start)).await;
    answered.expect("there is room again before an idle connection's whole time").expect("it answers");
    assert_eq!(&start, b"HTTP/1.1 404");
}

/// Port (0 or 1) and datagram.
type Overheard = (usize, Vec<u8>);

/// Stands between a replica and its seed, passes all on and writes down what the replica said.
struct Tap {
    address: SocketAddr,
    overheard: Arc<Mutex<Vec<Overheard>>>,
}

impl Tap {
    async fn open(seed: SocketAddr) -> Self {
        let overheard: Arc<Mutex<Vec<Overheard>>> = Arc::default();
        let (first, second) = loop {
            let first = UdpSocket::bind(SocketAddr::from(LOOPBACK)).await.expect("a port is free");
            let next = next_port(first.local_addr().expect("it is bound"));
            if let Ok(second) = UdpSocket::bind(next).await {
                break (first, second);
            }
        };
        let address = first.local_addr().expect("it is bound");
        for (port, socket, seed) in [(0, first, seed), (1, second, next_port(seed))] {
            let overheard = Arc::clone(&overheard);
            tokio::spawn(async move {
                let mut buffer = vec![0; 2_000];
                let mut client = None;
                while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                    let datagram = &buffer[..length];
                    if from == seed {
                        if let Some(client) = client {
                            let _ = socket.send_to(datagram, client).await;
                        }
                    } else {
                        client = Some(from);
                        overheard.lock().push((port, datagram.to_vec()));
                        let _ = socket.send_to(datagram, seed).await;
                    }
                }
            });
        }
        Self { address, overheard }
    }
}
