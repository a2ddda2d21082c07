//! Replicas on loopback: they find each other, tell each other, and outlive each other.

mod support;

use std::sync::Arc;

use gossip::{Faults, FrameKind, GossipEvent, Outcome};
use support::{Facts, Replica, load, place, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_learn_of_each_other() {
    let cluster = support::cluster(3).await;
    for replica in &cluster {
        replica.facts.set_load(vec![load(replica.number(), 1 + replica.number())]);
    }
    for replica in &cluster {
        for other in cluster.iter().filter(|other| other.name() != replica.name()) {
            let expected = vec![load(other.number(), 1 + other.number())];
            until("the load of the other arrives", || replica.heard.load_of(&other.name()) == expected).await;
            until("the other is alive", || replica.heard.beats_of(&other.name()) > 3).await;
        }
        assert_eq!(replica.gossip().peers().len(), 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pushed_row_arrives_without_the_boards() {
    let faults = Arc::new(Faults::new(1));
    let mut cluster = support::cluster(2).await;
    let b = cluster.pop().expect("two");
    let c = Replica::start("c", &[&b], |config| config.faults = Some(Arc::clone(&faults))).await;
    until("they know each other", || b.heard.beats_of("c") > 1 && c.heard.beats_of(&b.name()) > 1).await;
    faults.drop_ratio(FrameKind::Pulse, 1.0);
    faults.drop_ratio(FrameKind::Ledger, 1.0);
    for running in [3, 0, 5] {
        c.facts.set_load(if running == 0 { vec![] } else { vec![load(7, running)] });
        c.gossip().nudge();
        let expected = if running == 0 { vec![] } else { vec![load(7, running)] };
        until("the pushed row arrives", || b.heard.load_of("c") == expected).await;
    }
    c.facts.add_records(vec![place(1, 3)]);
    c.gossip().nudge();
    until("the pushed record arrives", || b.heard.ledger_of("c") == vec![place(1, 3)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_push_is_made_up_by_the_pulse() {
    let faults = Arc::new(Faults::new(2));
    let a = Replica::start("a", &[], |_| ()).await;
    let b = Replica::start("b", &[&a], |config| config.faults = Some(Arc::clone(&faults))).await;
    until("they know each other", || a.heard.beats_of("b") > 1 && b.heard.beats_of("a") > 1).await;
    faults.drop_ratio(FrameKind::Push, 1.0);
    b.facts.set_load(vec![load(1, 4)]);
    b.gossip().nudge();
    until("the pulse brings the row", || a.heard.load_of("b") == vec![load(1, 4)]).await;
    b.facts.set_load(vec![]);
    until("and takes it away", || a.heard.load_of("b").is_empty()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_in_the_ledger_is_pulled() {
    let faults = Arc::new(Faults::new(3));
    let a = Replica::start("a", &[], |_| ()).await;
    let b = Replica::start("b", &[&a], |config| config.faults = Some(Arc::clone(&faults))).await;
    until("they know each other", || a.heard.beats_of("b") > 1 && b.heard.beats_of("a") > 1).await;
    faults.drop_ratio(FrameKind::Push, 1.0);
    faults.drop_ratio(FrameKind::Ledger, 1.0);
    let lost: Vec<_> = (0..50).map(|n| place(n, 20)).collect();
    b.facts.add_records(lost.clone());
    b.gossip().nudge();
    until("they were sent and lost", || b.gossip().stats().pushes > 0 && b.facts.is_drained()).await;
    faults.heal();
    until("all were pulled", || a.heard.ledger_of("b").len() >= lost.len()).await;
    assert_eq!(a.heard.ledger_of("b"), lost);
    assert!(a.gossip().stats().records_missed >= 50);
    assert!(b.gossip().stats().pulls_served >= 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joiner_has_the_whole_index_before_it_is_done() {
    let a = Replica::start("a", &[], |_| ()).await;
    until("it is done alone", || a.heard.outcome() == Some(Outcome::Alone)).await;
    let index: Vec<_> = (0..3_000).map(|n| place(n, 4)).collect();
    a.facts.set_index(index.clone());
    let b = Replica::start("b", &[&a], |_| ()).await;
    until("it joined", || b.heard.outcome().is_some()).await;
    let joined = Outcome::Joined { from: routing::ReplicaId::new("a"), records: 3_000 };
    assert_eq!(b.heard.outcome(), Some(joined));
    let events = b.heard.events();
    let done = events.iter().position(|event| matches!(event, GossipEvent::SnapshotDone(_)));
    let mut records = Vec::new();
    for event in &events[..done.expect("it is there")] {
        if let GossipEvent::Snapshot { records: page, .. } = event {
            records.extend(page.iter().cloned());
        }
    }
    assert_eq!(records, index);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn goodbye_is_heard_and_a_successor_is_accepted() {
    let mut cluster = support::cluster(3).await;
    let c = cluster.pop().expect("three");
    let (name, address) = (c.name(), c.gossip().address());
    let first = cluster[0].heard.generation_of(&name);
    c.goodbye().await;
    for replica in &cluster {
        until("goodbye is heard", || replica.heard.goodbyes_of(&name) == 1).await;
    }
    let seeds: Vec<_> = cluster.iter().collect();
    let again = Replica::start_again(&name, &seeds, address, |_| ()).await;
    again.facts.set_load(vec![load(1, 9)]);
    for replica in &cluster {
        until("the new one is heard", || replica.heard.load_of(&name) == vec![load(1, 9)]).await;
        assert!(replica.heard.generation_of(&name) > first);
        assert_eq!(replica.heard.goodbyes_of(&name), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_replica_beats_no_more_and_its_port_refuses() {
    let mut cluster = support::cluster(3).await;
    let c = cluster.pop().expect("three");
    let name = c.name();
    c.kill().await;
    for replica in &cluster {
        until("its port refuses", || replica.heard.refusals_of(&name) > 0).await;
    }
    // Gossip that was under way may still bring its last heartbeats, but no others.
    let mut beats = 0;
    until("it beats no more", || {
        let now = cluster.iter().map(|replica| replica.heard.beats_of(&name)).sum();
        let age = cluster[0].gossip().peers().iter().find(|p| p.replica.as_str() == name).and_then(|p| p.age);
        std::mem::replace(&mut beats, now) == now && age.is_some_and(|age| age.as_millis() > 1_500)
    })
    .await;
    assert!(cluster.iter().all(|replica| replica.heard.goodbyes_of(&name) == 0));
    let facts: &Facts = &cluster[0].facts;
    facts.set_load(vec![load(2, 2)]);
    until("the others go on", || cluster[1].heard.load_of(&cluster[0].name()) == vec![load(2, 2)]).await;
}
