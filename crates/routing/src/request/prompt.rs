//! A request's prompt as canonical text, and that text as prefix blocks.
//!
//! Canonical text puts what an engine renders into the order in which it renders it, whatever the order
//! of the keys in the body: tools, template arguments, then message by message. Between the pieces stand
//! single bytes that UTF-8 never contains, always before a piece and never after it. So no two different
//! requests have the same text, and a chat's text is a byte prefix of the next turn's.

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use super::body::{Body, ResumeObstacles};
use super::json::{Count, Cursor, Kind, Sink, Text};
use super::refusal::BadRequest;
use super::rules::ShapeRules;
use super::shape::Route;
use crate::BlockHash;
use crate::prefix::BlockHasher;

/// What the next piece of canonical text is. None of these bytes occurs in UTF-8.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Mark {
    Text = 0xf5,
    TextEnd = 0xf6,
    Word = 0xf7,
    Tools = 0xf8,
    TemplateArguments = 0xf9,
    Message = 0xfa,
    Name = 0xfb,
    Part = 0xfc,
    Media = 0xfd,
    ToolCalls = 0xfe,
    ToolCallId = 0xff,
}

/// What kind of prompt the hashes are for; keeps equal bytes of different kinds apart.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Domain {
    Chat = 1,
    Text = 2,
    Tokens = 3,
}

/// A prompt as routing sees it.
pub(super) struct Prompt {
    pub(super) blocks: Vec<BlockHash>,
    pub(super) bytes: u64,
    /// Exact number of tokens, if the prompt is made of token ids.
    pub(super) tokens: Option<u64>,
    pub(super) media: u32,
    /// Prompts in the body's list; 1 if it is not a list.
    pub(super) prompts: u32,
    pub(super) tail: u64,
    pub(super) lead: u64,
    pub(super) conversation: Option<u64>,
    pub(super) obstacles: ResumeObstacles,
}

impl Prompt {
    /// Of a request whose prompt can't be read: nothing but load counts. Its body settles ties, so that
    /// they don't all fall alike.
    pub(super) fn absent(body: &[u8]) -> Self {
        let whole = xxh3_64(body);
        Self {
            blocks: Vec::new(),
            bytes: 0,
            tokens: None,
            media: 0,
            prompts: 1,
            tail: whole,
            lead: whole,
            conversation: None,
            obstacles: ResumeObstacles::default(),
        }
    }
}

/// Reads the prompt of a body on a route that has one.
pub(super) fn read(route: Route, body: &Body<'_>, rules: &ShapeRules) -> Result<Option<Prompt>, BadRequest> {
    match route {
        Route::ChatCompletions => {
            let messages = body.messages.ok_or_else(|| BadRequest::missing("messages", "messages"))?;
            read_chat(messages, "messages", body, rules).map(Some)
        }
        Route::Completions => match body.prompt {
            Some(prompt) => read_prompt(prompt, "prompt", body, rules).map(Some),
            None if body.opaque_prompt => Ok(None),
            None => Err(BadRequest::missing("prompt", "prompt")),
        },
        Route::Embeddings => match (body.input, body.messages) {
            (Some(input), _) => read_prompt(input, "input", body, rules).map(Some),
            (None, Some(messages)) => read_chat(messages, "messages", body, rules).map(Some),
            (None, None) => Err(BadRequest::missing("input", "input")),
        },
        Route::Responses => match body.input {
            Some(input) => read_chat(input, "input", body, rules).map(Some),
            None if body.opaque_prompt || body.previous_response.is_some() => Ok(None),
            None => Err(BadRequest::missing("input", "input")),
        },
        Route::Other => Ok(None),
    }
}

fn writer(domain: Domain, body: &Body<'_>, rules: &ShapeRules, text_bytes: usize) -> Writer {
    let mut seed = xxh3_64(&[domain as u8]);
    match body.model {
        Some(model) => seed = chained(seed, model),
        None => seed = chained(seed, Text::plain(rules.default_model.as_deref().unwrap_or("").as_bytes())),
    }
    if let Some(salt) = body.cache_salt {
        seed = chained(seed, salt);
    }
    let blocks = text_bytes / rules.block_bytes.max(1);
    Writer { main: BlockHasher::new(seed, rules.block_bytes, blocks), lead: Lead::Before, media: 0 }
}

fn chained(seed: u64, text: Text<'_>) -> u64 {
    if let Some(plain) = text.as_plain() {
        return xxh3_64_with_seed(plain, seed);
    }
    xxh3_64_with_seed(text.to_owned().as_bytes(), seed)
}

