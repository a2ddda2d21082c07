//! A small HTTP client for the commands that ask a replica something.

use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Method, Request};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// The largest answer that is read.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// What came back.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// The whole body.
    pub body: Bytes,
}

/// GETs `url` within `limit`.
///
/// # Errors
/// When it can't be reached or does not answer in time.
pub async fn get(url: &str, token: Option<&str>, limit: Duration) -> anyhow::Result<Reply> {
    ask(Method::GET, url, Vec::new(), token, limit).await
}

/// POSTs a JSON `body` to `url` within `limit`.
///
/// # Errors
/// When it can't be reached or does not answer in time.
pub async fn post(url: &str, body: Vec<u8>, token: Option<&str>, limit: Duration) -> anyhow::Result<Reply> {
    ask(Method::POST, url, body, token, limit).await
}

async fn ask(
    method: Method,
    url: &str,
    body: Vec<u8>,
    token: Option<&str>,
    limit: Duration,
) -> anyhow::Result<Reply> {
    let mut request = Request::builder().method(method).uri(url).header("content-type", "application/json");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request =
        request.body(Full::new(Bytes::from(body))).with_context(|| format!("{url} is not a URL"))?;
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let answer = async {
        let reply = client.request(request).await?;
        let status = reply.status().as_u16();
        let body = Limited::new(reply.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(anyhow::Error::from_boxed)?;
        anyhow::Ok(Reply { status, body: body.to_bytes() })
    };
    tokio::time::timeout(limit, answer)
        .await
        .with_context(|| format!("{url} did not answer within {limit:?}"))?
        .with_context(|| format!("{url} can't be reached"))
}
