//! SIGHUP: the configuration is taken whole or not at all, and nothing that lives is lost by it.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use grapevine::config::Sources;
use grapevine::ports;
use serde_json::Value;

use crate::quality::streamed;
use crate::rig::{
    Answer, Connection, Fake, Node, Process, chat, eventually, get, piece, post, post_as, request, sources,
    try_get, until,
};

/// A replica that reads a file, and the file.
struct Configured {
    node: Node,
    sources: Sources,
    file: tempfile::NamedTempFile,
}

impl Configured {
    async fn start(text: &str) -> Self {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        let (mut sources, name) = sources(&[]);
        sources.file = Some(file.path().to_owned());
        let node = Node::of(&sources, name).await;
        Self { node, sources, file }
    }

    /// Writes `text` and has it read; what was wrong with it.
    fn reload(&self, text: &str) -> Result<(), String> {
        std::fs::write(self.file.path(), text).expect("written");
        self.node.replica.reload(&self.sources).map_err(|faults| faults.to_string())
    }
}

fn endpoints(fakes: &[&Fake]) -> String {
    let urls: Vec<String> = fakes.iter().map(|fake| format!("{:?}", fake.url())).collect();
    format!(
        "endpoint = [{}]\nprobe_every_ms = 20\nscrape_every_ms = 20\nexplain_headers = true\n",
        urls.join(", ")
    )
}

async fn explained(node: &Node, content: &str) -> Value {
    post(node.admin(), "/explain", chat(content, false)).await.json()
}

fn warm_at(explained: &Value, url: &str) -> u64 {
    let candidates = explained["candidates"].as_array().into_iter().flatten();
    let own = candidates.into_iter().find(|candidate| candidate["url"] == url);
    own.and_then(|candidate| candidate["warm_tokens"].as_u64()).unwrap_or(0)
}