/// Takes canonical text and hashes it, twice where the first message of the user is.
struct Writer {
    main: BlockHasher,
    lead: Lead,
    media: u32,
}

/// The first message that is not the system's: what tells one conversation from another.
#[expect(clippy::large_enum_variant, reason = "one for each request, on the stack")]
enum Lead {
    Before,
    During(BlockHasher),
    After { first: u64, whole: u64 },
}

impl Writer {
    fn mark(&mut self, mark: Mark) {
        self.put(&[mark as u8]);
    }

    fn put(&mut self, bytes: &[u8]) {
        self.main.push(bytes);
        if let Lead::During(hasher) = &mut self.lead {
            hasher.push(bytes);
        }
    }

    fn put_text(&mut self, text: Text<'_>) {
        text.pieces(|piece| self.put(piece));
    }

    fn begin_message(&mut self, from_system: bool, block_bytes: usize) {
        match &self.lead {
            Lead::Before if !from_system => {
                // seeded by all before it: the same greeting behind other instructions is another chat
                self.lead = Lead::During(BlockHasher::new(self.main.tail(), block_bytes, 0));
            }
            Lead::During(hasher) => {
                self.lead = Lead::After { first: hasher.first(), whole: hasher.tail() };
            }
            Lead::Before | Lead::After { .. } => {}
        }
    }

    fn finish(self, tokens: Option<u64>, prompts: u32, obstacles: ResumeObstacles) -> Prompt {
        let tail = self.main.tail();
        let (lead, conversation) = match self.lead {
            Lead::Before => (self.main.blocks().last().map_or(tail, |block| block.raw()), None),
            Lead::During(hasher) => (hasher.first(), Some(hasher.tail())),
            Lead::After { first, whole } => (first, Some(whole)),
        };
        Prompt {
            bytes: self.main.bytes(),
            blocks: self.main.into_blocks(),
            tokens,
            media: self.media,
            prompts,
            tail,
            lead,
            conversation,
            obstacles,
        }
    }
}

/// Any JSON value as canonical text: white space and escapes don't matter, order does, since engines
/// render tools and calls in the order given.
impl Sink for Writer {
    fn bracket(&mut self, byte: u8) {
        self.put(&[byte]);
    }

    fn text(&mut self, text: Text<'_>) {
        self.mark(Mark::Text);
        self.put_text(text);
        self.mark(Mark::TextEnd);
    }

    fn word(&mut self, word: &[u8]) {
        self.mark(Mark::Word);
        self.put(word);
    }
}

/// The digest of a value that may be megabytes long, without a copy of it.
struct Digest(Xxh3);

impl Sink for Digest {
    fn bracket(&mut self, byte: u8) {
        self.0.update(&[byte]);
    }

    fn text(&mut self, text: Text<'_>) {
        self.0.update(&[Mark::Text as u8]);
        text.pieces(|piece| self.0.update(piece));
        self.0.update(&[Mark::TextEnd as u8]);
    }

    fn word(&mut self, word: &[u8]) {
        self.0.update(&[Mark::Word as u8]);
        self.0.update(word);
    }
}

/// A list of messages, or a single string that stands for one message of the user.
fn read_chat(
    text: &[u8],
    param: &'static str,
    body: &Body<'_>,
    rules: &ShapeRules,
) -> Result<Prompt, BadRequest> {
    let mut writer = writer(Domain::Chat, body, rules, text.len());
    for (mark, value) in [(Mark::Tools, body.tools), (Mark::TemplateArguments, body.chat_template_kwargs)] {
        if let Some(value) = value {
            writer.mark(mark);
            Cursor::new(value).walk(&mut writer)?;
        }
    }
    if let Some(instructions) = body.instructions {
        let message = Message {
            role: Some(Text::plain(b"system")),
            content: Content::Text(instructions),
            ..Message::default()
        };
        message.write(&mut writer, param, rules)?;
    }
    let mut cursor = Cursor::new(text);
    match cursor.kind()? {
        Kind::String if param == "input" => {
            let content = Content::Text(cursor.string()?);
            let message = Message { role: Some(Text::plain(b"user")), content, ..Message::default() };
            message.write(&mut writer, param, rules)?;
        }
        Kind::Array => {
            let messages = cursor.array(|index, cursor| {
                if cursor.kind()? == Kind::String && param == "input" {
                    // not a message, but tolerated by some engines
                    writer.text(cursor.string()?);
                    return Ok(());
                }
                Message::read(cursor, index, param)?.write(&mut writer, param, rules)
            })?;
            if messages == 0 {
                return Err(BadRequest::empty(param));
            }
        }
        kind => return Err(BadRequest::wrong_type(param, param, "an array of messages", kind)),
    }
    Ok(writer.finish(None, 1, ResumeObstacles::default()))
}

