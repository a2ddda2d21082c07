//! Actors under requests: one of each kind is made to panic, mailboxes fill, sessions outnumber their tables.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actors::{ActorKind, TurnEnded};
use rand::SeedableRng as _;
use routing::request::{HeaderView, RequestShape, Route};
use routing::{Rng, SessionKey};
use tests::stated;

use crate::rig::{Answer, Connection, Fake, Node, chat, get, post_as, request, until};

/// How soon an actor that panicked is back.
const BACK_WITHIN: Duration = Duration::from_secs(1);
const CLIENTS: usize = 8;
const TOKENS: usize = 10;

/// Streams without end, one after the other, each checked to its last event.
struct Traffic {
    done: Rc<Cell<usize>>,
    stop: Rc<Cell<bool>>,
    clients: Vec<actix_web::rt::task::JoinHandle<()>>,
}

impl Traffic {
    fn start(node: &Node) -> Self {
        let (done, stop) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        let clients = (0..CLIENTS).map(|client| {
            let (address, done, stop) = (node.public(), Rc::clone(&done), Rc::clone(&stop));
            actix_web::rt::spawn(async move {
                let mut connection = Connection::open(address).await;
                let session = format!("X-Session-Id: session-{client}\r\n");
                while !stop.get() {
                    let body = chat("hello", true);
                    connection.send(request("POST", "/v1/chat/completions", &session, body)).await;
                    let reply = connection.reply().await;
                    let text = reply.text();
                    assert!(reply.status == 200 && reply.complete, "{} {text}", reply.status);
                    assert!(
                        text.contains(&format!("word{}", TOKENS - 1)) && text.contains("[DONE]"),
                        "{text}"
                    );
                    done.set(done.get() + 1);
                }
            })
        });
        let clients = clients.collect();
        Self { done, stop, clients }
    }

    /// Waits until each client has had a whole reply to a request of after now.
    async fn goes_on(&self) {
        let goal = self.done.get() + 2 * CLIENTS;
        until("requests go on", || self.done.get() >= goal).await;
    }

    async fn end(self) {
        self.stop.set(true);
        for client in self.clients {
            client.await.expect("a client whose replies were all whole");
        }
    }
}

#[actix_web::test]
async fn an_actor_of_any_kind_that_panics_is_back_within_a_second_and_requests_go_on() {
    let engine = Fake::start(|_| Answer::stream(TOKENS, Duration::from_millis(5))).await;
    let node = Node::over(&[engine.url()], &[("probe_every_ms", "20")]).await;
    let actors = node.replica.actors();
    let traffic = Traffic::start(&node);
    traffic.goes_on().await;
    let endpoint = node.endpoint(&engine.url()).id;
    let session = SessionKey::of("x-session-id", b"session-3");
    let recreated = |kind: ActorKind| actors.counts().recreated(kind);

    until("the session has an actor", || actors.sessions().inject_panic(session)).await;
    back("session", || recreated(ActorKind::Session) == 1).await;
    traffic.goes_on().await;

    assert!(actors.inject_endpoint_panic(endpoint));
    back("endpoint", || recreated(ActorKind::Endpoint) == 1).await;
    let probes = engine.asked("/health");
    until("it probes again", || engine.asked("/health") > probes).await;
    traffic.goes_on().await;

    assert!(actors.inject_gossip_panic());
    back("gossip", || recreated(ActorKind::Gossip) == 1).await;
    traffic.goes_on().await;

    let lifecycles = node.replica.lifecycles();
    lifecycles.inject_panic();
    back("lifecycle", || lifecycles.counts().recreated() == 1).await;
    traffic.goes_on().await;

    traffic.end().await;
    node.at_rest().await;
    let page = get(node.admin(), "/metrics").await;
    let page = page.text();
    for kind in ["session", "endpoint", "gossip", "lifecycle"] {
        let line = format!("grapevine_actors_recreated_total{{actor=\"{kind}\"}} 1\n");
        assert!(page.contains(&line), "{line} is not in {page}");
    }
    // Nobody was thought ill of for it.
    assert!(page.contains("grapevine_endpoint_up"));
    assert_eq!(node.endpoint(&engine.url()).standing(), routing::endpoint::Standing::Ready);
}

async fn back(kind: &str, is_back: impl Fn() -> bool) {
    tests::until(&format!("the {kind} actor is back"), stated(BACK_WITHIN), async || {
        is_back().then_some(()).ok_or_else(|| "not yet".to_owned())
    })
    .await;
}

