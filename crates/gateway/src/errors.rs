//! Everything that can go wrong, as a client sees it: the one place where a reason becomes an HTTP status.

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use actix_web::http::header;
use bytes::Bytes;
use routing::lifecycle::{EndCause, GiveUp, Limit};
use routing::request::BadRequest;
use routing::{AdminFactsFull, Refusal};
use serde::Serialize;

/// What a client that may come again is told to wait when nothing better is known, in s.
const RETRY_AFTER_S: u64 = 1;

/// A failure in OpenAI's terms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EdgeError {
    pub(crate) status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: &'static str,
    retry_after_s: Option<u64>,
}

/// Why a request's body could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyFault {
    /// Longer than what is allowed, in bytes.
    TooLarge {
        /// What is allowed.
        max: u64,
    },
    /// The connection ended inside it, or its chunks make no sense (the server does not tell which).
    BrokenOff,
    /// Nothing came for too long.
    TooSlow,
    /// The bodies of all requests together take what they may.
    NoRoom,
}

impl EdgeError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = match status.as_u16() {
            401 | 403 => "authentication_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        Self { status, kind, message: message.into(), param: None, code, retry_after_s: None }
    }

    fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_s = Some(seconds.max(1));
        self
    }

    fn param(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// A path that this listener does not have.
    pub(crate) fn not_found(path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("There is nothing at `{path}`."))
    }

    /// Something of this name that does not exist.
    pub(crate) fn unknown(what: &str, name: &str) -> Self {
        let name: String = name.chars().take(200).collect();
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("The {what} `{name}` does not exist."))
    }

    /// A request that makes no sense, for this reason.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    /// A method that this path does not know.
    pub(crate) fn method_not_allowed(method: &str, allowed: &str) -> Self {
        let method: String = method.chars().take(20).collect();
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "method_not_allowed",
            format!("`{method}` is not possible here; allowed: {allowed}."),
        )
    }

    /// A request to speak something else than HTTP from here on.
    pub(crate) fn other_protocol() -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            "unsupported_protocol",
            "Only HTTP/1.1 is spoken here: neither `Upgrade: websocket` nor CONNECT is possible.",
        )
    }

    /// A request that the server could not parse, by the status it gives it.
    pub(crate) fn of_unparsed(status: u16) -> Option<Self> {
        let (status, code, message) = match status {
            400 => (StatusCode::BAD_REQUEST, "malformed_request", "The request is not valid HTTP."),
            408 => (StatusCode::REQUEST_TIMEOUT, "head_timeout", "The request's head did not come in time."),
            431 => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "head_too_large",
                "The request's head is too long or has too many fields.",
            ),
            _ => return None,
        };
        Some(Self::new(status, code, message))
    }

    /// An operator's change for which there is no room.
    pub(crate) fn too_many_changes(full: &AdminFactsFull) -> Self {
        Self::new(
            StatusCode::INSUFFICIENT_STORAGE,
            "too_many_changes",
            format!("Nothing was changed: {full}; configure the endpoints instead."),
        )
    }

    /// Something of our own that should not fail did.
    pub(crate) fn internal(message: &str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// No token, or the wrong one.
    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "A valid bearer token is required.")
    }

    /// The model is not served.
    pub(crate) fn model_unknown(model: &str) -> Self {
        Refusal::ModelUnknown { model: model.to_owned() }.into()
    }

    /// The answer to a request that was given up, unless that answer is a refusal's or the engine's own.
    pub(crate) fn of_give_up(what: &GiveUp) -> Self {
        match what {
            GiveUp::Refusal => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_endpoint", "No endpoint is ready.")
                    .retry_after(RETRY_AFTER_S)
            }
            GiveUp::PassOn { status, retry_after } => {
                let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_GATEWAY);
                let error = Self::new(status, "engine_error", "The engine refused the request.");
                match retry_after {
                    Some(span) => error.retry_after(span.as_secs()),
                    None => error,
                }
            }
            GiveUp::BadGateway { failure } => Self::new(
                StatusCode::BAD_GATEWAY,
                "bad_gateway",
                format!("No endpoint answered the request (last failure: {}).", failure.as_str()),
            ),
            GiveUp::Timeout { limit } => Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                match limit {
                    Limit::Prefill => "prefill_timeout",
                    Limit::Handoff => "handoff_timeout",
                    Limit::FirstByte => "first_byte_timeout",
                    Limit::Idle => "idle_timeout",
                    Limit::Total => "total_timeout",
                },
                format!("The engine did not answer in time ({} limit).", limit.as_str()),
            ),
            GiveUp::Unavailable => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "shutting_down",
                "This replica is shutting down; try again.",
            )
            .retry_after(RETRY_AFTER_S),
        }
    }

    /// The event that ends a stream which can't be completed.
    pub(crate) fn of_end(cause: &EndCause) -> Self {
        let message = match cause {
            EndCause::Failure(_) => "The engine broke off; the answer above is incomplete.",
            EndCause::Limit(_) => "The engine fell silent; the answer above is incomplete.",
            EndCause::Shutdown => "This replica is shutting down; the answer above is incomplete.",
        };
        Self::new(StatusCode::BAD_GATEWAY, cause.as_str(), message)
    }

    /// The response that says so.
    pub(crate) fn response(&self) -> HttpResponse {
        let mut builder = HttpResponse::build(self.status);
        if let Some(seconds) = self.retry_after_s {
            builder.insert_header((header::RETRY_AFTER, seconds));
        }
        builder.insert_header((header::CONTENT_TYPE, "application/json")).body(self.json())
    }

    /// The error as JSON, in OpenAI's shape.
    pub(crate) fn json(&self) -> Bytes {
        #[derive(Serialize)]
        struct Outer<'a> {
            error: Inner<'a>,
        }
        #[derive(Serialize)]
        struct Inner<'a> {
            message: &'a str,
            r#type: &'a str,
            param: Option<&'a str>,
            code: &'a str,
        }
        let error = Inner {
            message: &self.message,
            r#type: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        serde_json::to_vec(&Outer { error }).unwrap_or_default().into()
    }
}

