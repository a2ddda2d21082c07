//! How requests are read: what an operator can set.

use crate::prefix::BLOCK_BYTES_DEFAULT;
use crate::qoe::ClassTargets;
use crate::settings::names;

/// How to read a request.
#[derive(Clone, Debug, PartialEq)]
pub struct ShapeRules {
    /// Bytes of prompt text per prefix block. Replicas must agree on it. Default 512.
    pub block_bytes: usize,
    /// Headers that name the session, lower case, the first that is there wins. Default `x-session-id`,
    /// then `x-user-id`.
    pub session_headers: Vec<String>,
    /// Whether the body's `user` names the session when nothing else does. Off by default: many clients
    /// send one value for all they do.
    pub session_from_user: bool,
    /// Bytes of prompt text per token until the engines' `usage` says better. Default 4.
    pub bytes_per_token: f64,
    /// Tokens that one image, audio or video part counts for in the estimate. Default 512, about a small
    /// image for today's vision models.
    pub media_tokens: u32,
    /// Output tokens expected of a request that does not say less. Default 512.
    pub output_tokens: u32,
    /// What each class expects of its tokens when the request does not say.
    pub targets: ClassTargets,
    /// How the prompt's beginning is hashed for a ring, if the policy has one. Default none.
    pub beginning: Option<Beginning>,
    /// The model of a request without `model`, where there is only one; it must be set on all replicas
    /// alike, since it seeds the hashes.
    pub default_model: Option<String>,
}

/// How a prompt's beginning is made one hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// How many bytes of it count.
    pub bytes: usize,
    /// How they are hashed.
    pub hash: BeginningHash,
}

names! {
    /// How a prompt's beginning is hashed.
    BeginningHash {
        /// xxh3: equal beginnings meet.
        Xxhash = "xxhash",
        /// SimHash: similar beginnings mostly meet.
        Simhash = "simhash",
    }
}

impl Default for ShapeRules {
    fn default() -> Self {
        Self {
            block_bytes: BLOCK_BYTES_DEFAULT,
            session_headers: vec!["x-session-id".to_owned(), "x-user-id".to_owned()],
            session_from_user: false,
            bytes_per_token: 4.0,
            media_tokens: 512,
            output_tokens: 512,
            targets: ClassTargets::default(),
            beginning: None,
            default_model: None,
        }
    }
}
