//! The admin plane of whole replicas: shapes that others read, the token, changes that all replicas take.

use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{Answer, Connection, Fake, Node, ask, chat, eventually, get, piece, post, post_as, request};

/// What a value of a documented key looks like.
#[derive(Clone, Copy)]
enum Shape {
    Text,
    Number,
    Switch,
    List,
    Object,
    TextOrNull,
    Null,
}

fn check(value: &Value, shapes: &[(&str, Shape)]) {
    for (key, shape) in shapes {
        let own = value.get(*key).unwrap_or_else(|| panic!("{key} is missing: {value}"));
        let fits = match shape {
            Shape::Text => own.is_string(),
            Shape::Number => own.is_number(),
            Shape::Switch => own.is_boolean(),
            Shape::List => own.is_array(),
            Shape::Object => own.is_object(),
            Shape::TextOrNull => own.is_string() || own.is_null(),
            Shape::Null => own.is_null(),
        };
        assert!(fits, "{key} is {own} in {value}");
    }
}

#[actix_web::test]
async fn cluster_endpoints_requests_sessions_and_explain_have_the_documented_shapes() {
    use Shape::{List, Null, Number, Object, Switch, Text, TextOrNull};
    let engine = Fake::start(|asked| {
        if asked.body.windows(4).any(|word| word == b"stay") {
            Answer::Stalled(vec![piece(0)])
        } else {
            Answer::completion(5, 2)
        }
    })
    .await;
    let node = Node::over(&[engine.url()], &[]).await;
    let seed = node.replica.gossip_address().to_string();
    let peer = Node::over(&[engine.url()], &[("seed", &seed)]).await;
    assert_eq!(
        post_as(node.public(), "/v1/chat/completions", "X-Session-Id: one\r\n", chat("hi", false))
            .await
            .status,
        200
    );
    let mut open = Connection::open(node.public()).await;
    open.send(request(
        "POST",
        "/v1/chat/completions",
        "X-Request-Id: r-1\r\nX-Request-Priority: 3\r\n",
        chat("stay", true),
    ))
    .await;
    open.read_until("word0").await;

    let cluster = eventually("the other replica and the open request", async || {
        let cluster = get(node.admin(), "/cluster").await.json();
        let known = cluster["replicas"].as_array().is_some_and(|all| all.len() == 2);
        (known && cluster["endpoints"][0]["running"] == 1).then_some(cluster)
    })
    .await;
    check(&cluster, &[("replica", Text), ("replicas", List), ("endpoints", List), ("ready", Switch)]);
    assert_eq!(cluster["replica"], node.name);
    for replica in cluster["replicas"].as_array().into_iter().flatten() {
        check(replica, &[("id", Text), ("live", Switch), ("age_ms", Number)]);
    }
    let endpoint = &cluster["endpoints"][0];
    check(
        endpoint,
        &[
            ("url", Text),
            ("role", Text),
            ("standing", Text),
            ("running", Number),
            ("by_replica", Object),
            ("id", Text),
        ],
    );
    assert_eq!(endpoint["by_replica"], json!({&node.name: {"running": 1}}));
    assert_eq!(get(node.admin(), "/endpoints").await.json()[0]["id"], endpoint["id"]);
    // The other replica sees the same load, as its peer's.
    eventually("the load at the other replica", async || {
        let seen = get(peer.admin(), "/cluster").await.json();
        (seen["endpoints"][0]["by_replica"] == endpoint["by_replica"]).then_some(())
    })
    .await;

    let requests = get(node.admin(), "/requests").await.json();
    let rows = requests.as_array().expect("a list");
    assert_eq!(rows.len(), 2, "the open one and the ended one: {requests}");
    for row in rows {
        check(
            row,
            &[
                ("id", Text),
                ("phase", Text),
                ("age_ms", Number),
                ("endpoint", TextOrNull),
                ("prefill_endpoint", Null),
                ("priority", Number),
                ("qoe", Null),
            ],
        );
    }
    let one = get(node.admin(), "/requests/r-1").await.json();
    assert_eq!(
        (&one["phase"], &one["priority"], &one["endpoint"]),
        (&json!("decoding"), &json!(3), &json!(engine.url()))
    );

    let session = get(node.admin(), "/sessions/one").await.json();
    check(&session, &[("endpoint", Text), ("pair", Null), ("warm_tokens", Number), ("qoe", TextOrNull)]);
    assert_eq!(session["endpoint"], engine.url());

    let explained = post(node.admin(), "/explain", chat("hi", false)).await.json();
    check(
        &explained,
        &[("policy", Text), ("chosen", Text), ("prefill", Null), ("reason", Text), ("candidates", List)],
    );
    check(
        &explained["candidates"][0],
        &[
            ("url", Text),
            ("cost_ms", Number),
            ("wait_ms", Number),
            ("warm_tokens", Number),
            ("uncached_tokens", Number),
            ("dropped_by", Null),
        ],
    );
    assert_eq!(engine.served(), 2, "explaining sends nothing");
}

