//! The public listener: what clients of the engines see.

mod attempt;
mod counting;
mod drive;
mod face;
mod handoff;
mod intake;
mod kept;
mod leg;
pub(crate) mod queue;
mod relay;
mod resumption;
mod room;
mod split;
mod upload;

use std::cell::RefCell;
use std::rc::Rc;

use actix_web::dev::Payload;
use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::http::{ConnectionType, Method};
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use routing::Moment;
use routing::request::{HeaderView, RequestShape, Route};
use serde::Serialize;

use self::attempt::{Envelope, Outbound};
use self::drive::{Driver, Shunned};
use self::face::Face;
use self::intake::Intake;
pub(crate) use self::queue::{Admitted, Waiting};
pub(crate) use self::room::BodyRoom;
pub(crate) use self::split::LegName;
use self::upload::Upload;
use crate::errors::{BodyFault, EdgeError};
use crate::headers::X_REQUEST_ID;
use crate::percent;
use crate::request_id::RequestId;
use crate::state::{GatewayState, Missing};
use crate::worker::Worker;

/// Answers any request on the public listener.
pub(crate) async fn answer(request: HttpRequest, payload: web::Payload) -> HttpResponse {
    let Some(worker) = request.app_data::<Rc<Worker>>().map(Rc::clone) else {
        return HttpResponse::InternalServerError().finish();
    };
    let arrived = worker.now();
    let id = RequestId::of(request.headers());
    if leaves_http(&request) {
        return leave_not(&worker, &id, arrived);
    }
    let path = request.uri().path();
    let (route, answered) = match Face::of(request.method(), path) {
        Face::Live => return liveness(),
        Face::Ready => return readiness(&worker.state),
        Face::Models => (Route::Other, Ok(models(&worker))),
        Face::Model(model) => (Route::Other, one_model(&worker, model)),
        Face::Generate(route) => {
            (route, generate(&worker, route, &request, payload.into_inner(), &id, arrived).await)
        }
        Face::Response(made) => {
            let answered = match worker.all_but_home_of(made) {
                Some(others) => {
                    pass_through(&worker, &request, payload.into_inner(), &id, arrived, others.into()).await
                }
                None => Err(EdgeError::unknown("response", made)),
            };
            (Route::Responses, answered)
        }
        Face::Other => {
            let payload = payload.into_inner();
            (Route::Other, pass_through(&worker, &request, payload, &id, arrived, Shunned::new()).await)
        }
    };
    match answered {
        Ok(Answer::Driven(response)) => response,
        Ok(Answer::Ours(mut response)) => {
            worker.answered(id.as_str(), route, response.status(), arrived);
            response.headers_mut().insert(X_REQUEST_ID, id.value().clone());
            response
        }
        Err(error) => {
            let mut response = error.response();
            worker.answered(id.as_str(), route, response.status(), arrived);
            response.headers_mut().insert(X_REQUEST_ID, id.value().clone());
            response
        }
    }
}

/// Whether the server takes all that follows on the connection for this request's body, whatever length its
/// head gives: an engine would be told that length, and read what is behind it as another client's request.
fn leaves_http(request: &HttpRequest) -> bool {
    let upgrades = request.headers().get_all(header::UPGRADE);
    let mut upgrades = upgrades.filter_map(|value| value.to_str().ok());
    request.method() == Method::CONNECT
        || upgrades.any(|protocol| protocol.trim().eq_ignore_ascii_case("websocket"))
}

/// Says so, and closes the connection: nothing on it can be told apart any more.
fn leave_not(worker: &Worker, id: &RequestId, arrived: Moment) -> HttpResponse {
    let mut response = EdgeError::other_protocol().response();
    worker.answered(id.as_str(), Route::Other, response.status(), arrived);
    response.headers_mut().insert(X_REQUEST_ID, id.value().clone());
    response.head_mut().set_connection_type(ConnectionType::Close);
    response
}

/// An answer, and who accounts for it.
enum Answer {
    /// The request's lifecycle does.
    Driven(HttpResponse),
    /// Nobody yet.
    Ours(HttpResponse),
}

#[derive(Serialize)]
struct Live {
    status: &'static str,
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
    missing: Vec<Missing>,
}

/// The process is alive.
pub(crate) fn liveness() -> HttpResponse {
    HttpResponse::Ok().json(Live { status: "ok" })
}

/// Whether the replica should be sent requests, and what is missing if not.
pub(crate) fn readiness(state: &GatewayState) -> HttpResponse {
    let missing = state.missing();
    let ready = missing.is_empty();
    let mut response = if ready { HttpResponse::Ok() } else { HttpResponse::ServiceUnavailable() };
    response.json(Ready { ready, missing })
}

#[derive(Serialize)]
struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

impl Model {
    /// Engines disagree on when a model was made, so nobody is asked.
    fn new(id: String) -> Self {
        Self { id, object: "model", created: 0, owned_by: "grapevine" }
    }
}

/// The union of what all endpoints serve.
fn models(worker: &Worker) -> Answer {
    #[derive(Serialize)]
    struct List {
        object: &'static str,
        data: Vec<Model>,
    }
    let data = worker.state.router.models().into_iter().map(|model| Model::new(model.id)).collect();
    Answer::Ours(HttpResponse::Ok().json(List { object: "list", data }))
}

