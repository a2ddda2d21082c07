//! Reading along with replies: bytes pass, what they say is noted.

mod event;
mod scan;
mod tail;
mod usage;

pub(crate) use event::{data_of, is_comment};
pub(crate) use scan::{Dialect, Ending, Pieces, Scanner, event_end};
pub(crate) use tail::Tail;
pub(crate) use usage::Usage;
