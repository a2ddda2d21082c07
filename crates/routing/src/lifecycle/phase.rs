//! Where a request stands.

/// Where a request stands. `HandedOff` is reached by split requests only, `Resuming` by resumed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Read, and not yet placed.
    Admitted,
    /// Waiting for room.
    Queued,
    /// Sent to an endpoint, no byte back.
    Prefilling,
    /// Prefilled, its KV on the way to the decode endpoint.
    HandedOff,
    /// Its reply is coming.
    Decoding,
    /// A leg failed before the first byte; about to be sent elsewhere.
    Retrying,
    /// A leg failed within its stream; about to be continued elsewhere.
    Resuming,
    /// Over: the reply reached its end.
    Finished,
    /// Over: the client was told of a failure.
    Failed,
    /// Over: the client left.
    Cancelled,
}

impl Phase {
    /// The name in JSON and labels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Queued => "queued",
            Self::Prefilling => "prefilling",
            Self::HandedOff => "handed-off",
            Self::Decoding => "decoding",
            Self::Retrying => "retrying",
            Self::Resuming => "resuming",
            Self::Finished => "finished",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether nothing follows it.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Finished | Self::Failed | Self::Cancelled)
    }
}
