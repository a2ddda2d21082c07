//! What was missed is made up for, even if the one who said it is gone.

mod support;

use std::sync::Arc;

use gossip::{Faults, FrameKind, GossipEvent};
use routing::facts::LedgerRecord;
use support::{Replica, acquaint, load, place, until};

/// The records of the snapshots that a replica was told.
fn snapshots(replica: &Replica) -> Vec<LedgerRecord> {
    let events = replica.heard.events().into_iter();
    let pages = events.filter_map(|event| match event {
        GossipEvent::Snapshot { records, .. } => Some(records),
        _ => None,
    });
    pages.flatten().collect()
}

/// How far a replica has another's ledger.
fn sequence(replica: &Replica, of: &str) -> u64 {
    let peers = replica.gossip().peers();
    peers.iter().find(|peer| peer.replica.as_str() == of).map_or(0, |peer| peer.ledger_sequence)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_no_push_could_carry_come_in_slots() {
    let faults = Arc::new(Faults::new(1));
    let a = Replica::start("a", &[], |config| config.faults = Some(Arc::clone(&faults))).await;
    let b = Replica::start("b", &[&a], |config| config.push_bytes_per_second_max = 1).await;
    acquaint(&[&a, &b]).await;
    faults.drop_ratio(FrameKind::Pull, 1.0);
    let records: Vec<_> = (0..30).map(|n| place(n, 90)).collect();
    let mut made = Vec::new();
    // Ten at a time fit the ring.
    for some in records.chunks(10) {
        b.facts.add_records(some.to_vec());
        b.gossip().nudge();
        made.extend(some.to_vec());
        until("they arrive", || a.heard.ledger_of("b").len() == made.len()).await;
    }
    assert!(b.gossip().stats().pushes_deferred > 0);
    assert_eq!(a.gossip().stats().records_missed, 0);
    until("without a gap", || sequence(&a, "b") == 30).await;
    b.facts.set_load(vec![load(1, 4)]);
    until("so does the load, with the pulse", || a.heard.load_of("b") == vec![load(1, 4)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_are_no_longer_kept_cost_a_snapshot() {
    let faults = Arc::new(Faults::new(2));
    let a = Replica::start("a", &[], |_| ()).await;
    let b = Replica::start("b", &[&a], |config| {
        config.faults = Some(Arc::clone(&faults));
        config.log_bytes_max = 2_000;
    })
    .await;
    acquaint(&[&a, &b]).await;
    faults.drop_ratio(FrameKind::Push, 1.0);
    faults.drop_ratio(FrameKind::Ledger, 1.0);
    let records: Vec<_> = (0..50).map(|n| place(n, 20)).collect();
    b.facts.set_index(records.clone());
    b.facts.add_records(records.clone());
    b.gossip().nudge();
    until("they were taken", || b.facts.is_drained()).await;
    faults.heal();
    until("the snapshot makes up for them", || sequence(&a, "b") == 50).await;
    assert_eq!(snapshots(&a), records);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_replica_told_only_some_is_asked_of_them() {
    let faults = Arc::new(Faults::new(3));
    let a = Replica::start("a", &[], |_| ()).await;
    let b = Replica::start("b", &[&a], |_| ()).await;
    let c = Replica::start("c", &[&a], |config| config.faults = Some(Arc::clone(&faults))).await;
    acquaint(&[&a, &b, &c]).await;
    // a hears c's head through b, but can neither be pushed to nor pull.
    let cut = Arc::new(Faults::new(4));
    let d = Replica::start("d", &[&a], |config| config.faults = Some(Arc::clone(&cut))).await;
    acquaint(&[&b, &c, &d]).await;
    faults.cut(d.gossip().address());
    cut.cut(c.gossip().address());
    let records: Vec<_> = (0..5).map(|n| place(n, 20)).collect();
    b.facts.set_index(records.clone());
    a.facts.set_index(records.clone());
    c.facts.add_records(records.clone());
    c.gossip().nudge();
    until("b has them", || sequence(&b, "c") == 5).await;
    until("d tried in vain", || d.gossip().stats().pulls_failed > 0).await;
    c.kill().await;
    until("d knows what it missed", || sequence(&d, "c") == 5).await;
    assert_eq!(snapshots(&d)[..5], records);
    assert!(d.heard.ledger_of("c").is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ledger_that_is_not_the_one_received_is_taken_afresh() {
    let a = Replica::start("a", &[], |_| ()).await;
    let first = Replica::start("b", &[&a], |config| config.generation = Some(7)).await;
    acquaint(&[&a, &first]).await;
    first.facts.add_records((0..5).map(|n| place(n, 3)).collect());
    first.gossip().nudge();
    until("they arrive", || sequence(&a, "b") == 5).await;
    first.kill().await;
    // Not what replicas do: another life under the same generation.
    let second = Replica::start("b", &[&a], |config| config.generation = Some(7)).await;
    let index = vec![place(77, 2)];
    second.facts.set_index(index.clone());
    second.facts.add_records((10..17).map(|n| place(n, 3)).collect());
    until("it is noticed", || a.gossip().stats().ledger_diverged >= 1).await;
    until("the new one is taken", || snapshots(&a) == index).await;
    let last = place(99, 1);
    second.facts.add_records(vec![last.clone()]);
    until("it goes on from there", || a.heard.ledger_of("b").last() == Some(&last)).await;
    until("without another gap", || sequence(&a, "b") == 8).await;
    // A head that was under way while the new one was fetched may have said it once more.
    assert!(a.gossip().stats().ledger_diverged <= 2);
}