#[actix_web::test]
pub(super) async fn the_token_file_locks_everything_but_probes_and_the_page_and_sighup_changes_it() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    std::io::Write::write_all(&mut file, b"first\n").expect("written");
    let path = file.path().display().to_string();
    let (sources, name) = crate::rig::sources(&[("admin_token_file", &path)]);
    let node = Node::of(&sources, name).await;
    let open = ["/livez", "/readyz", "/", "/openapi.json"];
    let locked = ["/metrics", "/cluster", "/endpoints", "/requests", "/requests/x", "/sessions/x"];
    for path in open {
        assert_ne!(get(node.admin(), path).await.status, 401, "{path}");
    }
    let with = async |path: &str, token: &str| {
        ask(node.admin(), "GET", path, &format!("Authorization: Bearer {token}\r\n"), "").await
    };
    for path in locked {
        let refused = get(node.admin(), path).await;
        assert_eq!((refused.status, refused.error_code().as_str()), (401, "unauthorized"), "{path}");
        assert_eq!(with(path, "second").await.status, 401, "{path}");
        assert_ne!(with(path, "first").await.status, 401, "{path}");
    }
    for (method, path) in [
        ("POST", "/endpoints"),
        ("DELETE", "/endpoints/00"),
        ("POST", "/endpoints/00/drain"),
        ("POST", "/explain"),
    ] {
        assert_eq!(ask(node.admin(), method, path, "", "{}").await.status, 401, "{method} {path}");
    }
    std::fs::write(file.path(), "second\n").expect("written");
    node.replica.reload(&sources).expect("a good configuration");
    assert_eq!(with("/cluster", "first").await.status, 401);
    assert_eq!(with("/cluster", "second").await.status, 200);
}

/// The endpoints that a replica shows, by URL, with their standing.
async fn standings(node: &Node) -> Vec<(String, String)> {
    let shown = get(node.admin(), "/endpoints").await.json();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = shown.as_array().expect("a list");
    let mut all: Vec<_> = list.iter().map(|each| (text(&each["url"]), text(&each["standing"]))).collect();
    all.sort();
    all
}

async fn all_show(nodes: &[&Node], expected: &[(&Fake, &str)]) {
    let mut wanted: Vec<_> =
        expected.iter().map(|(fake, standing)| (fake.url(), (*standing).to_owned())).collect();
    wanted.sort();
    for node in nodes {
        eventually(&format!("{} to show {wanted:?}", node.name), async || {
            (standings(node).await == wanted).then_some(())
        })
        .await;
    }
}