/// Names of models have slashes, which some clients encode.
fn one_model(worker: &Worker, model: &str) -> Result<Answer, EdgeError> {
    let model = String::from_utf8_lossy(&percent::decode(model)).into_owned();
    let known = worker.state.router.models().into_iter().find(|known| known.id == model);
    known
        .map(|known| Answer::Ours(HttpResponse::Ok().json(Model::new(known.id))))
        .ok_or_else(|| EdgeError::model_unknown(&model))
}

/// A request whose body tells where it belongs.
async fn generate(
    worker: &Rc<Worker>,
    route: Route,
    request: &HttpRequest,
    mut payload: Payload,
    id: &RequestId,
    arrived: Moment,
) -> Result<Answer, EdgeError> {
    let announced = intake::announced(request.headers());
    let body = intake_of(&worker.state).read_whole(&mut payload, announced).await?;
    // The payload's end has been seen; the connection is free for the next request.
    drop(payload);
    let shape = RequestShape::read(route, &Headers(request.headers()), &body, &worker.state.router.rules())?;
    worker.await_word(&shape).await;
    Ok(drive(worker, request, id, shape, Outbound::Whole(body), arrived, Shunned::new()).await)
}

/// Any other request: goes to some endpoint as it is. A body that may be JSON is read whole, because what a
/// client must not say is refused on every path; any other goes on as it comes.
async fn pass_through(
    worker: &Rc<Worker>,
    request: &HttpRequest,
    mut payload: Payload,
    id: &RequestId,
    arrived: Moment,
    shunned: Shunned,
) -> Result<Answer, EdgeError> {
    let intake = intake_of(&worker.state);
    let announced = intake::announced(request.headers());
    intake.admits(announced)?;
    let first = intake::next(&mut payload, intake.idle).await?;
    let may_be_json = first.as_ref().is_none_or(|first| may_be_json(first));
    let (body, outbound) = if may_be_json {
        let rest = intake.read_rest(first, &mut payload, announced).await?;
        (rest.clone(), Outbound::Whole(rest))
    } else {
        let upload = Upload::start(first, payload, announced, &intake);
        (Bytes::new(), Outbound::Streamed(Some(upload)))
    };
    let headers = Headers(request.headers());
    let shape = RequestShape::read(Route::Other, &headers, &body, &worker.state.router.rules())?;
    Ok(drive(worker, request, id, shape, outbound, arrived, shunned).await)
}

async fn drive(
    worker: &Rc<Worker>,
    request: &HttpRequest,
    id: &RequestId,
    shape: RequestShape,
    outbound: Outbound,
    arrived: Moment,
    shunned: Shunned,
) -> Answer {
    let handle = worker.lifecycles.begin(id.as_str().to_owned(), shape, arrived);
    let envelope = Envelope { request: request.clone(), id: id.clone() };
    let driver = Driver::new(worker, envelope, handle, outbound, shunned);
    Answer::Driven(driver.run().await)
}

/// The whole body of a request to the admin listener, at most `bytes_max` long.
pub(crate) async fn read_body(
    state: &GatewayState,
    payload: web::Payload,
    headers: &HeaderMap,
    bytes_max: u64,
) -> Result<Bytes, BodyFault> {
    let mut intake = intake_of(state);
    intake.bytes_max = intake.bytes_max.min(bytes_max);
    intake.read_whole(&mut payload.into_inner(), intake::announced(headers)).await
}

fn intake_of(state: &GatewayState) -> Intake<'_> {
    let settings = state.settings.load();
    Intake {
        bytes_max: settings.body_bytes_max,
        idle: settings.body_idle,
        within: settings.body_timeout,
        room: &state.body_room,
        room_max: settings.body_room_bytes,
    }
}

/// Whether an engine could take this for the start of JSON, whatever the content type says: Python's parser
/// also takes UTF-16 and UTF-32, with their marks or zero bytes.
fn may_be_json(first: &[u8]) -> bool {
    matches!(first.trim_ascii_start(), [] | [b'{' | b'[' | b'"' | 0 | 0xef | 0xfe | 0xff, ..] | [_, 0, ..])
}

/// The client's headers as the core wants to see them.
pub(crate) struct Headers<'a>(pub(crate) &'a HeaderMap);

thread_local! {
    /// Names that were asked for, as the map wants them: it would make each anew for every request.
    static NAMES: RefCell<Vec<HeaderName>> = const { RefCell::new(Vec::new()) };
}

/// Names that are kept. The core asks for three of its own and for those that are configured; with more of them, the
/// others are made anew.
const NAMES_MAX: usize = 16;

impl HeaderView for Headers<'_> {
    fn get(&self, name: &str) -> Option<&[u8]> {
        let value = NAMES.with_borrow_mut(|names| {
            if let Some(known) = names.iter().find(|known| known.as_str().eq_ignore_ascii_case(name)) {
                return self.0.get(known);
            }
            let made = HeaderName::from_bytes(name.as_bytes()).ok()?;
            let value = self.0.get(&made);
            if names.len() < NAMES_MAX {
                names.push(made);
            }
            value
        });
        value.map(HeaderValue::as_bytes)
    }
}
