//! Token counts, as engines report them at the end of a reply.

use memchr::memmem;
use serde::Deserialize;

/// What an engine says a request has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
    /// Tokens of the answer.
    pub(crate) output_tokens: u32,
    /// Prompt tokens found in the engine's prefix cache; `None` if it does not say.
    pub(crate) cached_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Raw {
    #[serde(alias = "input_tokens")]
    prompt_tokens: u32,
    #[serde(default, alias = "output_tokens")]
    completion_tokens: Option<u32>,
    #[serde(default, alias = "input_tokens_details")]
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

impl Usage {
    /// The last `"usage": {...}` in a piece of JSON that may be cut at its start.
    pub(crate) fn find_last(json: &[u8]) -> Option<Self> {
        const KEY: &[u8] = b"\"usage\"";
        // From the front, for which there is vector code.
        let at = memmem::find_iter(json, KEY).last()?;
        let value = json[at + KEY.len()..].trim_ascii_start().strip_prefix(b":")?;
        let raw = Raw::deserialize(&mut serde_json::Deserializer::from_slice(value)).ok()?;
        Some(Self {
            prompt_tokens: raw.prompt_tokens,
            output_tokens: raw.completion_tokens.unwrap_or(0),
            cached_tokens: raw.prompt_tokens_details.and_then(|details| details.cached_tokens),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str, want: Option<(u32, u32, Option<u32>)>) {
        let got = Usage::find_last(json.as_bytes());
        assert_eq!(
            got.map(|usage| (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)),
            want,
            "{json}"
        );
    }

    #[test]
    fn usage_is_read_from_every_api_and_from_a_tail() {
        check(
            r#"xt":"a"}],"usage":{"prompt_tokens":14,"total_tokens":19,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":8}},"x":null}"#,
            Some((14, 5, Some(8))),
        );
        check(
            r#"{"usage":{"prompt_tokens":6,"total_tokens":6,"prompt_tokens_details":null}}"#,
            Some((6, 0, None)),
        );
        check(
            r#"{"response":{"usage":{"input_tokens":3,"output_tokens":4,"input_tokens_details":{"cached_tokens":1}}}}"#,
            Some((3, 4, Some(1))),
        );
    }

    #[test]
    fn what_is_no_usage_gives_none() {
        check(r#"{"usage":null}"#, None);
        check(r#"{"usage":{"prompt_tokens":-1}}"#, None);
        check(r#"{"text":"\"usage\":{\"prompt_tokens\":1}"}"#, None);
        check(r#"{"usage":{"prompt_tok"#, None);
    }
}
