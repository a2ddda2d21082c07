//! Refusals, in the shapes that vLLM gives them.

use std::fmt::Write;

use bytes::Bytes;
use http::StatusCode;

/// A request that is answered with an error body.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

impl ApiError {
    /// The ordinary shape: `{"error":{"message","type","param","code"}}`.
    pub(crate) fn new(status: StatusCode, kind: &str, param: Option<&str>, message: &str) -> Self {
        let mut body = String::with_capacity(96 + message.len());
        body.push_str("{\"error\":{\"message\":");
        push_json(&mut body, message);
        body.push_str(",\"type\":");
        push_json(&mut body, kind);
        body.push_str(",\"param\":");
        match param {
            Some(param) => push_json(&mut body, param),
            None => body.push_str("null"),
        }
        let _ = write!(body, ",\"code\":{}}}}}", status.as_u16());
        Self { status, body: body.into() }
    }

    /// A request that means something impossible.
    pub(crate) fn bad_request(param: Option<&str>, message: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequestError", param, message)
    }

    /// A parameter with an impossible value.
    pub(crate) fn bad_value(param: &str, value: &dyn std::fmt::Display, message: &str) -> Self {
        Self::bad_request(Some(param), &format!("{message} (parameter={param}, value={value})"))
    }

    /// A body that is not the expected JSON.
    pub(crate) fn invalid(param: Option<&str>, fault: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Bad Request", param, &format!("1 validation error:\n  {fault}"))
    }

    /// A required field that is not there, in a body with so many others.
    pub(crate) fn missing(field: &str, others: usize) -> Self {
        let loc = format!("body.{field}");
        let fault = format!(
            "{{'type': 'missing', 'loc': '{loc}', 'msg': 'Field required', 'input': '<dict of {others} items>'}}"
        );
        Self::invalid(Some(&loc), &fault)
    }

    /// The queue is full.
    pub(crate) fn busy() -> Self {
        let message = "The engine is currently busy and cannot accept new requests. \
                       Please try again later or on a different instance.";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", None, message)
    }

    /// Something that happened inside.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", None, "Internal server error")
    }

    /// The part that computes is gone.
    pub(crate) fn core_died() -> Self {
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", None, message)
    }

    /// A model that is not served here.
    pub(crate) fn unknown_model(asked: &str, served: &str) -> Self {
        let message = format!("The model `{asked}` does not exist. Valid aliases: {served}.");
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", Some("model"), &message)
    }

    /// The framework's own shape: `{"detail":...}`.
    pub(crate) fn detail(status: StatusCode) -> Self {
        let detail = status.canonical_reason().unwrap_or("Error");
        Self { status, body: format!("{{\"detail\":\"{detail}\"}}").into() }
    }

    /// No or a wrong key. The error is a string here.
    pub(crate) fn unauthorized() -> Self {
        Self { status: StatusCode::UNAUTHORIZED, body: Bytes::from_static(b"{\"error\":\"Unauthorized\"}") }
    }
}

/// Appends a JSON string.
pub(crate) fn push_json(out: &mut String, text: &str) {
    out.push('"');
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        let escape = match byte {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            b'\n' => "\\n",
            b'\r' => "\\r",
            b'\t' => "\\t",
            0..=0x1f => "",
            _ => continue,
        };
        out.push_str(&text[plain..at]);
        if escape.is_empty() {
            let _ = write!(out, "\\u{byte:04x}");
        } else {
            out.push_str(escape);
        }
        plain = at + 1;
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pushed_strings_are_json(text in any::<String>()) {
            let mut out = String::new();
            push_json(&mut out, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&out).expect("valid JSON"), text);
        }
    }
}
