//! An endpoint: what was configured of it, where it stands, and the load it carries.

mod spec;

pub use spec::{EndpointSpec, Role, SpecError};
