//! The driver against small servers on loopback that do exactly what a test says, byte by byte.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;

/// Longer than anything here takes, short enough to fail a hung test.
const DEADLINE: Duration = Duration::from_secs(20);

/// A request as a server got it.
#[derive(Debug, Clone)]
struct Got {
    at: Instant,
    head: String,
    body: Value,
    server: usize,
}

impl Got {
    fn messages(&self) -> &[Value] {
        self.body["messages"].as_array().unwrap()
    }
}

/// What a server does with a request.
#[derive(Debug, Clone)]
enum Act {
    /// Writes this and keeps the connection.
    Reply(String),
    /// Writes this and closes the connection.
    ReplyAndClose(String),
    /// Writes this and resets the connection.
    ReplyAndReset(String),
    /// Keeps silent.
    Stall,
}

/// Servers that record what they get; dropped with the test's runtime.
struct Servers {
    urls: Vec<String>,
    got: UnboundedReceiver<Got>,
    connections: Arc<AtomicUsize>,
}

impl Servers {
    /// `count` servers; `act` sees each request.
    async fn start(count: usize, act: impl Fn(&Got) -> Act + Send + Sync + 'static) -> Self {
        let act = Arc::new(act);
        let (sender, got) = unbounded_channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let mut urls = Vec::new();
        for server in 0..count {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            urls.push(format!("http://{}", listener.local_addr().unwrap()));
            let (act, sender, connections) = (act.clone(), sender.clone(), connections.clone());
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    connections.fetch_add(1, SeqCst);
                    let (act, sender) = (act.clone(), sender.clone());
                    tokio::spawn(async move {
                        while let Some(got) = read_request(&mut stream, server).await {
                            let todo = act(&got);
                            let _ = sender.send(got);
                            match todo {
                                Act::Reply(bytes) => stream.write_all(bytes.as_bytes()).await.unwrap(),
                                Act::ReplyAndClose(bytes) => {
                                    stream.write_all(bytes.as_bytes()).await.unwrap();
                                    return;
                                }
                                Act::ReplyAndReset(bytes) => {
                                    stream.write_all(bytes.as_bytes()).await.unwrap();
                                    stream.set_zero_linger().unwrap();
                                    return;
                                }
                                Act::Stall => pending().await,
                            }
                        }
                    });
                }
            });
        }
        Self { urls, got, connections }
    }

    fn targets(&self, path: &str) -> Targets {
        Targets::new(self.urls.iter().map(|url| Target::new(url, path).unwrap()).collect()).unwrap()
    }

    fn chats(&self, shape: ChatShape, clients: usize) -> Plan {
        let pace = Pace::Closed { clients, order: Order::Chats };
        Plan::new(self.targets("/v1/chat/completions"), Source::Chat(Arc::new(shape)), pace)
    }

    /// What was received so far, in order.
    fn received(&mut self) -> Vec<Got> {
        std::iter::from_fn(|| self.got.try_recv().ok()).collect()
    }
}

async fn read_request(stream: &mut TcpStream, server: usize) -> Option<Got> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_end].to_vec()).unwrap().to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.unwrap().parse().unwrap();
    while bytes.len() < head_end + length {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let body = serde_json::from_slice(&bytes[head_end..]).unwrap();
    Some(Got { at: Instant::now(), head, body, server })
}

