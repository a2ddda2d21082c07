//! The admin listener: what operators and their tools see. JSON in and out, described by `openapi.json`.

mod cluster;
mod endpoints;
mod explain;
mod requests;
mod route;

use std::sync::Arc;

use actix_web::http::header::{self, HeaderMap};
use actix_web::{HttpRequest, HttpResponse, web};
use serde::Serialize;

use self::route::AdminRoute;
use crate::data;
use crate::errors::EdgeError;
use crate::state::GatewayState;

const OPENAPI: &str = include_str!("openapi.json");
const DASHBOARD: &str = include_str!("dashboard.html");

/// Longest body of a change to the endpoint list, in bytes.
const CHANGE_BYTES_MAX: u64 = 64 << 10;

type Answered = Result<HttpResponse, EdgeError>;

/// Answers any request on the admin listener.
pub(crate) async fn answer(request: HttpRequest, payload: web::Payload) -> HttpResponse {
    let Some(state) = request.app_data::<Arc<GatewayState>>().map(Arc::clone) else {
        return HttpResponse::InternalServerError().finish();
    };
    serve(&state, &request, payload).await.unwrap_or_else(|error| error.response())
}

async fn serve(state: &Arc<GatewayState>, request: &HttpRequest, payload: web::Payload) -> Answered {
    let route = AdminRoute::of(request.method(), request.path())?;
    if !route.is_open() {
        authorize(state, request.headers())?;
    }
    match route {
        AdminRoute::Live => Ok(data::liveness()),
        AdminRoute::Ready => Ok(data::readiness(state)),
        AdminRoute::Dashboard => Ok(text("text/html; charset=utf-8", DASHBOARD)),
        AdminRoute::OpenApi => Ok(text("application/json", OPENAPI)),
        AdminRoute::Metrics => metrics(state),
        AdminRoute::Cluster => Ok(json(&cluster::cluster(state))),
        AdminRoute::Endpoints => Ok(json(&cluster::endpoints(state))),
        AdminRoute::Requests => Ok(json(&requests::list(state))),
        AdminRoute::Request(id) => Ok(json(&requests::one(state, id)?)),
        AdminRoute::Session(key) => Ok(json(&requests::session(state, key)?)),
        AdminRoute::Explain => {
            let body = data::read_body(state, payload, request.headers(), u64::MAX).await?;
            Ok(json(&explain::explain(state, request, &body)?))
        }
        AdminRoute::AddEndpoint => {
            let body = data::read_body(state, payload, request.headers(), CHANGE_BYTES_MAX).await?;
            endpoints::add(state, &body).await
        }
        AdminRoute::RemoveEndpoint(id) => endpoints::remove(state, id).await,
        AdminRoute::DrainEndpoint(id) => {
            let body = data::read_body(state, payload, request.headers(), CHANGE_BYTES_MAX).await?;
            endpoints::drain(state, id, &body).await
        }
    }
}

fn authorize(state: &GatewayState, headers: &HeaderMap) -> Result<(), EdgeError> {
    let settings = state.settings.load();
    let Some(token) = &settings.admin_token else { return Ok(()) };
    let given = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "))
        .unwrap_or_default();
    if is_same(given.trim_ascii(), token.as_bytes()) { Ok(()) } else { Err(EdgeError::unauthorized()) }
}

/// Compares in a time that does not tell how much is right.
fn is_same(given: &[u8], token: &[u8]) -> bool {
    let differing = token
        .iter()
        .enumerate()
        .fold(0, |differing, (at, byte)| differing | (byte ^ given.get(at).copied().unwrap_or(!byte)));
    given.len() == token.len() && differing == 0
}

fn metrics(state: &GatewayState) -> Answered {
    let gossip = (state.gauges)();
    let page = state.metrics.page(state, &gossip);
    page.map(|page| text("text/plain; version=0.0.4; charset=utf-8", page))
        .map_err(|error| EdgeError::internal(&error.to_string()))
}

fn json(body: &impl Serialize) -> HttpResponse {
    HttpResponse::Ok().json(body)
}

fn text(kind: &'static str, body: impl Into<String>) -> HttpResponse {
    HttpResponse::Ok()
        .insert_header((header::CONTENT_TYPE, kind))
        .insert_header((header::CACHE_CONTROL, "no-store"))
        .body(body.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_opens() {
        for (given, opens) in
            [("secret", true), ("secre", false), ("secrets", false), ("Secret", false), ("", false)]
        {
            assert_eq!(is_same(given.as_bytes(), b"secret"), opens, "{given}");
        }
    }
}
