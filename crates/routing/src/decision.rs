//! What was decided and why, as data: the reason is the metric label, the header and the explain output.

use std::sync::Arc;

use smallvec::SmallVec;
use thiserror::Error;

use crate::EndpointId;
use crate::endpoint::{Endpoint, Inserted, Role};
use crate::reserve::Reservation;

/// Why an endpoint was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No other endpoint was left to choose from.
    OnlyCandidate,
    /// It costs the fewest milliseconds, by more than the tie.
    LeastCost,
    /// Among those that cost the same, the session or conversation lives there.
    TieSession,
    /// Among those that cost the same, it holds the most of the prompt.
    TieWarm,
    /// Among those that cost the same, the prompt's hash and the placed tokens point to it.
    TieRendezvous,
    /// It holds the longest prefix of the prompt.
    PrefixHolder,
    /// Nobody holds enough of the prompt; it is the least loaded.
    NoMatchLeastLoad,
    /// Loads differ too much for affinity; it is the least loaded.
    ImbalancedLeastLoad,
    /// The ring puts this prefix there.
    RingHome,
    /// The ring's home for this prefix is too loaded; it is the next one with room.
    RingBounded,
    /// The session lives there.
    SessionHome,
    /// The request has no session key; it is the least loaded.
    NoSessionLeastLoad,
    /// Its turn.
    RoundRobin,
    /// Drawn by lot.
    Random,
    /// It is the least loaded.
    LeastLoad,
    /// It is the less loaded of two drawn by lot.
    PowerOfTwo,
    /// Of those that are not much more loaded than the rest it holds the most of the prompt.
    MatchWithinLoad,
    /// None is within the usual load; drawn by lot.
    FallbackRandom,
    /// The pair promises the best quality of experience.
    BestQoe,
}

impl Reason {
    /// Every reason, for metrics that want to know their labels at the start.
    pub const ALL: [Self; 19] = [
        Self::OnlyCandidate,
        Self::LeastCost,
        Self::TieSession,
        Self::TieWarm,
        Self::TieRendezvous,
        Self::PrefixHolder,
        Self::NoMatchLeastLoad,
        Self::ImbalancedLeastLoad,
        Self::RingHome,
        Self::RingBounded,
        Self::SessionHome,
        Self::NoSessionLeastLoad,
        Self::RoundRobin,
        Self::Random,
        Self::LeastLoad,
        Self::PowerOfTwo,
        Self::MatchWithinLoad,
        Self::FallbackRandom,
        Self::BestQoe,
    ];

    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OnlyCandidate => "only-candidate",
            Self::LeastCost => "least-cost",
            Self::TieSession => "tie-session",
            Self::TieWarm => "tie-warm",
            Self::TieRendezvous => "tie-rendezvous",
            Self::PrefixHolder => "prefix-holder",
            Self::NoMatchLeastLoad => "no-match-least-load",
            Self::ImbalancedLeastLoad => "imbalanced-least-load",
            Self::RingHome => "ring-home",
            Self::RingBounded => "ring-bounded",
            Self::SessionHome => "session-home",
            Self::NoSessionLeastLoad => "no-session-least-load",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::LeastLoad => "least-load",
            Self::PowerOfTwo => "power-of-two",
            Self::MatchWithinLoad => "match-within-load",
            Self::FallbackRandom => "fallback-random",
            Self::BestQoe => "best-qoe",
        }
    }
}

/// Why a request is split or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitReason {
    /// Split: the pair costs less than any endpoint alone.
    Paid,
    /// Split: the settings say always.
    Always,
    /// Split: those that could serve it alone refuse what is not split.
    ConnectorSplitsOnly,
    /// Split before: its prompt is computed, and another decode endpoint takes it over.
    Prefilled,
    /// Whole: the settings say never.
    Never,
    /// Whole: the prompt is too short to be worth a handoff.
    Short,
    /// Whole: what is not warm of the prompt is too short to be worth a handoff.
    Warm,
    /// Whole: one endpoint alone costs no more than any pair.
    Costlier,
    /// Whole: it can't be split (no prompt, no answer, or a connector that does not hand over several at once).
    Unsplittable,
    /// Whole: no endpoint is there to prefill for others.
    NoPrefillEndpoint,
    /// Whole, at an endpoint that is there to prefill for others: no other is left.
    NoDecodeEndpoint,
    /// Whole: no prefill endpoint can hand over to any of the decode endpoints (connector or group).
    NoPair,
    /// Whole: prefill endpoints failed it.
    PrefillFailed,
}

