//! From a request to its handler, and the small handlers.

use std::fmt::Write;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::fault::Order;
use crate::measures::Page;
use crate::record::Route;
use crate::tokens::{TokenId, detokenize};

use super::Server;
use super::body::Body;
use super::error::{ApiError, push_json};
use super::reply::{Failure, Reply};
use super::script::{Api, push_ids};
use super::{embeddings, generate, responses};

/// The route of a path. `/fault` and `/echo` exist only where faults are allowed.
pub(crate) fn route(path: &str, faults: bool) -> Route {
    let under =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let exact = Route::ALL.iter().find(|route| route.path() == path);
    match exact {
        Some(Route::Fault | Route::Echo | Route::Unknown) if !faults => Route::Unknown,
        Some(&route) => route,
        None if under("/v1/responses") => Route::Responses,
        None if faults && (under("/echo") || under("/v1/echo")) => Route::Echo,
        None => Route::Unknown,
    }
}

/// Answers one request.
pub(crate) async fn handle(
    server: &Arc<Server>,
    route: Route,
    parts: &Parts,
    body: &Bytes,
    request_id: &str,
) -> Result<Reply, Failure> {
    let method = match route {
        Route::Models | Route::Health | Route::Version | Route::Load | Route::Metrics => Some(Method::GET),
        Route::Ping | Route::Responses | Route::Echo | Route::Unknown => None,
        _ => Some(Method::POST),
    };
    if let Some(method) = method.filter(|method| *method != parts.method && parts.method != Method::HEAD) {
        let allowed = if method == Method::GET { "GET" } else { "POST" };
        return Ok(Reply::from(ApiError::detail(StatusCode::METHOD_NOT_ALLOWED)).with_allow(allowed));
    }
    if parts.uri.path().starts_with("/v1/") && !authorized(server, parts) {
        return Err(ApiError::unauthorized().into());
    }
    if takes_json(route) && parts.method == Method::POST && !body_is_json(parts) {
        let fault = "Unsupported Media Type: Only 'application/json' is allowed";
        return Err(ApiError::invalid(None, fault).into());
    }
    let computes = matches!(route, Route::Chat | Route::Completions | Route::Embeddings | Route::Responses);
    if computes && server.core_is_dead() {
        return Err(ApiError::core_died().into());
    }
    match route {
        Route::Chat => generate::completions(server, Api::Chat, &parts.headers, body, request_id).await,
        Route::Completions => {
            generate::completions(server, Api::Text, &parts.headers, body, request_id).await
        }
        Route::Embeddings => embeddings::handle(server, &parts.headers, body).await,
        Route::Responses => responses::handle(server, parts, body).await,
        Route::Models => Ok(models(server)),
        Route::Tokenize => Ok(tokenize_text(server, body)?),
        Route::Detokenize => Ok(detokenize_ids(server, body)?),
        Route::Health | Route::Ping if server.faults.healthy() && !server.core_is_dead() => {
            Ok(Reply::empty(StatusCode::OK))
        }
        Route::Health | Route::Ping => Ok(Reply::empty(StatusCode::SERVICE_UNAVAILABLE)),
        Route::Version => Ok(json("{\"version\":\"0.32.0\"}".to_owned())),
        Route::Load => Ok(load(server)),
        Route::Metrics if server.config.metrics => Ok(metrics(server)),
        Route::Fault => Ok(fault(server, body)?),
        Route::Echo => Ok(echo(parts, body)),
        Route::Metrics | Route::Unknown => Err(ApiError::detail(StatusCode::NOT_FOUND).into()),
    }
}

fn takes_json(route: Route) -> bool {
    use Route::{Chat, Completions, Detokenize, Embeddings, Responses, Tokenize};
    matches!(route, Chat | Completions | Embeddings | Responses | Tokenize | Detokenize)
}

fn body_is_json(parts: &Parts) -> bool {
    let media = parts.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    media.split(';').next().is_some_and(|media| media.trim().eq_ignore_ascii_case("application/json"))
}

fn authorized(server: &Server, parts: &Parts) -> bool {
    let Some(key) = &server.config.api_key else { return true };
    let given = parts.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or("");
    given.strip_prefix("Bearer ") == Some(key)
}

fn json(text: String) -> Reply {
    Reply::json(StatusCode::OK, text.into())
}

