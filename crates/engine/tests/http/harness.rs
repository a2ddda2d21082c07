//! A client for one exchange at a time, and waiting for conditions.

use std::time::Duration;

use bytes::Bytes;
use engine::Engine;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// No condition of these tests takes longer on any machine that is not stuck.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// A whole reply.
pub(crate) struct Got {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Got {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// The data of every event.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = std::str::from_utf8(&self.body).expect("UTF-8");
        text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// The text of choice 0, streamed or not.
    pub(crate) fn text(&self) -> String {
        let text_of = |value: &Value| {
            let choice = &value["choices"][0];
            let texts = [&choice["text"], &choice["delta"]["content"], &choice["message"]["content"]];
            texts.into_iter().find_map(Value::as_str).unwrap_or("").to_owned()
        };
        if self.headers["content-type"] == "application/json" {
            return text_of(&self.json());
        }
        let events = self.events();
        let chunks = events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok());
        chunks.filter(|chunk| chunk["choices"][0]["index"] == 0).map(|chunk| text_of(&chunk)).collect()
    }
}

/// Sends a request on a connection of its own; the reply's head, its body still to come.
pub(crate) async fn open(
    engine: &Engine,
    request: Request<Full<Bytes>>,
) -> Result<http::Response<Incoming>, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(engine.addr()).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// Sends a request and reads the whole reply.
pub(crate) async fn exchange(
    engine: &Engine,
    request: Request<Full<Bytes>>,
) -> Result<Got, Box<dyn std::error::Error + Send + Sync>> {
    let response = open(engine, request).await?;
    let (parts, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    Ok(Got { status: parts.status, headers: parts.headers, body })
}

/// A POST with a JSON body and more headers.
pub(crate) fn post(path: &str, body: &str, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(Method::POST).uri(path).header("host", "engine");
    request = request.header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(Bytes::from(body.to_owned()))).expect("a valid request")
}

/// The whole reply to a POST.
pub(crate) async fn ask(engine: &Engine, path: &str, body: &str) -> Got {
    exchange(engine, post(path, body, &[])).await.expect("an answer")
}

/// The whole reply to a GET.
pub(crate) async fn get(engine: &Engine, path: &str) -> Got {
    let request = Request::builder().uri(path).header("host", "engine").body(Full::default());
    exchange(engine, request.expect("a valid request")).await.expect("an answer")
}

/// One figure of `/metrics`, by its name and labels.
pub(crate) async fn metric(engine: &Engine, series: &str) -> f64 {
    let page = get(engine, "/metrics").await;
    let text = String::from_utf8(page.body.to_vec()).expect("UTF-8");
    let line =
        text.lines().find_map(|line| line.strip_prefix(series)).unwrap_or_else(|| panic!("no {series}"));
    line.trim().parse().unwrap_or_else(|_| panic!("{series} is {line:?}"))
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}
