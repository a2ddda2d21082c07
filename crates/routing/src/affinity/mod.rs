//! Affinities: the preference for an endpoint that knows the prompt or the session.

use crate::settings::names;

names! {
    /// The affinities there are.
    AffinityName {
        /// No preference.
        None = "none",
        /// The session's home.
        Session = "session",
        /// The holder of the longest prefix.
        PrefixLongest = "prefix-longest",
        /// The ring's home of the first characters.
        PrefixRing = "prefix-ring",
        /// The fewest expected milliseconds, warm prefixes counted.
        PrefixCost = "prefix-cost",
    }
}
