//! What is sent.

use std::sync::Arc;

use clap::ValueEnum;
use grapevine::load::{Api, ChatShape, Envelope, Source, Workload};
use serde::Serialize;

/// The seed of all texts.
const SEED: u64 = 1;

/// Tenants that the chats belong to.
const TENANTS: u64 = 12;

/// Different bodies that are sent in turn; a few MB of long ones.
const DIFFERENT: usize = 256;
const DIFFERENT_LONG: usize = 64;

/// The first turns of chats, whose system prompts begin alike: a part is common to all, a part to each tenant's.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Body {
    /// 0.3 KB.
    Small,
    /// 4 KB.
    Chat,
    /// 100 KB.
    Long,
}

impl Body {
    /// For a table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Small => "0.3 KB",
            Self::Chat => "4 KB",
            Self::Long => "100 KB",
        }
    }

    /// The bodies.
    pub(crate) fn all(self, stream: bool) -> Vec<Vec<u8>> {
        let (common_bytes, tenant_bytes, first_bytes) = match self {
            Self::Small => (40, 60, 100),
            Self::Chat => (1_000, 2_000, 900),
            Self::Long => (1_000, 60_000, 39_000),
        };
        let shape = ChatShape {
            sessions: None,
            tenants: TENANTS,
            common_bytes,
            tenant_bytes,
            first_bytes,
            ..ChatShape::default()
        };
        let envelope = Envelope { model: Some("sim".to_owned()), stream, ..Envelope::default() };
        let different = if self == Self::Long { DIFFERENT_LONG } else { DIFFERENT };
        Workload::new(Source::Chat(Arc::new(shape)), Api::Chat, SEED)
            .filter_map(|mut chat| chat.next_request(&envelope))
            .map(|request| request.body.to_vec())
            .take(different)
            .collect()
    }
}
