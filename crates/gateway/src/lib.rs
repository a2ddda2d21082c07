//! The HTTP edge: data plane, streaming relay, admin plane.
//!
//! The main choice: a request reads the core directly and acts at once; its lifecycle actor, on the same
//! thread, decides what failures, limits and disconnects mean. The client's bytes go to the engine and the
//! engine's to the client untouched, with a scanner reading along.
//!
//! Left out on purpose: gossip, scoring, configuration files; who embeds the gateway brings a router, the
//! lifecycles and two listeners.

mod admin;
mod connector;
mod data;
mod edit;
mod errors;
mod headers;
mod heir;
mod look;
mod metrics;
mod outspoken;
mod percent;
mod probe;
mod request_id;
mod resume;
mod serve;
mod state;
mod stream;
mod upstream;
mod worker;

pub use heir::Executor;
pub use metrics::{Gauges, GossipGauges, Metrics, ReloadResult};
pub use probe::Probe;
pub use serve::{Listeners, Serving, start};
pub use state::{GatewaySettings, GatewayState, Missing, Readiness};
pub use upstream::UpstreamSettings;
