//! An endpoint: what was configured of it, where it stands, and the load it carries.

mod breaker;
mod spec;
mod standing;

pub use breaker::{Breaker, BreakerConfig, ProbeStart, Signal, StandingChange};
pub use spec::{EndpointSpec, Role, SpecError};
pub use standing::{Cause, Drained, Standing, Usable};
