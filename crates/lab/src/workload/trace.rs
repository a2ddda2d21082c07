//! The rows of a recorded trace, and what their prompts say.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use routing::request::{Route, ShapeRules};

use super::{Asked, MODEL, text};

/// Tokens of a prompt that one of a row's ids stands for, as in Mooncake's traces.
pub const TRACE_BLOCK_TOKENS: u32 = 512;
/// Bytes of text that make a token, for the simulated engine as for the core's prior.
const BYTES_PER_TOKEN: usize = 4;
/// What the text of a row's block and of a row without blocks is made from.
const BLOCK_TEXT: u64 = 1;
const ROW_TEXT: u64 = 2;

/// One recorded request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRow {
    /// When it arrives, from the trace's start.
    pub at: Duration,
    /// Tokens of its prompt, at least 1.
    pub input_tokens: u32,
    /// Tokens of its answer, at least 1.
    pub output_tokens: u32,
    /// An id for each [`TRACE_BLOCK_TOKENS`] of its prompt: equal ids are equal text. `None` if it shares nothing.
    pub blocks: Option<Box<[u64]>>,
}

impl TraceRow {
    /// The request as it would be sent: its prompt as plain text, for what a chat's parts were is not recorded.
    pub(super) fn asked(&self, row: u64, rules: &ShapeRules, block_tokens: u32) -> Asked {
        let text = self.text(row);
        let body = format!(
            r#"{{"model":"{MODEL}","stream":true,"max_tokens":{},"prompt":"{text}"}}"#,
            self.output_tokens
        );
        Asked::read(Route::Completions, &body, &text, self.output_tokens, rules, block_tokens)
    }

    fn text(&self, row: u64) -> String {
        let bytes = self.input_tokens as usize * BYTES_PER_TOKEN;
        let Some(ids) = &self.blocks else { return text::of(text::key(0, ROW_TEXT, row), bytes) };
        let mut prompt = String::with_capacity(bytes);
        for id in ids {
            let block = (bytes - prompt.len()).min(TRACE_BLOCK_TOKENS as usize * BYTES_PER_TOKEN);
            text::append(&mut prompt, text::key(0, BLOCK_TEXT, *id), block);
        }
        prompt
    }
}

/// Which requests of a trace the figures are of. All that come before them are played, too.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Part {
    /// All of them.
    #[default]
    Whole,
    /// The first half of the trace's time; the rest is not played.
    FirstHalf,
    /// The second half of the trace's time.
    SecondHalf,
}

/// A trace: rows in order of arrival.
#[derive(Clone, Debug)]
pub struct Trace {
    rows: Arc<[TraceRow]>,
    part: Part,
}

impl Trace {
    /// The trace of these rows, in order of arrival.
    pub fn new(mut rows: Vec<TraceRow>, part: Part) -> Self {
        rows.sort_by_key(|row| row.at);
        Self { rows: rows.into(), part }
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.rows, &other.rows)
    }

    /// Its rows.
    pub fn rows(&self) -> &[TraceRow] {
        &self.rows
    }

    fn half(&self) -> usize {
        let last = self.rows.last().map_or(Duration::ZERO, |row| row.at);
        self.rows.partition_point(|row| row.at < last / 2)
    }

    /// How many rows are played.
    pub(crate) fn played(&self) -> usize {
        if self.part == Part::FirstHalf { self.half() } else { self.rows.len() }
    }

    /// The rows that figures are of.
    pub(crate) fn counted(&self) -> Range<usize> {
        let from = if self.part == Part::SecondHalf { self.half() } else { 0 };
        from..self.played()
    }

    /// Prompt tokens that arrive per second.
    pub fn input_tokens_per_second(&self) -> f64 {
        let tokens: u64 = self.rows.iter().map(|row| u64::from(row.input_tokens)).sum();
        let first = self.rows.first().map_or(Duration::ZERO, |row| row.at);
        let last = self.rows.last().map_or(Duration::ZERO, |row| row.at);
        tokens as f64 / (last - first).as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// The share of the trace's blocks that a cache which forgets nothing, and all requests share, would have; 0
    /// without any. The last block of a prompt may be a part of one.
    pub fn ceiling(&self) -> f64 {
        let mut seen = std::collections::BTreeSet::new();
        let (mut hits, mut blocks) = (0_u64, 0_u64);
        for ids in self.rows.iter().filter_map(|row| row.blocks.as_ref()) {
            blocks += ids.len() as u64;
            hits += ids.iter().take_while(|id| seen.contains(*id)).count() as u64;
            seen.extend(ids.iter().copied());
        }
        hits as f64 / blocks.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(at_s: u64, input_tokens: u32, blocks: &[u64]) -> TraceRow {
        TraceRow {
            at: Duration::from_secs(at_s),
            input_tokens,
            output_tokens: 3,
            blocks: Some(blocks.into()),
        }
    }

    #[test]
    fn equal_ids_are_equal_prefixes_to_the_core_and_to_the_engines() {
        let asked = |row: &TraceRow| row.asked(0, &ShapeRules::default(), 16);
        let (short, long) = (asked(&row(0, 1_000, &[1, 2])), asked(&row(0, 1_500, &[1, 2, 3])));
        let other = asked(&row(0, 1_000, &[1, 9]));
        assert_eq!(
            (short.prompt.tokens, short.shape.prompt_tokens, short.shape.output_tokens),
            (1_000, 1_000, 3)
        );
        // 1,000 tokens are 4,000 bytes: 7 blocks of the core, 62 of an engine; what a block fills is alike.
        assert_eq!(short.shape.blocks, long.shape.blocks[..7]);
        assert_eq!(short.prompt.blocks[..], long.prompt.blocks[..62]);
        let alike = |one: &Asked, two: &Asked| {
            one.prompt.blocks.iter().zip(&*two.prompt.blocks).filter(|(a, b)| a == b).count()
        };
        assert_eq!(alike(&short, &other), 32, "the first 512 tokens");
    }

    #[test]
    fn the_ceiling_counts_blocks_seen_before_without_a_gap() {
        let rows = vec![row(0, 1_024, &[1, 2]), row(1, 1_536, &[1, 2, 3]), row(2, 1_536, &[1, 4, 3])];
        assert_eq!(Trace::new(rows, Part::Whole).ceiling(), 3.0 / 8.0);
    }

    #[test]
    fn halves_are_halves_of_the_time() {
        let rows: Vec<TraceRow> = [0, 1, 2, 3, 4, 5, 10].into_iter().map(|at| row(at, 1, &[1])).collect();
        let counted = |part| Trace::new(rows.clone(), part).counted();
        assert_eq!(counted(Part::Whole), 0..7);
        assert_eq!(counted(Part::FirstHalf), 0..5);
        assert_eq!(counted(Part::SecondHalf), 5..7);
    }
}
