//! The JSON of a request: the fields an engine acts on, everything else skipped. As with Python's parser, a key
//! given twice counts with its last value.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::error::ApiError;

/// A string that borrows from the body where it has no escapes.
#[derive(serde::Deserialize, Debug, Clone)]
#[serde(transparent)]
pub(crate) struct Text<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// `stream_options`.
#[derive(serde::Deserialize, Debug, Clone, Copy, Default)]
#[serde(default)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    pub(crate) continuous_usage_stats: Option<bool>,
}

/// Declares a struct of optional fields that is read from a JSON object leniently: unknown keys are skipped,
/// `null` is absent, the last of equal keys counts.
macro_rules! lenient {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $name<'a> {
            /// Keys in the object, known or not.
            pub(crate) keys: usize,
            $(pub(crate) $field: Option<$type>,)*
        }

        impl<'de: 'a, 'a> Deserialize<'de> for $name<'a> {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(serde::Deserialize)]
                #[serde(field_identifier)]
                #[expect(non_camel_case_types, reason = "spelled as on the wire")]
                enum Key { $($field,)* #[serde(other)] Unknown }

                struct Fields<'a>($name<'a>);
                impl<'de: 'a, 'a> Visitor<'de> for Fields<'a> {
                    type Value = $name<'a>;

                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<M: MapAccess<'de>>(mut self, mut map: M) -> Result<Self::Value, M::Error> {
                        while let Some(key) = map.next_key()? {
                            self.0.keys += 1;
                            match key {
                                $(Key::$field => self.0.$field = map.next_value()?,)*
                                Key::Unknown => {
                                    map.next_value::<IgnoredAny>()?;
                                }
                            }
                        }
                        Ok(self.0)
                    }
                }
                deserializer.deserialize_map(Fields($name::default()))
            }
        }
    };
}

lenient! {
    /// The body of any request.
    Body {
        model: Text<'a>,
        messages: Vec<Message<'a>>,
        prompt: &'a RawValue,
        input: &'a RawValue,
        instructions: Text<'a>,
        tokens: Vec<u32>,
        tools: &'a RawValue,
        chat_template_kwargs: &'a RawValue,
        max_tokens: i64,
        max_completion_tokens: i64,
        max_output_tokens: i64,
        min_tokens: i64,
        n: i64,
        temperature: f64,
        stream: bool,
        stream_options: StreamOptions,
        ignore_eos: bool,
        cache_salt: Text<'a>,
        add_generation_prompt: bool,
        continue_final_message: bool,
        return_token_ids: bool,
        return_token_strs: bool,
        kv_transfer_params: &'a RawValue,
        bootstrap_host: &'a RawValue,
        bootstrap_port: &'a RawValue,
        bootstrap_room: &'a RawValue,
        encoding_format: Text<'a>,
        previous_response_id: Text<'a>,
        background: bool,
        store: bool,
    }
}

lenient! {
    /// One message of a chat.
    Message {
        role: Text<'a>,
        name: Text<'a>,
        content: &'a RawValue,
        tool_calls: &'a RawValue,
        tool_call_id: Text<'a>,
    }
}

lenient! {
    /// One part of a message's content.
    Part {
        text: Text<'a>,
    }
}

/// What a field must be, for the message about one that is not.
#[derive(Clone, Copy)]
enum Kind {
    String,
    Integer,
    Number,
    Boolean,
    List,
    Object,
}

const KINDS: &[(&str, Kind)] = &[
    ("model", Kind::String),
    ("messages", Kind::List),
    ("instructions", Kind::String),
    ("tokens", Kind::List),
    ("max_tokens", Kind::Integer),
    ("max_completion_tokens", Kind::Integer),
    ("max_output_tokens", Kind::Integer),
    ("min_tokens", Kind::Integer),
    ("n", Kind::Integer),
    ("temperature", Kind::Number),
    ("stream", Kind::Boolean),
    ("stream_options", Kind::Object),
    ("ignore_eos", Kind::Boolean),
    ("cache_salt", Kind::String),
    ("add_generation_prompt", Kind::Boolean),
    ("continue_final_message", Kind::Boolean),
    ("return_token_ids", Kind::Boolean),
    ("return_token_strs", Kind::Boolean),
    ("kv_transfer_params", Kind::Object),
    ("encoding_format", Kind::String),
    ("previous_response_id", Kind::String),
    ("background", Kind::Boolean),
    ("store", Kind::Boolean),
];

