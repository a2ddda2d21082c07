//! Why a body can't be served, in OpenAI's terms.

use thiserror::Error;

use super::json::{DEPTH_MAX, Fault, FaultKind, Kind};

/// A body that no engine could serve; becomes a 400 with `type` `invalid_request_error`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct BadRequest {
    /// For the client: what is wrong and what is expected.
    pub message: String,
    /// The top-level field at fault, if it is one.
    pub param: Option<&'static str>,
    /// A short word for programs.
    pub code: &'static str,
}

impl BadRequest {
    /// `where_` is the path of the value at fault, `param` the top-level field it is in.
    pub(super) fn wrong_type(where_: &str, param: &'static str, expected: &'static str, found: Kind) -> Self {
        Self {
            message: format!(
                "Invalid type for '{where_}': expected {expected}, but got {} instead.",
                found.described()
            ),
            param: Some(param),
            code: "invalid_type",
        }
    }

    pub(super) fn out_of_range(param: &'static str, expected: &str) -> Self {
        Self {
            message: format!("Invalid value for '{param}': expected {expected}."),
            param: Some(param),
            code: "invalid_value",
        }
    }

    pub(super) fn missing(where_: &str, param: &'static str) -> Self {
        Self {
            message: format!("Missing required parameter: '{where_}'."),
            param: Some(param),
            code: "missing_required_parameter",
        }
    }

    pub(super) fn empty(param: &'static str) -> Self {
        Self {
            message: format!("Invalid '{param}': expected at least one item, but got an empty array."),
            param: Some(param),
            code: "empty_array",
        }
    }

    pub(super) fn reserved(param: &'static str) -> Self {
        Self {
            message: format!(
                "'{param}' is set by the router between prefill and decode and can't be sent by a client."
            ),
            param: Some(param),
            code: "unsupported_parameter",
        }
    }

    pub(super) fn not_utf8(at: usize) -> Self {
        Self {
            message: format!("The body is not valid UTF-8 (byte {at})."),
            param: None,
            code: "invalid_utf8",
        }
    }

    pub(super) fn not_an_object(found: Kind) -> Self {
        Self {
            message: format!("The body must be a JSON object, but is {}.", found.described()),
            param: None,
            code: "invalid_type",
        }
    }
}

impl From<Fault> for BadRequest {
    fn from(fault: Fault) -> Self {
        let at = fault.at;
        let (message, code) = match fault.kind {
            FaultKind::Truncated => {
                (format!("The body ends inside its JSON, after {at} bytes."), "invalid_json")
            }
            FaultKind::Expected(what) => {
                (format!("The body is not valid JSON: expected {what} at byte {at}."), "invalid_json")
            }
            FaultKind::TooDeep => (
                format!("The body is nested deeper than {DEPTH_MAX} levels (byte {at})."),
                "nesting_too_deep",
            ),
        };
        Self { message, param: None, code }
    }
}