#[actix_web::test]
async fn a_full_mailbox_is_counted_and_neither_charges_nor_ends_of_turns_are_lost() {
    let engine = Fake::start(|_| Answer::completion(7, 2)).await;
    let node = Node::over(&[engine.url()], &[]).await;
    let sessions = node.replica.actors().sessions();
    let counts = Arc::clone(node.replica.actors().counts());
    let endpoint = node.endpoint(&engine.url()).id;
    let flooded = SessionKey::of("x-session-id", b"flooded");
    node.router().sessions().begin(flooded, endpoint, node.now());
    let mut turns = 0;
    while counts.overloaded(ActorKind::Session) == 0 {
        for _ in 0..10_000 {
            sessions.began(flooded);
        }
        turns += 1;
        assert!(turns < 1_000, "its mailbox does not fill");
    }
    sessions.ended(flooded, TurnEnded { endpoint, warm_tokens: Some(4_321), qoe: None });
    until("the end of the turn in the table", || {
        let home = node.router().session(flooded).home();
        home.is_some_and(|home| home.warm_tokens == 4_321)
    })
    .await;
    let session = "X-Session-Id: flooded\r\n";
    for n in 0..20 {
        let reply =
            post_as(node.public(), "/v1/chat/completions", session, chat(&n.to_string(), false)).await;
        assert_eq!(reply.status, 200);
    }
    node.at_rest().await;
    let page = get(node.admin(), "/metrics").await;
    let page = page.text();
    let overloads = page
        .lines()
        .find_map(|line| line.strip_prefix("grapevine_mailbox_overload_total{actor=\"session\"} "))
        .and_then(|count| count.parse::<u64>().ok());
    assert!(overloads.is_some_and(|count| count > 0), "{page}");
}

/// A request's headers, with a session of this number.
struct SessionOf(String);

impl HeaderView for SessionOf {
    fn get(&self, name: &str) -> Option<&[u8]> {
        (name == "x-session-id").then_some(self.0.as_bytes())
    }
}

#[actix_web::test]
pub(super) async fn of_100_000_sessions_the_table_keeps_its_cap_the_oldest_leave_and_an_idle_one_wakes_at_home()
 {
    const SESSIONS: usize = 100_000;
    const CAP: usize = 10_000;
    const ACTORS: usize = 100;
    let engines = [
        Fake::start(|_| Answer::completion(5, 1)).await,
        Fake::start(|_| Answer::completion(5, 1)).await,
        Fake::start(|_| Answer::completion(5, 1)).await,
        Fake::start(|_| Answer::completion(5, 1)).await,
    ];
    let flags = [("session_table_max", "10000"), ("session_actors_max", "100"), ("explain_headers", "true")];
    let node = Node::over(&engines.each_ref().map(Fake::url), &flags).await;
    let sessions = node.replica.actors().sessions();
    let router = node.router();
    let rules = router.rules();
    let mut rng = Rng::seed_from_u64(1);
    let body = chat("hello", false);
    let mut homes = Vec::with_capacity(SESSIONS);
    for n in 0..SESSIONS {
        let header = SessionOf(format!("s{n}"));
        let shape = RequestShape::read(Route::ChatCompletions, &header, body.as_bytes(), &rules)
            .expect("a good request");
        let chosen = router.choose(&shape, &[], node.now(), &mut rng).expect("an endpoint");
        let key = shape.session.expect("a session");
        sessions.began(key);
        sessions.ended(key, TurnEnded { endpoint: chosen.endpoint.id, warm_tokens: Some(9), qoe: None });
        homes.push((key, chosen.endpoint.spec.url.clone()));
        if n % 100 == 0 {
            // The engines live on this thread too, and must answer their probes.
            tokio::task::yield_now().await;
        }
        if n % 1_000 == 0 {
            assert!(router.sessions().len() <= CAP, "{}", router.sessions().len());
            assert!(sessions.actors() <= ACTORS + 16, "{}", sessions.actors());
        }
    }
    let kept = router.sessions().len();
    assert!(kept <= CAP && kept > CAP / 2, "{kept} of {CAP} are kept");
    let is_kept = |(key, _): &(SessionKey, String)| router.sessions().state(*key).home().is_some();
    assert_eq!(homes[..SESSIONS / 2].iter().filter(|home| is_kept(home)).count(), 0, "the oldest are gone");
    assert!(homes[SESSIONS - CAP / 4..].iter().all(is_kept), "the newest are there");
    node.at_rest().await;
    // With no actor of their own any more, and another prompt, they come home.
    for (n, (_, home)) in homes.iter().enumerate().skip(SESSIONS - CAP / 4).step_by(50) {
        let header = format!("X-Session-Id: s{n}\r\n");
        let body = chat(&format!("something else {n}"), false);
        let reply = post_as(node.public(), "/v1/chat/completions", &header, body).await;
        assert_eq!(reply.header("x-grapevine-endpoint"), Some(home.as_str()), "s{n}");
    }
}
