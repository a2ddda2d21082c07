//! Chats of tenants whose prompts begin with the same text.

use std::time::Duration;

use routing::request::{Route, ShapeRules};

use super::{Asked, MODEL, text};

/// What a text is for, so that no two share their letters.
const COMMON: u64 = 3;
const TENANT: u64 = 4;
const TURN: u64 = 5;

/// The measures of generated chats, in a closed loop: a client sends its next turn when it has its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatShape {
    /// Tenants that chats belong to, by lot; at least 1.
    pub tenants: usize,
    /// Bytes at the head of every prompt.
    pub common_bytes: usize,
    /// Bytes after it that only a tenant's prompts have.
    pub tenant_bytes: usize,
    /// Bytes of a chat's first message.
    pub first_bytes: usize,
    /// Bytes of each later one.
    pub turn_bytes: usize,
    /// Requests in a chat, at least 1.
    pub turns: usize,
    /// Tokens of each answer, at least 1.
    pub output_tokens: u32,
    /// Clients at once; each has one chat after the other.
    pub clients: usize,
    /// Chats in all.
    pub chats: usize,
    /// Between an answer and the client's next turn.
    pub think: Duration,
    /// Whether prompts are chats; else they are plain text.
    pub chat: bool,
}

impl Default for ChatShape {
    /// The headline bench: 240 chats of 4 turns by 16 clients, 12 tenants with 2 KB in common and 6 KB of their own.
    fn default() -> Self {
        Self {
            tenants: 12,
            common_bytes: 2_000,
            tenant_bytes: 6_000,
            first_bytes: 1_000,
            turn_bytes: 400,
            turns: 4,
            output_tokens: 16,
            clients: 16,
            chats: 240,
            think: Duration::from_millis(30),
            chat: true,
        }
    }
}

/// A chat under way.
pub(crate) struct Chat {
    shape: ChatShape,
    number: u64,
    seed: u64,
    turn: usize,
    system: String,
    messages: Vec<(&'static str, String)>,
}

impl Chat {
    pub(crate) fn begin(shape: ChatShape, tenant: usize, number: u64, seed: u64) -> Self {
        let mut system = text::of(text::key(seed, COMMON, 0), shape.common_bytes);
        text::append(&mut system, text::key(seed, TENANT, tenant as u64), shape.tenant_bytes);
        Self { shape, number, seed, turn: 0, system, messages: Vec::new() }
    }

    /// The next turn as it is sent.
    pub(crate) fn next_turn(&mut self, rules: &ShapeRules, block_tokens: u32) -> Asked {
        let bytes = if self.turn == 0 { self.shape.first_bytes } else { self.shape.turn_bytes };
        let which = self.number * self.shape.turns as u64 + self.turn as u64;
        self.messages.push(("user", text::of(text::key(self.seed, TURN, which), bytes)));
        self.turn += 1;
        let output_tokens = self.shape.output_tokens;
        let mut body = serde_json::json!({"model": MODEL, "stream": true, "max_tokens": output_tokens});
        let (route, prompt) = if self.shape.chat {
            let mut messages = vec![serde_json::json!({"role": "system", "content": self.system})];
            messages.extend(
                self.messages.iter().map(|(role, text)| serde_json::json!({"role": role, "content": text})),
            );
            body["messages"] = messages.into();
            (Route::ChatCompletions, self.transcript())
        } else {
            let said = self.messages.iter().map(|(_, text)| text.as_str());
            let prompt: String = std::iter::once(self.system.as_str()).chain(said).collect();
            body["prompt"] = prompt.clone().into();
            (Route::Completions, prompt)
        };
        Asked::read(route, &body.to_string(), &prompt, output_tokens, rules, block_tokens)
    }

    /// The chat as an engine's template words it.
    fn transcript(&self) -> String {
        let mut text = format!("<system>{}", self.system);
        for (role, said) in &self.messages {
            text.push('<');
            text.push_str(role);
            text.push('>');
            text.push_str(said);
        }
        text + "<assistant>"
    }

    /// Takes the answer in.
    pub(crate) fn answered(&mut self, asked: &Asked) {
        let answer = asked.prompt.tail.as_ref().map(|tail| tail.answer.text(asked.output_tokens));
        self.messages.push(("assistant", answer.unwrap_or_default()));
    }

    pub(crate) fn is_over(&self) -> bool {
        self.turn >= self.shape.turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_begins_with_all_that_was_said_before_answers_included() {
        let shape = ChatShape { first_bytes: 100, output_tokens: 40, ..ChatShape::default() };
        let mut chat = Chat::begin(shape, 3, 1, 9);
        let first = chat.next_turn(&ShapeRules::default(), 16);
        chat.answered(&first);
        let second = chat.next_turn(&ShapeRules::default(), 16);
        assert!(second.shape.goes_on && !first.shape.goes_on);
        assert_eq!(first.prompt.blocks[..], second.prompt.blocks[..first.prompt.blocks.len()]);
        let grown = second.prompt.tokens - first.prompt.tokens;
        // 40 answer words are 40 tokens; 400 bytes of the next turn are 100, and the template's words some.
        assert!((140..160).contains(&grown), "{grown}");
        let other = Chat::begin(shape, 4, 2, 9).next_turn(&ShapeRules::default(), 16);
        let alike = first.shape.blocks.iter().zip(&other.shape.blocks).filter(|(a, b)| a == b).count();
        assert_eq!(alike, 3, "2,000 bytes are common");
    }
}
