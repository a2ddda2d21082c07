//! Reading along with replies: bytes pass, what they say is noted.

mod event;
mod scan;
mod tail;
mod usage;

pub(crate) use scan::{Dialect, Ending, Scanner};
pub(crate) use tail::Tail;
pub(crate) use usage::Usage;