#[actix_web::test]
pub(super) async fn a_reload_changes_policy_filters_numbers_and_endpoints_and_keeps_everything_else() {
    let answer = |asked: &crate::rig::Asked| {
        if asked.body.windows(4).any(|word| word == b"stay") {
            Answer::stream(200, Duration::from_millis(10))
        } else {
            Answer::completion(900, 2)
        }
    };
    let (one, two, three) = (Fake::start(answer).await, Fake::start(answer).await, Fake::start(answer).await);
    let configured = Configured::start(&endpoints(&[&one, &two])).await;
    let node = &configured.node;
    node.ready().await;
    node.all_in_use(2).await;
    let prompt = "a prompt of several blocks that will be warm. ".repeat(80);
    let session = "X-Session-Id: kept\r\n";
    let reply = post_as(node.public(), "/v1/chat/completions", session, chat(&prompt, false)).await;
    let home = reply.header("x-grapevine-endpoint").expect("a header").to_owned();
    let before = explained(node, &prompt).await;
    assert!(warm_at(&before, &home) > 500 && before["policy"] == "cost", "{before}");
    let mut open = Connection::open(node.public()).await;
    open.send(request("POST", "/v1/chat/completions", "", chat("stay", true))).await;
    open.read_until("word0").await;

    let text = format!(
        "policy = \"round-robin\"\nendpoint_filter = [\"queue-percentile,percentile=0.5\"]\nprefill_us_per_token = 500\n{}",
        endpoints(&[&one, &two, &three])
    );
    configured.reload(&text).expect("a good file");
    node.all_in_use(3).await;
    let after = explained(node, &prompt).await;
    assert_eq!(after["policy"], "round-robin");
    assert_eq!(after["candidates"].as_array().map(Vec::len), Some(3));
    assert_eq!(warm_at(&after, &home), warm_at(&before, &home), "the index is the same");
    assert_eq!(get(node.admin(), "/sessions/kept").await.json()["endpoint"], home);
    assert_eq!(node.running(), 1, "the open stream is still charged");
    let counted = get(node.admin(), "/metrics").await;
    let counted = counted.text();
    assert!(counted.contains(r#"policy="cost""#), "counters go on from where they were");

    // And back, one endpoint fewer: the stream that was open all along comes to its end.
    configured.reload(&endpoints(&[&one, &two])).expect("a good file");
    assert_eq!(explained(node, &prompt).await["policy"], "cost");
    let reply = open.reply().await;
    assert!(reply.complete && reply.text().contains("word199") && reply.text().contains("[DONE]"));
    node.at_rest().await;
}

#[actix_web::test]
async fn an_endpoint_that_a_reload_takes_out_is_neither_used_nor_probed_nor_scraped() {
    let (kept, gone) =
        (Fake::start(|_| Answer::completion(1, 1)).await, Fake::start(|_| Answer::completion(1, 1)).await);
    let configured = Configured::start(&endpoints(&[&kept, &gone])).await;
    let node = &configured.node;
    node.all_in_use(2).await;
    until("both to be probed", || gone.asked("/health") > 3 && kept.asked("/health") > 3).await;
    configured.reload(&endpoints(&[&kept])).expect("a good file");
    // A probe may be under way; after two of the other one none can be.
    let probes = kept.asked("/health");
    until("two more probes", || kept.asked("/health") >= probes + 2).await;
    let settled = ["/health", "/metrics", "/v1/models"].map(|path| gone.asked(path));
    for n in 0..20 {
        assert_eq!(node.chat(&format!("number {n}")).await.status, 200);
    }
    let probes = kept.asked("/health");
    until("ten more probes", || kept.asked("/health") >= probes + 10).await;
    assert_eq!(["/health", "/metrics", "/v1/models"].map(|path| gone.asked(path)), settled);
    assert_eq!(gone.served(), 0);
    assert!(!get(node.admin(), "/metrics").await.text().contains(&gone.url()), "nor shown");
}

#[actix_web::test]
pub(super) async fn a_file_with_a_fault_changes_nothing_and_every_fault_is_told() {
    let (one, two) =
        (Fake::start(|_| Answer::completion(1, 1)).await, Fake::start(|_| Answer::completion(1, 1)).await);
    let configured = Configured::start(&endpoints(&[&one, &two])).await;
    let node = &configured.node;
    node.all_in_use(2).await;
    let shown = async || {
        let explained = explained(node, "the same prompt").await;
        (explained["policy"].clone(), explained["candidates"].as_array().map(Vec::len))
    };
    let before = shown().await;
    // Each has good changes in it, that must not be taken, and something bad, that must be told.
    let with = |bad_keys: &str, bad_tables: &str| {
        let good_keys = format!("body_bytes_max = 2048\n{}", endpoints(&[&one]));
        format!("{bad_keys}{good_keys}[policy]\nname = \"round-robin\"\n{bad_tables}")
    };
    let cases: [(&str, &str, &[&str]); 7] = [
        ("tries_max = 0\nidle_timeout_ms = \"soon\"\n", "", &["tries_max", "idle_timeout_ms"]),
        ("colour = \"red\"\n", "", &["colour"]),
        (
            "cluster_id = \"other\"\nconnect_timeout_ms = 9\n",
            "",
            &["cluster_id", "connect_timeout_ms", "until a restart"],
        ),
        ("", "[policy.cost]\ntie_ms = -1\n", &["policy.cost.tie_ms"]),
        ("", "[filter.kv-pressure]\nmoon = 1\n", &["filter.kv-pressure.moon"]),
        ("admin_token_file = \"/nonexistent\"\n", "", &["admin_token_file"]),
        ("this is not TOML\n", "", &["TOML"]),
    ];
    for (bad_keys, bad_tables, told) in cases {
        let bad = with(bad_keys, bad_tables);
        let faults = configured.reload(&bad).expect_err(&bad);
        for part in told {
            assert!(faults.contains(part), "{part} is not told of {bad}: {faults}");
        }
        assert_eq!(shown().await, before, "{bad}");
        let long = node.chat(&"x".repeat(4_096)).await;
        assert_eq!(long.status, 200, "{bad}: the body limit is the old one");
    }
    configured.reload(&with("", "")).expect("without the faults it is taken");
    assert_eq!(node.chat(&"x".repeat(4_096)).await.status, 413);
    assert_eq!(shown().await.1, Some(1));
}

#[actix_web::test]
pub(super) async fn what_each_class_expects_is_what_the_file_says_last() {
    let role = r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#;
    let answer = move |_: &crate::rig::Asked| {
        // The first token comes after the first pause.
        let events = std::iter::once(role.to_owned()).chain((0..3).map(piece));
        Answer::Events(events.collect(), Duration::from_millis(5))
    };
    let engine = Fake::start(answer).await;
    let configured = Configured::start(&endpoints(&[&engine])).await;
    let node = &configured.node;
    node.ready().await;
    node.all_in_use(1).await;
    for strict in 0..6 {
        let keys = (0..6).map(|key| {
            let (priority, target) = (key / 2 + 1, ["ttft", "tpot"][key % 2]);
            format!("priority_{priority}_{target}_ms = {}\n", if key == strict { 0.1 } else { 3_600_000.0 })
        });
        let text = format!("{}{}", keys.collect::<String>(), endpoints(&[&engine]));
        configured.reload(&text).expect("a good file");
        for priority in 1..=3 {
            let id = format!("{strict}-{priority}");
            let row = streamed(node, &id, &format!("X-Request-Priority: {priority}\r\n")).await;
            for (at, target) in ["ttft", "tpot"].into_iter().enumerate() {
                let expected = if (priority - 1) * 2 + at == strict { "missed" } else { "met" };
                assert_eq!(row["slo"][target], expected, "{target} of {priority} with {text}: {row}");
            }
        }
    }
}

/// The signal itself, at the process.
#[actix_web::test]
async fn sighup_takes_a_good_file_under_load_and_logs_what_is_wrong_with_a_bad_one() {
    let (one, two) =
        (Fake::start(|_| Answer::completion(9, 1)).await, Fake::start(|_| Answer::completion(9, 1)).await);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let write = |text: &str| std::fs::write(file.path(), text).expect("written");
    write(&format!("policy = \"round-robin\"\n{}", endpoints(&[&one, &two])));
    let log = tempfile::NamedTempFile::new().expect("a file");
    let own = ports::find(1).expect("free ports").remove(0);
    let [public, admin, gossip] = [own.public, own.admin, own.gossip].map(|address| address.to_string());
    let path = file.path().display().to_string();
    let arguments = ["serve", "--config", &path, "--listen", &public, "--admin", &admin, "--gossip", &gossip];
    let process = Process::start(&arguments, Stdio::from(log.reopen().expect("a log")));
    eventually("ready", async || (try_get(own.public, "/readyz").await?.status == 200).then_some(())).await;
    let policy = async || get(own.admin, "/cluster").await.json()["policy"].clone();
    assert_eq!(policy().await, "round-robin");

    let stop = std::rc::Rc::new(std::cell::Cell::new(false));
    let load = {
        let stop = std::rc::Rc::clone(&stop);
        actix_web::rt::spawn(async move {
            let mut connection = Connection::open(own.public).await;
            let mut served = 0;
            while !stop.get() {
                connection.send(request("POST", "/v1/chat/completions", "", chat("hello", false))).await;
                assert_eq!(connection.reply().await.status, 200);
                served += 1;
            }
            served
        })
    };
    write(&format!("tries_max = 0\n{}", endpoints(&[&one])));
    process.signal("HUP");
    eventually("the fault in the log", async || {
        let text = std::fs::read_to_string(log.path()).unwrap_or_default();
        (text.contains("reload refused") && text.contains("tries_max")).then_some(())
    })
    .await;
    assert_eq!(policy().await, "round-robin", "nothing has changed");
    write(&endpoints(&[&one, &two]));
    process.signal("HUP");
    eventually("the new policy", async || (policy().await == "cost").then_some(())).await;
    stop.set(true);
    assert!(load.await.expect("every request was served") > 0);
}