const ONE: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"one \\\"\"},\"finish_reason\":null}]}\n\n";
const END: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"two\"},\"finish_reason\":\"stop\"}]}\n\n\
    data: {\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":2,\
    \"prompt_tokens_details\":{\"cached_tokens\":10}}}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const ERROR: &str = "data: {\"error\":{\"message\":\"engine died\",\"code\":500}}\n\n";
const SSE: &str = "content-type: text/event-stream";
const JSON: &str = "content-type: application/json";

/// A reply of chunks, each an HTTP chunk of its own; without the last chunk when `cut`.
fn chunked(header: &str, chunks: &[&str], cut: bool) -> String {
    let mut reply = format!("HTTP/1.1 200 OK\r\n{header}\r\ntransfer-encoding: chunked\r\n\r\n");
    for chunk in chunks {
        reply.push_str(&format!("{:x}\r\n{chunk}\r\n", chunk.len()));
    }
    if !cut {
        reply.push_str("0\r\n\r\n");
    }
    reply
}

fn sized(status: &str, header: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{header}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn whole(endpoint: &str) -> String {
    chunked(&format!("{SSE}\r\nx-grapevine-endpoint: {endpoint}"), &[ONE, END, DONE], false)
}

async fn drive_to_end(plan: Plan) -> Report {
    tokio::time::timeout(DEADLINE, drive(plan, Live::new(), pending())).await.expect("the run hangs")
}

fn shape(sessions: u64, turns: u32) -> ChatShape {
    ChatShape { sessions: Some(sessions), turns, ..ChatShape::default() }
}

#[tokio::test]
async fn chats_carry_their_real_answers_and_the_report_counts_them() {
    let mut servers = Servers::start(2, |got| Act::Reply(whole(&format!("e{}", got.server)))).await;
    let report = drive_to_end(Plan { spread: Spread::Session, ..servers.chats(shape(6, 3), 2) }).await;
    assert_eq!((report.requests, report.failed(), report.abandoned), (18, 0, 0));
    assert_eq!(report.hit_rate, Some(0.25));
    assert_eq!((report.follow_ups, report.follow_up_at_home), (12, Some(1.0)));
    assert_eq!(report.per_endpoint, [("e0".to_owned(), 9), ("e1".to_owned(), 9)].into());
    assert_eq!((report.output_tokens, report.prompt_tokens), (36, 720));
    assert!(report.ttft_ms.p50.unwrap() > 0.0 && report.e2e_ms.p50 >= report.ttft_ms.p50);
    let received = servers.received();
    let last = received.iter().find(|got| got.messages().len() == 6).unwrap();
    for answer in [2, 4] {
        assert_eq!(last.messages()[answer]["content"], "one \"two");
        assert_eq!(last.messages()[answer]["role"], "assistant");
    }
    assert_eq!(last.body["stream_options"]["include_usage"], true);
}

#[tokio::test]
async fn requests_take_turns_over_the_targets_and_a_chat_that_moves_is_not_at_home() {
    let servers = Servers::start(2, |got| Act::Reply(whole(&format!("e{}", got.server)))).await;
    let report = drive_to_end(servers.chats(shape(3, 3), 1)).await;
    // Requests 0..9 in turn; a chat's three requests are at x, y, x.
    assert_eq!(report.per_endpoint, [("e0".to_owned(), 5), ("e1".to_owned(), 4)].into());
    assert_eq!(report.follow_up_at_home, Some(0.5));
}

#[tokio::test]
async fn every_failure_is_counted_by_its_kind() {
    let check = |stream: bool, act: Act, kind: &str| {
        let (act, kind) = (act.clone(), kind.to_owned());
        async move {
            let servers = Servers::start(1, move |_| act.clone()).await;
            let mut plan = servers.chats(shape(1, 2), 1);
            plan.envelope.stream = stream;
            plan.wire.request_timeout = Duration::from_secs(5);
            let report = drive_to_end(plan).await;
            assert_eq!(report.errors, [(kind.clone(), 1)].into(), "{:?}", report.error_details);
            assert_eq!((report.requests, report.chats_broken), (1, 1), "a failed turn ends its chat");
            report
        }
    };
    let report = check(true, Act::Reply(sized("503 Busy", JSON, "later")), "status 503").await;
    assert_eq!(report.error_details["status 503"], "later");
    check(true, Act::ReplyAndClose(String::new()), "reset").await;
    check(true, Act::ReplyAndReset(String::new()), "reset").await;
    check(true, Act::Reply(chunked(SSE, &[ONE, ERROR, DONE], false)), "error-event").await;
    check(true, Act::ReplyAndClose(chunked(SSE, &[ONE, ERROR], true)), "error-event").await;
    check(true, Act::Reply(chunked(SSE, &[ONE, END], false)), "truncated").await;
    check(true, Act::ReplyAndClose(chunked(SSE, &[ONE], true)), "truncated").await;
    check(true, Act::Reply(chunked(SSE, &[ONE, DONE], false)), "truncated").await;
    check(true, Act::Reply(chunked(SSE, &[&END.replace("stop", "abort"), DONE], false)), "abort").await;
    check(true, Act::Reply(chunked(SSE, &["data: <html>\n\n"], false)), "body mismatch").await;
    check(true, Act::Reply(sized("200 OK", JSON, "{}")), "body mismatch").await;
    check(false, Act::Reply(sized("200 OK", JSON, "ok")), "body mismatch").await;
    check(false, Act::ReplyAndClose(sized("200 OK", JSON, "{}").replace(": 2", ": 20")), "truncated").await;
}

#[tokio::test]
async fn a_refused_connection_is_a_connect_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let targets = Targets::new(vec![Target::new(&url, "/").unwrap()]).unwrap();
    let pace = Pace::Closed { clients: 1, order: Order::Chats };
    let report = drive_to_end(Plan::new(targets, Source::Chat(Arc::new(shape(2, 1))), pace)).await;
    assert_eq!(report.errors, [("connect".to_owned(), 2)].into());
}

#[tokio::test]
async fn silence_before_or_within_the_reply_is_a_timeout() {
    let unfinished = chunked(SSE, &[ONE], true);
    for act in [Act::Stall, Act::Reply(unfinished)] {
        let servers = Servers::start(1, move |_| act.clone()).await;
        let mut plan = servers.chats(shape(1, 1), 1);
        plan.wire.request_timeout = Duration::from_millis(50);
        assert_eq!(drive_to_end(plan).await.errors, [("timeout".to_owned(), 1)].into());
    }
}

#[tokio::test]
async fn whole_replies_are_read_when_no_stream_is_asked() {
    let reply = r#"{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],
        "usage":{"prompt_tokens":10,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":5}}}"#;
    let mut servers = Servers::start(1, |_| Act::Reply(sized("200 OK", JSON, reply))).await;
    let mut plan = servers.chats(shape(1, 2), 1);
    plan.envelope.stream = false;
    let report = drive_to_end(plan).await;
    assert_eq!((report.requests, report.failed(), report.hit_rate), (2, 0, Some(0.5)));
    assert!(report.ttft_ms.p50.is_none() && report.e2e_ms.p50.is_some());
    let received = servers.received();
    assert!(received[1].body.get("stream").is_none());
    assert_eq!(received[1].messages()[2]["content"], "hi");
}

#[tokio::test]
async fn a_trace_is_replayed_no_earlier_than_its_times_with_equal_text_for_equal_ids() {
    let mut servers = Servers::start(1, |_| Act::Reply(whole("e"))).await;
    let lines = r#"{"timestamp":0,"input_length":700,"output_length":9,"hash_ids":[1,2]}
        {"timestamp":1000,"input_length":600,"output_length":8,"hash_ids":[1,3]}
        {"timestamp":2000,"input_length":512,"output_length":7,"hash_ids":[4]}"#;
    let reading = Reading { arrivals: Some(Arrivals::Recorded), ..Reading::default() };
    let trace = Trace::read(lines.as_bytes(), &reading).unwrap();
    let source = Source::Trace(Arc::new(trace));
    let mut plan = Plan::new(servers.targets("/v1/completions"), source, Pace::Recorded { speed: 20.0 });
    plan.envelope.api = Api::Completions;
    let begun = Instant::now();
    let report = drive_to_end(plan).await;
    assert_eq!((report.requests, report.failed(), report.held_back), (3, 0, 0));
    let mut received = servers.received();
    received.sort_by_key(|got| std::cmp::Reverse(got.body["max_tokens"].as_u64()));
    let prompt = |row: usize| received[row].body["prompt"].as_str().unwrap();
    assert_eq!([prompt(0).len(), prompt(1).len(), prompt(2).len()], [2800, 2400, 2048]);
    assert_eq!(prompt(0)[..2048], prompt(1)[..2048]);
    assert_ne!(prompt(0)[..2048], prompt(2)[..2048]);
    for (row, due_ms) in [(0, 0), (1, 50), (2, 100)] {
        let at = received[row].at.duration_since(begun);
        assert!(at >= Duration::from_millis(due_ms), "row {row} at {at:?}");
    }
}

#[tokio::test]
async fn an_open_loop_holds_its_bound_and_says_who_waited() {
    let replies = Arc::new(AtomicUsize::new(0));
    let seen = replies.clone();
    let servers =
        Servers::start(
            1,
            move |_| {
                if seen.fetch_add(1, SeqCst) < 2 { Act::Stall } else { Act::Reply(whole("e")) }
            },
        )
        .await;
    let shape = ChatShape { sessions: Some(5), turns: 1, ..ChatShape::default() };
    let mut plan = Plan::new(
        servers.targets("/"),
        Source::Chat(Arc::new(shape)),
        Pace::Poisson { requests_per_second: 10_000.0 },
    );
    plan.limits.in_flight_max = 2;
    plan.wire.request_timeout = Duration::from_millis(100);
    let live = Live::new();
    let watched = live.clone();
    let mut most = 0;
    let report = tokio::select! {
        report = drive(plan, live, pending()) => report,
        () = async { loop {
            most = most.max(watched.in_flight());
            tokio::task::yield_now().await;
        } } => unreachable!(),
    };
    assert_eq!(most, 2);
    assert_eq!((report.requests, report.errors["timeout"]), (5, 2));
    assert!(report.held_back >= 1);
    assert!(report.late_ms.max.unwrap() >= 50.0, "{:?}", report.late_ms);
}

#[tokio::test]
async fn a_run_ends_at_its_number_of_requests() {
    let mut servers = Servers::start(1, |_| Act::Reply(whole("e"))).await;
    let endless = ChatShape { sessions: None, ..ChatShape::default() };
    let mut plan = servers.chats(endless, 3);
    plan.limits.requests_max = Some(17);
    assert_eq!(drive_to_end(plan).await.requests, 17);
    assert_eq!(servers.received().len(), 17);
}

#[tokio::test]
async fn a_run_ends_at_its_time_and_lets_answers_come_in() {
    let servers = Servers::start(1, |_| Act::Reply(whole("e"))).await;
    let endless = ChatShape { sessions: None, ..ChatShape::default() };
    let mut plan = servers.chats(endless, 2);
    plan.limits.run_max = Some(Duration::from_millis(100));
    let report = drive_to_end(plan).await;
    assert!(report.requests > 0);
    assert_eq!((report.failed(), report.abandoned), (0, 0));
}

#[tokio::test]
async fn a_stopped_run_abandons_what_does_not_end_and_says_so() {
    let mut servers = Servers::start(1, |_| Act::Stall).await;
    let mut plan = servers.chats(shape(9, 1), 3);
    plan.limits.drain_max = Duration::ZERO;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let live = Live::new();
    let run = tokio::spawn(drive(plan, live.clone(), async { drop(stopped.await) }));
    for _ in 0..3 {
        tokio::time::timeout(DEADLINE, servers.got.recv()).await.unwrap();
    }
    stop.send(()).unwrap();
    let report = tokio::time::timeout(DEADLINE, run).await.unwrap().unwrap();
    assert_eq!((report.requests, report.abandoned), (0, 3));
    assert_eq!(live.in_flight(), 0, "nothing goes on behind the report");
}

#[tokio::test]
async fn in_turns_order_every_chat_has_its_first_turn_before_any_has_its_second() {
    let mut servers = Servers::start(1, |_| Act::Reply(whole("e"))).await;
    let plan = servers.chats(shape(3, 2), 1);
    drive_to_end(Plan { pace: Pace::Closed { clients: 1, order: Order::Turns }, ..plan }).await;
    let lengths: Vec<usize> = servers.received().iter().map(|got| got.messages().len()).collect();
    assert_eq!(lengths, [2, 2, 2, 4, 4, 4]);
}

#[tokio::test]
async fn headers_reach_the_server_and_a_chat_keeps_its_session() {
    let mut servers = Servers::start(1, |_| Act::Reply(whole("e"))).await;
    let mut plan = servers.chats(shape(2, 2), 1);
    plan.seed = 5;
    plan.wire.session_header = Some("x-session-id".parse().unwrap());
    plan.wire.headers.insert("x-request-priority", "1".parse().unwrap());
    drive_to_end(plan).await;
    let received = servers.received();
    let sessions: Vec<&str> = received
        .iter()
        .map(|got| got.head.lines().find(|line| line.starts_with("x-session-id")).unwrap())
        .collect();
    assert_eq!(
        sessions,
        [
            "x-session-id: load-5-0",
            "x-session-id: load-5-0",
            "x-session-id: load-5-1",
            "x-session-id: load-5-1"
        ]
    );
    assert!(received.iter().all(|got| got.head.contains("x-request-priority: 1")));
}

#[tokio::test]
async fn connections_are_kept_unless_asked_fresh() {
    // Kept: a second one may be opened while the first is on its way back to the pool.
    for (fresh, connections) in [(false, 1..=2), (true, 6..=6)] {
        let servers = Servers::start(1, |_| Act::Reply(whole("e"))).await;
        let mut plan = servers.chats(shape(2, 3), 1);
        plan.wire.fresh_connections = fresh;
        assert_eq!(drive_to_end(plan).await.requests, 6);
        assert!(connections.contains(&servers.connections.load(SeqCst)), "fresh: {fresh}");
    }
}

#[tokio::test]
async fn a_retry_goes_to_the_next_target_and_is_counted() {
    let busy = |got: &Got| {
        let refusal = Act::Reply(sized("503 Busy", JSON, "later"));
        if got.server == 0 { refusal } else { Act::Reply(whole("e1")) }
    };
    for spread in [Spread::Request, Spread::Session] {
        let servers = Servers::start(2, busy).await;
        let mut plan = servers.chats(shape(1, 1), 1);
        plan.spread = spread;
        plan.limits.retries_max = 1;
        let report = drive_to_end(plan).await;
        assert_eq!((report.requests, report.failed(), report.retries), (1, 0, 1));
        assert_eq!(report.per_endpoint["e1"], 1);
    }
}

#[tokio::test]
async fn what_clients_do_not_retry_is_not_retried() {
    for act in [Act::Reply(sized("400 Bad", JSON, "no")), Act::ReplyAndReset(chunked(SSE, &[ONE], true))] {
        let mut servers = Servers::start(1, move |_| act.clone()).await;
        let mut plan = servers.chats(shape(1, 1), 1);
        plan.limits.retries_max = 3;
        let report = drive_to_end(plan).await;
        assert_eq!((report.failed(), report.retries, servers.received().len()), (1, 0, 1));
    }
}
