//! How long a request may take, and each of its parts.

use std::time::Duration;

/// How the client wants its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Delivery {
    /// As a stream of events: it has first-byte and idle limits, and can end in an error event.
    Stream,
    /// In one piece, which may take as long as the generation: it has a total limit only.
    Whole,
}

/// How long a request may take. The connect limit is the connector's; its failures arrive as events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For one connection to be made. 2 s: a lost SYN is sent again after one.
    pub connect: Duration,
    /// From arrival to the first byte of a stream, over all tries. 60 s: the longest prompts behind a full
    /// queue; beyond it people have left.
    pub first_byte: Duration,
    /// For the prefill leg of a split request. 20 s: a third of what the first byte may take, so that another prefill
    /// and then serving it whole are still in time.
    pub prefill: Duration,
    /// From the handoff to the first byte of a stream. 20 s, likewise; a real engine needs 10 to say that the one it
    /// is to fetch from is gone.
    pub handoff: Duration,
    /// Silence within a stream after which its endpoint is looked at, at the least: where it says tokens slowly, it is
    /// [`Self::QUIET_TOKENS`] of them. 1 s: far more than any step but one that computes a long prompt beside the
    /// stream; a look costs next to nothing.
    pub quiet: Duration,
    /// Between two parts of a stream, whatever is seen of its endpoint. 60 s: far above any decode step, about most clients' patience.
    pub idle: Duration,
    /// For a stream from arrival to end. 1 h: it only ends what would run for ever.
    pub total: Duration,
    /// For a reply in one piece. 10 min: what OpenAI's own clients wait.
    pub total_whole: Duration,
}

impl Limits {
    /// Tokens that could have come before silence is strange. 20: one step in a thousand takes as long.
    pub const QUIET_TOKENS: f64 = 20.0;

    /// How long a stream of an endpoint that says a token every `token_ms` may be silent before the endpoint is looked
    /// at.
    pub fn quiet_at(&self, token_ms: f64) -> Duration {
        let paced = Duration::try_from_secs_f64(Self::QUIET_TOKENS * token_ms / 1_000.0).unwrap_or_default();
        paced.max(self.quiet).min(self.idle)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            first_byte: Duration::from_secs(60),
            prefill: Duration::from_secs(20),
            handoff: Duration::from_secs(20),
            quiet: Duration::from_secs(1),
            idle: Duration::from_secs(60),
            total: Duration::from_secs(3_600),
            total_whole: Duration::from_secs(600),
        }
    }
}
