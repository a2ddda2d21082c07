//! What to ask: a seeded source of conversations, with no clock and no network.
//!
//! A [`Workload`] hands out [`Conversation`]s; a conversation hands out one request at a time and takes the
//! answer that came back. A row of a trace is a conversation of one turn.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::body::{Api, Envelope, Speaker, Transcript};
use super::text::{self, Numbers, Piece};
use super::trace::Trace;

/// The measures of generated multi-turn chats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatShape {
    /// How many chats there are; without a number they never end.
    pub sessions: Option<u64>,
    /// Requests in each chat, at least 1.
    pub turns: u32,
    /// How many tenants the chats belong to, at least 1.
    pub tenants: u64,
    /// Bytes of system prompt that all chats have.
    pub common_bytes: usize,
    /// Bytes of system prompt, after the common ones, that the chats of one tenant have.
    pub tenant_bytes: usize,
    /// Bytes of a chat's first user message.
    pub first_bytes: usize,
    /// Bytes of each later user message.
    pub turn_bytes: usize,
    /// Tokens asked for in each answer.
    pub max_tokens: u32,
    /// How long the user thinks between an answer and the next turn.
    pub think: Duration,
}

impl Default for ChatShape {
    /// 80 chats of 5 turns: 2.5 KB at first behind a 340-byte system prompt, then 400 bytes a turn.
    fn default() -> Self {
        Self {
            sessions: Some(80),
            turns: 5,
            tenants: 1,
            common_bytes: 340,
            tenant_bytes: 0,
            first_bytes: 2500,
            turn_bytes: 400,
            max_tokens: 64,
            think: Duration::ZERO,
        }
    }
}

/// Where conversations come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Generated chats.
    Chat(Arc<ChatShape>),
    /// The rows of a trace, in order of arrival.
    Trace(Arc<Trace>),
}

impl Source {
    /// Requests in all, when they have an end.
    pub fn requests_total(&self) -> Option<u64> {
        match self {
            Self::Chat(shape) => {
                shape.sessions.map(|sessions| sessions.saturating_mul(u64::from(shape.turns)))
            }
            Self::Trace(trace) => Some(trace.rows.len() as u64),
        }
    }

    /// Requests in each conversation.
    pub fn turns(&self) -> u32 {
        match self {
            Self::Chat(shape) => shape.turns,
            Self::Trace(_) => 1,
        }
    }
}

/// The conversations of a source, one after another. The same seed gives the same ones.
#[derive(Debug, Clone)]
pub struct Workload {
    source: Source,
    api: Api,
    seed: u64,
    next: u64,
}

impl Workload {
    /// All conversations of `source`, worded for `api`.
    pub fn new(source: Source, api: Api, seed: u64) -> Self {
        Self { source, api, seed, next: 0 }
    }
}

impl Iterator for Workload {
    type Item = Conversation;

    fn next(&mut self) -> Option<Conversation> {
        let id = self.next;
        let end = match &self.source {
            Source::Chat(shape) => shape.sessions,
            Source::Trace(trace) => Some(trace.rows.len() as u64),
        };
        if end.is_some_and(|end| id >= end) {
            return None;
        }
        self.next += 1;
        Some(Conversation {
            id,
            turn: 0,
            seed: self.seed,
            transcript: Transcript::new(self.api),
            api: self.api,
            source: self.source.clone(),
        })
    }
}

/// One conversation and how far it has come.
#[derive(Debug, Clone)]
pub struct Conversation {
    id: u64,
    turn: u32,
    seed: u64,
    api: Api,
    transcript: Transcript,
    source: Source,
}

/// One request of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its body, JSON.
    pub body: Bytes,
    /// Which turn of its conversation it is, from 0.
    pub turn: u32,
}

impl Conversation {
    /// Its number in the run, from 0.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// When a trace wants it, counted from the trace's start; `None` for a generated chat.
    pub fn due(&self) -> Option<Duration> {
        match &self.source {
            Source::Chat(_) => None,
            Source::Trace(trace) => Some(trace.rows[self.id as usize].at),
        }
    }

    /// Whether every turn has been asked.
    pub fn is_over(&self) -> bool {
        self.turn >= self.source.turns()
    }

    /// How long the user thinks before the next turn.
    pub fn think(&self) -> Duration {
        match &self.source {
            Source::Chat(shape) => shape.think,
            Source::Trace(_) => Duration::ZERO,
        }
    }

