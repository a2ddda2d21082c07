//! Canonical text, and that text as prefix blocks.
//!
//! Canonical text puts what an engine renders into the order in which it renders it, whatever the order
//! of the keys in the body: tools, template arguments, then message by message. Between the pieces stand
//! single bytes that UTF-8 never contains, always before a piece and never after it. So no two different
//! requests have the same text, and a chat's text is a byte prefix of the next turn's.

use smallvec::SmallVec;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use super::beginning::BeginningReader;
use super::body::{Body, ResumeObstacles};
use super::json::Sink;
use super::rules::ShapeRules;
use super::text::Text;
use crate::BlockHash;
use crate::prefix::{BLOCK_BYTES_DEFAULT, BlockHasher};

/// What the next piece of canonical text is. None of these bytes occurs in UTF-8.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum Mark {
    /// A string within a value of any kind.
    Text = 0xf5,
    /// The end of such a string, which is needed where brackets may follow.
    TextEnd = 0xf6,
    /// A number or literal within a value of any kind.
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
pub(super) enum Domain {
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
    /// Whether an answer is among its messages.
    pub(super) answered: bool,
    /// The hash of its beginning, if the rules ask for it.
    pub(super) beginning: Option<u64>,
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
            answered: false,
            beginning: None,
            obstacles: ResumeObstacles::default(),
        }
    }
}

/// Who a message is from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaker {
    System,
    Assistant,
    /// The user, a tool, whoever else.
    Other,
}

/// Takes canonical text and hashes it.
pub(super) struct Writer {
    main: BlockHasher,
    lead: Lead,
    answered: bool,
    /// Images, audio and video so far.
    pub(super) media: u32,
    block_bytes: usize,
    beginning: Option<BeginningReader>,
    seed: u64,
}

/// The first message that is not the system's: what tells one conversation from another.
#[expect(clippy::large_enum_variant, reason = "one for each request, on the stack")]
enum Lead {
    Before,
    /// The hash of all before it, so that the same greeting behind other instructions is another chat, and
    /// its text up to the length of a block.
    During {
        common: u64,
        start: SmallVec<[u8; BLOCK_BYTES_DEFAULT]>,
    },
    After {
        rendezvous: u64,
        conversation: u64,
    },
}

impl Writer {
    /// A writer for the prompt of `body`, seeded by all that keeps equal prompts apart in an engine's cache:
    /// the model (an adapter is one), the cache salt and the kind of prompt. `text_bytes` is a guess.
    pub(super) fn new(domain: Domain, body: &Body<'_>, rules: &ShapeRules, text_bytes: usize) -> Self {
        let mut seed = xxh3_64(&[domain as u8]);
        match body.model {
            Some(model) => seed = chained(seed, model),
            None => {
                seed = chained(seed, Text::plain(rules.default_model.as_deref().unwrap_or("").as_bytes()));
            }
        }
        if let Some(salt) = body.cache_salt {
            seed = chained(seed, salt);
        }
        let blocks = text_bytes / rules.block_bytes.max(1);
        Self {
            main: BlockHasher::new(seed, rules.block_bytes, blocks),
            lead: Lead::Before,
            answered: false,
            media: 0,
            block_bytes: rules.block_bytes.max(1),
            beginning: rules.beginning.map(BeginningReader::new),
            seed,
        }
    }

    pub(super) fn mark(&mut self, mark: Mark) {
        self.put(&[mark as u8]);
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.main.push(bytes);
        if let Some(beginning) = &mut self.beginning {
            beginning.put(bytes);
        }
        if let Lead::During { start, .. } = &mut self.lead {
            let wanted = self.block_bytes - start.len();
            start.extend_from_slice(&bytes[..bytes.len().min(wanted)]);
        }
    }

    pub(super) fn put_text(&mut self, text: Text<'_>) {
        text.pieces(|piece| self.put(piece));
    }

    /// Begins the part of the text that is a message of this speaker.
    pub(super) fn begin_message(&mut self, speaker: Speaker) {
        self.answered |= speaker == Speaker::Assistant;
        match &self.lead {
            Lead::Before if speaker != Speaker::System => {
                self.lead = Lead::During { common: self.main.tail(), start: SmallVec::new() };
            }
            Lead::During { .. } => self.end_lead(),
            Lead::Before | Lead::After { .. } => {}
        }
    }

    fn end_lead(&mut self) {
        if let Lead::During { common, start } = &self.lead {
            let rendezvous = xxh3_64_with_seed(start, *common);
            self.lead = Lead::After { rendezvous, conversation: self.main.tail() };
        }
    }

    pub(super) fn finish(mut self, tokens: Option<u64>, prompts: u32, obstacles: ResumeObstacles) -> Prompt {
        self.end_lead();
        let tail = self.main.tail();
        let (lead, conversation) = match self.lead {
            Lead::After { rendezvous, conversation } => (rendezvous, Some(conversation)),
            // So short a prompt has no block to be known by, but may come again.
            Lead::Before | Lead::During { .. } if self.main.blocks().is_empty() => (tail, Some(tail)),
            _ => (self.main.blocks().last().map_or(tail, |block| block.raw()), None),
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
            answered: self.answered,
            beginning: self.beginning.map(|beginning| beginning.key(self.seed)),
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
pub(super) struct Digest(Xxh3);

impl Digest {
    pub(super) fn new() -> Self {
        Self(Xxh3::new())
    }

    pub(super) fn value(&self) -> u128 {
        self.0.digest128()
    }
}

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

fn chained(seed: u64, text: Text<'_>) -> u64 {
    if let Some(plain) = text.as_plain() {
        return xxh3_64_with_seed(plain, seed);
    }
    xxh3_64_with_seed(text.to_owned().as_bytes(), seed)
}
