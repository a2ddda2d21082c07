//! Recorded traces: what arrived when, how long it was and what it shared with others.
//!
//! Two formats, told apart by their first line:
//! - Mooncake JSON lines: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id for
//!   each prefix block of 512 tokens. Equal ids become equal text.
//! - Azure CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`. It says nothing of prefixes: every prompt is unique.

use std::io::BufRead;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use serde::Deserialize;

use super::arrivals;
use super::text::{self, BYTES_PER_TOKEN, Piece};

/// Tokens of prompt that one Mooncake hash id stands for.
pub const BLOCK_TOKENS: usize = 512;

/// Rows read from one file, about 300 MB of memory: 80 times the largest published trace in use here.
pub(super) const ROWS_MAX: usize = 1_000_000;

/// Tokens of one prompt, 64 MB of text: a longer one is a mistake in the file.
pub(super) const INPUT_TOKENS_MAX: u32 = 16 << 20;

/// What to do with arrival times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Arrivals {
    /// Spread requests recorded at one moment over the time to the next one, at most 3 s (Mooncake only).
    Spread,
    /// As recorded, herds and all.
    Recorded,
}

/// Requests in order of arrival.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    /// The requests; times count from the first one recorded.
    pub rows: Vec<Row>,
}

/// One recorded request.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// When it arrives, from the trace's start.
    pub at: Duration,
    /// Tokens of its prompt, at least 1.
    pub input_tokens: u32,
    /// Tokens of its answer, at least 1.
    pub output_tokens: u32,
    /// What its prompt shares with others.
    pub prompt: Prompt,
}

/// What is known of a prompt's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Ids of its blocks of [`BLOCK_TOKENS`], the last one maybe shorter.
    Blocks(Box<[u64]>),
    /// Nothing: it shares no prefix.
    Unique,
}

impl Row {
    /// The prompt's text: [`BYTES_PER_TOKEN`] bytes a token, equal blocks alike under one seed.
    pub fn prompt_text(&self, seed: u64, row: u64) -> String {
        let mut prompt = String::new();
        let mut left = self.input_tokens as usize * BYTES_PER_TOKEN;
        match &self.prompt {
            Prompt::Blocks(ids) => {
                prompt.reserve(left);
                for id in ids {
                    let bytes = left.min(BLOCK_TOKENS * BYTES_PER_TOKEN);
                    text::append(&mut prompt, seed, Piece::Block(*id), bytes);
                    left -= bytes;
                }
            }
            Prompt::Unique => text::append(&mut prompt, seed, Piece::Row(row), left),
        }
        prompt
    }
}

/// How to read a trace.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reading {
    /// Only what arrives before this, in trace time as recorded.
    pub until: Option<Duration>,
    /// Arrival times; unset: spread for Mooncake, recorded for Azure.
    pub arrivals: Option<Arrivals>,
    /// An upper bound for the tokens of each answer.
    pub output_tokens_max: Option<u32>,
    /// Settles where inside its window a request is spread.
    pub seed: u64,
}

impl Trace {
    /// Reads a file in either format. The error names the file and the line.
    pub fn open(path: &Path, reading: &Reading) -> anyhow::Result<Self> {
        let file =
            std::fs::File::open(path).with_context(|| format!("cannot open the trace {}", path.display()))?;
        Self::read(std::io::BufReader::new(file), reading)
            .with_context(|| format!("in the trace {}", path.display()))
    }

    /// Reads either format from its lines.
    pub fn read(lines: impl BufRead, reading: &Reading) -> anyhow::Result<Self> {
        let mut format = None;
        let mut rows = Vec::new();
        for (index, line) in lines.lines().enumerate() {
            let number = index + 1;
            let line = line.with_context(|| format!("line {number}"))?;
            let line = line.trim_start_matches('\u{feff}').trim();
            if line.is_empty() {
                continue;
            }
            let Some(known) = format else {
                let (found, row) = Format::of_first_line(line).with_context(|| format!("line {number}"))?;
                format = Some(found);
                rows.extend(row);
                continue;
            };
            ensure!(rows.len() < ROWS_MAX, "more than {ROWS_MAX} requests");
            rows.push(known.row(line).with_context(|| format!("line {number}"))?);
        }
        let Some(format) = format else { bail!("no request in it") };
        Self::arrange(rows, format, reading)
    }

