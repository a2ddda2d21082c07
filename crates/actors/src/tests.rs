use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use routing::endpoint::{Endpoint, EndpointSpec, Standing};
use routing::facts::{LoadRow, ObservedRow, Pulse, StagedPush, StagedRow};
use routing::settings::Settings;
use routing::staged::Orphan;
use routing::{ReplicaId, Router, SessionKey};
use tokio::sync::mpsc;

use crate::*;

/// Status and body, or why there is none.
type Answer = Result<(u16, &'static str), ProbeError>;

/// Engines as a table of answers, and a count of who was asked for what.
#[derive(Default)]
struct Engines {
    answers: Mutex<HashMap<&'static str, Answer>>,
    asked: Mutex<HashMap<String, u32>>,
}

impl Engines {
    fn answer(&self, path: &'static str, answer: Answer) {
        self.answers.lock().insert(path, answer);
    }

    fn asked(&self, what: &str) -> u32 {
        self.asked.lock().get(what).copied().unwrap_or(0)
    }
}

#[async_trait]
impl EngineProbe for Engines {
    async fn get(&self, endpoint: &EndpointSpec, path: &str, _: Duration) -> Result<ProbeReply, ProbeError> {
        *self.asked.lock().entry(format!("{}{path}", endpoint.url)).or_default() += 1;
        let (status, body) = self.answers.lock().get(path).copied().unwrap_or(Ok((404, "")))?;
        Ok(ProbeReply { status, body: Bytes::from_static(body.as_bytes()) })
    }
}

/// What fell to this replica.
#[derive(Default)]
struct Left(Mutex<Vec<Orphan>>);

impl Heir for Left {
    fn inherit(&self, orphans: Vec<Orphan>) {
        self.0.lock().extend(orphans);
    }
}

struct Rig {
    router: Arc<Router>,
    engines: Arc<Engines>,
    left: Arc<Left>,
    actors: Actors,
    peers: mpsc::Sender<PeerEvent>,
    clock: Clock,
}

const METRICS: &str =
    "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nprocess_start_time_seconds 7\n";

fn rig(urls: &[&str], settings: ActorSettings) -> Rig {
    let router = Router::new(ReplicaId::new("a"), 1, Settings::default()).expect("defaults are good");
    let (router, clock) = (Arc::new(router), Clock::start());
    let specs = urls.iter().map(|url| EndpointSpec::at(url).expect("a URL")).collect();
    router.set_endpoints(specs, clock.now());
    let engines = Arc::new(Engines::default());
    engines.answer("/health", Ok((200, "")));
    engines.answer("/v1/models", Ok((200, r#"{"data":[{"id":"m"}]}"#)));
    engines.answer("/metrics", Ok((200, METRICS)));
    let (peers, heard) = mpsc::channel(64);
    let probe: Arc<dyn EngineProbe> = engines.clone();
    let left: Arc<Left> = Arc::default();
    let heir: Arc<dyn Heir> = left.clone();
    let surroundings = Surroundings { router: Arc::clone(&router), clock, probe, heir, peers: heard };
    Rig { router, engines, left, actors: Actors::start(surroundings, settings), peers, clock }
}

/// Waits until `condition` holds; fails the test after 10 s.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[actix::test]
async fn an_endpoint_is_probed_asked_for_its_models_and_scraped() {
    let rig = rig(&["http://e:1"], ActorSettings::default());
    let view = rig.router.view();
    let endpoint = Arc::clone(&view.endpoints[0]);
    until("ready", || endpoint.standing() == Standing::Ready).await;
    until("models", || rig.router.models().iter().any(|model| model.id == "m")).await;
    until("scraped", || endpoint.observed().is_some_and(|seen| seen.waiting == 2 && seen.running == 3)).await;
}

#[actix::test]
async fn three_failed_probes_eject_and_good_ones_readmit() {
    let rig = rig(&["http://e:1", "http://e:2"], ActorSettings::default());
    let endpoint = Arc::clone(&rig.router.view().endpoints[0]);
    until("ready", || endpoint.standing() == Standing::Ready).await;
    rig.engines.answer("/health", Err(ProbeError::Refused));
    until("ejected", || matches!(endpoint.standing(), Standing::Ejected { .. })).await;
    assert!(rig.engines.asked(&format!("{}/health", endpoint.spec.url)) >= 4);
    rig.engines.answer("/health", Ok((200, "")));
    until("readmitted", || endpoint.standing() == Standing::Ready).await;
}

#[actix::test]
async fn a_removed_endpoint_is_asked_for_nothing_more() {
    let settings = ActorSettings { scrape_every: Duration::from_millis(20), ..ActorSettings::default() };
    let rig = rig(&["http://e:1", "http://e:2"], settings);
    until("scraped", || rig.engines.asked("http://e:2/metrics") > 2).await;
    let keep = vec![EndpointSpec::at("http://e:1").expect("a URL")];
    rig.router.set_endpoints(keep, rig.clock.now());
    // A scrape may be under way at the removal; after two more of the other one none can be.
    let before = rig.engines.asked("http://e:1/metrics");
    until("two more", || rig.engines.asked("http://e:1/metrics") >= before + 2).await;
    let settled = rig.engines.asked("http://e:2/metrics");
    let before = rig.engines.asked("http://e:1/metrics");
    until("ten more", || rig.engines.asked("http://e:1/metrics") >= before + 10).await;
    assert_eq!(rig.engines.asked("http://e:2/metrics"), settled);
}

#[actix::test]
async fn scrapes_are_shared_with_a_live_replica_and_taken_over_from_a_dead_one() {
    let urls: Vec<String> = (1..=16).map(|port| format!("http://e:{port}")).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let settings = ActorSettings { dead_after: Duration::from_millis(300), ..ActorSettings::default() };
    let rig = rig(&urls, settings);
    let ids: Vec<_> = rig.router.view().endpoints.iter().map(|endpoint| endpoint.id).collect();
    let cluster = Arc::clone(rig.actors.cluster());
    let own = rig.router.own();
    let owned = || ids.iter().filter(|id| rig.router.scrape_owner(**id).as_ref() == Some(own)).count();
    assert_eq!(owned(), 16);
    rig.peers.send(PeerEvent::Heartbeat { replica: ReplicaId::new("b") }).await.expect("sent");
    until("shared", || owned() < 16).await;
    assert!(owned() > 0);
    until("taken over", || owned() == 16).await;
    assert!(!cluster.replicas(rig.clock.now()).iter().any(|seen| seen.replica.as_str() == "b" && seen.live));
}

#[actix::test]
async fn an_endpoint_that_its_owner_says_nothing_of_is_scraped_all_the_same() {
    let urls: Vec<String> = (1..=16).map(|port| format!("http://e:{port}")).collect();
    let urls: Vec<&str> = urls.iter().map(String::as_str).collect();
    let settings = ActorSettings { dead_after: Duration::from_secs(60), ..ActorSettings::default() };
    let rig = rig(&urls, settings);
    let owner = ReplicaId::new("b");
    rig.peers.send(PeerEvent::Heartbeat { replica: owner.clone() }).await.expect("sent");
    let view = rig.router.view();
    let of_owner = || {
        let all = view.endpoints.iter();
        all.filter(|each| rig.router.scrape_owner(each.id).as_ref() == Some(&owner)).collect::<Vec<_>>()
    };
    until("two are the other's", || of_owner().len() >= 2).await;
    let (told, untold) = (Arc::clone(of_owner()[0]), Arc::clone(of_owner()[1]));
    let asked = |endpoint: &Endpoint| rig.engines.asked(&format!("{}/metrics", endpoint.spec.url));
    let before = (asked(&told), asked(&untold));
    let mut version = 0;
    let deadline = Instant::now() + Duration::from_secs(20);
    while asked(&untold) < before.1 + 2 {
        assert!(Instant::now() < deadline, "nobody looks at what the owner does not have");
        version += 1;
        let row = ObservedRow {
            endpoint: told.id,
            age_ms: 0,
            running: 0,
            waiting: 0,
            kv_ratio: None,
            engine_epoch: 7,
        };
        let pulse = Pulse { epoch: 1, version, observed: vec![row], ..Pulse::default() };
        rig.peers.send(PeerEvent::Pulse { replica: owner.clone(), pulse }).await.expect("sent");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // One may have been under way when the other replica came.
    assert!(asked(&told) <= before.0 + 1, "what is told of is left to its owner");
    assert!(untold.observed().is_some_and(|seen| seen.running == 3));
}

#[actix::test]
async fn the_load_of_a_replica_goes_with_it() {
    let rig = rig(&["http://e:1"], ActorSettings::default());
    let endpoint = Arc::clone(&rig.router.view().endpoints[0]);
    let replica = ReplicaId::new("b");
    let row =
        LoadRow { endpoint: endpoint.id, running: 5, prefill_tokens: 0, decode_tokens: 0, placed_tokens: 0 };
    let pulse = Pulse { epoch: 1, version: 1, ready: true, load: vec![row], ..Pulse::default() };
    rig.peers.send(PeerEvent::Heartbeat { replica: replica.clone() }).await.expect("sent");
    rig.peers.send(PeerEvent::Pulse { replica: replica.clone(), pulse }).await.expect("sent");
    until("counted", || endpoint.running(rig.clock.now()) == 5).await;
    rig.peers.send(PeerEvent::Goodbye { replica }).await.expect("sent");
    until("gone", || endpoint.running(rig.clock.now()) == 0).await;
}

#[cfg(feature = "panic-injection")]
#[actix::test]
async fn actors_that_panic_are_made_anew_and_go_on() {
    let rig = rig(&["http://e:1"], ActorSettings::default());
    let endpoint = Arc::clone(&rig.router.view().endpoints[0]);
    until("ready", || endpoint.standing() == Standing::Ready).await;
    let key = SessionKey::of("test", b"1");
    rig.actors.sessions().began(key);
    assert!(rig.actors.inject_endpoint_panic(endpoint.id));
    assert!(rig.actors.inject_gossip_panic());
    assert!(rig.actors.sessions().inject_panic(key));
    let counts = Arc::clone(rig.actors.counts());
    for kind in [ActorKind::Endpoint, ActorKind::Gossip, ActorKind::Session] {
        until(kind.as_str(), || counts.recreated(kind) == 1).await;
    }
    let asked = rig.engines.asked("http://e:1/health");
    until("probed again", || rig.engines.asked("http://e:1/health") > asked).await;
    rig.peers.send(PeerEvent::CaughtUp).await.expect("sent");
    until("heard again", || rig.actors.cluster().caught_up()).await;
}

#[actix::test]
async fn a_session_has_an_actor_while_it_is_in_use_and_its_home_outlives_it() {
    let settings = ActorSettings {
        session_idle: Duration::from_millis(40),
        session_actors_max: 16,
        ..ActorSettings::default()
    };
    let rig = rig(&["http://e:1"], settings);
    let endpoint = rig.router.view().endpoints[0].id;
    let keys: Vec<SessionKey> = (0..200_u32).map(|n| SessionKey::of("test", &n.to_le_bytes())).collect();
    let sessions = rig.actors.sessions();
    for key in &keys {
        rig.router.sessions().begin(*key, endpoint, rig.clock.now());
        sessions.began(*key);
    }
    assert!((1..=16).contains(&sessions.actors()), "{}", sessions.actors());
    for key in &keys {
        sessions.ended(*key, TurnEnded { endpoint, warm_tokens: Some(9), qoe: Some(0.5) });
    }
    let home = |key: &SessionKey| rig.router.sessions().state(*key).home();
    until("ends taken", || keys.iter().all(|key| home(key).is_some_and(|home| home.warm_tokens == 9))).await;
    until("actors gone", || sessions.actors() == 0).await;
    assert!(keys.iter().all(|key| home(key).is_some_and(|home| home.endpoint == endpoint)));
}

#[actix::test]
async fn what_a_replica_has_staged_falls_to_its_heir_when_nobody_listens_at_its_port_any_more() {
    let rig = rig(&["http://e:1"], ActorSettings::default());
    let replica = ReplicaId::new("b");
    let row = StagedRow { number: 1, prefill: rig.router.view().endpoints[0].id, token: Some(vec![7]) };
    let push = StagedPush { epoch: 1, version: 1, held: vec![1], rows: vec![row.clone()] };
    let origin = replica.clone();
    for event in [
        PeerEvent::Heartbeat { replica: replica.clone() },
        PeerEvent::Staged { replica: replica.clone(), push },
        PeerEvent::Refused { replica },
    ] {
        rig.peers.send(event).await.expect("the actors listen");
    }
    until("it is inherited", || !rig.left.0.lock().is_empty()).await;
    assert_eq!(*rig.left.0.lock(), [Orphan { origin, prefill: row.prefill, token: row.token }]);
}
