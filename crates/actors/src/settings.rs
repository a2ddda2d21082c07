//! The numbers of the actors.

use std::time::Duration;

/// How the actors pace themselves and where they stop.
#[derive(Clone, Debug)]
pub struct ActorSettings {
    /// Period in which the scrape's owner reads an engine's metrics. 250 ms.
    pub scrape_every: Duration,
    /// Limit for one probe or scrape. 1 s.
    pub probe_timeout: Duration,
    /// Sessions with an actor of their own. 10,000; beyond it the session table alone serves.
    pub session_actors_max: usize,
    /// How long a session's actor outlives its last request. 60 s.
    pub session_idle: Duration,
    /// Silence after which a replica's load no longer counts. 1.5 s.
    pub dead_after: Duration,
    /// How long what a replica staged is left alone after it fell silent, in which it may yet live: as long as its
    /// decode legs may take to their first byte. 20 s.
    pub handoff: Duration,
}

impl Default for ActorSettings {
    fn default() -> Self {
        Self {
            scrape_every: Duration::from_millis(250),
            probe_timeout: Duration::from_secs(1),
            session_actors_max: 10_000,
            session_idle: Duration::from_secs(60),
            dead_after: Duration::from_millis(1_500),
            handoff: Duration::from_secs(20),
        }
    }
}
