//! The top level of a body: finds the fields that matter, checks their types, leaves the rest alone.
//!
//! Of a key that comes twice the last one counts, as in the engines; each one's type is checked. `null`
//! counts as not sent.

use super::json::{Count, Cursor, Kind};
use super::refusal::BadRequest;
use super::shape::Route;
use super::text::{KeyBuffer, Text};

/// The most samples that one request may ask for; engines reserve KV for each.
const SAMPLES_MAX: u32 = 128;

/// What makes it impossible to continue a broken stream exactly on another engine: a set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResumeObstacles(u16);

impl ResumeObstacles {
    /// Tools are offered: the reply may be a call in parts.
    pub const TOOLS: Self = Self(1);
    /// Log-probabilities are asked for.
    pub const LOGPROBS: Self = Self(1 << 1);
    /// More than one sample.
    pub const SAMPLES: Self = Self(1 << 2);
    /// Output bound to a grammar or schema.
    pub const STRUCTURED: Self = Self(1 << 3);
    /// A seed is set.
    pub const SEED: Self = Self(1 << 4);
    /// Penalties count what was generated so far.
    pub const PENALTIES: Self = Self(1 << 5);
    /// The prompt is repeated in the reply.
    pub const ECHO: Self = Self(1 << 6);
    /// A list of prompts.
    pub const PROMPT_LIST: Self = Self(1 << 7);
    /// A prompt of token ids.
    pub const TOKEN_IDS: Self = Self(1 << 8);
    /// The last message is continued as it is, or no answer is begun.
    pub const CONTINUED: Self = Self(1 << 9);
    /// A text completion without a limit of its own: what the engine's is, is not known.
    pub const LIMITLESS: Self = Self(1 << 10);
    /// The engine cuts the prompt, or it is no text.
    pub const OTHER_PROMPT: Self = Self(1 << 11);
    /// The reply says token ids, the prompt's among them.
    pub const IDS_SAID: Self = Self(1 << 12);

    const NAMES: [(Self, &'static str); 13] = [
        (Self::TOOLS, "tools"),
        (Self::LOGPROBS, "logprobs"),
        (Self::SAMPLES, "samples"),
        (Self::STRUCTURED, "structured"),
        (Self::SEED, "seed"),
        (Self::PENALTIES, "penalties"),
        (Self::ECHO, "echo"),
        (Self::PROMPT_LIST, "prompt_list"),
        (Self::TOKEN_IDS, "token_ids"),
        (Self::CONTINUED, "continued"),
        (Self::LIMITLESS, "limitless"),
        (Self::OTHER_PROMPT, "other_prompt"),
        (Self::IDS_SAID, "ids_said"),
    ];

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of `other` are among these.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Each one's name, in a fixed order.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |(one, _)| self.contains(*one)).map(|(_, name)| name)
    }

    pub(super) fn join(&mut self, others: Self) {
        self.0 |= others.0;
    }

    pub(super) fn set(&mut self, one: Self, present: bool) {
        self.0 = if present { self.0 | one.0 } else { self.0 & !one.0 };
    }
}

/// The fields that matter, as spans of the body.
#[derive(Debug, Default)]
pub(super) struct Body<'a> {
    pub(super) model: Option<Text<'a>>,
    pub(super) messages: Option<&'a [u8]>,
    pub(super) prompt: Option<&'a [u8]>,
    pub(super) input: Option<&'a [u8]>,
    pub(super) instructions: Option<Text<'a>>,
    pub(super) tools: Option<&'a [u8]>,
    pub(super) chat_template_kwargs: Option<&'a [u8]>,
    pub(super) cache_salt: Option<Text<'a>>,
    pub(super) prompt_cache_key: Option<Text<'a>>,
    pub(super) user: Option<Text<'a>>,
    pub(super) previous_response: Option<Text<'a>>,
    /// The prompt comes in a form that can't be hashed (embeddings, a stored template).
    pub(super) opaque_prompt: bool,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// `max_completion_tokens` or `max_output_tokens`.
    pub(super) output_tokens_max: Option<u64>,
    /// `max_tokens`, the older name, used where the newer is not sent.
    pub(super) max_tokens: Option<u64>,
    pub(super) samples: Option<u32>,
    pub(super) best_of: Option<u32>,
    pub(super) obstacles: ResumeObstacles,
    penalties: [bool; 3],
    logprobs: [bool; 2],
    beams: bool,
    structured: [bool; STRUCTURED_FIELDS],
    functions: [bool; 2],
    continued: [bool; 2],
    prompt_cut: bool,
}

const STRUCTURED_FIELDS: usize = 7;

fn check_utf8(text: &[u8]) -> Result<(), BadRequest> {
    simdutf8::compat::from_utf8(text).map(|_| ()).map_err(|error| BadRequest::not_utf8(error.valid_up_to()))
}