impl SplitReason {
    /// Every reason, for metrics that want to know their labels at the start.
    pub const ALL: [Self; 13] = [
        Self::Paid,
        Self::Always,
        Self::ConnectorSplitsOnly,
        Self::Prefilled,
        Self::Never,
        Self::Short,
        Self::Warm,
        Self::Costlier,
        Self::Unsplittable,
        Self::NoPrefillEndpoint,
        Self::NoDecodeEndpoint,
        Self::NoPair,
        Self::PrefillFailed,
    ];

    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Paid => "paid",
            Self::Always => "always",
            Self::ConnectorSplitsOnly => "connector-splits-only",
            Self::Prefilled => "prefilled",
            Self::Never => "never",
            Self::Short => "short",
            Self::Warm => "warm",
            Self::Costlier => "costlier",
            Self::Unsplittable => "unsplittable",
            Self::NoPrefillEndpoint => "no-prefill-endpoint",
            Self::NoDecodeEndpoint => "no-decode-endpoint",
            Self::NoPair => "no-pair",
            Self::PrefillFailed => "prefill-failed",
        }
    }

    /// Whether a request with this reason is split.
    pub const fn splits(self) -> bool {
        matches!(self, Self::Paid | Self::Always | Self::ConnectorSplitsOnly | Self::Prefilled)
    }
}

/// The first half of a decision where endpoints have roles: whether another endpoint computes the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct SplitDecision {
    /// The policy that chose the prefill endpoint.
    pub policy: &'static str,
    /// Why it is split or not.
    pub reason: SplitReason,
    /// Which endpoint prefills; `Some` exactly if the reason [`SplitReason::splits`].
    pub prefill: Option<PrefillChoice>,
    /// What the best pair costs, in ms, and what one endpoint alone does; `None` where none was weighed.
    pub pair_ms: Option<f64>,
    /// See `pair_ms`.
    pub whole_ms: Option<f64>,
    /// The candidates for the prefill, like [`Decision::candidates`]; empty if none were looked at.
    pub candidates: SmallVec<[CandidateCost; 4]>,
    /// Filters that would have dropped every candidate for the prefill and were undone.
    pub reverted: SmallVec<[&'static str; 2]>,
}

/// Which endpoint prefills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChoice {
    /// The endpoint.
    pub chosen: EndpointId,
    /// Why this one.
    pub reason: Reason,
}

/// What one candidate looked like when the choice was made.
#[derive(Clone, Debug, PartialEq)]
pub struct CandidateCost {
    /// Which endpoint.
    pub endpoint: EndpointId,
    /// Expected cost of the request there, in ms: wait, prefill, decode and KV pressure together.
    pub cost_ms: f64,
    /// The part of it that is waiting for others' prompts, in ms.
    pub wait_ms: f64,
    /// Tokens of the prompt believed warm there.
    pub warm_tokens: u32,
    /// Tokens of the prompt that it would have to compute.
    pub uncached_tokens: u32,
    /// Requests in flight there through all replicas.
    pub running: u32,
    /// The filter that dropped it, if one did.
    pub dropped_by: Option<&'static str>,
}

/// One choice, with everything that led to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The policy that decided.
    pub policy: &'static str,
    /// Why this endpoint.
    pub reason: Reason,
    /// The endpoint that answers the client: of a split request the one that decodes.
    pub chosen: EndpointId,
    /// The candidates that were weighed, in the order of their ids, those that filters dropped included: all, or of a
    /// large fleet a shortlist. Of a split request they are weighed for its decode leg alone.
    pub candidates: SmallVec<[CandidateCost; 4]>,
    /// Filters that would have dropped every candidate and were undone.
    pub reverted: SmallVec<[&'static str; 2]>,
    /// Whether it is split, and why; `None` where no endpoint that serves the model has a role
    /// of its own.
    pub split: Option<Box<SplitDecision>>,
}

