//! Replicas on loopback: they find each other, tell each other, and outlive each other.

mod support;

use std::sync::Arc;

use gossip::{Faults, FrameKind, GossipEvent, Outcome};
use routing::facts::StagedRow;
use support::{Facts, Replica, endpoint, load, place, until};

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
    support::acquaint(&[&b, &c]).await;
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
    support::acquaint(&[&a, &b]).await;
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
    support::acquaint(&[&a, &b]).await;
    faults.drop_ratio(FrameKind::Push, 1.0);
    faults.drop_ratio(FrameKind::Ledger, 1.0);
    let lost: Vec<_> = (0..50).map(|n| place(n, 20)).collect();
    let before = b.gossip().stats().pushes;
    b.facts.add_records(lost.clone());
    b.gossip().nudge();
    // Counted once they are out: what is sent after the heal would come before the others.
    until("they were sent and lost", || b.gossip().stats().pushes > before && b.facts.is_drained()).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_endpoints_at_each_of_three_replicas_reach_a_newcomer() {
    let cluster = support::cluster(3).await;
    let mut busy: Vec<_> = (0..1_000).map(|n| load(n, 300 + n)).collect();
    busy.sort_unstable_by_key(|row| row.endpoint);
    for replica in &cluster {
        replica.facts.set_load(busy.clone());
    }
    let seeds: Vec<_> = cluster.iter().collect();
    let newcomer = Replica::start("d", &seeds, |_| ()).await;
    for replica in &cluster {
        until("all rows arrive", || newcomer.heard.load_of(&replica.name()) == busy).await;
    }
    assert_eq!(newcomer.gossip().stats().values_oversized, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_fifth_of_all_datagrams_lost_everything_still_arrives() {
    let lossy = |seed| {
        let faults = Arc::new(Faults::new(seed));
        for kind in [FrameKind::Pulse, FrameKind::Ledger, FrameKind::Push, FrameKind::Prove] {
            faults.drop_ratio(kind, 0.2);
        }
        faults.delay(std::time::Duration::from_millis(3));
        faults
    };
    let key = gossip::ClusterKey::from_bytes([3; 32]);
    let keyed = |config: &mut gossip::GossipConfig, seed| {
        config.faults = Some(lossy(seed));
        config.keys = vec![key.clone()];
    };
    let a = Replica::start("a", &[], |config| keyed(config, 1)).await;
    let b = Replica::start("b", &[&a], |config| keyed(config, 2)).await;
    support::acquaint(&[&a, &b]).await;
    let mut records = Vec::new();
    for n in 0..200 {
        b.facts.set_load(vec![load(n % 7, 1 + n), load(9, n)]);
        let record = place(u64::from(n), 1 + u64::from(n) % 40);
        records.push(record.clone());
        b.facts.add_records(vec![record]);
        b.gossip().nudge();
        tokio::task::yield_now().await;
    }
    let mut expected = vec![load(199 % 7, 200), load(9, 199)];
    expected.sort_unstable_by_key(|row| row.endpoint);
    until("the load is the last one", || a.heard.load_of("b") == expected).await;
    let order = |records: &[routing::facts::LedgerRecord]| {
        let mut texts: Vec<_> = records.iter().map(|record| format!("{record:?}")).collect();
        texts.sort_unstable();
        texts
    };
    until("every record arrived", || a.heard.ledger_of("b").len() >= records.len()).await;
    assert_eq!(order(&a.heard.ledger_of("b")), order(&records), "each once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_cut_apart_heals_by_itself() {
    let faults: Vec<_> = (0..3).map(|seed| Arc::new(Faults::new(seed))).collect();
    let mut cluster: Vec<Replica> = Vec::new();
    for (name, faults) in ["a", "b", "c"].iter().zip(&faults) {
        let seeds: Vec<_> = cluster.iter().take(1).collect();
        let replica = Replica::start(name, &seeds, |config| config.faults = Some(Arc::clone(faults))).await;
        cluster.push(replica);
    }
    support::acquaint(&cluster.iter().collect::<Vec<_>>()).await;
    let address = |n: usize| cluster[n].gossip().address();
    for other in [1, 2] {
        faults[0].cut(address(other));
        faults[other].cut(address(0));
    }
    let silent = |at: usize, name: &str| {
        let peers = cluster[at].gossip().peers();
        peers.iter().any(|p| p.replica.as_str() == name && p.age.is_some_and(|age| age.as_millis() > 3_200))
    };
    until("they are silent to each other", || silent(0, "b") && silent(0, "c") && silent(1, "a")).await;
    for (replica, number) in cluster.iter().zip(1..) {
        replica.facts.set_load(vec![load(1, number)]);
        replica.facts.add_records((0..30).map(|n| place(u64::from(number) * 100 + n, 10)).collect());
        replica.gossip().nudge();
    }
    until("the two go on", || cluster[1].heard.load_of("c") == vec![load(1, 3)]).await;
    assert!(cluster[0].heard.load_of("b").is_empty());
    faults.iter().for_each(|faults| faults.heal());
    for replica in &cluster {
        for (name, number) in ["a", "b", "c"].iter().zip(1..) {
            if replica.name() != *name {
                until("the load arrives", || replica.heard.load_of(name) == vec![load(1, number)]).await;
                until("the ledger arrives", || replica.heard.ledger_of(name).len() == 30).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_reads_its_events_late_still_ends_at_the_newest() {
    let a = Replica::start("a", &[], |_| ()).await;
    let config = |name| {
        let mut config = gossip::GossipConfig::new(routing::ReplicaId::new(name), ([127, 0, 0, 1], 0).into());
        config.seeds = vec![a.gossip().address().to_string()];
        config
    };
    let (events, mut late) = tokio::sync::mpsc::channel(1);
    let slow = gossip::start(config("b"), Arc::new(Facts::default()), events).await.expect("it starts");
    until("a knows b", || a.heard.beats_of("b") > 0).await;
    for running in 1..=300 {
        let pushes = a.gossip().stats().pushes;
        a.facts.set_load(vec![load(running % 50, running)]);
        a.gossip().nudge();
        until("it was pushed", || a.gossip().stats().pushes > pushes).await;
    }
    let expected = vec![load(0, 300)];
    let mut rows = Vec::new();
    let reading = async {
        while rows != expected {
            match late.recv().await.expect("gossip runs") {
                GossipEvent::Pulse { pulse, .. } => rows = pulse.load,
                GossipEvent::Load { push, .. } => {
                    for row in push.rows {
                        rows.retain(|known: &routing::facts::LoadRow| known.endpoint != row.endpoint);
                        if row.running > 0 {
                            rows.push(row);
                        }
                    }
                }
                _ => {}
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), reading).await.expect("it ends at the newest");
    drop(slow);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joiner_whose_seeds_do_not_answer_goes_on_and_says_so() {
    let nobody = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port is free");
    let seeds =
        vec![nobody.local_addr().expect("it is bound").to_string(), "no-such-host.invalid:7946".to_owned()];
    let shorten = |config: &mut gossip::GossipConfig| {
        config.snapshot_wait = std::time::Duration::from_millis(300);
    };
    let a =
        Replica::try_start("a", seeds, ([127, 0, 0, 1], 0).into(), &shorten).await.expect("gossip starts");
    until("it goes on", || a.heard.outcome() == Some(Outcome::Unreachable)).await;
    until("the name was tried", || a.gossip().stats().seed_lookups_failed > 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_is_its_own_only_seed_is_alone() {
    let free = Replica::start("x", &[], |_| ()).await;
    let address = free.gossip().address();
    free.kill().await;
    let own = |config: &mut gossip::GossipConfig| config.seeds = vec![address.to_string()];
    let a = Replica::start_again("a", &[], address, own).await;
    until("it is alone", || a.heard.outcome() == Some(Outcome::Alone)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pulse_too_large_to_gossip_is_counted_and_holds_nothing_up() {
    let cluster = support::cluster(2).await;
    let (a, b) = (&cluster[0], &cluster[1]);
    b.facts.set_load((0..26_000).map(|n| load(n, 1 + n)).collect());
    until("values were refused", || b.gossip().stats().values_oversized > 0).await;
    b.facts.set_load(vec![load(1, 5)]);
    let arrived = || a.heard.pulse_of("b").is_some_and(|pulse| pulse.load == vec![load(1, 5)]);
    until("what fits arrives", arrived).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_whose_seed_is_itself_by_another_address_is_alone() {
    let free = Replica::start("x", &[], |_| ()).await;
    let address = free.gossip().address();
    free.kill().await;
    let own = |config: &mut gossip::GossipConfig| {
        config.seeds = vec![address.to_string()];
        config.advertise = Some(([127, 0, 0, 2], 0).into());
        config.snapshot_wait = std::time::Duration::from_secs(600);
    };
    let a = Replica::start_again("a", &[], address, own).await;
    until("its own greeting came back", || a.gossip().stats().rejected(gossip::Rejection::Own) > 0).await;
    until("it goes on", || a.heard.outcome() == Some(Outcome::Alone)).await;
    assert!(a.gossip().peers().is_empty());
    assert_eq!(a.heard.clashes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_staged_is_told_to_the_heirs_alone_though_some_of_it_is_lost_and_taken_back() {
    let faults = Arc::new(Faults::new(5));
    let a = Replica::start("a", &[], |config| config.faults = Some(Arc::clone(&faults))).await;
    let b = Replica::start("b", &[&a], |_| ()).await;
    let c = Replica::start("c", &[&a], |_| ()).await;
    support::acquaint(&[&a, &b, &c]).await;
    let rows: Vec<_> = (1..=40)
        .map(|number| {
            let token = (number != 3).then(|| vec![number as u8; 400]);
            Arc::new(StagedRow { number, prefill: endpoint(number as u32), token })
        })
        .collect();
    faults.drop_ratio(FrameKind::Staged, 0.2);
    a.facts.set_staged(rows.clone(), &["b"]);
    a.gossip().nudge();
    let numbers: Vec<u64> = (1..=40).collect();
    // A row is lost for good once in a hundred and twenty-five times, so of forty rarely more than two.
    until("nearly all has come", || {
        let (held, told) = b.heard.staged_of("a");
        held == numbers && told.len() >= 36
    })
    .await;
    let (_, told) = b.heard.staged_of("a");
    assert!(told.iter().all(|row| rows.iter().any(|staged| **staged == *row)));
    faults.heal();
    a.facts.set_staged(vec![Arc::clone(&rows[6])], &["b"]);
    a.gossip().nudge();
    until("the others are over", || b.heard.staged_of("a").0 == [7]).await;
    assert_eq!(c.heard.staged_of("a").0, Vec::<u64>::new(), "no heir");
    a.facts.set_staged(vec![Arc::clone(&rows[6])], &["c"]);
    until("another heir is told all", || c.heard.staged_of("a").1 == [StagedRow::clone(&rows[6])]).await;
}