/// Reads the body of a request on a known route.
pub(super) fn read(route: Route, text: &[u8]) -> Result<Body<'_>, BadRequest> {
    check_utf8(text)?;
    let mut body = Body::default();
    let mut cursor = Cursor::new(text);
    match cursor.kind()? {
        Kind::Object => read_object(route, &mut cursor, &mut body)?,
        found => return Err(BadRequest::not_an_object(found)),
    }
    cursor.end()?;
    body.settle(route);
    Ok(body)
}

/// Reads the body of a request on a route that is passed through: only what looks like JSON is looked
/// at, then all of it (there may be several values), so that no field can be smuggled past.
pub(super) fn read_other(text: &[u8]) -> Result<Body<'_>, BadRequest> {
    // byte order marks and the zero bytes of UTF-16 count as white space here: some engines guess encodings
    let first = text
        .iter()
        .find(|byte| !matches!(byte, b' ' | b'\t' | b'\r' | b'\n' | 0 | 0xef | 0xbb | 0xbf | 0xfe | 0xff));
    if first != Some(&b'{') {
        return Ok(Body::default());
    }
    check_utf8(text)?;
    let mut body = Body::default();
    let mut cursor = Cursor::new(text);
    while !cursor.at_end() {
        match cursor.kind()? {
            Kind::Object => read_object(Route::Other, &mut cursor, &mut body)?,
            _ => {
                cursor.skip()?;
            }
        }
    }
    Ok(body)
}

fn read_object<'a>(route: Route, cursor: &mut Cursor<'a>, body: &mut Body<'a>) -> Result<(), BadRequest> {
    cursor.object(|key, cursor| {
        let mut buffer = KeyBuffer::default();
        let key = key.key(&mut buffer);
        if refuse_reserved(key, cursor)? {
            return Ok(());
        }
        if route == Route::Other {
            match key {
                // what is not a string is none of our business here
                b"model" if cursor.kind()? == Kind::String => body.model = Some(cursor.string()?),
                b"stream" if cursor.kind()? == Kind::Bool => body.stream = cursor.boolean()?,
                _ => {
                    cursor.skip()?;
                }
            }
            return Ok(());
        }
        read_member(route, key, cursor, body)
    })
}

/// Fields that travel only between engines. A client's could make an engine read another's memory, and
/// kill it (recorded with a real engine). Some are also reachable through fields that hand arguments on.
fn refuse_reserved(key: &[u8], cursor: &mut Cursor<'_>) -> Result<bool, BadRequest> {
    let reserved = match key {
        b"kv_transfer_params" => "kv_transfer_params",
        b"bootstrap_host" => "bootstrap_host",
        b"bootstrap_port" => "bootstrap_port",
        b"bootstrap_room" => "bootstrap_room",
        b"vllm_xargs" | b"extra_args" | b"sampling_params" | b"extra_body" | b"nvext" => {
            if cursor.kind()? != Kind::Object {
                return Ok(false);
            }
            cursor.object(|key, cursor| {
                let mut buffer = KeyBuffer::default();
                if !refuse_reserved(key.key(&mut buffer), cursor)? {
                    cursor.skip()?;
                }
                Ok::<(), BadRequest>(())
            })?;
            return Ok(true);
        }
        _ => return Ok(false),
    };
    if cursor.kind()? == Kind::Null {
        cursor.null()?;
        return Ok(true);
    }
    Err(BadRequest::reserved(reserved))
}