#[derive(Default)]
struct Message<'a> {
    role: Option<Text<'a>>,
    /// What an item of a response has instead of a role.
    item_type: Option<Text<'a>>,
    name: Option<Text<'a>>,
    content: Content<'a>,
    tool_calls: Option<&'a [u8]>,
    tool_call_id: Option<Text<'a>>,
}

#[derive(Default)]
enum Content<'a> {
    #[default]
    None,
    Text(Text<'a>),
    Parts(&'a [u8]),
}

impl<'a> Message<'a> {
    fn read(cursor: &mut Cursor<'a>, index: usize, param: &'static str) -> Result<Self, BadRequest> {
        let wrong = |field: &str, expected, found| {
            BadRequest::wrong_type(&format!("{param}[{index}]{field}"), param, expected, found)
        };
        let kind = cursor.kind()?;
        if kind != Kind::Object {
            return Err(wrong("", "an object", kind));
        }
        let mut message = Self::default();
        cursor.object(|key, cursor| {
            let kind = cursor.kind()?;
            let mut buffer = super::json::KeyBuffer::default();
            let key = key.key(&mut buffer);
            let text = match key {
                b"role" => &mut message.role,
                b"name" => &mut message.name,
                b"type" if param == "input" => &mut message.item_type,
                b"tool_call_id" | b"call_id" => &mut message.tool_call_id,
                b"content" | b"output" => {
                    message.content = match kind {
                        Kind::String => Content::Text(cursor.string()?),
                        Kind::Array => Content::Parts(cursor.skip()?),
                        Kind::Null => {
                            cursor.null()?;
                            Content::None
                        }
                        found => return Err(wrong(".content", "a string or an array of parts", found)),
                    };
                    return Ok(());
                }
                b"tool_calls" | b"arguments" => {
                    let value = cursor.skip()?;
                    message.tool_calls = match kind {
                        Kind::Null => None,
                        Kind::Array
                            if value.get(1..value.len() - 1).is_some_and(|v| v.trim_ascii().is_empty()) =>
                        {
                            None
                        }
                        Kind::Array => Some(value),
                        Kind::String if key == b"arguments" => Some(value),
                        found => return Err(wrong(".tool_calls", "an array", found)),
                    };
                    return Ok(());
                }
                _ => {
                    cursor.skip()?;
                    return Ok(());
                }
            };
            *text = match kind {
                Kind::String => Some(cursor.string()?),
                Kind::Null => {
                    cursor.null()?;
                    None
                }
                found => {
                    let field = format!(".{}", String::from_utf8_lossy(key));
                    return Err(wrong(&field, "a string", found));
                }
            };
            Ok(())
        })?;
        if message.role.is_none() && message.item_type.is_none() {
            return Err(BadRequest::missing(&format!("{param}[{index}].role"), param));
        }
        Ok(message)
    }

    fn write(&self, writer: &mut Writer, param: &'static str, rules: &ShapeRules) -> Result<(), BadRequest> {
        let role = self.role.or(self.item_type);
        let from_system = role.is_some_and(|role| role.is("system") || role.is("developer"));
        writer.begin_message(from_system, rules.block_bytes);
        writer.mark(Mark::Message);
        if let Some(role) = role {
            writer.put_text(role);
        }
        if let Some(name) = self.name {
            writer.mark(Mark::Name);
            writer.put_text(name);
        }
        match self.content {
            Content::None => {}
            Content::Text(text) => {
                writer.mark(Mark::Part);
                writer.put_text(text);
            }
            Content::Parts(parts) => {
                Cursor::new(parts).array(|index, cursor| write_part(writer, cursor, index, param))?;
            }
        }
        if let Some(calls) = self.tool_calls {
            writer.mark(Mark::ToolCalls);
            Cursor::new(calls).walk(writer)?;
        }
        if let Some(id) = self.tool_call_id {
            writer.mark(Mark::ToolCallId);
            writer.put_text(id);
        }
        Ok(())
    }
}

fn write_part(
    writer: &mut Writer,
    cursor: &mut Cursor<'_>,
    index: usize,
    param: &'static str,
) -> Result<(), BadRequest> {
    match cursor.kind()? {
        Kind::String => {
            writer.mark(Mark::Part);
            writer.put_text(cursor.string()?);
            return Ok(());
        }
        Kind::Object => {}
        found => {
            let place = format!("{param}[].content[{index}]");
            return Err(BadRequest::wrong_type(&place, param, "an object", found));
        }
    }
    let (mut kind, mut text) = (None, None);
    // a sum, so that the order of the part's keys does not matter
    let mut digest = 0_u128;
    cursor.object(|key, cursor| {
        let is_string = cursor.kind()? == Kind::String;
        if is_string && key.is("type") {
            kind = Some(cursor.string()?);
        } else if is_string && key.is("text") {
            text = Some(cursor.string()?);
        } else {
            let mut field = Digest(Xxh3::new());
            field.text(key);
            cursor.walk(&mut field)?;
            digest = digest.wrapping_add(field.0.digest128());
        }
        Ok::<(), BadRequest>(())
    })?;
    if let Some(text) = text
        && kind.is_none_or(|kind| ["text", "input_text", "output_text"].iter().any(|name| kind.is(name)))
    {
        writer.mark(Mark::Part);
        writer.put_text(text);
        return Ok(());
    }
    writer.mark(Mark::Media);
    if let Some(kind) = kind {
        writer.put_text(kind);
    }
    writer.mark(Mark::Word);
    writer.put(&digest.to_le_bytes());
    if let Some(text) = text {
        writer.mark(Mark::Part);
        writer.put_text(text);
    }
    writer.media = writer.media.saturating_add(1);
    Ok(())
}

/// A raw prompt: a string, token ids, or a list of either, of which the first counts for the prefix and
/// all count for the size.
fn read_prompt(
    text: &[u8],
    param: &'static str,
    body: &Body<'_>,
    rules: &ShapeRules,
) -> Result<Prompt, BadRequest> {
    const EXPECTED: &str = "a string, an array of strings, of token ids, or of arrays of token ids";
    let mut obstacles = ResumeObstacles::default();
    let mut cursor = Cursor::new(text);
    match cursor.kind()? {
        Kind::String => {
            let mut writer = writer(Domain::Text, body, rules, text.len());
            writer.put_text(cursor.string()?);
            return Ok(writer.finish(None, 1, obstacles));
        }
        Kind::Array => {}
        found => return Err(BadRequest::wrong_type(param, param, EXPECTED, found)),
    }
    // the first item tells what the others have to be
    let mut list: Option<(Kind, Writer)> = None;
    let (mut other_bytes, mut tokens) = (0_u64, 0_u64);
    let items = cursor.array(|index, cursor| {
        let kind = cursor.kind()?;
        let known = list.as_ref().map_or(kind, |(kind, _)| *kind);
        if kind != known || !matches!(kind, Kind::String | Kind::Number | Kind::Array) {
            return Err(BadRequest::wrong_type(&format!("{param}[{index}]"), param, EXPECTED, kind));
        }
        let domain = if kind == Kind::String { Domain::Text } else { Domain::Tokens };
        let (_, writer) = list.get_or_insert_with(|| (kind, writer(domain, body, rules, text.len())));
        match kind {
            Kind::String if index == 0 => writer.put_text(cursor.string()?),
            Kind::String => cursor.string()?.pieces(|piece| other_bytes += piece.len() as u64),
            Kind::Number => {
                writer.put(&token(cursor, index, param)?.to_le_bytes());
                tokens += 1;
            }
            _ => {
                tokens += cursor.array(|at, cursor| {
                    let kind = cursor.kind()?;
                    if kind != Kind::Number {
                        let place = format!("{param}[{index}][{at}]");
                        return Err(BadRequest::wrong_type(&place, param, "a token id", kind));
                    }
                    let token = token(cursor, at, param)?.to_le_bytes();
                    if index == 0 {
                        writer.put(&token);
                    } else {
                        other_bytes += token.len() as u64;
                    }
                    Ok(())
                })? as u64;
            }
        }
        Ok(())
    })?;
    let Some((kind, writer)) = list else { return Err(BadRequest::empty(param)) };
    obstacles.set(ResumeObstacles::TOKEN_IDS, kind != Kind::String);
    let prompts = if kind == Kind::Number { 1 } else { u32::try_from(items).unwrap_or(u32::MAX) };
    obstacles.set(ResumeObstacles::PROMPT_LIST, prompts > 1);
    let mut prompt = writer.finish((kind != Kind::String).then_some(tokens), prompts, obstacles);
    prompt.bytes += other_bytes;
    Ok(prompt)
}

fn token(cursor: &mut Cursor<'_>, index: usize, param: &'static str) -> Result<u32, BadRequest> {
    match cursor.number()?.count() {
        Count::Whole(token) if token <= u64::from(u32::MAX) => Ok(token as u32),
        _ => Err(BadRequest {
            message: format!(
                "Invalid value in '{param}' (item {index}): a token id is an integer from 0 to {}.",
                u32::MAX
            ),
            param: Some(param),
            code: "invalid_value",
        }),
    }
}
