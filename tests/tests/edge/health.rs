//! Health: what ejects an endpoint and what does not, and when a replica says that it is ready.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use routing::Router;
use routing::endpoint::Standing;
use serde_json::json;

use crate::rig::{Answer, Fake, Node, eventually, get, post, until};

/// Answers that the engine's client caused say nothing of the engine.
#[actix_web::test]
async fn a_hundred_400s_and_a_hundred_401s_keep_the_endpoints_in_use() {
    let status = Arc::new(AtomicUsize::new(400));
    let engine = async || {
        let status = Arc::clone(&status);
        Fake::start(move |_| Answer::status(status.load(Ordering::SeqCst) as u16)).await
    };
    let engines = [engine().await, engine().await];
    let urls = engines.each_ref().map(Fake::url);
    let node = Node::over(&urls, &[("policy", "round-robin")]).await;
    for expected in [400, 401] {
        status.store(expected, Ordering::SeqCst);
        for n in 0..200 {
            assert_eq!(usize::from(node.chat(&format!("number {n}")).await.status), expected);
        }
    }
    for engine in &engines {
        assert_eq!(engine.served(), 200, "nothing was tried twice, nobody was left out");
        assert_eq!(node.endpoint(&engine.url()).standing(), Standing::Ready);
    }
    // The same traffic with the engine's own fault does eject.
    status.store(503, Ordering::SeqCst);
    let ejected = || urls.iter().any(|url| matches!(node.endpoint(url).standing(), Standing::Ejected { .. }));
    eventually("one of them ejected", async || {
        node.chat("again").await;
        ejected().then_some(())
    })
    .await;
}

/// Each probe notes what the probes before it have led to.
#[actix_web::test]
async fn one_failed_probe_never_ejects_three_do_and_two_good_ones_readmit() {
    const SCRIPT: [bool; 12] = [true, false, true, false, false, true, false, false, false, true, true, true];
    let expected = [
        "joining", "ready", "ready", "ready", "ready", "ready", "ready", "ready", "ready", "ejected",
        "ejected", "ready",
    ];
    let router: Arc<OnceLock<Arc<Router>>> = Arc::default();
    let noted: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let (known, notes) = (Arc::clone(&router), Arc::clone(&noted));
    let probed = Fake::start_raw(move |asked| {
        if asked.path != "/health" {
            return Answer::status(404);
        }
        let Some(router) = known.get() else { return Answer::status(503) };
        let own = format!("host: {}", asked.head.split("host: ").nth(1).unwrap_or_default());
        let view = router.view();
        let endpoint = view.endpoints.iter().find(|endpoint| own.contains(&endpoint.spec.url[7..]));
        let mut notes = notes.lock();
        let well = SCRIPT.get(notes.len()).copied().unwrap_or(true);
        notes.push(endpoint.map_or("unknown", |endpoint| endpoint.standing().as_str()));
        if well { Answer::ok("") } else { Answer::status(503) }
    })
    .await;
    let other = Fake::start(|_| Answer::completion(1, 1)).await;
    // Added once the script can see where it stands.
    let node = Node::over(&[other.url()], &[("probe_every_ms", "20")]).await;
    assert!(router.set(Arc::clone(node.router())).is_ok());
    let added = post(node.admin(), "/endpoints", json!({"url": probed.url()}).to_string()).await;
    assert_eq!(added.status, 201);
    until("all probes", || noted.lock().len() >= SCRIPT.len()).await;
    assert_eq!(noted.lock()[..SCRIPT.len()], expected);
}

#[actix_web::test]
async fn without_endpoints_it_is_alive_but_not_ready_until_one_is_added() {
    let node = Node::start_unready(&[]).await;
    for address in [node.public(), node.admin()] {
        assert_eq!(get(address, "/livez").await.status, 200);
        let ready = get(address, "/readyz").await;
        assert_eq!(ready.status, 503);
        assert_eq!(ready.json()["ready"], false);
        assert!(ready.json()["missing"].as_array().is_some_and(|all| all.contains(&json!("endpoint"))));
    }
    let refused = node.chat("hello").await;
    assert_eq!((refused.status, refused.error_code().as_str()), (503, "no_endpoint"));
    assert!(refused.header("retry-after").is_some());

    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    let added = post(node.admin(), "/endpoints", json!({"url": engine.url()}).to_string()).await;
    assert_eq!(added.status, 201);
    node.ready().await;
    assert_eq!(node.chat("hello").await.status, 200);
    assert_eq!(get(node.admin(), "/readyz").await.json(), json!({"ready": true, "missing": []}));
}

/// An endpoint alone makes no replica ready: it must be one that can serve.
#[actix_web::test]
async fn an_endpoint_that_nobody_listens_at_makes_no_replica_ready() {
    let gone = Fake::start(|_| Answer::completion(1, 1)).await.url();
    let node = Node::start_unready(&[("endpoint", gone.as_str())]).await;
    eventually("ejected", async || {
        matches!(node.endpoint(&gone).standing(), Standing::Ejected { .. }).then_some(())
    })
    .await;
    assert_eq!(get(node.public(), "/readyz").await.status, 503);
    assert_eq!(get(node.public(), "/livez").await.status, 200);
    assert_eq!(node.chat("hello").await.status, 503);
}

#[actix_web::test]
async fn a_role_that_nobody_has_is_named_where_the_others_can_not_do_without() {
    let engine = Fake::start(|_| Answer::completion(1, 1)).await;
    for (keys, missing) in [
        ("role=prefill", "decode-endpoint"),
        ("role=decode,connector=sglang-bootstrap", "prefill-endpoint"),
        ("role=prefill,connector=sglang-bootstrap", "decode-endpoint"),
    ] {
        let endpoint = format!("{},model=sim,{keys}", engine.url());
        let node = Node::start_unready(&[("endpoint", endpoint.as_str())]).await;
        eventually("it is ready but for that role", async || {
            let ready = get(node.public(), "/readyz").await;
            (ready.status == 503 && ready.json()["missing"] == json!([missing])).then_some(())
        })
        .await;
        let refused = node.chat("hello").await;
        let role = missing.trim_end_matches("-endpoint");
        assert_eq!((refused.status, refused.error_code().as_str()), (503, "no_endpoint_ready"), "{keys}");
        assert!(refused.text().contains(&format!("none with role {role}")), "{keys}: {}", refused.text());
    }
    // Decode engines of other connectors serve whole requests.
    let endpoint = format!("{},model=sim,role=decode", engine.url());
    let node = Node::start_unready(&[("endpoint", endpoint.as_str())]).await;
    node.ready().await;
    assert_eq!(node.chat("hello").await.status, 200);
}
