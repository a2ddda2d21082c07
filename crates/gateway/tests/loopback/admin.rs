//! The admin listener: faces, changes, malformed input.

use gateway::GatewaySettings;
use serde_json::json;

use crate::rig::{Connection, Fake, Reply, Rig, Step, Wishes, chat, get, post, request, until};

async fn ask(rig: &Rig, method: &str, path: &str, headers: &str) -> Reply {
    let mut connection = Connection::open(rig.admin()).await;
    connection.send(format!("{method} {path} HTTP/1.1\r\nHost: g\r\n{headers}\r\n")).await;
    connection.reply().await
}

fn waiting() -> Vec<Step> {
    vec![
        Step::stream_head(),
        Step::chunk("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"),
        Step::AwaitClose,
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cluster_its_endpoints_and_requests_are_shown_as_described() {
    let fake = Fake::start(waiting()).await;
    let rig = Rig::start(&[format!("{},model=sim,role=decode", fake.url)]);
    let mut client = Connection::open(rig.address()).await;
    client
        .send(request(
            "POST",
            "/v1/chat/completions",
            "X-Request-Id: r-1\r\nX-Request-Priority: 1\r\n",
            chat(true),
        ))
        .await;
    client.read_until("content").await;
    let shown = || async { get(rig.admin(), "/requests/r-1").await.json() };
    until("the request to decode", || rig.phases() == ["decoding"]).await;

    let cluster = get(rig.admin(), "/cluster").await.json();
    assert_eq!((&cluster["replica"], &cluster["ready"]), (&json!("rig"), &json!(true)));
    assert_eq!(cluster["replicas"][0], json!({"id": "rig", "live": true, "age_ms": 0.0}));
    let endpoint = &cluster["endpoints"][0];
    assert_eq!(endpoint["url"], fake.url);
    assert_eq!(
        (&endpoint["role"], &endpoint["standing"], &endpoint["running"]),
        (&json!("decode"), &json!("ready"), &json!(1))
    );
    assert_eq!(endpoint["by_replica"], json!({"rig": {"running": 1}}));
    assert_eq!(get(rig.admin(), "/endpoints").await.json()[0]["id"], endpoint["id"]);

    let request = shown().await;
    assert_eq!(
        (&request["id"], &request["phase"], &request["endpoint"], &request["priority"]),
        (&json!("r-1"), &json!("decoding"), &json!(fake.url), &json!(1))
    );
    assert!(request["age_ms"].as_f64().unwrap() > 0.0 && request["prefill_endpoint"].is_null());
    drop(client);
    rig.at_rest().await;
    assert_eq!(shown().await["phase"], "cancelled");
    assert_eq!(get(rig.admin(), "/requests").await.json().as_array().unwrap().len(), 1);
    assert_eq!(get(rig.admin(), "/requests/r-2").await.status, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decision_is_explained_without_being_made() {
    let fake = Fake::start(vec![Step::reply(200, "application/json", "{}")]).await;
    let rig = Rig::start(&[fake.url.clone(), "http://127.0.0.1:9".to_owned()]);
    for path in
        ["/explain", "/explain?route=/v1/chat/completions", "/explain?route=%2Fv1%2Fchat%2Fcompletions"]
    {
        let explained = post(rig.admin(), path, chat(false)).await.json();
        assert_eq!(explained["policy"], "cost");
        let urls: Vec<_> =
            explained["candidates"].as_array().unwrap().iter().map(|each| each["url"].clone()).collect();
        assert!(urls.len() == 2 && urls.contains(&explained["chosen"]), "{explained}");
        for key in ["cost_ms", "wait_ms", "warm_tokens", "uncached_tokens"] {
            assert!(explained["candidates"][0][key].is_number(), "{key}");
        }
        assert!(explained["reason"].is_string() && explained["candidates"][0]["dropped_by"].is_null());
    }
    assert_eq!((rig.running(), fake.requests().len()), (0, 0));
    assert_eq!(post(rig.admin(), "/explain", "{").await.error_code(), "invalid_json");
    assert_eq!(post(rig.admin(), "/explain?route=/v1/files", "{}").await.status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoints_are_added_drained_and_removed_while_serving() {
    let fake = Fake::start(vec![Step::reply(200, "application/json", "{}"), Step::AwaitClose]).await;
    let rig = Rig::start(&[]);
    let body = json!({"url": fake.url, "model": "sim", "role": "both"}).to_string();
    let added = post(rig.admin(), "/endpoints", &body).await;
    assert_eq!(added.status, 201, "{}", added.text());
    let id = added.json()["endpoints"][0].as_str().unwrap().to_owned();
    assert_eq!(added.json()["replicated"], false, "there is nobody else");
    assert_eq!(post(rig.address(), "/v1/chat/completions", chat(false)).await.status, 200);

    let drained = post(rig.admin(), &format!("/endpoints/{id}/drain"), r#"{"deadline_ms":60000}"#).await;
    assert_eq!((drained.status, &drained.json()["endpoints"][0]), (202, &json!(id)));
    assert_eq!(post(rig.address(), "/v1/chat/completions", chat(false)).await.status, 503);
    let again = post(rig.admin(), "/endpoints", &body).await;
    assert_eq!(again.status, 201);

    assert_eq!(ask(&rig, "DELETE", &format!("/endpoints/{id}"), "").await.status, 200);
    assert_eq!(get(rig.admin(), "/endpoints").await.json(), json!([]));
    assert_eq!(ask(&rig, "DELETE", &format!("/endpoints/{id}"), "").await.error_code(), "not_found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_makes_no_sense_gets_a_4xx_in_json() {
    let rig = Rig::start(&[]);
    for body in [
        "",
        "{",
        "[]",
        "{}",
        r#"{"url":7}"#,
        r#"{"url":"ftp://x"}"#,
        r#"{"url":"http://h:1","role":"boss"}"#,
        r#"{"url":"http://h:1","colour":"red"}"#,
        r#"{"url":"http://h:1","model":"a,role=prefill"}"#,
        r#"{"url":"http://h:1","dp":0}"#,
    ] {
        let reply = post(rig.admin(), "/endpoints", body).await;
        assert_eq!((reply.status, reply.error_code().as_str()), (400, "bad_request"), "{body}");
    }
    assert_eq!(post(rig.admin(), "/endpoints/xyz/drain", "").await.status, 400);
    assert_eq!(post(rig.admin(), "/endpoints/00000000000000ff/drain", "").await.status, 404);
    assert_eq!(get(rig.admin(), "/sessions/nobody").await.error_code(), "not_found");
    assert_eq!(get(rig.admin(), "/nothing").await.error_code(), "not_found");
    assert_eq!(ask(&rig, "PUT", "/endpoints", "").await.error_code(), "method_not_allowed");
    assert_eq!(post(rig.admin(), "/endpoints", "x".repeat(65 << 10)).await.status, 413);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_token_only_probes_and_the_page_are_open() {
    let gateway = GatewaySettings { admin_token: Some("secret".to_owned()), ..GatewaySettings::default() };
    let rig = Rig::start_as(&[], Wishes { gateway, ..Wishes::default() });
    for path in ["/cluster", "/metrics", "/endpoints", "/requests"] {
        assert_eq!(get(rig.admin(), path).await.error_code(), "unauthorized", "{path}");
        assert_eq!(ask(&rig, "GET", path, "Authorization: Bearer wrong\r\n").await.status, 401);
        assert_eq!(ask(&rig, "GET", path, "Authorization: Bearer secret\r\n").await.status, 200, "{path}");
    }
    assert_eq!(get(rig.admin(), "/livez").await.status, 200);
    assert_eq!(get(rig.admin(), "/readyz").await.json(), json!({"ready": false, "missing": ["endpoint"]}));
    let page = get(rig.admin(), "/").await;
    assert!(page.header("content-type").unwrap().starts_with("text/html"));
    // Self-contained: nothing is fetched from elsewhere.
    assert!(!page.text().contains("http://") && !page.text().contains("https://"));
    assert_eq!(get(rig.admin(), "/openapi.json").await.json()["openapi"], "3.1.0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_shown_where_it_lives() {
    let fake = Fake::start(vec![Step::reply(200, "application/json", "{}"), Step::AwaitClose]).await;
    let rig = Rig::start(std::slice::from_ref(&fake.url));
    let mut client = Connection::open(rig.address()).await;
    client.send(request("POST", "/v1/chat/completions", "X-Session-Id: team a\r\n", chat(false))).await;
    assert_eq!(client.reply().await.status, 200);
    rig.at_rest().await;
    let session = get(rig.admin(), "/sessions/team%20a").await.json();
    assert_eq!((&session["endpoint"], &session["pair"]), (&json!(fake.url), &json!(null)));
    assert!(session["warm_tokens"].is_number() && session.get("qoe").is_some());
    until("the turn to end", || {
        let key = routing::SessionKey::of("x-session-id", b"team a");
        rig.router.session(key).as_str() == "idle"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_is_got_where_it_was_made_and_an_unknown_one_nowhere() {
    let script = |id: &str| {
        vec![
            Step::reply(
                200,
                "application/json",
                &format!(r#"{{"id":"{id}","object":"response","output":[]}}"#),
            ),
            Step::Next,
            Step::reply(200, "application/json", &format!(r#"{{"id":"{id}"}}"#)),
            Step::Next,
            Step::reply(200, "application/json", "{}"),
            Step::AwaitClose,
        ]
    };
    let (one, two) = (Fake::start(script("resp_a")).await, Fake::start(script("resp_b")).await);
    let rig = Rig::start(&[one.url.clone(), two.url.clone()]);
    let made = post(rig.address(), "/v1/responses", r#"{"input":"hello"}"#).await.json();
    let id = made["id"].as_str().unwrap().to_owned();
    let home = if id == "resp_a" { &one } else { &two };
    assert_eq!(get(rig.address(), &format!("/v1/responses/{id}")).await.json()["id"], id);
    let cancel = post(rig.address(), &format!("/v1/responses/{id}/cancel"), "").await;
    assert_eq!(cancel.status, 200);
    assert_eq!(home.requests().len(), 3);
    let unknown = get(rig.address(), "/v1/responses/resp_z").await;
    assert_eq!((unknown.status, unknown.error_code().as_str()), (404, "not_found"));
    assert_eq!(one.requests().len() + two.requests().len(), 3);
}
