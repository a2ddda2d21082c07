//! Reads the prompt of a body: messages, text or token ids.

use super::body::{Body, ResumeObstacles};
use super::canonical::{Digest, Domain, Mark, Prompt, Speaker, Writer};
use super::json::{Count, Cursor, Kind, Sink};
use super::refusal::BadRequest;
use super::rules::ShapeRules;
use super::shape::Route;
use super::text::{KeyBuffer, Text};

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

/// A list of messages, or a single string that stands for one message of the user.
fn read_chat(
    text: &[u8],
    param: &'static str,
    body: &Body<'_>,
    rules: &ShapeRules,
) -> Result<Prompt, BadRequest> {
    let mut writer = Writer::new(Domain::Chat, body, rules, text.len());
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
        message.write(&mut writer, param)?;
    }
    let mut cursor = Cursor::new(text);
    match cursor.kind()? {
        Kind::String if param == "input" => {
            let content = Content::Text(cursor.string()?);
            let message = Message { role: Some(Text::plain(b"user")), content, ..Message::default() };
            message.write(&mut writer, param)?;
        }
        Kind::Array => {
            let messages = cursor.array(|index, cursor| {
                if cursor.kind()? == Kind::String && param == "input" {
                    // not a message, but tolerated by some engines
                    writer.text(cursor.string()?);
                    return Ok(());
                }
                Message::read(cursor, index, param)?.write(&mut writer, param)
            })?;
            if messages == 0 {
                return Err(BadRequest::empty(param));
            }
        }
        kind => {
            let is_input = param == "input";
            let expected = if is_input { "a string or an array of messages" } else { "an array of messages" };
            return Err(BadRequest::wrong_type(param, param, expected, kind));
        }
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
            let mut buffer = KeyBuffer::default();
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

    fn write(&self, writer: &mut Writer, param: &'static str) -> Result<(), BadRequest> {
        let role = self.role.or(self.item_type);
        writer.begin_message(match role {
            Some(role) if role.is("system") || role.is("developer") => Speaker::System,
            Some(role) if role.is("assistant") => Speaker::Assistant,
            _ => Speaker::Other,
        });
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
            let mut field = Digest::new();
            field.text(key);
            cursor.walk(&mut field)?;
            digest = digest.wrapping_add(field.value());
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
            let mut writer = Writer::new(Domain::Text, body, rules, text.len());
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
        let (_, writer) = list.get_or_insert_with(|| (kind, Writer::new(domain, body, rules, text.len())));
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
    if let Some(token) = cursor.small_number() {
        return Ok(token);
    }
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
