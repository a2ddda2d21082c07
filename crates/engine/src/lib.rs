//! A simulated vLLM: a real HTTP server that queues, caches and slows down as engines do.
//!
//! The main choice: what is computed when is decided by a pure model (`engine-model`, here [`scheduler`]) that is
//! given the time, so the same code runs behind a socket and in a discrete-event simulator; the server only waits
//! until the model says that something is due. Texts follow from the prompt alone ([`answer`]), so a continuation can be checked
//! word for word, and prompts are cached by content ([`kv`]) as vLLM does.
//!
//! Left out: sampling parameters, stop strings, log-probabilities, tools and structured output are accepted and
//! change nothing; `echo` too. The engine knows nothing of routers.

mod config;
mod fault;
mod flight;
mod handle;
mod measures;
mod rank;
mod record;
mod server;
mod transfer;

pub use engine_model::{answer, kv, scheduler, timing, tokens};

pub use config::{Config, ConfigError, Options};
pub use fault::{Fault, Health, Lies};
pub use handle::{Engine, EngineError, Stats, serve};
pub use record::{Recorded, Route};
pub use scheduler::SchedulerKind;
pub use server::chat_prompt;
pub use timing::{Crowding, Profile, Timing};
pub use transfer::{BadParams, Connector, Role, Transfer};