fn models(server: &Server) -> Reply {
    let mut out = "{\"object\":\"list\",\"data\":[{\"id\":".to_owned();
    push_json(&mut out, &server.config.model);
    let created = server.unix_s();
    let _ = write!(out, ",\"object\":\"model\",\"created\":{created},\"owned_by\":\"vllm\",\"root\":");
    push_json(&mut out, &server.config.model);
    let _ = write!(
        out,
        ",\"parent\":null,\"max_model_len\":{},\"permission\":[{{\"id\":\"modelperm-{:016x}\",\
         \"object\":\"model_permission\",\"created\":{created},\"allow_create_engine\":false,\
         \"allow_sampling\":true,\"allow_logprobs\":true,\"allow_search_indices\":false,\"allow_view\":true,\
         \"allow_fine_tuning\":false,\"organization\":\"*\",\"group\":null,\"is_blocking\":false}}]}}]}}",
        server.config.model_tokens_max,
        server.ids.next()
    );
    json(out)
}

fn tokenize_text(server: &Server, bytes: &Bytes) -> Result<Reply, ApiError> {
    let body = super::body::parse(bytes)?;
    server.check_model(&body)?;
    let tokens = match body.prompt {
        Some(prompt) => generate::text_prompts(prompt)?.swap_remove(0),
        None if body.messages.is_some() => generate::chat_tokens(&body)?,
        None => return Err(body.missing("prompt")),
    };
    Ok(json(token_list(server, &body, &tokens)))
}

fn token_list(server: &Server, body: &Body<'_>, tokens: &[TokenId]) -> String {
    let max = server.config.model_tokens_max;
    let mut out = format!("{{\"count\":{},\"max_model_len\":{max},\"tokens\":", tokens.len());
    push_ids(&mut out, tokens.iter().copied());
    out.push_str(",\"token_strs\":");
    if body.return_token_strs.unwrap_or(false) {
        for (index, &token) in tokens.iter().enumerate() {
            out.push(if index == 0 { '[' } else { ',' });
            push_json(&mut out, &String::from_utf8_lossy(&detokenize(&[token])));
        }
        out.push_str(if tokens.is_empty() { "[]" } else { "]" });
    } else {
        out.push_str("null");
    }
    out.push('}');
    out
}

fn detokenize_ids(server: &Server, bytes: &Bytes) -> Result<Reply, ApiError> {
    let body = super::body::parse(bytes)?;
    server.check_model(&body)?;
    let ids = body.tokens.as_ref().ok_or_else(|| body.missing("tokens"))?;
    let tokens: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
    let mut out = "{\"prompt\":".to_owned();
    push_json(&mut out, &String::from_utf8_lossy(&detokenize(&tokens)));
    out.push('}');
    Ok(json(out))
}

fn load(server: &Server) -> Reply {
    let running: u32 =
        server.ranks.iter().map(|rank| server.told(rank.gauges())).map(|g| g.running + g.waiting).sum();
    json(format!("{{\"server_load\":{running}}}"))
}

fn metrics(server: &Server) -> Reply {
    let mut ranks: Vec<_> = server.ranks.iter().map(|rank| rank.snapshot()).collect();
    for rank in &mut ranks {
        rank.gauges = server.told(rank.gauges);
    }
    let limits = server.config.limits;
    let page = Page {
        model: &server.config.model,
        block_tokens: limits.block_tokens,
        kv_blocks: limits.kv_blocks,
        process_start_unix_s: server.process_start_unix_s(),
        connector: server.config.transfer.connector,
        rooms: server.rooms.count(),
        ranks: &ranks,
    };
    let content_type = HeaderValue::from_static("text/plain; version=1.0.0; charset=utf-8");
    Reply::bytes(StatusCode::OK, content_type, page.render().into())
}

fn fault(server: &Server, body: &Bytes) -> Result<Reply, ApiError> {
    let order: Order =
        serde_json::from_slice(body).map_err(|error| ApiError::bad_request(None, &error.to_string()))?;
    server.obey(&order);
    Ok(json("{}".to_owned()))
}

/// Sends the body back as it came, with its content type, and says how it came.
fn echo(parts: &Parts, body: &Bytes) -> Reply {
    let octets = HeaderValue::from_static("application/octet-stream");
    let content_type = parts.headers.get(CONTENT_TYPE).cloned().unwrap_or(octets);
    let mut reply = Reply::bytes(StatusCode::OK, content_type, body.clone());
    let path = parts.uri.path_and_query().map_or("", |path| path.as_str());
    for (name, value) in [("x-echo-method", parts.method.as_str()), ("x-echo-path", path)] {
        if let Ok(value) = HeaderValue::from_str(value) {
            reply = reply.with_header(HeaderName::from_static(name), value);
        }
    }
    reply
}