fn read_member<'a>(
    route: Route,
    key: &[u8],
    cursor: &mut Cursor<'a>,
    body: &mut Body<'a>,
) -> Result<(), BadRequest> {
    match key {
        b"model" => body.model = string(cursor, "model")?,
        b"messages" => body.messages = array(cursor, "messages")?,
        b"prompt" if route == Route::Completions => body.prompt = present(cursor)?,
        b"prompt" if route == Route::Responses => body.opaque_prompt |= present(cursor)?.is_some(),
        b"prompt_embeds" => body.opaque_prompt |= present(cursor)?.is_some(),
        b"input" if matches!(route, Route::Embeddings | Route::Responses) => body.input = present(cursor)?,
        b"instructions" if route == Route::Responses => body.instructions = string(cursor, "instructions")?,
        b"previous_response_id" => body.previous_response = string(cursor, "previous_response_id")?,
        b"tools" => {
            body.tools = array(cursor, "tools")?.filter(|tools| !is_empty_array(tools));
            body.functions[0] = body.tools.is_some();
        }
        b"functions" => {
            body.functions[1] = array(cursor, "functions")?.is_some_and(|list| !is_empty_array(list));
        }
        b"chat_template_kwargs" => {
            body.chat_template_kwargs = object(cursor, "chat_template_kwargs")?;
        }
        b"cache_salt" => body.cache_salt = string(cursor, "cache_salt")?,
        b"prompt_cache_key" => body.prompt_cache_key = string(cursor, "prompt_cache_key")?,
        b"user" => body.user = string(cursor, "user")?,
        b"stream" => body.stream = boolean(cursor, "stream")?.unwrap_or(false),
        b"stream_options" => body.include_usage = include_usage(cursor)?,
        b"max_tokens" => body.max_tokens = count(cursor, "max_tokens")?,
        b"max_completion_tokens" => body.output_tokens_max = count(cursor, "max_completion_tokens")?,
        b"max_output_tokens" => body.output_tokens_max = count(cursor, "max_output_tokens")?,
        b"n" => body.samples = samples(cursor, "n")?,
        b"best_of" => body.best_of = samples(cursor, "best_of")?,
        b"seed" => {
            let seed = present(cursor)?.is_some();
            body.obstacles.set(ResumeObstacles::SEED, seed);
        }
        b"echo" => {
            let echo = boolean(cursor, "echo")?.unwrap_or(false);
            body.obstacles.set(ResumeObstacles::ECHO, echo);
        }
        // a boolean for chats, a count for completions, where 0 still asks for them
        b"logprobs" => body.logprobs[0] = present(cursor)?.is_some_and(|value| value != b"false"),
        b"prompt_logprobs" => body.logprobs[1] = present(cursor)?.is_some_and(|value| value != b"false"),
        b"use_beam_search" => body.beams = boolean(cursor, "use_beam_search")?.unwrap_or(false),
        b"presence_penalty" => {
            body.penalties[0] = number(cursor, "presence_penalty")?.is_some_and(|v| v != 0.0);
        }
        b"frequency_penalty" => {
            body.penalties[1] = number(cursor, "frequency_penalty")?.is_some_and(|v| v != 0.0);
        }
        b"repetition_penalty" => {
            body.penalties[2] = number(cursor, "repetition_penalty")?.is_some_and(|v| v != 1.0);
        }
        b"continue_final_message" => {
            body.continued[0] = boolean(cursor, "continue_final_message")?.unwrap_or(false);
        }
        b"add_generation_prompt" => {
            body.continued[1] = !boolean(cursor, "add_generation_prompt")?.unwrap_or(true);
        }
        b"truncate_prompt_tokens" => body.prompt_cut = present(cursor)?.is_some(),
        b"return_token_ids" => {
            let said = present(cursor)?.is_some_and(|value| value != b"false");
            body.obstacles.set(ResumeObstacles::IDS_SAID, said);
        }
        b"response_format" => body.structured[0] = is_structured(cursor)?,
        b"text" if route == Route::Responses => body.structured[1] = has_structured_format(cursor)?,
        b"guided_json" => body.structured[2] = present(cursor)?.is_some(),
        b"guided_regex" => body.structured[3] = present(cursor)?.is_some(),
        b"guided_choice" => body.structured[4] = present(cursor)?.is_some(),
        b"guided_grammar" => body.structured[5] = present(cursor)?.is_some(),
        b"structured_outputs" => body.structured[6] = present(cursor)?.is_some(),
        _ => {
            cursor.skip()?;
        }
    }
    Ok(())
}

impl Body<'_> {
    fn settle(&mut self, route: Route) {
        let any = |flags: &[bool]| flags.contains(&true);
        self.obstacles.set(ResumeObstacles::TOOLS, any(&self.functions));
        self.obstacles.set(ResumeObstacles::LOGPROBS, any(&self.logprobs));
        self.obstacles.set(ResumeObstacles::PENALTIES, any(&self.penalties));
        self.obstacles.set(ResumeObstacles::STRUCTURED, any(&self.structured));
        self.obstacles.set(ResumeObstacles::SAMPLES, self.samples_run() > 1 || self.beams);
        self.obstacles.set(ResumeObstacles::CONTINUED, any(&self.continued));
        self.obstacles.set(ResumeObstacles::OTHER_PROMPT, self.prompt_cut || self.opaque_prompt);
        let limitless = route == Route::Completions && self.max_tokens.is_none();
        self.obstacles.set(ResumeObstacles::LIMITLESS, limitless);
    }

    /// Whether the prompt has to be computed where the answer is: for probabilities of its own tokens, or for beams.
    pub(super) fn undivided(&self) -> bool {
        let [of_answer, of_prompt] = self.logprobs;
        self.beams || of_prompt || (of_answer && self.obstacles.contains(ResumeObstacles::ECHO))
    }

    /// How many samples the engine runs per prompt.
    pub(super) fn samples_run(&self) -> u32 {
        self.samples.unwrap_or(1).max(self.best_of.unwrap_or(1))
    }
}