    fn arrange(mut rows: Vec<Row>, format: Format, reading: &Reading) -> anyhow::Result<Self> {
        rows.sort_by_key(|row| row.at);
        let start = rows.first().map_or(Duration::ZERO, |row| row.at);
        for row in &mut rows {
            row.at -= start;
            row.output_tokens = row.output_tokens.min(reading.output_tokens_max.unwrap_or(u32::MAX)).max(1);
        }
        // The whole trace is spread before it is cut: a longer part begins with the shorter one.
        let recorded: Vec<Duration> = rows.iter().map(|row| row.at).collect();
        match (reading.arrivals, format) {
            (Some(Arrivals::Recorded), _) | (None, Format::Azure) => {}
            (Some(Arrivals::Spread), Format::Azure) => {
                bail!("arrivals can't be spread: Azure traces are recorded to the 100 ns; use recorded")
            }
            (Some(Arrivals::Spread) | None, Format::Mooncake) => {
                for (row, at) in rows.iter_mut().zip(arrivals::spread(&recorded, reading.seed)) {
                    row.at = at;
                }
            }
        }
        if let Some(until) = reading.until {
            rows.truncate(recorded.partition_point(|at| *at < until));
        }
        ensure!(!rows.is_empty(), "no request in it");
        Ok(Self { rows })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Mooncake,
    Azure,
}

const AZURE_HEADER: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

impl Format {
    /// The format, and the request that the first line already is.
    fn of_first_line(line: &str) -> anyhow::Result<(Self, Option<Row>)> {
        if line.starts_with('{') {
            return Ok((Self::Mooncake, Some(Self::Mooncake.row(line)?)));
        }
        if line.split(',').map(str::trim).eq(AZURE_HEADER) {
            return Ok((Self::Azure, None));
        }
        bail!("neither a Mooncake JSON object nor the header {}", AZURE_HEADER.join(","))
    }

    fn row(self, line: &str) -> anyhow::Result<Row> {
        let row = match self {
            Self::Mooncake => mooncake_row(line),
            Self::Azure => azure_row(line),
        }?;
        ensure!(
            row.input_tokens <= INPUT_TOKENS_MAX,
            "a prompt of {} tokens; the most is {INPUT_TOKENS_MAX}",
            row.input_tokens
        );
        Ok(row)
    }
}

fn mooncake_row(line: &str) -> anyhow::Result<Row> {
    #[derive(Deserialize)]
    struct Line {
        timestamp: f64,
        input_length: u32,
        output_length: u32,
        hash_ids: Box<[u64]>,
    }
    let line: Line = serde_json::from_str(line)?;
    let at = Duration::try_from_secs_f64(line.timestamp / 1000.0).context("timestamp")?;
    let input_tokens = line.input_length.max(1);
    let blocks = (input_tokens as usize).div_ceil(BLOCK_TOKENS);
    ensure!(
        line.hash_ids.len() == blocks,
        "{} hash_ids for {input_tokens} tokens; blocks of {BLOCK_TOKENS} tokens make {blocks}",
        line.hash_ids.len()
    );
    Ok(Row { at, input_tokens, output_tokens: line.output_length, prompt: Prompt::Blocks(line.hash_ids) })
}

fn azure_row(line: &str) -> anyhow::Result<Row> {
    let mut fields = line.split(',').map(str::trim);
    let (Some(timestamp), Some(input), Some(output), None) =
        (fields.next(), fields.next(), fields.next(), fields.next())
    else {
        bail!("not three fields");
    };
    let moment =
        humantime::parse_rfc3339_weak(timestamp).with_context(|| format!("TIMESTAMP {timestamp:?}"))?;
    let at =
        moment.duration_since(std::time::UNIX_EPOCH).with_context(|| format!("TIMESTAMP {timestamp:?}"))?;
    let tokens = |name, value: &str| value.parse::<u32>().with_context(|| format!("{name} {value:?}"));
    Ok(Row {
        at,
        input_tokens: tokens(AZURE_HEADER[1], input)?.max(1),
        output_tokens: tokens(AZURE_HEADER[2], output)?,
        prompt: Prompt::Unique,
    })
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
