//! Chats of tenants whose prompts begin with the same text.

use std::fmt::Write as _;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// What is asked of the engines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    /// Bytes at the head of every prompt.
    pub(crate) common_bytes: usize,
    /// Bytes after it that only a tenant's prompts have.
    pub(crate) tenant_bytes: usize,
    /// Bytes of a chat's first message.
    pub(crate) first_bytes: usize,
    /// Bytes of each later one.
    pub(crate) turn_bytes: usize,
    pub(crate) turns: usize,
    pub(crate) output_tokens: u64,
    /// Whether prompts are chats; else they are plain text.
    pub(crate) chat: bool,
}

/// Text that no other seed gives, about like prose in its letters.
pub(crate) fn prose(seed: u64, bytes: usize) -> String {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut text = String::with_capacity(bytes + 8);
    while text.len() < bytes {
        let _ = write!(text, "{:06x} ", rng.random_range(0..0x100_0000_u32));
    }
    text.truncate(bytes);
    text
}

/// A chat under way.
pub(crate) struct Chat {
    system: String,
    messages: Vec<(&'static str, String)>,
    pub(crate) turn: usize,
    seed: u64,
    workload: Workload,
}

impl Chat {
    pub(crate) fn begin(workload: Workload, tenant: usize, seed: u64) -> Self {
        let system = prose(1, workload.common_bytes) + &prose(1_000 + tenant as u64, workload.tenant_bytes);
        Self { system, messages: Vec::new(), turn: 0, seed, workload }
    }

    /// The body of the next turn.
    pub(crate) fn next_body(&mut self) -> String {
        let seed = self.seed * 100 + self.turn as u64;
        let bytes = if self.turn == 0 { self.workload.first_bytes } else { self.workload.turn_bytes };
        self.turn += 1;
        self.messages.push(("user", prose(seed.wrapping_mul(0x9e37_79b9), bytes)));
        if self.workload.chat {
            let mut messages = vec![serde_json::json!({"role": "system", "content": self.system})];
            for (role, text) in &self.messages {
                messages.push(serde_json::json!({"role": role, "content": text}));
            }
            serde_json::json!({"model": "m", "stream": true, "messages": messages,
                "max_tokens": self.workload.output_tokens})
            .to_string()
        } else {
            let text: String = self.messages.iter().map(|(_, text)| text.as_str()).collect();
            let prompt = format!("{}{text}", self.system);
            serde_json::json!({"model": "m", "stream": true, "prompt": prompt,
                "max_tokens": self.workload.output_tokens})
            .to_string()
        }
    }

    pub(crate) fn reply(&mut self) {
        let text = prose(self.seed * 100 + 50 + self.turn as u64, self.workload.output_tokens as usize * 4);
        self.messages.push(("assistant", text));
    }

    pub(crate) fn is_over(&self) -> bool {
        self.turn >= self.workload.turns
    }
}
