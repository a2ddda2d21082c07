//! What clients say.

use serde_json::{Value, json};

/// About `bytes` bytes of words that follow from `name` alone; equal names give equal words.
pub fn words(name: &str, bytes: usize) -> String {
    // FNV-1a to begin with, then a linear congruence: texts only have to differ.
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325, fold);
    let mut text = String::with_capacity(bytes + 8);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let letters = 2 + (state >> 61) as usize;
        for at in 0..letters {
            text.push(char::from(b'a' + (state >> (8 + 5 * at)) as u8 % 26));
        }
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

/// A chat as its client keeps it: every answer is appended as it came.
#[derive(Clone, Debug)]
pub struct Chat {
    name: String,
    messages: Vec<Value>,
    turns: usize,
}

impl Chat {
    /// The chat `name` behind a system prompt (none if empty).
    pub fn new(name: &str, system: &str) -> Self {
        let messages =
            if system.is_empty() { Vec::new() } else { vec![json!({"role": "system", "content": system})] };
        Self { name: name.to_owned(), messages, turns: 0 }
    }

    /// The user says `bytes` bytes more.
    pub fn say(&mut self, bytes: usize) -> &mut Self {
        let text = words(&format!("{} turn {}", self.name, self.turns), bytes);
        self.turns += 1;
        self.messages.push(json!({"role": "user", "content": text}));
        self
    }

    /// The model has said `text`.
    pub fn answered(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    /// What was said so far.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// The next request's body, as most libraries write it.
    pub fn body(&self) -> Value {
        json!({"model": crate::MODEL, "messages": self.messages, "max_tokens": 16})
    }
}
