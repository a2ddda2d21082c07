//! The chat template: tools, template arguments, then each message's role, name and content as plain text, so
//! that equal beginnings give equal tokens and a partial last message continues where an answer would begin.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::body::{Body, Message, Part, Text};

/// Why a chat could not be rendered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unrenderable {
    #[error("content should be a string or a list of objects")]
    Content,
    #[error("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")]
    ContinuesAndBegins,
    #[error("continue_final_message is set but the final message does not appear in the chat")]
    NothingToContinue,
}

/// The prompt that a chat request means.
pub(crate) fn render(body: &Body<'_>, messages: &[Message<'_>]) -> Result<String, Unrenderable> {
    let continues = body.continue_final_message.unwrap_or(false);
    let begins = body.add_generation_prompt.unwrap_or(true);
    if continues && begins {
        return Err(Unrenderable::ContinuesAndBegins);
    }
    let content_bytes: usize =
        messages.iter().filter_map(|m| m.content).map(|raw| raw.get().len() + 32).sum();
    let mut out = String::with_capacity(content_bytes + 64);
    section(&mut out, "tools", body.tools);
    section(&mut out, "arguments", body.chat_template_kwargs);
    let last = messages.len().checked_sub(1);
    for (index, message) in messages.iter().enumerate() {
        push_message(&mut out, message)?;
        if !(continues && Some(index) == last) {
            out.push_str("<|end|>\n");
        }
    }
    if continues && last.is_none() {
        return Err(Unrenderable::NothingToContinue);
    }
    if begins {
        out.push_str("<|assistant|>\n");
    }
    Ok(out)
}

fn section(out: &mut String, name: &str, value: Option<&RawValue>) {
    if let Some(value) = value {
        for part in ["<|", name, "|>\n", value.get(), "<|end|>\n"] {
            out.push_str(part);
        }
    }
}

fn push_message(out: &mut String, message: &Message<'_>) -> Result<(), Unrenderable> {
    out.push_str("<|");
    out.push_str(message.role.as_ref().map_or("user", |role| &role.0));
    for name in [&message.name, &message.tool_call_id].into_iter().flatten() {
        out.push(' ');
        out.push_str(&name.0);
    }
    out.push_str("|>\n");
    if let Some(content) = message.content {
        push_content(out, content)?;
    }
    if let Some(calls) = message.tool_calls {
        out.push_str(calls.get());
    }
    Ok(())
}

/// Appends text as it is and every other part as its JSON.
pub(crate) fn push_content(out: &mut String, content: &RawValue) -> Result<(), Unrenderable> {
    let raw = content.get();
    match raw.as_bytes().first() {
        Some(b'"') => out.push_str(&string(content).ok_or(Unrenderable::Content)?),
        Some(b'[') => {
            let parts: Vec<&RawValue> = serde_json::from_str(raw).map_err(|_| Unrenderable::Content)?;
            for raw in parts {
                let part: Part<'_> = serde_json::from_str(raw.get()).map_err(|_| Unrenderable::Content)?;
                match part.text {
                    Some(text) => out.push_str(&text.0),
                    None => out.push_str(raw.get()),
                }
            }
        }
        Some(b'n') => {}
        _ => return Err(Unrenderable::Content),
    }
    Ok(())
}

/// A raw value that is a string.
pub(crate) fn string(raw: &RawValue) -> Option<Cow<'_, str>> {
    serde_json::from_str::<Text<'_>>(raw.get()).ok().map(|text| text.0)
}