fn is_empty_array(text: &[u8]) -> bool {
    text.get(1..text.len().saturating_sub(1)).is_none_or(|inside| inside.trim_ascii().is_empty())
}

/// The value's text unless it is null.
fn present<'a>(cursor: &mut Cursor<'a>) -> Result<Option<&'a [u8]>, BadRequest> {
    let kind = cursor.kind()?;
    let text = cursor.skip()?;
    Ok((kind != Kind::Null).then_some(text))
}

/// Checks that the next value is null (then takes it and returns false) or of the wanted kind.
fn expect(
    cursor: &mut Cursor<'_>,
    name: &'static str,
    wanted: Kind,
    described: &'static str,
) -> Result<bool, BadRequest> {
    match cursor.kind()? {
        Kind::Null => {
            cursor.null()?;
            Ok(false)
        }
        kind if kind == wanted => Ok(true),
        kind => Err(BadRequest::wrong_type(name, name, described, kind)),
    }
}

fn string<'a>(cursor: &mut Cursor<'a>, name: &'static str) -> Result<Option<Text<'a>>, BadRequest> {
    Ok(if expect(cursor, name, Kind::String, "a string")? { Some(cursor.string()?) } else { None })
}

fn array<'a>(cursor: &mut Cursor<'a>, name: &'static str) -> Result<Option<&'a [u8]>, BadRequest> {
    Ok(if expect(cursor, name, Kind::Array, "an array")? { Some(cursor.skip()?) } else { None })
}

fn object<'a>(cursor: &mut Cursor<'a>, name: &'static str) -> Result<Option<&'a [u8]>, BadRequest> {
    Ok(if expect(cursor, name, Kind::Object, "an object")? { Some(cursor.skip()?) } else { None })
}

fn boolean(cursor: &mut Cursor<'_>, name: &'static str) -> Result<Option<bool>, BadRequest> {
    Ok(if expect(cursor, name, Kind::Bool, "a boolean")? { Some(cursor.boolean()?) } else { None })
}

fn number(cursor: &mut Cursor<'_>, name: &'static str) -> Result<Option<f64>, BadRequest> {
    Ok(if expect(cursor, name, Kind::Number, "a number")? { Some(cursor.number()?.float()) } else { None })
}

fn count(cursor: &mut Cursor<'_>, name: &'static str) -> Result<Option<u64>, BadRequest> {
    if !expect(cursor, name, Kind::Number, "an integer")? {
        return Ok(None);
    }
    match cursor.number()?.count() {
        Count::Whole(count) => Ok(Some(count)),
        Count::Negative => Err(BadRequest::out_of_range(name, "an integer that is not negative")),
        Count::Fraction => Err(BadRequest::wrong_type(name, name, "an integer", Kind::Number)),
    }
}

fn samples(cursor: &mut Cursor<'_>, name: &'static str) -> Result<Option<u32>, BadRequest> {
    count(cursor, name)?
        .map(|samples| {
            u32::try_from(samples)
                .ok()
                .filter(|samples| (1..=SAMPLES_MAX).contains(samples))
                .ok_or_else(|| BadRequest::out_of_range(name, &format!("an integer from 1 to {SAMPLES_MAX}")))
        })
        .transpose()
}

fn include_usage(cursor: &mut Cursor<'_>) -> Result<bool, BadRequest> {
    let mut include = false;
    if expect(cursor, "stream_options", Kind::Object, "an object")? {
        cursor.object(|key, cursor| {
            if key.is("include_usage") {
                include = boolean(cursor, "stream_options")?.unwrap_or(false);
            } else {
                cursor.skip()?;
            }
            Ok::<(), BadRequest>(())
        })?;
    }
    Ok(include)
}

/// Whether a `response_format` binds the output: any type but `text`.
fn is_structured(cursor: &mut Cursor<'_>) -> Result<bool, BadRequest> {
    if cursor.kind()? != Kind::Object {
        return Ok(present(cursor)?.is_some());
    }
    let mut structured = true;
    cursor.object(|key, cursor| {
        if key.is("type") && cursor.kind()? == Kind::String {
            structured = !cursor.string()?.is("text");
        } else {
            cursor.skip()?;
        }
        Ok::<(), BadRequest>(())
    })?;
    Ok(structured)
}

/// Whether the `text` object of a response has a `format` that binds the output.
fn has_structured_format(cursor: &mut Cursor<'_>) -> Result<bool, BadRequest> {
    if cursor.kind()? != Kind::Object {
        cursor.skip()?;
        return Ok(false);
    }
    let mut structured = false;
    cursor.object(|key, cursor| {
        if key.is("format") {
            structured = is_structured(cursor)?;
        } else {
            cursor.skip()?;
        }
        Ok::<(), BadRequest>(())
    })?;
    Ok(structured)
}