#[actix_web::test]
async fn a_change_that_is_said_to_be_replicated_outlives_its_origin_however_soon_that_dies() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let added = Fake::start(|_| Answer::completion(1, 1)).await;
    let first = Node::over(&[engine.url()], &[]).await;
    let seed = first.replica.gossip_address().to_string();
    let alone = post(first.admin(), "/endpoints", json!({"url": "http://127.0.0.1:9"}).to_string()).await;
    assert_eq!((alone.status, &alone.json()["replicated"]), (201, &json!(false)));
    let second = Node::over(&[engine.url()], &[("seed", &seed)]).await;
    let seeds = [("seed", seed.as_str()), ("seed", &second.replica.gossip_address().to_string())];
    let third = Node::over(&[engine.url()], &seeds).await;
    eventually("all to know each other", async || {
        let live = async |node: &Node| {
            let cluster = get(node.admin(), "/cluster").await.json();
            cluster["replicas"].as_array().map(|all| all.iter().filter(|each| each["live"] == true).count())
        };
        (live(&first).await == Some(3) && live(&second).await == Some(3)).then_some(())
    })
    .await;
    let reply = post(first.admin(), "/endpoints", json!({"url": added.url()}).to_string()).await;
    assert_eq!((reply.status, &reply.json()["replicated"]), (201, &json!(true)));
    drop(first);
    for node in [&second, &third] {
        eventually("the change", async || {
            standings(node).await.iter().any(|(url, _)| *url == added.url()).then_some(())
        })
        .await;
    }
}

#[actix_web::test]
async fn operators_changes_reach_every_replica_and_outlive_the_one_they_were_made_at() {
    let base = Fake::start(|_| Answer::completion(1, 1)).await;
    let added = Fake::start(|_| Answer::completion(1, 1)).await;
    let drained = Fake::start(|_| Answer::stream(1_000, Duration::from_millis(20))).await;
    let removed = Fake::start(|_| Answer::completion(1, 1)).await;
    let configured = [base.url(), format!("{},model=long", drained.url()), removed.url()];
    let flags: Vec<(&str, &str)> = configured.iter().map(|url| ("endpoint", url.as_str())).collect();
    let first = Node::start(&flags).await;
    let seed = first.replica.gossip_address().to_string();
    let with_seed: Vec<(&str, &str)> = flags.iter().copied().chain([("seed", seed.as_str())]).collect();
    let second = Node::start(&with_seed).await;
    all_show(&[&first, &second], &[(&base, "ready"), (&drained, "ready"), (&removed, "ready")]).await;

    let id = |url: &str| first.endpoint(url).id.to_string();
    let (drained_id, removed_id) = (id(&drained.url()), id(&removed.url()));
    // Something runs there, so that the drain lasts; it came through the second replica.
    let mut open = Connection::open(second.public()).await;
    let long = chat("long", true).replace("\"sim\"", "\"long\"");
    open.send(request("POST", "/v1/chat/completions", "", long)).await;
    open.read_until("word1").await;
    let reply = post(first.admin(), "/endpoints", json!({"url": added.url()}).to_string()).await;
    assert_eq!(reply.status, 201, "{}", reply.text());
    assert_eq!(post(first.admin(), &format!("/endpoints/{drained_id}/drain"), "").await.status, 202);
    assert_eq!(ask(first.admin(), "DELETE", &format!("/endpoints/{removed_id}"), "", "").await.status, 200);
    let expected = [(&base, "ready"), (&added, "ready"), (&drained, "draining")];
    all_show(&[&first, &second], &expected).await;

    // The origin dies without a word. The other keeps the changes, and tells them to one that comes later.
    drop(first);
    eventually("the death to be seen", async || {
        let cluster = get(second.admin(), "/cluster").await.json();
        let live =
            cluster["replicas"].as_array().map(|all| all.iter().filter(|each| each["live"] == true).count());
        (live == Some(1)).then_some(())
    })
    .await;
    assert_eq!(standings(&second).await.len(), 3);
    let seed = second.replica.gossip_address().to_string();
    let with_seed: Vec<(&str, &str)> = flags.iter().copied().chain([("seed", seed.as_str())]).collect();
    let third = Node::start(&with_seed).await;
    all_show(&[&second, &third], &expected).await;
    // Nothing new goes to what drains or is gone.
    for n in 0..20 {
        assert_eq!(third.chat(&format!("number {n}")).await.status, 200);
    }
    assert_eq!((drained.served(), removed.served()), (1, 0));
    drop(open);
    // What drained is gone once nothing runs there.
    all_show(&[&second, &third], &expected[..2]).await;
}
