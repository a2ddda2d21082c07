//! Speed and memory, as ratios against something real.
//!
//! What the bench targets share: engines and proxies as they are started for a measurement, and what is read
//! off them. Every figure is taken side by side with its reference in one run and told as a ratio to it: the
//! absolute ones hold for one machine on one day.
//!
//! Left out: timed assertions. A bench prints what it measured and whether that meets the target; it fails
//! only when it could not measure.

pub mod arms;
pub mod blocks;
pub mod canned;
pub mod chats;
pub mod closed_chats;
pub mod closed_loop;
pub mod fleet;
pub mod front;
pub mod machine;
pub mod options;
pub mod oracle;
pub mod peer;
pub mod process;
pub mod replicas;
pub mod roles;
pub mod spread;
pub mod times;
pub mod wait;
pub mod way;