impl Decision {
    /// What the chosen candidate looked like.
    pub fn chosen_cost(&self) -> Option<&CandidateCost> {
        self.candidates.iter().find(|candidate| candidate.endpoint == self.chosen)
    }

    /// The endpoint that computes the prompt for another to decode, if the request is split.
    pub fn prefill(&self) -> Option<EndpointId> {
        self.split.as_ref()?.prefill.map(|prefill| prefill.chosen)
    }
}

/// A choice that is charged: the reservation holds the place until it is dropped.
#[derive(Debug)]
pub struct Chosen {
    /// What was decided and why.
    pub decision: Decision,
    /// Where to send the request, or the decode leg of a split one.
    pub endpoint: Arc<Endpoint>,
    /// The charge, to be kept until the last byte.
    pub reservation: Reservation,
    /// On what footing the request began there, for whoever learns from how it fares.
    pub footing: Footing,
    /// The leg that goes first, if the request is split.
    pub prefill: Option<PrefillLeg>,
}

/// The first leg of a split request: it computes the prompt, whose KV then moves to [`Chosen::endpoint`].
#[derive(Debug)]
pub struct PrefillLeg {
    /// Where to send it.
    pub endpoint: Arc<Endpoint>,
    /// Its charge, to be kept until the handoff.
    pub reservation: Reservation,
    /// On what footing it began there.
    pub footing: Footing,
}

/// Which part of a request an endpoint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it.
    Whole,
    /// Its prompt.
    Prefill,
    /// Its answer, with the KV that another endpoint made.
    Decode,
}

impl Part {
    /// The name in JSON and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What was believed of an endpoint when a request was sent there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footing {
    /// Where.
    pub endpoint: EndpointId,
    /// What it was sent there for.
    pub part: Part,
    /// Prompt tokens that it would have to compute, or to be handed if it only decodes.
    pub uncached_tokens: u32,
    /// Prompt tokens of others that were to be computed before, through all replicas.
    pub ahead_tokens: u32,
    /// Requests in flight there, through all replicas, without this one.
    pub running: u32,
    /// How many leading blocks of the prompt were believed warm there.
    pub warm_blocks: u32,
    /// How many were noted there before, warm or not.
    pub known_blocks: u32,
    /// Whether its conversation was.
    pub known_conversation: bool,
    /// Tokens put into the endpoint's cache since the deepest of those blocks was last wanted there.
    pub inserted_since: Inserted,
}

/// Why no endpoint can be chosen. The edge makes a status of it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Every endpoint has said what it serves, and it is not this. 404.
    #[error("the model `{model}` does not exist")]
    ModelUnknown {
        /// What was asked for.
        model: String,
    },
    /// The request names no model and several are served. 400.
    #[error("`model` is required: {} models are served", served.len())]
    ModelRequired {
        /// What is served.
        served: Vec<String>,
    },
    /// The model is known (or may yet be), but nobody is ready for it. 503 with Retry-After.
    #[error("no endpoint is ready for {}{}", model.as_deref().unwrap_or("this request"), match missing_role {
        Some(role) => format!(": none with role {role}"),
        None => String::new(),
    })]
    NoEndpointReady {
        /// What was asked for, if it was named.
        model: Option<String>,
        /// The role that nobody has, if that is the reason.
        missing_role: Option<Role>,
        /// When to try again, in ms.
        retry_after_ms: u64,
    },
    /// There are no endpoints at all. 503.
    #[error("no endpoint is configured")]
    NoEndpointConfigured,
    /// Every endpoint that could serve it was tried already. The last try's failure is the answer.
    #[error("every endpoint that could serve the request was tried")]
    AllTried,
    /// Everything is busy. 429 with Retry-After.
    #[error("all endpoints are busy")]
    Overloaded {
        /// When to try again, in ms.
        retry_after_ms: u64,
    },
    /// The response that the request goes on from was not made here, or too long ago. 404.
    #[error("the response that it goes on from does not exist")]
    ResponseUnknown,
}