impl From<BadRequest> for EdgeError {
    fn from(bad: BadRequest) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, bad.code, bad.message);
        match bad.param {
            Some(param) => error.param(param),
            None => error,
        }
    }
}

impl From<Refusal> for EdgeError {
    fn from(refusal: Refusal) -> Self {
        let message = format!("{}.", capitalised(&refusal.to_string()));
        let seconds = |ms: u64| ms.div_ceil(1_000);
        match refusal {
            Refusal::ModelUnknown { .. } => {
                Self::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model")
            }
            Refusal::ModelRequired { served } => {
                let served = served.join(", ");
                Self::new(StatusCode::BAD_REQUEST, "model_required", format!("{message} Served: {served}."))
                    .param("model")
            }
            Refusal::NoEndpointReady { retry_after_ms, .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_endpoint_ready", message)
                    .retry_after(seconds(retry_after_ms))
            }
            Refusal::NoEndpointConfigured | Refusal::AllTried => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "no_endpoint", message).retry_after(RETRY_AFTER_S)
            }
            Refusal::Overloaded { retry_after_ms } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", message)
                    .retry_after(seconds(retry_after_ms))
            }
            Refusal::ResponseUnknown => Self::new(StatusCode::NOT_FOUND, "response_not_found", message),
        }
    }
}

impl From<BodyFault> for EdgeError {
    fn from(fault: BodyFault) -> Self {
        match fault {
            BodyFault::TooLarge { max } => Self::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "request_too_large",
                format!("The body is longer than the {max} bytes allowed."),
            ),
            BodyFault::BrokenOff => Self::new(
                StatusCode::BAD_REQUEST,
                "incomplete_body",
                "The body ended before its end, or its chunked encoding is malformed.",
            ),
            BodyFault::TooSlow => {
                Self::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", "The body did not come in time.")
            }
            BodyFault::NoRoom => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "no_room_for_body",
                "The bodies of other requests take all the memory that bodies may.",
            )
            .retry_after(RETRY_AFTER_S),
        }
    }
}

fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use routing::retry::{LegFailure, LegFault};

    use super::*;

    fn check(error: &EdgeError, status: u16, kind: &str, code: &str) {
        let json: serde_json::Value = serde_json::from_slice(&error.json()).unwrap();
        let keys: Vec<_> = json["error"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys, ["code", "message", "param", "type"]);
        assert_eq!(
            (error.status.as_u16(), json["error"]["type"].as_str(), json["error"]["code"].as_str()),
            (status, Some(kind), Some(code)),
            "{json}"
        );
    }

    #[test]
    fn every_failure_has_its_status_and_openai_s_shape() {
        let invalid = "invalid_request_error";
        check(&BodyFault::TooLarge { max: 5 }.into(), 413, invalid, "request_too_large");
        check(&BodyFault::NoRoom.into(), 503, "server_error", "no_room_for_body");
        check(&BodyFault::TooSlow.into(), 408, invalid, "body_timeout");
        check(&Refusal::ModelUnknown { model: "m".into() }.into(), 404, invalid, "model_not_found");
        check(&Refusal::ModelRequired { served: vec!["a".into()] }.into(), 400, invalid, "model_required");
        check(&Refusal::NoEndpointConfigured.into(), 503, "server_error", "no_endpoint");
        check(&Refusal::Overloaded { retry_after_ms: 1 }.into(), 429, "rate_limit_error", "overloaded");
        let failure = LegFailure::new(LegFault::Reset);
        check(&EdgeError::of_give_up(&GiveUp::BadGateway { failure }), 502, "server_error", "bad_gateway");
        check(
            &EdgeError::of_give_up(&GiveUp::Timeout { limit: Limit::FirstByte }),
            504,
            "server_error",
            "first_byte_timeout",
        );
    }

    #[test]
    fn waits_are_told_in_whole_seconds_and_never_as_zero() {
        for (ms, seconds) in [(0, "1"), (1, "1"), (1_000, "1"), (1_001, "2")] {
            let error = EdgeError::from(Refusal::Overloaded { retry_after_ms: ms });
            assert_eq!(error.response().headers().get("retry-after").unwrap(), seconds);
        }
    }
}