    /// The next turn's request, or `None` when the conversation is over.
    pub fn next_request(&mut self, envelope: &Envelope) -> Option<Request> {
        if self.is_over() {
            return None;
        }
        let body = match self.source.clone() {
            Source::Chat(shape) => {
                self.say_turn(&shape);
                self.transcript.body(envelope, shape.max_tokens)
            }
            Source::Trace(trace) => {
                let row = &trace.rows[self.id as usize];
                let prompt = row.prompt_text(self.seed, self.id);
                Transcript::of_prompt(self.api, &prompt).body(envelope, row.output_tokens)
            }
        };
        let turn = self.turn;
        self.turn += 1;
        Some(Request { body, turn })
    }

    /// Takes the model's answer into the history that the next turn sends.
    pub fn answered(&mut self, answer: &str) {
        if matches!(self.source, Source::Chat(_)) {
            self.transcript.say(Speaker::Assistant, answer);
        }
    }

    fn say_turn(&mut self, shape: &ChatShape) {
        let mut said = String::new();
        if self.turn == 0 {
            // By hash, not in turn: a tenant must not fall in step with a list of targets or endpoints.
            let tenant = Numbers::new(self.seed ^ text::scramble(self.id)).next() % shape.tenants.max(1);
            text::append(&mut said, self.seed, Piece::Common, shape.common_bytes);
            text::append(&mut said, self.seed, Piece::Tenant(tenant), shape.tenant_bytes);
            if !said.is_empty() {
                self.transcript.say(Speaker::System, &said);
            }
            said.clear();
        }
        let bytes = if self.turn == 0 { shape.first_bytes } else { shape.turn_bytes };
        text::append(&mut said, self.seed, Piece::Turn { chat: self.id, turn: self.turn }, bytes);
        self.transcript.say(Speaker::User, &said);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    fn messages(conversation: &mut Conversation) -> Vec<Value> {
        let request = conversation.next_request(&Envelope::default()).unwrap();
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        body["messages"].as_array().unwrap().clone()
    }

    fn chats(shape: ChatShape) -> Workload {
        Workload::new(Source::Chat(Arc::new(shape)), Api::Chat, 5)
    }

    #[test]
    fn a_chat_grows_by_the_answer_it_got_and_a_new_turn() {
        let shape = ChatShape { turns: 2, ..ChatShape::default() };
        let mut chat = chats(shape.clone()).next().unwrap();
        let first = messages(&mut chat);
        let bytes: Vec<usize> =
            first.iter().map(|message| message["content"].as_str().unwrap().len()).collect();
        assert_eq!(bytes, [shape.common_bytes, shape.first_bytes]);
        chat.answered("the answer");
        let second = messages(&mut chat);
        assert_eq!(second[..2], first[..]);
        assert_eq!(second[2], serde_json::json!({"role": "assistant", "content": "the answer"}));
        assert_eq!(second[3]["content"].as_str().unwrap().len(), shape.turn_bytes);
        assert!(chat.is_over());
        assert_eq!(chat.next_request(&Envelope::default()), None);
    }

    #[test]
    fn tenants_share_their_prompt_and_only_the_common_part_with_others() {
        let shape = ChatShape { tenants: 4, common_bytes: 100, tenant_bytes: 200, ..ChatShape::default() };
        let mut chats_of: BTreeMap<String, u32> = BTreeMap::new();
        for mut chat in chats(ChatShape { sessions: Some(400), ..shape }) {
            let system = messages(&mut chat)[0]["content"].as_str().unwrap().to_owned();
            assert_eq!(system.len(), 300);
            *chats_of.entry(system).or_default() += 1;
        }
        assert_eq!(chats_of.len(), 4);
        assert!(chats_of.values().all(|chats| (60..=140).contains(chats)), "{:?}", chats_of.values());
        let systems: Vec<&String> = chats_of.keys().collect();
        assert!(systems.iter().all(|system| system[..100] == systems[0][..100]));
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_and_another_seed_others() {
        let body = |seed| {
            let shape = Arc::new(ChatShape::default());
            let mut chat = Workload::new(Source::Chat(shape), Api::Chat, seed).next().unwrap();
            chat.next_request(&Envelope::default()).unwrap().body
        };
        assert_eq!(body(1), body(1));
        assert_ne!(body(1), body(2));
    }

    #[test]
    fn without_a_number_of_sessions_chats_do_not_end() {
        let shape = ChatShape { sessions: None, ..ChatShape::default() };
        assert_eq!(Source::Chat(Arc::new(shape.clone())).requests_total(), None);
        assert_eq!(chats(shape).take(10_000).last().unwrap().id(), 9_999);
    }
}
