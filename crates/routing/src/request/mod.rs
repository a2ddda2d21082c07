//! What a request is, as far as routing needs to know: a thin view over the client's own bytes.
//!
//! The main choice: nothing is parsed into a tree and nothing is written back. A cursor checks the JSON
//! and finds the few fields that matter; prompt text goes through the block hasher piece by piece. The
//! bytes that reach the engine are the client's.

mod beginning;
mod body;
mod canonical;
mod class;
mod json;
mod members;
mod prompt;
mod refusal;
mod rules;
mod shape;
mod text;

pub use body::ResumeObstacles;
pub use class::{HeaderView, PRIORITY_HEADER, Priority, Slo, TARGET_MS_MAX, TPOT_HEADER, TTFT_HEADER};
pub use members::members;
pub use refusal::BadRequest;
pub use rules::{Beginning, BeginningHash, ShapeRules};
pub use shape::{PromptUnit, RequestShape, Route, response_key};

#[cfg(test)]
mod tests;