impl Body<'_> {
    /// The error for a required field that is not there.
    pub(crate) fn missing(&self, field: &str) -> ApiError {
        ApiError::missing(field, self.keys)
    }
}

/// Reads a body.
pub(crate) fn parse(bytes: &[u8]) -> Result<Body<'_>, ApiError> {
    serde_json::from_slice(bytes).map_err(|error| explain(bytes, &error))
}

/// What is wrong with a body that could not be read. Slow, and only walked then.
fn explain(bytes: &[u8], error: &serde_json::Error) -> ApiError {
    let value = match serde_json::from_slice::<Value>(bytes) {
        Ok(value) => value,
        Err(error) => return invalid_json(bytes, &error),
    };
    let Some(fields) = value.as_object() else {
        let fault = "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid \
                     dictionary or object to extract fields from'}";
        return ApiError::invalid(Some("body"), fault);
    };
    for (field, kind) in KINDS {
        if let Some(value) = fields.get(*field)
            && let Some((fault, message)) = misfit(*kind, value)
        {
            let loc = format!("body.{field}");
            let input = value.as_str().map_or_else(|| value.to_string(), |text| format!("'{text}'"));
            let fault =
                format!("{{'type': '{fault}', 'loc': '{loc}', 'msg': '{message}', 'input': {input}}}");
            return ApiError::invalid(Some(&loc), &fault);
        }
    }
    ApiError::invalid(Some("body"), &format!("{{'type': 'value_error', 'loc': 'body', 'msg': '{error}'}}"))
}

fn invalid_json(bytes: &[u8], error: &serde_json::Error) -> ApiError {
    let lines = bytes.split_inclusive(|&byte| byte == b'\n');
    let before: usize = lines.take(error.line().saturating_sub(1)).map(<[u8]>::len).sum();
    let loc = format!("body.{}", (before + error.column()).saturating_sub(1));
    let fault = format!(
        "{{'type': 'json_invalid', 'loc': '{loc}', 'msg': 'JSON decode error', 'ctx': {{'error': '{error}'}}}}"
    );
    ApiError::invalid(Some(&loc), &fault)
}

fn misfit(kind: Kind, value: &Value) -> Option<(&'static str, &'static str)> {
    let (fits, fault, message) = match kind {
        Kind::String => (value.is_string(), "string_type", "Input should be a valid string"),
        Kind::Integer => (value.is_i64(), "int_parsing", "Input should be a valid integer"),
        Kind::Number => (
            value.is_number(),
            "float_parsing",
            "Input should be a valid number, unable to parse string as a number",
        ),
        Kind::Boolean => (value.is_boolean(), "bool_parsing", "Input should be a valid boolean"),
        Kind::List => (value.is_array(), "list_type", "Input should be a valid list"),
        Kind::Object => (value.is_object(), "dict_type", "Input should be a valid dictionary"),
    };
    (!fits && !value.is_null()).then_some((fault, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_last_of_equal_keys_counts_and_null_is_absent() {
        let body =
            parse(br#"{"n":1,"n":2,"model":"a","model":null,"stream":true,"x":{"n":3}}"#).expect("valid");
        assert_eq!((body.n, body.stream, body.keys), (Some(2), Some(true), 6));
        assert!(body.model.is_none());
    }

    #[test]
    fn a_string_without_escapes_is_borrowed() {
        let body = parse(br#"{"model":"a","cache_salt":"a\n"}"#).expect("valid");
        assert!(matches!(body.model, Some(Text(Cow::Borrowed("a")))));
        assert!(matches!(body.cache_salt, Some(Text(Cow::Owned(salt))) if salt == "a\n"));
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused_with_400(
            bytes in prop::collection::vec(any::<u8>(), 0..40),
            cut in 0_usize..80,
        ) {
            let mut body = br#"{"model":"m","messages":[{"role":"user","content":"x"}],"n":1}"#.to_vec();
            let at = cut.min(body.len());
            body.splice(at.., bytes);
            if let Err(error) = parse(&body) {
                prop_assert_eq!(error.status, http::StatusCode::BAD_REQUEST);
                let shape: Value = serde_json::from_slice(&error.body).expect("JSON");
                prop_assert_eq!(&shape["error"]["code"], 400);
            }
        }
    }
}
