//! What a simulated engine computes when, and what its prefix cache keeps: the model behind `engine`, alone.
//!
//! The main choice: everything is pure. Time is an argument and what happened are values, so the same code runs
//! behind a socket in real time (`engine`) and in virtual time (`lab`), and the two can't come to differ. Texts
//! follow from the prompt alone ([`answer`]), and prompts are cached by content ([`kv`]) as vLLM does.
//!
//! Left out: HTTP, the moving of KV between engines, and whoever waits for the answers.

pub mod answer;
pub mod kv;
pub mod scheduler;
pub mod timing;
pub mod tokens;
