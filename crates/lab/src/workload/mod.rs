//! What is asked: generated chats in a closed loop, or the rows of a trace at their times.

pub(crate) mod chats;
pub(crate) mod text;
pub(crate) mod trace;

use std::sync::Arc;

use engine_model::answer::Answer;
use engine_model::kv::BlockHash;
use engine_model::scheduler::Prompt;
use engine_model::tokens::tokenize;
use routing::request::{RequestShape, Route, ShapeRules};

use chats::ChatShape;
use trace::{Trace, TraceRow};

/// The model that every request names.
pub(crate) const MODEL: &str = "m";

/// What is asked of the engines.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Clients that wait for each answer.
    Chats(ChatShape),
    /// Requests at their times, whatever the answers do.
    Trace(Trace),
}

/// One request as the replicas and the engines see it.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) shape: RequestShape,
    pub(crate) prompt: Prompt,
    pub(crate) output_tokens: u32,
}

impl Asked {
    /// Reads a body as a replica does, and takes `text` for what the engine's template makes of it.
    pub(crate) fn read(
        route: Route,
        body: &str,
        text: &str,
        output_tokens: u32,
        rules: &ShapeRules,
        block_tokens: u32,
    ) -> Self {
        let headers: [(&str, &str); 0] = [];
        let shape = RequestShape::read(route, &headers, body.as_bytes(), rules);
        let tokens = tokenize(text);
        let root = BlockHash::root(MODEL, "");
        Self {
            shape: shape.expect("bodies made here are well formed"),
            prompt: Prompt::new(root, &tokens, block_tokens, Answer::to(&tokens)),
            output_tokens,
        }
    }
}

/// The requests of a trace, read once under one set of rules and for one size of KV blocks: runs share them.
#[derive(Clone, Debug)]
pub(crate) struct Prompts {
    asked: Arc<[Arc<Asked>]>,
}

impl Prompts {
    /// Reads a trace's requests on `threads` threads.
    pub(crate) fn of_trace(trace: &Trace, rules: &ShapeRules, block_tokens: u32, threads: usize) -> Self {
        let rows = trace.rows();
        let part = rows.len().div_ceil(threads.max(1)).max(1);
        let read = |(at, rows): (usize, &[TraceRow])| -> Vec<Arc<Asked>> {
            let first = at * part;
            rows.iter()
                .enumerate()
                .map(|(row, each)| Arc::new(each.asked((first + row) as u64, rules, block_tokens)))
                .collect()
        };
        let asked = std::thread::scope(|scope| {
            let workers: Vec<_> =
                rows.chunks(part).enumerate().map(|chunk| scope.spawn(move || read(chunk))).collect();
            workers.into_iter().flat_map(|worker| worker.join().expect("reading does not panic")).collect()
        });
        Self { asked }
    }

    pub(crate) fn row(&self, row: usize) -> &Arc<Asked> {
        &self.asked[row]
    }
}
